// Of the plan of FP8 tiles: what lies in a block's shared memory, and who copies into it: tokens,
// FP8 tiles or, where weights come as MXFP4, records that other warps expand (tiles_expand.cuh).
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_TILES_PRODUCER_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_TILES_PRODUCER_CUH_

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "core/cluster.cuh"
#include "core/ptx.cuh"
#include "dense_fp8/instructions.cuh"
#include "moe_gemm_fp8/tiles_schedule.cuh"

namespace gptoss::moe {

using dense_fp8::copy_box;
using dense_fp8::copy_box_to_all;

constexpr int kTileConsumerWarps = kTileConsumers * 4;
constexpr int kTileSwizzle = 1024;
constexpr int kItemSlots = 2;
constexpr int kTileStages = 4;
constexpr int kChunkBytes = kChunkRows * kRecordColumns;
// An item is taken this many records before the last of the one ahead: not earlier, because some
// cost a quarter of others.
constexpr int kTakeAhead = 6;
constexpr int kTileStrips = kTileRows / kStripRows;

constexpr int kTilePitch = ceil_div(kTileBytes, kTileSwizzle) * kTileSwizzle;

constexpr int kTakingBytes = 8 + (8 + 8 + 4) * kItemSlots;  // TileMemory::wanted() and behind it

// Records as they lie in memory, ahead of their expansion: those of a tile's strips.
constexpr int kRawStages = 3;
constexpr int kRawPitch = record_bytes(Storage::kMxfp4, 2);
constexpr int kRawBytes = ceil_div(kTileStrips * kRawPitch, 128) * 128;

// An item of kTiles tiles and what its end needs.
template <int kTiles>
struct TileSlot {
  TileItem item;
  uint16_t bias[kTiles * kTileRows];  // bf16 bits
  uint2 rows[kBlockRows];  // DOWN: output slot and routing weight. GATE_UP has none: kSlotBytes.
};

// Byte offsets from a multiple of kTileSwizzle.
template <bool kGateUp, int kSharing, Storage kStorage, bool kInPairs>
struct TileShape {
  static constexpr bool kGate = kGateUp;
  static constexpr bool kExpand = kStorage == Storage::kMxfp4;
  // Warpgroups: kTileConsumers that multiply, one that expands, one that copies. A launch gets as
  // many registers for all threads as these.
  static constexpr int kThreads = (kTileConsumers + (kExpand ? 2 : 1)) * 128;
  static constexpr int kConsumerRegisters = kExpand ? 208 : 224;
  static constexpr int kExpanderRegisters = 56;
  static constexpr int kProducerRegisters = kExpand ? 40 : 56;
  static constexpr int kExpandingWarps = kExpand ? 4 : 0;
  static constexpr int kCopyingThreads = kExpand ? 2 : 1;
  static constexpr int kShare = kSharing, kStages = kTileStages;
  // FP8 tiles may go in pairs to blocks of 128 tokens, so that a warpgroup reads its tokens once
  // for both.
  static constexpr bool kPairs = kInPairs;
  static constexpr int kTiles = kPairs ? 2 : 1;
  static constexpr int kClusterTiles = kPairs ? kTiles : kShare;
  static constexpr int kChunks = kPairs ? kTileConsumers : kBlockChunks;
  static constexpr int kClusterChunks = kPairs ? kShare * kChunks : kChunks;
  // A last chunk alone gets one of the block before: expansion costs a block of one chunk as much
  // as one of three. (GATE_UP's scales lie by whole blocks.)
  static constexpr bool kEvens = kExpand && !kGate;
  static constexpr int kBoxes = kPairs ? 1 : kShare;  // copies of a chunk
  static constexpr int kTokenBytes = kChunks * kChunkBytes;
  // A stage: tokens, tiles and their scales, scales of tokens. Where tiles are expanded, the scales
  // of all stages lie behind these: they would take a kilobyte each for the swizzle's sake.
  static constexpr int kTokenScaleBytes = kGate ? kChunks * kChunkRows * 4 : 0;
  static constexpr int kScalesAt = kTokenBytes + (kTiles - 1) * kTilePitch + kTileBytes;
  static constexpr int kStageBytes =
      kExpand ? kTokenBytes + kTileRows * kRecordColumns
              : ceil_div(kScalesAt + kTokenScaleBytes, kTileSwizzle) * kTileSwizzle;
  static constexpr int kApartAt = kStages * kStageBytes;
  static constexpr int kWeightScalesAt = kApartAt + kStages * kTokenScaleBytes;
  static constexpr int kApartBytes = kExpand ? kStages * (kTokenScaleBytes + 16) : 0;
  using Slot = TileSlot<kTiles>;
  static constexpr int kSlotBytes = static_cast<int>(kGate ? offsetof(Slot, rows) : sizeof(Slot));
  static constexpr int kRawAt = ceil_div(kApartAt + kApartBytes, 128) * 128;
  static constexpr int kSlotsAt = kRawAt + (kExpand ? kRawStages * kRawBytes : 0);
  static constexpr int kBarriersAt = kSlotsAt + kItemSlots * kSlotBytes;
  static constexpr int kTablesAt = kBarriersAt + 2 * 8 * (kStages + kItemSlots) + kTakingBytes +
                                   (kExpand ? 2 * 8 * kRawStages : 0);
  static constexpr int shared_bytes(int experts) {
    return kTablesAt + 2 * (experts + 1) * 4 + kTileSwizzle;
  }
};

template <typename S>
struct TileMemory {
  uint8_t* base;
  uint32_t address;

