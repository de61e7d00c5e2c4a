// Dense products of FP8 128x128 on tensor cores: out = x W^T + bias for more tokens than dense_few
// takes. Tokens are the M operand and a block of 128 rows of the weight the N operand, both in
// shared memory, where tensor copies put them through a ring of stages of 128 columns of K. The
// tensor cores sum a stage; its sums times scale of token and block go to fp32 sums in registers,
// while the other warpgroup's instructions run.
//
// The blocks of a cluster have parts of K and add their sums through each other's shared memory
// (kSplit). The weights of the first stages are requested ahead of the wait for the kernel before.
// With kRotates the rows of the weight are q, k and v, and the results go where rope_kv_append puts
// them (store.cuh, rotate.cuh); with kAdds they are added to what the output holds, a residual.
// Many tokens have a kernel of their own (wide.cuh).
//
// Invariant: the order in which a result's products are added depends on K and the plan alone.
#ifndef GPTOSS_TRT_DENSE_FP8_KERNEL_CUH_
#define GPTOSS_TRT_DENSE_FP8_KERNEL_CUH_

#include <cuda.h>

#include <cstdint>

#include "core/cluster.cuh"
#include "core/ptx.cuh"
#include "dense_fp8/instructions.cuh"
#include "dense_fp8/params.h"
#include "dense_fp8/store.cuh"
#include "dense_fp8/tile.cuh"

namespace gptoss::dense_fp8 {

// ---- producers ------------------------------------------------------------------------------

// One thread: tokens and weights.
template <typename S>
__device__ inline void produce_tiles(const Params& p, const Memory<S>& memory,
                                     const CUtensorMap& x_map, const CUtensorMap& weight_map) {
  Schedule<S> schedule(p);
  const auto request_weights = [&](int stage, int block, int row) {
    barrier_expect_bytes(memory.full(stage), S::kStageBytes);
    copy_box(memory.weights(stage), weight_map, block * kBlock, row, memory.full(stage));
  };
  int ahead = 0;  // stages whose weights are under way
  if (!schedule.done()) {
    ahead = min(S::kStages, schedule.end() - schedule.begin());
    const int row = schedule.tile().row;
    for (int i = 0; i < ahead; ++i) request_weights(i, schedule.begin() + i, row);
  }
  dependency_wait();
  Position<S> position;
  for (; !schedule.done(); schedule.advance()) {
    const Tile tile = schedule.tile();
    for (int block = schedule.begin(); block < schedule.end(); ++block, position.step()) {
      const int stage = position.stage;
      barrier_wait(memory.empty(stage), position.parity ^ 1);
      if (ahead > 0) {
        --ahead;
      } else {
        request_weights(stage, block, tile.row);
      }
      copy_box(memory.tokens(stage), x_map, block * kBlock, tile.token, memory.full(stage));
    }
  }
}

// One warp: the lines of a tile that results will be added to come into the second-level cache, a
// token a lane each `turn`.
template <typename S>
__device__ __forceinline__ void ask_for_out(const Params& p, const Tile& tile, int turn) {
  const int token = tile.token + threadIdx.x % 32 + 32 * turn;
  if (turn >= S::kTokens / 32 || token >= p.tokens) return;
  const auto* row = static_cast<const uint8_t*>(p.out) +
                    (static_cast<int64_t>(token) * p.n + tile.row) * sizeof(uint16_t);
  prefetch_line(row);
  if (tile.rows > kBlock / 2) prefetch_line(row + kBlock);
}

// One warp: the scales of a stage's tokens, from `first` on.
template <typename S>
__device__ __forceinline__ void copy_token_scales(const Params& p, uint32_t target,
                                                  const float* scales, int first, int lane) {
#pragma unroll
  for (int i = 0; i < S::kTokens / 32; ++i) {
    const int token = first + lane + 32 * i;
    copy_word_async(target + (lane + 32 * i) * 4, scales + min(token, p.tokens - 1),
                    token < p.tokens);
  }
}

// One warp: the bias of a tile.
__device__ __forceinline__ void copy_bias(const Params& p, uint32_t target, const Tile& tile,
                                          int lane) {
#pragma unroll
  for (int i = 0; i < kBlock / 64; ++i) {
    const int column = 2 * (lane + 32 * i);
    copy_word_async(target + column * 2, p.bias + min(tile.row + column, p.n - 2),
                    column < tile.rows);
  }
}

// One warp: scales, and the bias with the last of them.
template <typename S>
__device__ inline void produce_scales(const Params& p, const Memory<S>& memory) {
  const int lane = threadIdx.x % 32;
  dependency_wait();
  Position<S> position;
  for (Schedule<S> schedule(p); !schedule.done(); schedule.advance()) {
    const Tile tile = schedule.tile();
    const float* unit = p.weight_scale + static_cast<int64_t>(tile.block) * p.k_blocks;
    for (int block = schedule.begin(); block < schedule.end(); ++block, position.step()) {
      const uint32_t side = memory.side(position.stage);
      const float* scales = p.x_scale + static_cast<int64_t>(block) * p.tokens;
      barrier_wait(memory.empty(position.stage), position.parity ^ 1);
      copy_token_scales<S>(p, side, scales, tile.token, lane);
      if (lane == 0) copy_word_async(side + S::kWeightScaleAt, unit + block, true);
      if (!S::kSplit && p.bias != nullptr && block + 1 == schedule.end()) {
        copy_bias(p, side + S::kBiasAt, tile, lane);
      }
      copies_arrive(memory.full(position.stage));
      if constexpr (S::kAdds) ask_for_out<S>(p, tile, block - schedule.begin());
    }
  }
}

// ---- consumers ------------------------------------------------------------------------------

template <typename S>
__device__ __forceinline__ void release(const Memory<S>& memory, int stage, uint32_t leader) {
  __syncwarp();
  if (leader != 0) barrier_arrive(memory.empty(stage));
}

// sum += the bias, which lies beside a stage, of the first kColumns. Two columns a word.
template <typename S, int kColumns = S::kColumns>
__device__ __forceinline__ void add_bias(const Lane<S>& lane, uint32_t bias, Sums<S>& sum) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const uint32_t pair = __float_as_uint(load_shared_f32(bias + (lane.column + 8 * j) * 2));
    const float even = __uint_as_float(pair << 16);
    const float odd = __uint_as_float(pair & 0xFFFF0000u);
    sum[4 * j] += even;
    sum[4 * j + 1] += odd;
    sum[4 * j + 2] += even;
    sum[4 * j + 3] += odd;
  }
}

