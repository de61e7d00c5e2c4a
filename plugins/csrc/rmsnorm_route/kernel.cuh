// The norm ahead of the experts and the routing behind it, in one kernel: residual + delta, its
// norm in e4m3, router product, choice, and the rows of each expert in order.
//
// A cluster has a tile of tokens, each of its blocks 512 columns of them, so that the sum of
// squares and the logits cross shared memory of the cluster instead of a kernel boundary. A block's
// part of the router lies in registers before the wait for the kernel ahead. A cluster's first
// block chooses the experts of its 8 tokens, and the cluster that comes last sorts the rows. Many
// tokens have a kernel of their own (resident.cuh).
//
// Invariant: sums are added in an order that the hidden size alone decides, so a token's results
// have the same bits whatever stands beside it; rows are ordered by (expert, token, slot).
#ifndef GPTOSS_TRT_RMSNORM_ROUTE_KERNEL_CUH_
#define GPTOSS_TRT_RMSNORM_ROUTE_KERNEL_CUH_

#include <cstdint>

#include "core/bf16.cuh"
#include "core/cluster.cuh"
#include "core/ptx.cuh"
#include "rmsnorm_route/choose.cuh"
#include "rmsnorm_route/params.h"
#include "rmsnorm_route/sort.cuh"

namespace gptoss::rmsnorm_route {

constexpr int kLoads = kColumns / (32 * 8);  // of eight columns a lane, of a token
// 16-bit numbers of a token in shared memory: neighbours lie 16 banks apart.
constexpr int kPitch = kColumns + 32;

// kExpertTiles: of 16 experts.
template <int kExpertTiles>
struct Shape {
  static constexpr int kTiles = kExpertTiles;
  static constexpr int kParts = kWarps / kTiles;  // of a block's columns, for the product
  static constexpr int kPartColumns = kColumns / kParts;
  static constexpr int kRuns = kPartColumns / 32;  // of 32 columns
  static constexpr int kLogits = kTiles * 16;
  static constexpr int kLogitPitch = kLogits + 4;  // floats
};

// What a block keeps in shared memory while tokens are formed.
template <typename S>
struct Forming {
  float sums[kMostBlocks][kTokens][S::kLogitPitch];  // in the first block: of each block's columns
  float squares[kMostBlocks][kTokens];               // of each block of the cluster
  uint16_t tokens[kTokens][kPitch];                  // the norm, bf16
  float parts[S::kParts][kTokens][S::kLogitPitch];
  float bias[S::kLogits];
};

// A warp's part of the router: 16 experts, 32 columns a run. Lane 4g + t holds columns 8t to
// 8t + 7 of rows g and g + 8: any order of columns will do that tokens have too.
template <typename S>
struct Router {
  uint4 low[S::kRuns], high[S::kRuns];

  __device__ __forceinline__ void load(const Params& p, int row, int column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int run = 0; run < S::kRuns; ++run) {
      const int at = column + run * 32 + lane % 4 * 8;
      low[run] = part(p, row + lane / 4, at);
      high[run] = part(p, row + lane / 4 + 8, at);
    }
  }

 private:
  static __device__ __forceinline__ uint4 part(const Params& p, int row, int column) {
    if (row >= p.experts || column >= p.hidden) return make_uint4(0, 0, 0, 0);
    return __ldg(
        reinterpret_cast<const uint4*>(p.router + static_cast<int64_t>(row) * p.hidden + column));
  }
};

// One token's columns of a lane: eight from `first` + 256 i on.
struct Columns {
  uint4 words[kLoads];

  __device__ __forceinline__ void load(const uint16_t* row, int first, int hidden) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first + 256 * i;
      words[i] =
          column < hidden ? *reinterpret_cast<const uint4*>(row + column) : make_uint4(0, 0, 0, 0);
    }
  }
};