  __device__ uint32_t tokens(int stage) const { return address + stage * S::kStageBytes; }
  __device__ uint32_t weights(int stage, int tile = 0) const {
    return tokens(stage) + S::kTokenBytes + tile * kTilePitch;
  }
  __device__ uint32_t weight_scale(int stage, int tile = 0) const {
    return S::kExpand ? address + S::kWeightScalesAt + stage * 16
                      : weights(stage, tile) + kTileRows * kRecordColumns;
  }
  __device__ uint32_t scales(int stage) const {
    return S::kExpand ? address + S::kApartAt + stage * S::kTokenScaleBytes
                      : tokens(stage) + S::kScalesAt;
  }
  __device__ typename S::Slot& slot(int i) const {
    return *reinterpret_cast<typename S::Slot*>(base + S::kSlotsAt + i * S::kSlotBytes);
  }
  __device__ uint32_t full(int stage) const { return address + S::kBarriersAt + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(S::kStages) + 8 * stage; }
  __device__ uint32_t item_full(int i) const { return empty(S::kStages) + 8 * i; }
  __device__ uint32_t item_empty(int i) const { return item_full(kItemSlots) + 8 * i; }
  // The next item may be taken. Its index has come, from the first block of the cluster to the
  // others; there: it has been read.
  __device__ uint32_t wanted() const { return item_empty(kItemSlots); }
  __device__ uint32_t index_full(int i) const { return wanted() + 8 + 8 * i; }
  __device__ uint32_t index_read(int i) const { return wanted() + 24 + 8 * i; }
  __device__ uint32_t index(int i) const { return wanted() + 40 + 4 * i; }
  __device__ uint32_t raw(int i) const { return address + S::kRawAt + i * kRawBytes; }
  __device__ uint32_t raw_full(int i) const { return wanted() + kTakingBytes + 8 * i; }
  __device__ uint32_t raw_empty(int i) const { return raw_full(kRawStages) + 8 * i; }
  __device__ int32_t* tables() const { return reinterpret_cast<int32_t*>(base + S::kTablesAt); }
};

template <int kCount>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void step() {
    if (++stage == kCount) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- producers ------------------------------------------------------------------------------

// bulk_copy to the blocks of the cluster in `blocks` (a bit each), at the same places of each.
__device__ __forceinline__ void bulk_copy_to_all(uint32_t target, const void* source,
                                                 uint32_t bytes, uint32_t barrier,
                                                 uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1], %2, [%3], %4;" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier), "h"(blocks)
      : "memory");
}

