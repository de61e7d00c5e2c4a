// moe_gemm_fp8 on FP8 tiles, many rows an expert. Tokens are the M operand, up to 256 of one
// expert, and a tile of 128 rows of the weights the N operand, both in shared memory with 128-byte
// swizzle: tokens by tensor copies of their sorted rows, weights by bulk copies of tiles that lie
// in memory as they shall lie here. The tensor cores sum 128 columns of K; their sums times the
// scales of token and tile go to fp32 sums in registers while the other warpgroup's instructions
// run.
//
// A cluster of two blocks (kShare) multiplies the same tokens with two tiles and copies the tokens
// once. Tiles that lie ready may go in pairs (kPairs): a block multiplies 128 tokens, read
// into registers once for both, and a cluster copies the pair once. Items are taken from a counter,
// because they cost as much as their rows: one warp takes them and finds what their ends need,
// others copy (tiles_producer.cuh). Weights that lie as MXFP4 are expanded into such tiles by warps
// ahead of the products (tiles_expand.cuh).
//
// Invariant: a result depends on its own row of x and its expert's weights only: records are added
// in their order, whatever the token block.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_TILES_KERNEL_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_TILES_KERNEL_CUH_

#include <cuda.h>

#include <cstdint>

#include "core/cluster.cuh"
#include "core/ptx.cuh"
#include "core/wgmma_wide.cuh"
#include "dense_fp8/instructions.cuh"
#include "moe_gemm_fp8/tiles_ends.cuh"
#include "moe_gemm_fp8/tiles_expand.cuh"
#include "moe_gemm_fp8/tiles_producer.cuh"
#include "moe_gemm_fp8/tiles_schedule.cuh"

namespace gptoss::moe {

using dense_fp8::fragment_place;
using dense_fp8::load_fragments;
using dense_fp8::multiply;
using dense_fp8::swizzled_rows;
using dense_fp8::TokenFragments;

// ---- consumers ------------------------------------------------------------------------------

template <typename S>
__device__ __forceinline__ void release_stage(const TileMemory<S>& memory, int stage,
                                              uint32_t leader) {
  __syncwarp();
  if (leader == 0) return;
  if constexpr (S::kShare == 1) {
    barrier_arrive(memory.empty(stage));
  } else {
#pragma unroll
    for (int rank = 0; rank < S::kShare; ++rank) {
      cluster_arrive(cluster_address(memory.empty(stage), rank));
    }
  }
}

// Of a thread's two rows of a chunk, times a tile's.
struct TileScales {
  float low, high;
};

template <typename S>
__device__ __forceinline__ TileScales load_scales(const TileMemory<S>& memory, const TileLane& lane,
                                                  const TileWork<S>& work, int stage, int block) {
  const float tile = load_shared_f32(memory.weight_scale(stage, work.tile(block)));
  if constexpr (!S::kGate) return {tile * kStaticScale, tile * kStaticScale};
  const uint32_t at = memory.scales(stage) + (work.chunk(block) * kChunkRows + lane.row) * 4;
  return {tile * load_shared_f32(at), tile * load_shared_f32(at + 32)};
}

// sum = the products of an item, record by record. What the next instructions need is read while
// these run: a warpgroup that is done with its additions starts them at once. Where tiles go in
// pairs, tokens are read into registers, once for both.
template <typename S, int kBlocks, int kColumns>
__device__ __forceinline__ void multiply_item(const Params& p, const TileMemory<S>& memory,
                                              const TileLane& lane, const TileWork<S>& work,
                                              RingPlace<S::kStages>& place, TileSums& sum) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sum[block][i] = 0.0f;
  }
  const auto tokens_at = [&](int stage, int block) {
    return memory.tokens(stage) + work.chunk(block) * kChunkBytes;
  };
  const uint32_t fragments = S::kPairs ? fragment_place() : 0;
  TokenFragments a;
  barrier_wait(memory.full(place.stage), place.parity);
  TileScales next = load_scales(memory, lane, work, place.stage, 0);
  if constexpr (S::kPairs) load_fragments(tokens_at(place.stage, 0) + fragments, a);
