// Dense products of many tokens: a cluster of two blocks multiplies 256 tokens, 128 a block, with
// 192 rows of the weight at a time. Each block copies half of these rows into both blocks' shared
// memory, and a warpgroup reads its 64 tokens into registers once for all of them. Instructions of
// 192 columns, because between two chains of them a warpgroup has some 400 cycles of its own, as
// long as the other warpgroup's chain takes then.
//
// Results leave through stages of the ring, boxes of 64 columns, which two warps store.
//
// Invariant: a result's products are added in the order of K, as in kernel.cuh.
#ifndef GPTOSS_TRT_DENSE_FP8_WIDE_CUH_
#define GPTOSS_TRT_DENSE_FP8_WIDE_CUH_

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
#include "dense_fp8/wide_schedule.h"

namespace gptoss::dense_fp8 {

constexpr int kStageBoxes = 2;  // that leave through a stage

template <End kEnd>
struct WideShape {
  static constexpr int kTokens = kWideTokens, kStages = 5, kGroups = kWideGroups;
  static constexpr bool kRotates = kEnd == End::kRotate, kAdds = kEnd == End::kAdd;
  static constexpr int kColumns = kGroups * kGroupRows;
  static constexpr int kHalfRows = kColumns / kWideBlocks;  // that a block copies
  static constexpr int kHalfBytes = kHalfRows * kBlock;
  static constexpr int kTokenBytes = kTokens * kBlock;
  static constexpr int kStageBytes = kTokenBytes + kWideBlocks * kHalfBytes;
  static constexpr int kWeightScaleAt = kTokens * 4;
  static constexpr int kBiasAt = kWeightScaleAt + 16;
  static constexpr int kPositionsAt = kBiasAt + kColumns * 2;
  static constexpr int kSlotsAt = kPositionsAt + kTokens * 4;
  static constexpr int kSideBytes = kRotates ? kSlotsAt + kTokens * 4 : kPositionsAt;
  static constexpr int kSideAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kSideAt + kStages * kSideBytes;
  static constexpr int kSharedBytes = kBarriersAt + 3 * 8 * kStages + kSwizzleAlignment;
  static_assert(kStageBoxes * kBoxBytes <= kStageBytes, "boxes of a stage");
};

// The items of this block's cluster.
__device__ __forceinline__ WideSchedule own_schedule(const Params& p) {
  return WideSchedule(p.cut, blockIdx.x / kWideBlocks);
}

// The first token of an item in this block.
__device__ __forceinline__ int first_token(const WideItem& item) {
  return (item.tokens * kWideBlocks + static_cast<int>(cluster_rank())) * kWideTokens;
}

// Stages of an item behind those of its products, through which its results leave.
__device__ __forceinline__ int end_stages(const WideItem& item) {
  return (item.groups + kStageBoxes - 1) / kStageBoxes;
}

// Of the weight's scales, which a row shares with 127 others of its segment.
__device__ __forceinline__ int scale_block(const Params& p, int row) {
  int before = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row < p.segments[i]) return before + row / kBlock;
    row -= p.segments[i];
    before += (p.segments[i] + kBlock - 1) / kBlock;
  }
  return before + row / kBlock;
}

// ---- producers ------------------------------------------------------------------------------