// Fills the slots of items, one warp.
template <typename S>
class SlotFiller {
 public:
  __device__ __forceinline__ SlotFiller(const Params& p, const TileMemory<S>& memory)
      : p_(p),
        memory_(memory),
        tables_(memory.tables(), p.experts),
        rank_(S::kShare > 1 ? static_cast<int>(cluster_rank()) : 0),
        total_(tables_.blocks_before[p.experts] * ceil_div(p.weight_tiles, S::kClusterTiles)) {}

  __device__ __forceinline__ void fill_first() {
    write(blockIdx.x / S::kShare);
    copy_weights();
    finish();
  }

  __device__ __forceinline__ bool has_item() const { return rows_ >= 0; }

  // Takes the next item, the first block of a cluster for all.
  __device__ __forceinline__ void write_next() { write(next()); }

  // Routing weights, once their slots have come.
  __device__ __forceinline__ void copy_weights() {
    if constexpr (S::kGate) return;
    copies_wait_all();
    typename S::Slot& slot = memory_.slot(place_.stage);
    for (int row = threadIdx.x % 32; row < rows_; row += 32) {
      copy_word_async(shared_address(&slot.rows[row].y), p_.expert_weights + slot.rows[row].x,
                      true);
    }
  }

  // False: the slot says that there are no more items.
  __device__ __forceinline__ bool finish() {
    copies_wait_all();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(memory_.item_full(place_.stage));
    place_.step();
    return rows_ >= 0;
  }

 private:
  __device__ __forceinline__ int next() {
    int index = 0;
    if (threadIdx.x % 32 == 0) {
      const uint32_t full = memory_.index_full(taken_.stage), here = memory_.index(taken_.stage);
      const uint32_t read = memory_.index_read(taken_.stage);
      if (rank_ == 0) {
        const int taken = atomicAdd(p_.items_taken, 1);
        if (taken + 1 == total_) *p_.items_taken = 0;  // nobody takes another
        index = taken + gridDim.x / S::kShare;
        if constexpr (S::kShare > 1) {
          barrier_wait(read, taken_.parity ^ 1);
#pragma unroll
          for (int other = 1; other < S::kShare; ++other) {
            cluster_store_async(cluster_address(here, other), index, cluster_address(full, other));
          }
        }
      } else {
        barrier_expect_bytes(full, sizeof(int32_t));
        barrier_wait(full, taken_.parity);
        index = load_shared_s32(here);
        cluster_arrive(cluster_address(read, 0));
      }
    }
    taken_.step();
    return __shfl_sync(0xFFFFFFFFu, index, 0);
  }

  __device__ __forceinline__ void write(int index) {
    const int lane = threadIdx.x % 32;
    typename S::Slot& slot = memory_.slot(place_.stage);
    barrier_wait(memory_.item_empty(place_.stage), place_.parity ^ 1);
    if (index >= total_) {
      if (lane == 0) slot.item.expert = -1;
      rows_ = -1;
      return;
    }
    const TileItem item = make_item<S>(p_, tables_, index, rank_, expert_);
    rows_ = item.rows;
    if (lane == 0) {
      slot.item = item;
      if constexpr (S::kExpand) {
        const int strips = min(p_.strips - item.tile * kTileStrips, kTileStrips);
        prefetch_to_l2(p_.weights + item.expert * p_.expert_bytes +
                           static_cast<int64_t>(item.tile) * kTileStrips * p_.strip_bytes,
                       strips * p_.strip_bytes);
      }
    }
    const uint16_t* bias = p_.bias + static_cast<int64_t>(item.expert) * p_.n;
#pragma unroll
    for (int i = 0; i < 2 * S::kTiles; ++i) {  // n is even
      const int inside = (lane + i * 32) * 2, column = item.tile * kTileRows + inside;
      const bool present = p_.bias != nullptr && column < p_.n;
      copy_word_async(shared_address(slot.bias + inside),
                      present ? static_cast<const void*>(bias + column) : p_.weights, present);
    }
    if constexpr (!S::kGate) {
      for (int row = lane; row < item.rows; row += 32) {
        copy_word_async(shared_address(&slot.rows[row].x), p_.row_slots + item.first + row, true);
      }
    }
  }

