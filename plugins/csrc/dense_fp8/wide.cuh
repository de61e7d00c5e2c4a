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
#include "dense_fp8/wide_producers.cuh"
#include "dense_fp8/wide_schedule.h"

namespace gptoss::dense_fp8 {

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
  if (p.bias != nullptr) add_bias<S, kGroups * kGroupRows>(lane, side + S::kBiasAt, sums);
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
