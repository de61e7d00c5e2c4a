// Dense products of many tokens: a cluster of two blocks multiplies 256 tokens, 128 a block, with
// two tiles of the weight at a time. Each block copies one of the tiles into both blocks' shared
// memory, and a warpgroup reads its 64 tokens into registers once for both tiles. What bounds these
// products is what goes through caches and shared memory, and the power that it takes.
//
// Clusters have items in rounds: pairs of tiles, and behind them single tiles where that makes the
// last round shorter (`cut_pairs` in launch.cu).
//
// Invariant: a result's products are added in the order of K, as in kernel.cuh.
#ifndef GPTOSS_TRT_DENSE_FP8_PAIRS_CUH_
#define GPTOSS_TRT_DENSE_FP8_PAIRS_CUH_

#include <cuda.h>

#include <cstdint>

#include "core/cluster.cuh"
#include "core/ptx.cuh"
#include "core/wgmma_wide.cuh"
#include "dense_fp8/instructions.cuh"
#include "dense_fp8/kernel.cuh"
#include "dense_fp8/params.h"
#include "dense_fp8/store.cuh"
#include "dense_fp8/tile.cuh"

namespace gptoss::dense_fp8 {

struct PairItem {
  int token;  // the block's first
  int block;  // of the weight, the first of `tiles`
  int tiles;
};

// The items of a cluster.
class PairSchedule {
 public:
  __device__ __forceinline__ explicit PairSchedule(const Params& p)
      : p_(p),
        clusters_(gridDim.x / kPairBlocks),
        cluster_(blockIdx.x / kPairBlocks),
        rank_(static_cast<int>(cluster_rank())),
        pairs_(p.tiles / 2),
        all_pairs_(p.token_tiles * pairs_),
        end_(2 * all_pairs_ - p.whole_pairs + (p.tiles % 2) * p.token_tiles) {}

  __device__ __forceinline__ bool done() const { return at() >= end_; }
  __device__ __forceinline__ void advance() { ++round_; }
  __device__ __forceinline__ int rank() const { return rank_; }

  __device__ __forceinline__ PairItem item() const {
    const int number = at();
    const int single = number - p_.whole_pairs;
    if (single < 0) return place(number, 0, 2);
    if (number < 2 * all_pairs_ - p_.whole_pairs) {
      return place(p_.whole_pairs + single / 2, single % 2, 1);
    }
    return {token_of(number - (2 * all_pairs_ - p_.whole_pairs)), p_.tiles - 1, 1};
  }

 private:
  // Rounds go there and back: of two that are not full the same clusters have an item less.
  __device__ __forceinline__ int at() const {
    return round_ * clusters_ + (round_ % 2 == 0 ? cluster_ : clusters_ - 1 - cluster_);
  }

  __device__ __forceinline__ int token_of(int group) const {
    return (group * kPairBlocks + rank_) * kPairTokens;
  }

  __device__ __forceinline__ PairItem place(int pair, int tile, int tiles) const {
    const int fast = p_.tokens_first ? p_.token_tiles : pairs_;
    const int slow = pair / fast;
    const int inner = pair - slow * fast;
    return {token_of(p_.tokens_first ? inner : slow), 2 * (p_.tokens_first ? slow : inner) + tile,
            tiles};
  }