  const Params& p_;
  const TileMemory<S>& memory_;
  const TileTables tables_;
  const int rank_;
  const int total_;
  int expert_ = 0;
  int rows_ = 0;  // of the item being written; negative: there is none
  RingPlace<kItemSlots> place_;
  RingPlace<kItemSlots> taken_;
};

// One warp.
template <typename S>
__device__ inline void produce_slots(const Params& p, const TileMemory<S>& memory) {
  SlotFiller<S> filler(p, memory);
  uint32_t parity = 0;
  filler.fill_first();
  for (bool more = filler.has_item(); more; more = filler.finish()) {
    barrier_wait(memory.wanted(), parity);
    parity ^= 1;
    filler.write_next();
    filler.copy_weights();
  }
}

// Record of an item at which the next is taken.
__device__ __forceinline__ int taking_record(const Params& p) {
  return max(p.records - 1 - kTakeAhead, 0);
}

template <typename S>
__device__ __forceinline__ uint32_t token_bytes(const TileItem& item) {
  return item.chunks * (kChunkBytes + (S::kGate ? kChunkRows * 4 : 0));
}

// Tokens of a chunk and record to `stage`, whose barrier is told of their bytes by the caller.
template <typename S>
__device__ __forceinline__ void copy_chunk(const Params& p, const TileMemory<S>& memory,
                                           const CUtensorMap& map, const TileItem& item, int rank,
                                           int chunk, int record, int stage) {
  constexpr int kBoxRows = kChunkRows / S::kBoxes, kBoxBytes = kChunkBytes / S::kBoxes;
  const uint32_t full = memory.full(stage);
  const int column = record * kRecordColumns;
  const uint32_t to = memory.tokens(stage) + chunk * kChunkBytes;
  const int row = item.first + chunk * kChunkRows;
  if constexpr (S::kBoxes == 1) {
    copy_box(to, map, column, row, full);
  } else if (item.shared) {
    copy_box_to_all(to + rank * kBoxBytes, map, column, row + rank * kBoxRows, full,
                    (1 << S::kShare) - 1);
  } else {
    for (int part = 0; part < S::kBoxes; ++part) {
      copy_box(to + part * kBoxBytes, map, column, row + part * kBoxRows, full);
    }
  }
}

// The same of the scales of all tokens.
template <typename S>
__device__ __forceinline__ void copy_scales(const Params& p, const TileMemory<S>& memory,
                                            const TileItem& item, int record, int stage) {
  bulk_copy(memory.scales(stage), p.sorted_scales + item.scales + record * p.cluster_rows,
            item.chunks * kChunkRows * 4, memory.full(stage));
}

// Fields that all lanes of a warp read alike, as the compiler cannot know.
__device__ __forceinline__ TileItem uniform_item(const TileItem& item) {
  TileItem same;
  same.expert = __shfl_sync(0xFFFFFFFFu, item.expert, 0);
  same.tiles = __shfl_sync(0xFFFFFFFFu, item.tiles, 0);
  same.tile = __shfl_sync(0xFFFFFFFFu, item.tile, 0);
  same.first = __shfl_sync(0xFFFFFFFFu, item.first, 0);
  same.chunks = __shfl_sync(0xFFFFFFFFu, item.chunks, 0);
  same.shared = __shfl_sync(0xFFFFFFFFu, item.shared, 0);
  same.scales = __shfl_sync(0xFFFFFFFFu, item.scales, 0);
  return same;
}