// One warp, by a lane that it elects: tokens and weights, and behind an item's last stage the
// stages of its end, with what results are added to.
template <typename S>
__device__ inline void produce_wide(const Params& p, const Memory<S>& memory,
                                    const CUtensorMap& x_map, const CUtensorMap& weight_map,
                                    const CUtensorMap& out_map) {
  constexpr uint16_t kAll = (1 << kWideBlocks) - 1;
  WideSchedule schedule = own_schedule(p);
  const int rank = static_cast<int>(cluster_rank());
  const auto request_weights = [&](int stage, int block, const WideItem& item) {
    const uint32_t full = memory.full(stage);
    const int halves = item.groups * kGroupRows > S::kHalfRows ? 2 : 1;
    barrier_expect_bytes(full, S::kTokenBytes + halves * S::kHalfBytes);
    if (rank < halves) {
      copy_box_to_all(memory.weights(stage) + rank * S::kHalfBytes, weight_map, block * kBlock,
                      item.row + rank * S::kHalfRows, full, kAll);
    }
  };
  int ahead = 0;  // stages whose weights are under way
  if (!schedule.done()) {
    const WideItem item = schedule.item();
    ahead = min(S::kStages, p.k_blocks);
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
      if (elect_lane()) request_weights(i, i, item);
      __syncwarp();
    }
  }
  dependency_wait();
  Position<S> position;
  for (; !schedule.done(); schedule.advance()) {
    const WideItem item = schedule.item();
    const int token = first_token(item);
#pragma unroll 1
    for (int block = 0; block < p.k_blocks; ++block, position.step(), --ahead) {
      const int stage = position.stage;
      barrier_wait(memory.empty(stage), position.parity ^ 1);
      if (elect_lane()) {
        if (ahead <= 0) request_weights(stage, block, item);
        copy_box(memory.tokens(stage), x_map, block * kBlock, token, memory.full(stage));
      }
      __syncwarp();
    }
#pragma unroll 1
    for (int i = 0; i < end_stages(item); ++i, position.step()) {
      const uint32_t full = memory.full(position.stage), to = memory.tokens(position.stage);
      barrier_wait(memory.empty(position.stage), position.parity ^ 1);
      if (elect_lane()) {
        if constexpr (S::kAdds) {
          const int first = i * kStageBoxes, boxes = min(item.groups - first, kStageBoxes);
          barrier_expect_bytes(full, boxes * kBoxBytes);
          for (int box = 0; box < boxes; ++box) {
            copy_box(to + box * kBoxBytes, out_map, 2 * (item.row + (first + box) * kGroupRows),
                     token, full);
          }
        } else {
          barrier_arrive(full);
        }
      }
      __syncwarp();
    }
  }
}

// The bias of an item's rows, and positions and slots of its tokens.
template <typename S>
__device__ __forceinline__ void copy_ends(const Params& p, const WideItem& item, int first,
                                          uint32_t side, int lane) {
  if (p.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < S::kColumns / 64; ++i) {
      const int column = 2 * (lane + 32 * i);
      copy_word_async(side + S::kBiasAt + column * 2, p.bias + min(item.row + column, p.n - 2),
                      column < item.groups * kGroupRows);
    }
  }
  if constexpr (S::kRotates) {
#pragma unroll 2
    for (int i = 0; i < S::kTokens / 32; ++i) {
      const int at = lane + 32 * i, token = min(first + at, p.tokens - 1);
      copy_word_async(side + S::kPositionsAt + at * 4, p.positions + token, true);
      copy_word_async(side + S::kSlotsAt + at * 4, p.slots + token, true);
    }
  }
}

// One warp: scales, and with the last of them the bias and what rotation needs.
template <typename S>
__device__ inline void produce_wide_scales(const Params& p, const Memory<S>& memory) {
  const int lane = threadIdx.x % 32;
  dependency_wait();
  Position<S> position;
  for (WideSchedule schedule = own_schedule(p); !schedule.done(); schedule.advance()) {
    const WideItem item = schedule.item();
    const int group = min(lane, item.groups - 1), token = first_token(item);
    const float* unit =
        p.weight_scale +
        static_cast<int64_t>(scale_block(p, item.row + group * kGroupRows)) * p.k_blocks;
#pragma unroll 1
    for (int block = 0; block < p.k_blocks; ++block, position.step()) {
      const uint32_t side = memory.side(position.stage);
      const float* scales = p.x_scale + static_cast<int64_t>(block) * p.tokens;
      barrier_wait(memory.empty(position.stage), position.parity ^ 1);
      copy_token_scales<S>(p, side, scales, token, lane);
      if (lane < item.groups) {
        copy_word_async(side + S::kWeightScaleAt + lane * 4, unit + block, true);
      }
      if (block + 1 == p.k_blocks) copy_ends<S>(p, item, token, side, lane);
      copies_arrive(memory.full(position.stage));
    }
    for (int i = 0; i < end_stages(item); ++i, position.step()) {
      barrier_wait(memory.empty(position.stage), position.parity ^ 1);
      copies_arrive(memory.full(position.stage));
    }
  }
}