  const Params& p_;
  const int clusters_, cluster_, rank_, pairs_, all_pairs_, end_;
  int round_ = 0;
};

// Stages of an item behind those of its products.
template <typename S>
__device__ __forceinline__ int end_stages(const PairItem& item) {
  return S::kAdds ? item.tiles : 0;
}

// ---- producers ------------------------------------------------------------------------------

// One warp, by a lane that it elects: tokens and weights, and behind an item's last stage what its
// end needs, in stages of their own: what results are added to, a tile each.
template <typename S>
__device__ inline void produce_pairs(const Params& p, const Memory<S>& memory,
                                     const CUtensorMap& x_map, const CUtensorMap& weight_map,
                                     const CUtensorMap& out_map) {
  constexpr uint16_t kAll = (1 << kPairBlocks) - 1;
  PairSchedule schedule(p);
  const int rank = schedule.rank();
  const auto own_tile = [&](const PairItem& item) { return item.tiles == 2 ? rank : 0; };
  // `row`: the first of own_tile(item). Of a single tile the blocks copy every second stage.
  const auto request_weights = [&](int stage, int block, const PairItem& item, int row) {
    const uint32_t full = memory.full(stage);
    barrier_expect_bytes(full, S::kTokenBytes + item.tiles * kWeightBytes);
    if (item.tiles == 2 || block % 2 == rank) {
      copy_box_to_all(memory.weights(stage, own_tile(item)), weight_map, block * kBlock, row, full,
                      kAll);
    }
  };
  int ahead = 0;  // stages whose weights are under way
  if (!schedule.done()) {
    const PairItem item = schedule.item();
    const int row = tile_of(p, item.block + own_tile(item), 0).row;
    ahead = min(S::kStages, p.k_blocks);
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
      if (elect_lane()) request_weights(i, i, item, row);
      __syncwarp();
    }
  }
  dependency_wait();
  Position<S> position;
  for (; !schedule.done(); schedule.advance()) {
    const PairItem item = schedule.item();
    const int row = tile_of(p, item.block + own_tile(item), 0).row;
#pragma unroll 1
    for (int block = 0; block < p.k_blocks; ++block, position.step(), --ahead) {
      const int stage = position.stage;
      barrier_wait(memory.empty(stage), position.parity ^ 1);
      if (elect_lane()) {
        if (ahead <= 0) request_weights(stage, block, item, row);
        copy_box(memory.tokens(stage), x_map, block * kBlock, item.token, memory.full(stage));
      }
      __syncwarp();
    }
#pragma unroll 1
    for (int i = 0; i < end_stages<S>(item); ++i, position.step()) {
      const uint32_t full = memory.full(position.stage), to = memory.tokens(position.stage);
      barrier_wait(memory.empty(position.stage), position.parity ^ 1);
      if (elect_lane()) {
        constexpr int kBoxBytes = S::kTokens * 128;
        const int column = 2 * tile_of(p, item.block + i, 0).row;
        barrier_expect_bytes(full, 2 * kBoxBytes);
        copy_box(to, out_map, column, item.token, full);
        copy_box(to + kBoxBytes, out_map, column + 128, item.token, full);
      }
      __syncwarp();
    }
  }
}

// The bias of an item's tiles, and positions and slots of its tokens.
template <typename S>
__device__ __forceinline__ void copy_ends(const Params& p, const PairItem& item, uint32_t side,
                                          int lane) {
  if (p.bias != nullptr) {
    for (int tile = 0; tile < item.tiles; ++tile) {
      copy_bias(p, side + S::kBiasAt + tile * kBlock * 2, tile_of(p, item.block + tile, item.token),
                lane);
    }
  }
  if constexpr (S::kRotates) {
#pragma unroll 2
    for (int i = 0; i < S::kTokens / 32; ++i) {
      const int at = lane + 32 * i, token = min(item.token + at, p.tokens - 1);
      copy_word_async(side + S::kPositionsAt + at * 4, p.positions + token, true);
      copy_word_async(side + S::kSlotsAt + at * 4, p.slots + token, true);
    }
  }
}