// One thread: what a stage has of a record. Weights that are expanded come from elsewhere.
template <typename S>
__device__ __forceinline__ void copy_record(const Params& p, const TileMemory<S>& memory,
                                            const CUtensorMap& map, const TileItem& item, int rank,
                                            const uint8_t* weights, int record, int stage) {
  const uint32_t full = memory.full(stage);
  if (item.chunks == 0) {
    barrier_arrive(full);
    return;
  }
  barrier_expect_bytes(full, token_bytes<S>(item) + (S::kExpand ? 0 : item.tiles * kTileBytes));
#pragma unroll
  for (int chunk = 0; chunk < S::kChunks; ++chunk) {
    if (chunk < item.chunks) copy_chunk<S>(p, memory, map, item, rank, chunk, record, stage);
  }
  if constexpr (S::kGate) copy_scales<S>(p, memory, item, record, stage);
  if constexpr (!S::kExpand) {
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      if (tile >= item.tiles) break;
      const uint8_t* from = weights + static_cast<int64_t>(tile * p.records + record) * kTileBytes;
      if (!S::kPairs || S::kShare == 1 || !item.shared) {
        bulk_copy(memory.weights(stage, tile), from, kTileBytes, full);
      } else if (tile == rank) {
        bulk_copy_to_all(memory.weights(stage, tile), from, kTileBytes, full, (1 << S::kShare) - 1);
      }
    }
  }
}

// One warp: tokens, scales, weights. Tokens are what the kernel ahead makes: it is waited for here.
template <typename S>
__device__ inline void produce_stages(const Params& p, const TileMemory<S>& memory,
                                      const CUtensorMap& map) {
  const int rank = S::kShare > 1 ? static_cast<int>(cluster_rank()) : 0;
  RingPlace<S::kStages> place;
  RingPlace<kItemSlots> slots;
  dependency_wait();
  dependents_launch();
  for (;; slots.step()) {
    barrier_wait(memory.item_full(slots.stage), slots.parity);
    const TileItem item = uniform_item(memory.slot(slots.stage).item);
    if (item.expert < 0) return;
    if (elect_lane()) barrier_arrive(memory.item_empty(slots.stage));
    const uint8_t* weights = p.weights + item.expert * p.expert_bytes +
                             static_cast<int64_t>(item.tile) * p.records * kTileBytes;
#pragma unroll 1
    for (int record = 0; record < p.records; ++record, place.step()) {
      barrier_wait(memory.empty(place.stage), place.parity ^ 1);
      if (elect_lane()) {
        if (record == taking_record(p)) barrier_arrive(memory.wanted());
        copy_record<S>(p, memory, map, item, rank, weights, record, place.stage);
      }
      __syncwarp();
    }
  }
}

// One warp: records that others expand.
template <typename S>
__device__ inline void produce_records(const Params& p, const TileMemory<S>& memory) {
  RingPlace<kRawStages> place;
  RingPlace<kItemSlots> slots;
  for (;; slots.step()) {
    barrier_wait(memory.item_full(slots.stage), slots.parity);
    const TileItem item = uniform_item(memory.slot(slots.stage).item);
    if (item.expert < 0) return;
    if (elect_lane()) barrier_arrive(memory.item_empty(slots.stage));
    if (item.chunks == 0) continue;
    const int strips = min(p.strips - item.tile * kTileStrips, kTileStrips);
    const uint8_t* source = p.weights + item.expert * p.expert_bytes +
                            static_cast<int64_t>(item.tile) * kTileStrips * p.strip_bytes;
#pragma unroll 1
    for (int left = p.records - 1; left >= 0; --left, place.step()) {
      const uint32_t bytes = record_bytes(Storage::kMxfp4, left > 0 ? 2 : p.tail_halves);
      barrier_wait(memory.raw_empty(place.stage), place.parity ^ 1);
      if (elect_lane()) {
        const uint32_t full = memory.raw_full(place.stage), to = memory.raw(place.stage);
        barrier_expect_bytes(full, strips * bytes);
#pragma unroll
        for (int strip = 0; strip < kTileStrips; ++strip) {
          if (strip >= strips) break;
          bulk_copy(to + strip * kRawPitch, source + strip * p.strip_bytes, bytes, full);
        }
      }
      __syncwarp();
      source += bytes;
    }
  }
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_TILES_PRODUCER_CUH_
