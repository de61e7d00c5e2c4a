// The two weight readers: a record in shared memory -> A fragments of its four WGMMA instructions.
// Both hand over the same e4m3 bytes, so everything behind them is one kernel.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_WEIGHT_READER_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_WEIGHT_READER_CUH_

#include <cstdint>

#include "core/ptx.cuh"
#include "moe_gemm_fp8/layout.h"

namespace gptoss::moe {

constexpr int kInstructionsPerHalf = 2;
constexpr int kInstructionsPerRecord = 4;

using Fragments = uint32_t[kInstructionsPerRecord][4];

// The code table and 16 zero bytes, in shared memory at an address that the compiler knows. A row
// takes 16 bytes, so that a shift in the high nibble of its byte is the row's offset as it stands;
// rows 8 apart share banks, which shifts of one block seldom are.
struct ReaderTable {
  struct __align__(16) Row {
    uint2 codes;
  };
  Row rows[kTableRows];
  uint4 zeros;

  __device__ __forceinline__ uint2 codes(uint32_t offset) const {
    return *reinterpret_cast<const uint2*>(reinterpret_cast<const uint8_t*>(rows) + offset);
  }
};

// The same by an address in a register: where the compiler would otherwise find it out anew for
// every record, with a special register's latency ahead of the look-up.
struct KeptTable {
  uint32_t rows;
  uint32_t zeros;

  __device__ __forceinline__ explicit KeptTable(const ReaderTable& table)
      : rows(keep_in_register(shared_address(table.rows))),
        zeros(rows + kTableRows * sizeof(ReaderTable::Row)) {}

  __device__ __forceinline__ uint2 codes(uint32_t offset) const {
    return load_shared_u64(rows + offset);
  }
};

__device__ __forceinline__ uint32_t zeros_address(const ReaderTable& table) {
  return shared_address(&table.zeros);
}
__device__ __forceinline__ uint32_t zeros_address(const KeptTable& table) { return table.zeros; }

template <Storage kStorage>
struct WeightReader;

template <>
struct WeightReader<Storage::kMxfp4> {
  // One thread's share of a record as it lies in memory.
  struct Raw {
    uint4 words[2];
    uint32_t shifts[2];

    // Its loads have come from here on: the record's memory may be given back.
    __device__ __forceinline__ void settle() {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        keep_in_registers(words[i]);
        shifts[i] = keep_in_register(shifts[i]);
      }
    }
  };

  // `thread` is the caller's place in its warpgroup.
  __device__ __forceinline__ explicit WeightReader(int thread)
      : nibbles_(keep_in_register(kHeaderBytes + kShiftBytes + thread * 16)),
        shifts_(keep_in_register(kHeaderBytes + thread / 32 * 16 + thread % 32 / 2)) {}

  // Called by every thread of a warpgroup. Absent halves give zero weights: zero nibbles are code 0
  // in every row of the table, so a stale shift does no harm.
  template <class Table>
  __device__ __forceinline__ Raw fetch(uint32_t record, const Table& table,
                                       bool second_half) const {
    constexpr int kHalf = half_bytes(Storage::kMxfp4);
    const uint32_t nibbles = record + nibbles_;
    const uint32_t shifts = record + shifts_;
    Raw raw;
    raw.shifts[0] = load_shared_u8(shifts);
    raw.shifts[1] = load_shared_u8(shifts + kHalf);
    raw.words[0] = load_shared_u128(nibbles);
    raw.words[1] = load_shared_u128(second_half ? nibbles + kHalf : zeros_address(table));
    return raw;
  }

  template <class Table>
  static __device__ __forceinline__ void expand(const Raw& raw, const Table& table, Fragments& a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) expand_half(raw, table, half, a);
  }

  template <class Table>
  static __device__ __forceinline__ void expand_half(const Raw& raw, const Table& table, int half,
                                                     Fragments& a) {
    const uint2 low = table.codes((raw.shifts[half] << 4) & 0xF0);
    const uint2 high = table.codes(raw.shifts[half] & 0xF0);
    expand_words(raw.words[half], low, high, half, a);
  }

  // The same, given the codes of this thread's two rows.
  static __device__ __forceinline__ void expand_words(const uint4& words, uint2 low, uint2 high,
                                                      int half, Fragments& a) {
    expand_word(words.x, low, a[2 * half][0], a[2 * half][2]);
    expand_word(words.y, high, a[2 * half][1], a[2 * half][3]);
    expand_word(words.z, low, a[2 * half + 1][0], a[2 * half + 1][2]);
    expand_word(words.w, high, a[2 * half + 1][1], a[2 * half + 1][3]);
  }

 private:
  // Eight weights: four by a byte permute with the magnitudes as selectors, the signs ORed on.
  static __device__ __forceinline__ void expand_word(uint32_t word, uint2 codes, uint32_t& columns,
                                                     uint32_t& columns_16) {
    const uint32_t selectors = word & 0x77777777u;
    columns = permute_bytes(codes.x, codes.y, selectors) | (word & 0x80808080u);
    columns_16 = permute_bytes(codes.x, codes.y, selectors >> 16) | ((word << 4) & 0x80808080u);
  }

  uint32_t nibbles_;
  uint32_t shifts_;
};

template <>
struct WeightReader<Storage::kFp8> {
  struct Raw {
    uint4 words[kInstructionsPerRecord];

    __device__ __forceinline__ void settle() {
#pragma unroll
      for (int i = 0; i < kInstructionsPerRecord; ++i) keep_in_registers(words[i]);
    }
  };

  __device__ __forceinline__ explicit WeightReader(int thread)
      : fragments_(keep_in_register(kHeaderBytes + thread * 16)) {}

  template <class Table>
  __device__ __forceinline__ Raw fetch(uint32_t record, const Table& table,
                                       bool second_half) const {
    constexpr int kRunBytes = half_bytes(Storage::kFp8) / kInstructionsPerHalf;
    const uint32_t zeros = zeros_address(table);
    Raw raw;
#pragma unroll
    for (int i = 0; i < kInstructionsPerRecord; ++i) {
      const bool present = i < kInstructionsPerHalf || second_half;
      raw.words[i] = load_shared_u128(present ? record + fragments_ + i * kRunBytes : zeros);
    }
    return raw;
  }

  template <class Table>
  static __device__ __forceinline__ void expand_half(const Raw& raw, const Table&, int half,
                                                     Fragments& a) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + kInstructionsPerHalf; ++i) {
      a[i][0] = raw.words[i].x;
      a[i][1] = raw.words[i].y;
      a[i][2] = raw.words[i].z;
      a[i][3] = raw.words[i].w;
    }
  }

  template <class Table>
  static __device__ __forceinline__ void expand(const Raw& raw, const Table& table, Fragments& a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) expand_half(raw, table, half, a);
  }

 private:
  uint32_t fragments_;
};

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_WEIGHT_READER_CUH_