// One warp for each of a stage's boxes: what consumers have put there goes where it belongs, and
// the stages are given back for all consumers.
template <typename S>
__device__ inline void store_boxes(const Params& p, const Memory<S>& memory,
                                   const CUtensorMap& out_map, int box) {
  int stage = 0;
  uint32_t parities = 0;  // a bit a stage
  for (WideSchedule schedule = own_schedule(p); !schedule.done(); schedule.advance()) {
    const WideItem item = schedule.item();
    stage = (stage + p.k_blocks) % S::kStages;
#pragma unroll 1
    for (int group = box; group - box < item.groups; group += kStageBoxes) {
      const int token = first_token(item), row = item.row + group * kGroupRows;
      const uint32_t from = memory.tokens(stage) + box * kBoxBytes;
      const uint32_t boxed = memory.boxed(stage), parity = parities >> stage & 1;
      parities ^= 1u << stage;
      if (group >= item.groups) {
        barrier_wait(boxed, parity);
      } else if (S::kRotates && row >= p.segments[0]) {
        const KeptBox kept(p, token, row);
        barrier_wait(boxed, parity);
        kept.store(from);
      } else {
        barrier_wait(boxed, parity);
        if (elect_lane()) {
          store_box(out_map, 2 * row, token, from);
          bulk_stores_commit();
          bulk_stores_wait_read();
        }
      }
      // Behind the stores: an arrival in the cluster overtakes loads that are under way.
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int rank = 0; rank < kWideBlocks; ++rank) {
          cluster_arrive(cluster_address(memory.empty(stage), rank), kConsumerWarps / kStageBoxes);
        }
      }
      stage = (stage + 1) % S::kStages;
    }
  }
  if (elect_lane()) bulk_stores_wait();
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
__device__ __forceinline__ void release_wide(const Memory<S>& memory, int stage, uint32_t leader) {
  __syncwarp();
  if (leader == 0) return;
#pragma unroll
  for (int rank = 0; rank < kWideBlocks; ++rank) {
    cluster_arrive(cluster_address(memory.empty(stage), rank));
  }
}

// Where it stands: what it reads has come then.
__device__ __forceinline__ float multiply_here(float a, float b) {
  float product;
  asm volatile("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b) : "memory");
  return product;
}

// sums = the products of an item, stage by stage; the last stage is held.
template <typename S, int kGroups>
__device__ __forceinline__ void multiply_wide(const Params& p, const Memory<S>& memory,
                                              const Lane<S>& lane, Position<S>& position,
                                              Sums<S>& sums) {
  constexpr int kColumns = kGroups * kGroupRows, kValues = kGroupRows / 2;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sums[i] = 0.0f;
  const uint32_t fragments = lane.warpgroup * 64 * kBlock + fragment_place();
  TokenFragments a;
  barrier_wait(memory.full(position.stage), position.parity);
  load_fragments(memory.tokens(position.stage) + fragments, a);
  int before = 0;
#pragma unroll 1
  for (int left = p.k_blocks - 1; left >= 0; --left) {
    const int stage = position.stage;
    const uint64_t weights = swizzled_rows(memory.weights(stage));
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
    // Only now, while instructions run, so that they do not wait for it.
    if (left + 1 < p.k_blocks) release_wide(memory, before, lane.leader);
    before = stage;
    const uint32_t side = memory.side(stage);
    const float first = load_shared_f32(side + lane.token * 4);
    const float second = load_shared_f32(side + lane.token * 4 + 32);
    float low[kGroups], high[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float unit = load_shared_f32(side + S::kWeightScaleAt + i * 4);
      low[i] = multiply_here(unit, first);
      high[i] = multiply_here(unit, second);
    }
    position.step();
    if (left > 0) barrier_wait(memory.full(position.stage), position.parity);
    wgmma_wait_all();
    wgmma_settle(part);
    // Behind the last stage whatever lies there, to no use.
    load_fragments(memory.tokens(position.stage) + fragments, a);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const int group = i / kValues;
      sums[i] = fmaf(part[i], i % 4 < 2 ? low[group] : high[group], sums[i]);
    }
  }
}