#pragma unroll 1
  for (int left = p.records - 1; left >= 0; --left) {
    const int stage = place.stage;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint64_t tokens = swizzled_rows(tokens_at(stage, block));
      const uint64_t weights = swizzled_rows(memory.weights(stage, work.tile(block)));
      float part[kColumns / 2];
      const auto start = [&](int i) {
        if constexpr (S::kPairs) {
          wgmma_e4m3<kColumns>(part, a[i], weights + 2 * i, i);
        } else {
          multiply<kColumns>(part, tokens + 2 * i, weights + 2 * i, i);
        }
      };
      wgmma_fence();
      if (left > 0 || p.tail_halves == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) start(i);
        wgmma_commit();
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) start(i);
        wgmma_commit();
      }
      const TileScales now = next;
      if (block + 1 < kBlocks) {
        next = load_scales(memory, lane, work, stage, block + 1);
      } else {
        place.step();
        if (left > 0) {
          barrier_wait(memory.full(place.stage), place.parity);
          next = load_scales(memory, lane, work, place.stage, 0);
        }
      }
      wgmma_wait_all();
      wgmma_settle(part);
      if (block + 1 == kBlocks) {
        release_stage(memory, stage, lane.leader);
        // Behind the last record whatever lies there, to no use.
        if constexpr (S::kPairs) load_fragments(tokens_at(place.stage, 0) + fragments, a);
      }
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        sum[block][i] = fmaf(part[i], i % 4 < 2 ? now.low : now.high, sum[block][i]);
      }
    }
  }
}

// An item of which the warpgroup has nothing.
template <typename S>
__device__ __forceinline__ void pass_item(const Params& p, const TileMemory<S>& memory,
                                          const TileLane& lane, RingPlace<S::kStages>& place) {
#pragma unroll 1
  for (int left = p.records; left > 0; --left, place.step()) {
    barrier_wait(memory.full(place.stage), place.parity);
    release_stage(memory, place.stage, lane.leader);
  }
}

template <typename S, int kBlocks, int kColumns = kTileRows>
__device__ __forceinline__ void consume_columns(const Params& p, const TileMemory<S>& memory,
                                                const typename S::Slot& slot, const TileLane& lane,
                                                const TileWork<S>& work,
                                                RingPlace<S::kStages>& place) {
  TileSums sum;
  multiply_item<S, kBlocks, kColumns>(p, memory, lane, work, place, sum);
  if constexpr (S::kGate) {
    store_h<S, kBlocks>(p, slot, lane, work, sum);
  } else {
    store_out<S, kBlocks, kColumns>(p, slot, lane, work, sum);
  }
}

// DOWN has tiles whose second half lies behind n: the first is multiplied alone.
template <typename S, int kBlocks>
__device__ __forceinline__ void consume_blocks(const Params& p, const TileMemory<S>& memory,
                                               const typename S::Slot& slot, const TileLane& lane,
                                               const TileWork<S>& work,
                                               RingPlace<S::kStages>& place) {
  if constexpr (!S::kGate && (kBlocks == 1 || !S::kPairs)) {
    if ((slot.item.tile + work.tile(0) + 1) * kTileRows - p.n >= kTileRows / 2) {
      consume_columns<S, kBlocks, kTileRows / 2>(p, memory, slot, lane, work, place);
      return;
    }
  }
  consume_columns<S, kBlocks>(p, memory, slot, lane, work, place);
}

// Returns how many blocks of the item the warpgroup has.
template <typename S>
__device__ __forceinline__ int share_item(const TileItem& item, int warpgroup, TileWork<S>& work) {
  work = {warpgroup, 0};
  if constexpr (!S::kPairs) return ceil_div(item.chunks - warpgroup, kTileConsumers);
  if (item.chunks != 1) return item.chunks == 0 ? 0 : item.tiles;
  work = {0, warpgroup};  // of the only chunk a tile each
  return warpgroup < item.tiles;
}

