// Of the plan of FP8 tiles: who fills a block's shared memory where weights come as MXFP4 (layout
// sm90_v1). Four warps expand a tile of 128 rows and 128 columns into the form that FP8 tiles have,
// each thread 32 columns of four rows, read one record ahead. Each copies a chunk of tokens; the
// last also fills the slots, in steps, because what it waits for the others wait for.
//
// Rows of a tile stand where a consumer's thread has 8 neighbours among its sums (kPermuted).
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_TILES_EXPAND_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_TILES_EXPAND_CUH_

#include <cstdint>

#include "moe_gemm_fp8/tiles_producer.cuh"
#include "moe_gemm_fp8/weight_reader.cuh"

namespace gptoss::moe {

// Records ahead of an item's last that filling the next slot begins.
constexpr int kFillAhead = 9;

// One thread's share of the tiles of an item. Lanes of odd g take a record's second half first: of
// eight neighbours no two store to the same banks.
class TileExpander {
 public:
  __device__ __forceinline__ explicit TileExpander(const ReaderTable& table) : table_(table) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4;
    odd_ = g % 2;
    words_ = kHeaderBytes + kShiftBytes + (warp * 32 + lane) * 16;
    shifts_ = kHeaderBytes + warp * 16 + lane / 2;
    // Of the tile; row 16 warp + 2g of the strip.
    const int row = 32 * (warp / 2) + 8 * (g % 4) + 4 * (warp % 2) + 2 * (g / 4);
    const int chunk = 4 * odd_ + lane % 4;
    low_ = row * kRecordColumns + 16 * (chunk ^ (row % 8));
    high_ = (row + 1) * kRecordColumns + 16 * (chunk ^ ((row + 1) % 8));
  }

  // Of a tile: `source` is the first record of its first strip. Where there is no second strip, the
  // first is read again: nobody reads what becomes of it.
  __device__ __forceinline__ void begin(const uint8_t* source, uint32_t to_second_strip) {
    source_ = source;
    second_ = to_second_strip;
  }

  // The next record; where it has no second half, the first twice.
  __device__ __forceinline__ void load(bool second_half) {
    scale_ = __ldg(reinterpret_cast<const float*>(source_));
#pragma unroll
    for (int i = 0; i < 2 * kTileStrips; ++i) load(i, second_half);
    source_ += record_bytes(Storage::kMxfp4, 2);
  }

  // Stores the record that was loaded and, if there is `more`, loads the next.
  __device__ __forceinline__ void expand(uint32_t tile, uint32_t tile_scale, bool more,
                                         bool second_half) {
    if (threadIdx.x % 128 == 32) {
      store_shared_f32(tile_scale, scale_);
    }
    source_ -= more ? 0 : record_bytes(Storage::kMxfp4, 2);  // read once more rather than behind it
    scale_ = __ldg(reinterpret_cast<const float*>(source_));
    uint2 low[2 * kTileStrips], high[2 * kTileStrips];
#pragma unroll
    for (int i = 0; i < 2 * kTileStrips; ++i) {
      low[i] = table_.codes((shifts_of_[i] << 4) & 0xF0);
      high[i] = table_.codes(shifts_of_[i] & 0xF0);
    }
#pragma unroll
    for (int i = 0; i < 2 * kTileStrips; ++i) {
      const int turn = i % 2;
      Fragments a;
      Reader::expand_words(words_of_[i], low[i], high[i], 0, a);
      const uint32_t to = tile + i / 2 * kStripRows * kRecordColumns;
      store_shared_u128(to + (low_ ^ 64 * turn), a[0][0], a[0][2], a[1][0], a[1][2]);
      store_shared_u128(to + (high_ ^ 64 * turn), a[0][1], a[0][3], a[1][1], a[1][3]);
      load(i, second_half);
    }
    source_ += record_bytes(Storage::kMxfp4, 2);
  }

 private:
  using Reader = WeightReader<Storage::kMxfp4>;

  // Of strip i / 2 its half i % 2, or the other one.
  __device__ __forceinline__ void load(int i, bool second_half) {
    const uint32_t half = (i % 2 ^ odd_) && second_half ? half_bytes(Storage::kMxfp4) : 0;
    const uint32_t at = (i / 2 == 0 ? 0 : second_) + half;
    words_of_[i] = load_global_once(source_ + (at + words_));
    shifts_of_[i] = __ldg(source_ + (at + shifts_));
  }

  const KeptTable table_;
  const uint8_t* source_;
  uint32_t second_;
  uint4 words_of_[2 * kTileStrips];
  uint32_t shifts_of_[2 * kTileStrips];
  float scale_;
  int odd_;
  uint32_t words_, shifts_;
  uint32_t low_, high_;  // of this thread's rows in a tile, first turn
};

// Four warps.
template <typename S>
__device__ inline void expand_stages(const Params& p, const TileMemory<S>& memory,
                                     const ReaderTable& table, const CUtensorMap& map) {
  const int rank = S::kShare > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32 % 4, 0);
  const bool fills = warp == 3;
  TileExpander expander(table);
  SlotFiller<S> filler(p, memory);
  if (fills) filler.fill_first();
  // Records at which the steps of the next slot are due.
  const int asks = max(p.records - kFillAhead, 0);
  const int writes = min(asks + 2, p.records - 1), copies = min(asks + 4, p.records - 1);
  const int finishes = min(asks + 6, p.records - 1);
  int taken = 0;
  RingPlace<S::kStages> place;
  RingPlace<kItemSlots> slots;
  for (;; slots.step()) {
    barrier_wait(memory.item_full(slots.stage), slots.parity);
    const TileItem item = memory.slot(slots.stage).item;
    if (item.expert < 0) return;
    __syncwarp();
    if (lane == 0) barrier_arrive(memory.item_empty(slots.stage));
    const bool tail = p.tail_halves == 2;
    expander.begin(p.weights + item.expert * p.expert_bytes +
                       static_cast<int64_t>(item.tile) * kTileStrips * p.strip_bytes,
                   (item.tile + 1) * kTileStrips <= p.strips ? p.strip_bytes : 0);
    expander.load(p.records > 1 || tail);
#pragma unroll 1
    for (int left = p.records - 1; left >= 0; --left, place.step()) {
      const int record = p.records - 1 - left;
      if (fills) {
        if (record == asks) taken = filler.ask();
        if (record == writes) filler.write_next(taken);
        if (record == copies) filler.copy_weights();
        if (record == finishes) filler.finish();
      }
      const int stage = place.stage;
      barrier_wait(memory.empty(stage), place.parity ^ 1);
      // A chunk for each warp, the scales for the last.
      if (lane == 0) {
        const bool scales = S::kGate && warp == 3 && item.chunks > 0;
        const uint32_t bytes =
            (warp < item.chunks ? kChunkBytes : 0) + (scales ? item.chunks * kChunkRows * 4 : 0);
        if (bytes > 0) barrier_expect_more(memory.full(stage), bytes);
        if (warp < item.chunks) copy_chunk<S>(p, memory, map, item, rank, warp, record, stage);
        if (scales) copy_scales<S>(p, memory, item, record, stage);
      }
      __syncwarp();
      expander.expand(memory.weights(stage), memory.weight_scale(stage), left > 0,
                      left > 1 || tail);
      __syncwarp();
      if (lane == 0) barrier_arrive(memory.full(stage));
    }
  }
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_TILES_EXPAND_CUH_
