// Of the plan of FP8 tiles: who makes tiles where weights come as MXFP4 (layout sm90_v1). Four
// warps read records that a copy brought (tiles_producer.cuh) and expand each a half of a strip, 64
// rows of 64 columns, into the form that FP8 tiles have.
//
// Rows of a tile stand where a consumer's thread has 8 neighbours among its sums (kPermuted).
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_TILES_EXPAND_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_TILES_EXPAND_CUH_

#include <cstdint>

#include "moe_gemm_fp8/tiles_producer.cuh"
#include "moe_gemm_fp8/weight_reader.cuh"

namespace gptoss::moe {

// One lane's share of a tile's record: 16 columns of each of eight rows, in the half strip that its
// warp expands. Lanes of odd g swap neighbouring 16 rows: of eight neighbours no two store to the
// same banks.
class TileExpander {
 public:
  __device__ __forceinline__ TileExpander(const ReaderTable& table, int strip, int half)
      : table_(table) {
    const int lane = threadIdx.x % 32, g = lane / 4, odd = g % 2;
    const uint32_t from = strip * kRawPitch + kHeaderBytes + half * half_bytes(Storage::kMxfp4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int rows_16 = i ^ odd;
      shifts_[i] = from + rows_16 * 16 + lane / 2;
      words_[i] = from + kShiftBytes + (rows_16 * 32 + lane) * 16;
      const int inside = 4 * rows_16 + 2 * (g / 4);  // of eight rows
      const int chunk = 4 * half + lane % 4;
      const int row = strip * kStripRows + 8 * (g % 4) + inside;
      low_[i] = row * kRecordColumns + 16 * (chunk ^ inside);
      high_[i] = (row + 1) * kRecordColumns + 16 * (chunk ^ (inside + 1));
    }
  }

  // The record at `raw`.
  __device__ __forceinline__ void load(uint32_t raw) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      shifts_of_[i] = load_shared_u8(raw + shifts_[i % 2] + i / 2 * 32);
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      words_of_[i] = load_shared_u128(raw + words_[i % 2] + i / 2 * 1024);
    }
  }

  // What load() read, expanded.
  __device__ __forceinline__ void store(uint32_t tile) const {
    uint2 low[kParts], high[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      low[i] = table_.codes((shifts_of_[i] << 4) & 0xF0);
      high[i] = table_.codes(shifts_of_[i] & 0xF0);
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      Fragments a;
      WeightReader<Storage::kMxfp4>::expand_words(words_of_[i], low[i], high[i], 0, a);
      const uint32_t to = tile + i / 2 * 32 * kRecordColumns;
      store_shared_u128(to + low_[i % 2], a[0][0], a[0][2], a[1][0], a[1][2]);
      store_shared_u128(to + high_[i % 2], a[0][1], a[0][3], a[1][1], a[1][3]);
    }
  }

 private:
  static constexpr int kParts = 4;  // of 16 rows

  const KeptTable table_;
  uint4 words_of_[kParts];
  uint32_t shifts_of_[kParts];
  uint32_t shifts_[2], words_[2];  // in a record's place
  uint32_t low_[2], high_[2];      // in a tile
};

// Four warps, each a half of a strip. Absent ones are not expanded: nobody reads what stands there.
//
// A record is given back when what was read of it has been stored, not when it was read: an arrival
// may overtake a load from shared memory, which waits behind the tensor cores' reads, by more than
// a copy takes.
template <typename S>
__device__ inline void expand_stages(const Params& p, const TileMemory<S>& memory,
                                     const ReaderTable& table) {
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32 % 4, 0);
  const int strip = warp / 2, half = warp % 2;
  TileExpander expander(table, strip, half);
  RingPlace<S::kStages> place;
  RingPlace<kRawStages> raw;
  RingPlace<kItemSlots> slots;
  for (;; slots.step()) {
    barrier_wait(memory.item_full(slots.stage), slots.parity);
    const TileItem& item = memory.slot(slots.stage).item;
    const int expert = item.expert, tile = item.tile, chunks = item.chunks;
    if (expert < 0) return;
    __syncwarp();
    if (lane == 0) barrier_arrive(memory.item_empty(slots.stage));
    if (chunks == 0) {
#pragma unroll 1
      for (int left = p.records; left > 0; --left, place.step()) {
        barrier_wait(memory.empty(place.stage), place.parity ^ 1);
        if (lane == 0) barrier_arrive(memory.full(place.stage));
      }
      continue;
    }
    const bool has_strip = tile * kTileStrips + strip < p.strips;
#pragma unroll 1
    for (int left = p.records - 1; left >= 0; --left, place.step(), raw.step()) {
      const bool present = has_strip && (half == 0 || left > 0 || p.tail_halves == 2);
      const uint32_t record = memory.raw(raw.stage);
      barrier_wait(memory.raw_full(raw.stage), raw.parity);
      const float scale = warp == 0 ? load_shared_f32(record) : 0.0f;
      if (present) expander.load(record);
      barrier_wait(memory.empty(place.stage), place.parity ^ 1);
      if (present) expander.store(memory.weights(place.stage));
      if (threadIdx.x % 128 == 0) store_shared_f32(memory.weight_scale(place.stage), scale);
      async_proxy_fence();
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(memory.full(place.stage));
        barrier_arrive(memory.raw_empty(raw.stage));
      }
    }
  }
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_TILES_EXPAND_CUH_