template <typename S>
__device__ __forceinline__ void consume_items(const Params& p, const TileMemory<S>& memory) {
  const TileLane lane;
  RingPlace<S::kStages> place;
  RingPlace<kItemSlots> slots;
  for (;; slots.step()) {
    barrier_wait(memory.item_full(slots.stage), slots.parity);
    const typename S::Slot& slot = memory.slot(slots.stage);
    if (slot.item.expert < 0) return;
    TileWork<S> work;
    const int blocks = share_item(slot.item, lane.warpgroup, work);
    if (blocks == kOwnBlocks) {
      consume_blocks<S, kOwnBlocks>(p, memory, slot, lane, work, place);
    } else if (blocks == 1) {
      consume_blocks<S, 1>(p, memory, slot, lane, work, place);
    } else {
      pass_item(p, memory, lane, place);
    }
    __syncwarp();
    if (lane.leader != 0) barrier_arrive(memory.item_empty(slots.stage));
  }
}

__constant__ constexpr CodeTable kTileCodes = make_code_table();

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    moe_gemm_tiles_kernel(const __grid_constant__ Params p,
                          const __grid_constant__ CUtensorMap map) {
  extern __shared__ uint8_t tiles_shared[];
  __shared__ __align__(128) ReaderTable table;
  const uint32_t start = shared_address(tiles_shared);
  const uint32_t skipped = (kTileSwizzle - start % kTileSwizzle) % kTileSwizzle;
  const TileMemory<S> memory{tiles_shared + skipped, start + skipped};
  if (threadIdx.x < S::kStages) {
    barrier_init(memory.full(threadIdx.x), S::kExpandingWarps + 1);
    barrier_init(memory.empty(threadIdx.x), kTileConsumerWarps * S::kShare);
  } else if (threadIdx.x >= 32 && threadIdx.x < 32 + kItemSlots) {
    barrier_init(memory.item_full(threadIdx.x - 32), 1);
    barrier_init(memory.item_empty(threadIdx.x - 32),
                 kTileConsumerWarps + S::kExpandingWarps + S::kCopyingThreads);
    barrier_init(memory.index_full(threadIdx.x - 32), 1);
    barrier_init(memory.index_read(threadIdx.x - 32), S::kShare > 1 ? S::kShare - 1 : 1);
  } else if (threadIdx.x == 64) {
    barrier_init(memory.wanted(), 1);
    if constexpr (S::kExpand) {
      for (int i = 0; i < kRawStages; ++i) {
        barrier_init(memory.raw_full(i), 1);
        barrier_init(memory.raw_empty(i), S::kExpandingWarps);
      }
    }
  } else if (S::kExpand && threadIdx.x >= 96 && threadIdx.x < 96 + kTableRows) {
    const int row = threadIdx.x - 96;
    table.rows[row].codes = make_uint2(kTileCodes.words[row][0], kTileCodes.words[row][1]);
  }
  barrier_init_fence();
  // GATE_UP stands behind the kernel that sorts rows, which waited for offsets. The warp that
  // copies tokens waits in any case.
  if (!S::kGate && !p.routing_ready) dependency_wait();
  TileTables(memory.tables(), p.experts).fill(p);
  if constexpr (S::kShare > 1) cluster_sync();
  const int warp_of_all = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  const int warpgroup = warp_of_all / 4, warp = warp_of_all % 4;
  if (S::kExpand && warpgroup == kTileConsumers) {
    if constexpr (S::kExpand) {
      registers_release<S::kExpanderRegisters>();
      expand_stages<S>(p, memory, table);
    }
  } else if (warpgroup >= kTileConsumers) {
    registers_release<S::kProducerRegisters>();
    if (warp == 0) {
      produce_stages<S>(p, memory, map);
    } else if (warp == 1) {
      produce_slots<S>(p, memory);
    } else if (S::kExpand && warp == 2) {
      produce_records<S>(p, memory);
    }
  } else {
    registers_claim<S::kConsumerRegisters>();
    consume_items<S>(p, memory);
  }
  if constexpr (S::kShare > 1) {
    __syncwarp();
    cluster_sync();  // copies into the others and their arrivals here have ended
  }
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_TILES_KERNEL_CUH_