// One warp: scales, and with the last of them the bias and what rotation needs.
template <typename S>
__device__ inline void produce_pair_scales(const Params& p, const Memory<S>& memory) {
  const int lane = threadIdx.x % 32;
  dependency_wait();
  Position<S> position;
  for (PairSchedule schedule(p); !schedule.done(); schedule.advance()) {
    const PairItem item = schedule.item();
    const float* unit = p.weight_scale + static_cast<int64_t>(item.block + lane % 2) * p.k_blocks;
#pragma unroll 1
    for (int block = 0; block < p.k_blocks; ++block, position.step()) {
      const uint32_t side = memory.side(position.stage);
      const float* scales = p.x_scale + static_cast<int64_t>(block) * p.tokens;
      barrier_wait(memory.empty(position.stage), position.parity ^ 1);
      copy_token_scales<S>(p, side, scales, item.token, lane);
      if (lane < item.tiles) {
        copy_word_async(side + S::kWeightScaleAt + lane * 4, unit + block, true);
      }
      if (block + 1 == p.k_blocks) copy_ends<S>(p, item, side, lane);
      copies_arrive(memory.full(position.stage));
    }
    for (int i = 0; i < end_stages<S>(item); ++i, position.step()) {
      barrier_wait(memory.empty(position.stage), position.parity ^ 1);
      copies_arrive(memory.full(position.stage));
    }
  }
}

// One warp: the angles of all tokens come into the second-level cache, some by each block.
__device__ inline void ask_for_angles(const Params& p) {
  const int step = gridDim.x * 32;
  for (int token = blockIdx.x * 32 + threadIdx.x % 32; token < p.tokens; token += step) {
    const float* row = p.cos_sin + static_cast<int64_t>(p.positions[token]) * kHeadDim;
    prefetch_line(row);
    prefetch_line(row + kHeadDim / 2);
  }
}

// ---- consumers ------------------------------------------------------------------------------

template <typename S>
__device__ __forceinline__ void release_pair(const Memory<S>& memory, int stage, uint32_t leader) {
  __syncwarp();
  if (leader == 0) return;
#pragma unroll
  for (int rank = 0; rank < kPairBlocks; ++rank) {
    cluster_arrive(cluster_address(memory.empty(stage), rank));
  }
}

// Of a thread's two tokens, times a tile's.
struct PairScales {
  float low, high;
};

template <typename S>
__device__ __forceinline__ PairScales load_pair_scales(const Memory<S>& memory, const Lane<S>& lane,
                                                       int stage, int tile) {
  const uint32_t side = memory.side(stage);
  const float unit = load_shared_f32(side + S::kWeightScaleAt + tile * 4);
  return {unit * load_shared_f32(side + lane.token * 4),
          unit * load_shared_f32(side + lane.token * 4 + 32)};
}

// sums = the products of an item, stage by stage; the last stage is held. What the next
// instructions need is read while these run: a warpgroup that is done with its additions starts
// them at once.
template <typename S, int kTiles, int kColumns>
__device__ __forceinline__ void multiply_pair(const Params& p, const Memory<S>& memory,
                                              const Lane<S>& lane, Position<S>& position,
                                              Sums<S> (&sums)[kTiles]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < S::kColumns / 2; ++i) sums[tile][i] = 0.0f;
  }
  const uint32_t fragments = lane.warpgroup * 64 * kBlock + fragment_place();
  TokenFragments a;
  barrier_wait(memory.full(position.stage), position.parity);
  PairScales next = load_pair_scales(memory, lane, position.stage, 0);
  load_fragments(memory.tokens(position.stage) + fragments, a);
#pragma unroll 1
  for (int left = p.k_blocks - 1; left >= 0; --left) {
    const int stage = position.stage;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint64_t weights = swizzled_rows(memory.weights(stage, tile));
      float part[kColumns / 2];
      wgmma_fence();
      if (left > 0 || p.tail_halves == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_e4m3<kColumns>(part, a[i], weights + 2 * i, i);
        wgmma_commit();
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) wgmma_e4m3<kColumns>(part, a[i], weights + 2 * i, i);
        wgmma_commit();
      }
      const PairScales now = next;
      if (tile + 1 < kTiles) {
        next = load_pair_scales(memory, lane, stage, tile + 1);
      } else {
        position.step();
        if (left > 0) {
          barrier_wait(memory.full(position.stage), position.parity);
          next = load_pair_scales(memory, lane, position.stage, 0);
        }
      }
      wgmma_wait_all();
      wgmma_settle(part);
      if (tile + 1 == kTiles) {
        if (left > 0) release_pair(memory, stage, lane.leader);
        // Behind the last stage whatever lies there, to no use.
        load_fragments(memory.tokens(position.stage) + fragments, a);
      }
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        sums[tile][i] = fmaf(part[i], i % 4 < 2 ? now.low : now.high, sums[tile][i]);
      }
    }
  }
}