// Stores x = residual + delta, and returns its sum of squares over the warp.
__device__ __forceinline__ float add(const Params& p, int token, int first, Columns& x) {
  const int64_t row = static_cast<int64_t>(token) * p.hidden;
  x.load(p.residual + row, first, p.hidden);
  if (p.delta != nullptr) {
    Columns delta;
    delta.load(p.delta + row, first, p.hidden);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      float a[8], b[8];
      widen(x.words[i], a);
      widen(delta.words[i], b);
#pragma unroll
      for (int j = 0; j < 8; ++j) a[j] += b[j];
      x.words[i] = narrow(a);
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    float a[8];
    widen(x.words[i], a);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares = fmaf(a[j], a[j], squares);
    const int column = first + 256 * i;
    if (column < p.hidden) *reinterpret_cast<uint4*>(p.updated + row + column) = x.words[i];
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(kAll, squares, step);
  return squares;
}

// The norm of x into shared memory, and its e4m3 codes and scales into place.
__device__ __forceinline__ void normalise(const Params& p, int token, int first, const Columns& x,
                                          const Columns& gain, float inverse, uint16_t* kept) {
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    float a[8], b[8];
    widen(x.words[i], a);
    widen(gain.words[i], b);
#pragma unroll
    for (int j = 0; j < 8; ++j) a[j] = a[j] * inverse * b[j];
    const uint4 rounded = narrow(a);
    const int lane = threadIdx.x % 32, column = first + 256 * i;
    *reinterpret_cast<uint4*>(kept + lane * 8 + 256 * i) = rounded;
    widen(rounded, a);
    float scale;
    const uint2 codes = quantise_group(a, column < p.hidden, &scale);
    if (column < p.hidden) {
      *reinterpret_cast<uint2*>(p.quantised + static_cast<int64_t>(token) * p.hidden + column) =
          codes;
      if (lane % 16 == 0)
        p.scales[static_cast<int64_t>(column / kGroup) * p.rows.tokens + token] = scale;
    }
  }
}

// Logits of a block's columns, to the cluster's first block.
template <typename S>
__device__ __forceinline__ void multiply_tile(const Router<S>& router, Forming<S>& forming,
                                              int block) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = warp / S::kTiles;
  float logits[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int run = 0; run < S::kRuns; ++run) {
    const uint4 low = router.low[run], high = router.high[run];
    const int column = part * S::kPartColumns + run * 32 + lane % 4 * 8;
    const uint4 words = *reinterpret_cast<const uint4*>(forming.tokens[lane / 4] + column);
    multiply(logits, low.x, high.x, low.y, high.y, words.x, words.y);
    multiply(logits, low.z, high.z, low.w, high.w, words.z, words.w);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int expert = warp % S::kTiles * 16 + lane / 4 + c / 2 * 8;
    forming.parts[part][lane % 4 * 2 + c % 2][expert] = logits[c];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTokens * S::kLogits; i += kThreads) {
    const int token = i / S::kLogits, expert = i % S::kLogits;
    float sum = 0.0f;
#pragma unroll
    for (int of = 0; of < S::kParts; ++of) sum += forming.parts[of][token][expert];
    cluster_store(cluster_address(shared_address(&forming.sums[block][token][expert]), 0), sum);
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads, S::kTiles <= 2 ? 2 : 1)
    rmsnorm_route_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) uint8_t route_shared[];
  __shared__ int last;
  Forming<S>& forming = *reinterpret_cast<Forming<S>*>(route_shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = static_cast<int>(cluster_rank());
  const int begin = block * kColumns, first = begin + lane * 8;
  const int token = blockIdx.x / p.blocks * kTokens + warp;
  dependents_launch();
  Router<S> router;
  router.load(p, warp % S::kTiles * 16, begin + warp / S::kTiles * S::kPartColumns);
  Columns gain, x;
  gain.load(p.gain, first, p.hidden);
  if (threadIdx.x < p.experts) forming.bias[threadIdx.x] = bf16_value(p.bias[threadIdx.x]);
  cluster_sync();  // all blocks run, so their shared memory may be written
  dependency_wait();
  const int real = p.token_count == nullptr ? p.rows.tokens : *p.token_count;
  const float squares = token < p.rows.tokens ? add(p, token, first, x) : 0.0f;
  if (lane < p.blocks) {
    cluster_store(cluster_address(shared_address(&forming.squares[block][warp]), lane), squares);
  }
  cluster_sync();
  uint16_t* kept = forming.tokens[warp];
  if (token < p.rows.tokens) {
    float sum = 0.0f;
    for (int of = 0; of < p.blocks; ++of) sum += forming.squares[of][warp];
    normalise(p, token, first, x, gain, inverse_rms(sum, p.hidden, p.eps), kept);
  } else {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      *reinterpret_cast<uint4*>(kept + lane * 8 + 256 * i) = make_uint4(0, 0, 0, 0);
    }
  }
  __syncthreads();
  multiply_tile(router, forming, block);
  cluster_sync();
  if (block != 0) return;
  if (token < p.rows.tokens)
    choose<kMostExperts>(p, token, token < real, &forming.sums[0][warp], forming.bias);
  __threadfence();
  __syncthreads();
  if (gridDim.x > p.blocks) {
    if (threadIdx.x == 0) last = atomicAdd(p.ticket, 1) + 1 == gridDim.x / p.blocks;
    __syncthreads();
    if (last == 0) return;
    __threadfence();
    if (threadIdx.x == 0) *p.ticket = 0;
  }
  sort_rows(p.rows, *reinterpret_cast<SortingFew*>(route_shared), 0);
}

}  // namespace gptoss::rmsnorm_route

#endif  // GPTOSS_TRT_RMSNORM_ROUTE_KERNEL_CUH_