// sum = the products of a tile (and bias), stage by stage.
template <typename S>
__device__ __forceinline__ void multiply_tile(const Memory<S>& memory, const Lane<S>& lane,
                                              int blocks, bool with_bias, Position<S>& position,
                                              Sums<S>& sum) {
  constexpr int kInstructions = kBlock / 32, kValues = S::kColumns / 2;
#pragma unroll
  for (int i = 0; i < kValues; ++i) sum[i] = 0.0f;
  const uint32_t own_tokens = S::kTokens > 64 ? lane.warpgroup * 64 * kBlock : 0;
  const uint32_t own_weights = S::kTokens > 64 ? 0 : lane.warpgroup * S::kColumns * kBlock;
#pragma unroll 1
  for (int left = blocks - 1; left >= 0; --left, position.step()) {
    const int stage = position.stage;
    const uint32_t side = memory.side(stage);
    const bool finish = with_bias && left == 0;
    barrier_wait(memory.full(stage), position.parity);
    const float unit = load_shared_f32(side + S::kWeightScaleAt);
    const uint64_t weights = swizzled_rows(memory.weights(stage) + own_weights);
    const uint64_t tokens = swizzled_rows(memory.tokens(stage) + own_tokens);
    const uint32_t scales = side + lane.token * 4;
    const float low = unit * load_shared_f32(scales);
    const float high = unit * load_shared_f32(scales + 32);
    float part[kValues];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kInstructions; ++i) {
      multiply<S::kColumns>(part, tokens + 2 * i, weights + 2 * i, i);
    }
    wgmma_commit();
    wgmma_wait_all();
    wgmma_settle(part);
    if (!finish) release(memory, stage, lane.leader);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      sum[i] = fmaf(part[i], i % 4 < 2 ? low : high, sum[i]);
    }
    if (finish) {
      add_bias(lane, side + S::kBiasAt, sum);
      release(memory, stage, lane.leader);
    }
  }
}

template <typename S>
__device__ __forceinline__ void consume(const Params& p, const Memory<S>& memory) {
  const Lane<S> lane;
  Position<S> position;
  for (Schedule<S> schedule(p); !schedule.done(); schedule.advance()) {
    const Tile tile = schedule.tile();
    const int blocks = schedule.end() - schedule.begin();
    Sums<S> sum;
    if constexpr (S::kSplit) {
      multiply_tile(memory, lane, blocks, false, position, sum);
      keep_part(memory, lane, sum);
    } else if constexpr (S::kRotates) {
      multiply_tile(memory, lane, blocks, p.bias != nullptr, position, sum);
      Places places;
      places.load(p, lane, tile);
      store_rotated(p, lane, tile, places, sum);
    } else if constexpr (S::kAdds) {
      multiply_tile(memory, lane, blocks, p.bias != nullptr, position, sum);
      dependency_wait();
      add_tile(p, lane, tile, sum);
    } else {
      multiply_tile(memory, lane, blocks, p.bias != nullptr, position, sum);
      store_tile(p, lane, tile, sum);
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    dense_fp8_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap x_map,
                     const __grid_constant__ CUtensorMap weight_map) {
  extern __shared__ uint8_t dense_shared[];
  const Memory<S> memory{(shared_address(dense_shared) + kSwizzleAlignment - 1) /
                         kSwizzleAlignment * kSwizzleAlignment};
  if (threadIdx.x < S::kStages) {
    barrier_init(memory.full(threadIdx.x), 1 + 32);  // one thread's expected bytes, a warp's scales
    barrier_init(memory.empty(threadIdx.x), kConsumerWarps);
  }
  barrier_init_fence();
  dependents_launch();
  __syncthreads();
  Tile tile;
  uint2 bias;
  Angles<S> angles;
  if constexpr (S::kSplit) {
    tile = Schedule<S>(p).tile();
    bias = bias_of_thread(p, tile);
    angles.load(p, tile);
  }
  if (threadIdx.x >= kConsumerThreads) {
    if (threadIdx.x == kConsumerThreads) {
      produce_tiles<S>(p, memory, x_map, weight_map);
    } else if (threadIdx.x / 32 == kConsumerWarps + 1) {
      produce_scales<S>(p, memory);
    }
  } else {
    consume<S>(p, memory);
  }
  if constexpr (S::kSplit) {
    cluster_sync();  // the sums of all are in place
    dependency_wait();
    add_parts<S>(p, memory, tile, bias, angles);
    cluster_sync();  // the others have read this block's sums
  }
}

}  // namespace gptoss::dense_fp8

#endif  // GPTOSS_TRT_DENSE_FP8_KERNEL_CUH_