template <typename S, int kTiles, int kColumns>
__device__ __forceinline__ void consume_pair(const Params& p, const Memory<S>& memory,
                                             const Lane<S>& lane, const PairItem& item,
                                             Position<S>& position) {
  Sums<S> sums[kTiles];
  multiply_pair<S, kTiles, kColumns>(p, memory, lane, position, sums);
  const int held = (position.stage + S::kStages - 1) % S::kStages;
  const uint32_t side = memory.side(held);
  Places places;
  if constexpr (S::kRotates) places.take(p, lane, side);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    if (p.bias != nullptr) add_bias(lane, side + S::kBiasAt + tile * kBlock * 2, sums[tile]);
  }
  release_pair(memory, held, lane.leader);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const Tile at = tile_of(p, item.block + tile, item.token);
    if constexpr (S::kRotates) {
      store_rotated(p, lane, at, places, sums[tile]);
    } else if constexpr (S::kAdds) {
      barrier_wait(memory.full(position.stage), position.parity);
      add_tile(p, lane, at, memory.tokens(position.stage), sums[tile]);
      // Not ahead of the additions: an arrival in the cluster overtakes loads that are under way.
      release_pair(memory, position.stage, lane.leader);
      position.step();
    } else {
      store_tile(p, lane, at, sums[tile]);
    }
  }
}

template <typename S>
__device__ __forceinline__ void consume_pairs(const Params& p, const Memory<S>& memory) {
  const Lane<S> lane;
  Position<S> position;
  for (PairSchedule schedule(p); !schedule.done(); schedule.advance()) {
    const PairItem item = schedule.item();
    if (item.tiles == 2) {
      consume_pair<S, 2, kBlock>(p, memory, lane, item, position);
    } else if (tile_of(p, item.block, 0).rows > kBlock / 2) {
      consume_pair<S, 1, kBlock>(p, memory, lane, item, position);
    } else {
      consume_pair<S, 1, kBlock / 2>(p, memory, lane, item, position);
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    dense_fp8_pairs_kernel(const __grid_constant__ Params p,
                           const __grid_constant__ CUtensorMap x_map,
                           const __grid_constant__ CUtensorMap weight_map,
                           const __grid_constant__ CUtensorMap out_map) {
  extern __shared__ uint8_t dense_shared[];
  const Memory<S> memory{(shared_address(dense_shared) + kSwizzleAlignment - 1) /
                         kSwizzleAlignment * kSwizzleAlignment};
  if (threadIdx.x < S::kStages) {
    barrier_init(memory.full(threadIdx.x), 1 + 32);  // a thread's expected bytes, a warp's scales
    barrier_init(memory.empty(threadIdx.x), kConsumerWarps * kPairBlocks);
  }
  barrier_init_fence();
  dependents_launch();
  cluster_sync();  // both blocks' barriers are there
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0) - kConsumerWarps;
  if (warp >= 0) {
    registers_release<kProducerRegisters>();
    if (warp == 0) {
      produce_pairs<S>(p, memory, x_map, weight_map, out_map);
    } else if (warp == 1) {
      produce_pair_scales<S>(p, memory);
    } else if (S::kRotates && warp == 2) {
      ask_for_angles(p);
    }
  } else {
    registers_claim<kConsumerRegisters>();
    consume_pairs<S>(p, memory);
  }
  __syncwarp();
  cluster_sync();  // copies into the other block and arrivals there have ended
}

}  // namespace gptoss::dense_fp8

#endif  // GPTOSS_TRT_DENSE_FP8_PAIRS_CUH_