// sums += the bias, which lies beside a stage. Two columns a word.
template <typename S, int kGroups>
__device__ __forceinline__ void add_wide_bias(const Lane<S>& lane, uint32_t bias, Sums<S>& sums) {
#pragma unroll
  for (int j = 0; j < kGroups * kGroupRows / 8; ++j) {
    const uint32_t pair = __float_as_uint(load_shared_f32(bias + (lane.column + 8 * j) * 2));
    const float even = __uint_as_float(pair << 16);
    const float odd = __uint_as_float(pair & 0xFFFF0000u);
    sums[4 * j] += even;
    sums[4 * j + 1] += odd;
    sums[4 * j + 2] += even;
    sums[4 * j + 3] += odd;
  }
}

template <typename S, int kGroups>
__device__ __forceinline__ void consume_item(const Params& p, const Memory<S>& memory,
                                             const Lane<S>& lane, const WideItem& item,
                                             Position<S>& position) {
  Sums<S> sums;
  multiply_wide<S, kGroups>(p, memory, lane, position, sums);
  const int held = (position.stage + S::kStages - 1) % S::kStages;
  const uint32_t side = memory.side(held);
  Places places;
  if constexpr (S::kRotates) places.take(p, lane, side);
  if (p.bias != nullptr) add_wide_bias<S, kGroups>(lane, side + S::kBiasAt, sums);
  release_wide(memory, held, lane.leader);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int stage = position.stage, inside = group % kStageBoxes;
    if (inside == 0) barrier_wait(memory.full(stage), position.parity);
    const uint32_t box = memory.tokens(stage) + inside * kBoxBytes;
    const float* own = sums + group * kGroupRows / 2;
    if (S::kRotates && is_turned(p, item.row + group * kGroupRows)) {
      fill_box<S, S::kRotates>(lane, places, box, own);
    } else {
      fill_box<S, false>(lane, places, box, own);
    }
    if (inside + 1 == kStageBoxes || group + 1 == kGroups) {
      async_proxy_fence();
      __syncwarp();
      if (lane.leader != 0) barrier_arrive(memory.boxed(stage));
      position.step();
    }
  }
}

template <typename S>
__device__ __forceinline__ void consume_wide(const Params& p, const Memory<S>& memory) {
  const Lane<S> lane;
  Position<S> position;
  for (WideSchedule schedule = own_schedule(p); !schedule.done(); schedule.advance()) {
    const WideItem item = schedule.item();
    if (item.groups == 3) {
      consume_item<S, 3>(p, memory, lane, item, position);
    } else if (item.groups == 2) {
      consume_item<S, 2>(p, memory, lane, item, position);
    } else {
      consume_item<S, 1>(p, memory, lane, item, position);
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    dense_fp8_wide_kernel(const __grid_constant__ Params p,
                          const __grid_constant__ CUtensorMap x_map,
                          const __grid_constant__ CUtensorMap weight_map,
                          const __grid_constant__ CUtensorMap out_map) {
  extern __shared__ uint8_t dense_shared[];
  const Memory<S> memory{(shared_address(dense_shared) + kSwizzleAlignment - 1) /
                         kSwizzleAlignment * kSwizzleAlignment};
  if (threadIdx.x < S::kStages) {
    barrier_init(memory.full(threadIdx.x),
                 1 + 32);  // a thread's expected bytes, a warp's scales
    barrier_init(memory.empty(threadIdx.x), kConsumerWarps * kWideBlocks);
    barrier_init(memory.boxed(threadIdx.x), kConsumerWarps);
  }
  barrier_init_fence();
  dependents_launch();
  cluster_sync();  // both blocks' barriers are there
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0) - kConsumerWarps;
  if (warp >= 0) {
    registers_release<kProducerRegisters>();
    if (warp == 0) {
      produce_wide<S>(p, memory, x_map, weight_map, out_map);
    } else if (warp == 1) {
      produce_wide_scales<S>(p, memory);
    } else {
      if (S::kRotates && warp == 2) ask_for_angles(p);
      store_boxes<S>(p, memory, out_map, warp - 2);
    }
  } else {
    registers_claim<kConsumerRegisters>();
    consume_wide<S>(p, memory);
  }
  __syncwarp();
  cluster_sync();  // copies into the other block and arrivals there have ended
}

}  // namespace gptoss::dense_fp8

#endif  // GPTOSS_TRT_DENSE_FP8_WIDE_CUH_
