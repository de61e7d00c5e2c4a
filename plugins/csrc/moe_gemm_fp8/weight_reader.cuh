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

// The code table and 16 zero bytes, in shared memory at an address that the compiler knows. 15 rows
// of 8 bytes lie in 32 different banks, so any lanes may read any rows at once.
struct ReaderTable {
  uint2 codes[kTableRows];
  uint4 zeros;
};

template <Storage kStorage>
struct WeightReader;

template <>
struct WeightReader<Storage::kMxfp4> {
  // Every thread of a warpgroup calls it; `thread` is its place there. Absent halves give zero
  // weights.
  static __device__ __forceinline__ void load(uint32_t record, const ReaderTable& table, int thread,
                                              bool second_half, Fragments& a) {
    const uint32_t zeros = shared_address(&table.zeros);
    const uint32_t shifts = record + kHeaderBytes + thread / 32 * 16 + thread % 32 / 2;
    const uint32_t nibbles = record + kHeaderBytes + kShiftBytes + thread * 16;
    const uint32_t later = second_half ? nibbles + half_bytes(Storage::kMxfp4) : zeros;
    expand(load_shared_u128(nibbles), load_shared_u8(shifts), table, a[0], a[1]);
    // Zero nibbles are code 0 in every row of the table: the stale shift does no harm.
    expand(load_shared_u128(later), load_shared_u8(shifts + half_bytes(Storage::kMxfp4)), table,
           a[2], a[3]);
  }

 private:
  static __device__ __forceinline__ void expand(uint4 words, uint32_t shift,
                                                const ReaderTable& table, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    const uint2 low = table.codes[shift & 15];
    const uint2 high = table.codes[shift >> 4];
    expand_word(words.x, low, first[0], first[2]);
    expand_word(words.y, high, first[1], first[3]);
    expand_word(words.z, low, second[0], second[2]);
    expand_word(words.w, high, second[1], second[3]);
  }

  // Eight weights: four by a byte permute with the magnitudes as selectors, the signs ORed on.
  static __device__ __forceinline__ void expand_word(uint32_t word, uint2 codes, uint32_t& columns,
                                                     uint32_t& columns_16) {
    const uint32_t selectors = word & 0x77777777u;
    columns = permute_bytes(codes.x, codes.y, selectors) | (word & 0x80808080u);
    columns_16 = permute_bytes(codes.x, codes.y, selectors >> 16) | ((word << 4) & 0x80808080u);
  }
};

template <>
struct WeightReader<Storage::kFp8> {
  static __device__ __forceinline__ void load(uint32_t record, const ReaderTable& table, int thread,
                                              bool second_half, Fragments& a) {
    const uint32_t zeros = shared_address(&table.zeros);
    const uint32_t mine = record + kHeaderBytes + thread * 16;
#pragma unroll
    for (int i = 0; i < kInstructionsPerRecord; ++i) {
      constexpr int kRunBytes = half_bytes(Storage::kFp8) / kInstructionsPerHalf;
      const bool present = i < kInstructionsPerHalf || second_half;
      const uint4 words = load_shared_u128(present ? mine + i * kRunBytes : zeros);
      a[i][0] = words.x;
      a[i][1] = words.y;
      a[i][2] = words.z;
      a[i][3] = words.w;
    }
  }
};

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_WEIGHT_READER_CUH_
