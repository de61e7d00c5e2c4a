// Dense products of 1 to 16 tokens at the speed of the memory: out = x W^T + bias, bf16 or FP8
// 128x128. A block of threads has tiles of 8 rows of the weight and all of K, of which its warps
// take runs of 128 bytes in turn; the runs of the first tiles are requested ahead of the wait for
// the kernel before. Tokens are the M operand of mma.sync, weights the N operand, straight from the
// registers that they were loaded into: the columns of K are permuted alike on both sides.
//
// Invariant: warps take runs and add their sums in an order that K alone decides, so a token's
// result has the same bits whatever stands beside it.
#ifndef GPTOSS_TRT_DENSE_FEW_KERNEL_CUH_
#define GPTOSS_TRT_DENSE_FEW_KERNEL_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "core/bf16.cuh"
#include "core/e4m3.cuh"
#include "core/ptx.cuh"
#include "dense_few/params.h"

namespace gptoss::dense {

constexpr int kRunBytes = 128;
constexpr int kLoads = 2;  // of 16 bytes a thread and run

__device__ __forceinline__ uint4 load_weights(const uint8_t* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// c += a b, 16 tokens x 8 rows x 16 columns; `low` and `high` are tokens g and g + 8.
template <Format kFormat>
__device__ __forceinline__ void multiply(float (&c)[4], uint2 low, uint2 high, uint2 weights) {
  if constexpr (kFormat == Format::kBf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(low.x), "r"(high.x), "r"(low.y), "r"(high.y), "r"(weights.x), "r"(weights.y));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(low.x), "r"(high.x), "r"(low.y), "r"(high.y), "r"(weights.x), "r"(weights.y));
  }
}

// acc += one load of weights times the same columns of tokens `low` and `high` (shared memory).
template <Format kFormat, bool kSixteen>
__device__ __forceinline__ void multiply_load(uint4 weights, const uint16_t* low,
                                              const uint16_t* high, float (&acc)[4]) {
  constexpr int kQuads = kFormat == Format::kBf16 ? 1 : 2;  // 16-byte words of a token
  const uint32_t words[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const uint4 a = reinterpret_cast<const uint4*>(low)[i];
    uint4 b = make_uint4(0, 0, 0, 0);
    if constexpr (kSixteen) b = reinterpret_cast<const uint4*>(high)[i];
    uint2 first = make_uint2(words[0], words[1]), second = make_uint2(words[2], words[3]);
    if constexpr (kFormat == Format::kFp8) {
      first = halves_of_word(words[2 * i]);
      second = halves_of_word(words[2 * i + 1]);
    }
    multiply<kFormat>(acc, make_uint2(a.x, a.y), make_uint2(b.x, b.y), first);
    multiply<kFormat>(acc, make_uint2(a.z, a.w), make_uint2(b.z, b.w), second);
  }
}

// The row of scales of weight row `row`.
__device__ __forceinline__ int row_of_scales(const Params& p, int row) {
  const int blocks_0 = (p.segments[0] + kScaleColumns - 1) / kScaleColumns;
  if (row < p.segments[0]) return row / kScaleColumns;
  row -= p.segments[0];
  if (row < p.segments[1]) return blocks_0 + row / kScaleColumns;
  const int blocks_1 = (p.segments[1] + kScaleColumns - 1) / kScaleColumns;
  return blocks_0 + blocks_1 + (row - p.segments[1]) / kScaleColumns;
}

// Tokens into shared memory as 16-bit numbers [tokens][k + kPadding].
template <Format kFormat>
__device__ inline void load_tokens(const Params& p, uint16_t* tokens, int threads) {
  const int pitch = p.k + kPadding;
  const int words = p.k / 8;  // of 8 numbers
  for (int i = threadIdx.x; i < p.tokens * words; i += threads) {
    const int token = i / words, column = i % words * 8;
    const int64_t at = static_cast<int64_t>(token) * p.k + column;
    uint4 value;
    if constexpr (kFormat == Format::kBf16) {
      value = *reinterpret_cast<const uint4*>(p.x + 2 * at);
    } else {
      const uint2 codes = *reinterpret_cast<const uint2*>(p.x + at);
      const uint2 low = halves_of_word(codes.x), high = halves_of_word(codes.y);
      value = make_uint4(low.x, low.y, high.x, high.y);
    }
    *reinterpret_cast<uint4*>(tokens + token * pitch + column) = value;
  }
}

// [runs][kMostTokens], zeros behind the tokens.
__device__ inline void load_scales(const Params& p, float* scales, int runs, int threads) {
  for (int i = threadIdx.x; i < runs * kMostTokens; i += threads) {
    const int token = i % kMostTokens;
    scales[i] = token < p.tokens ? p.x_scale[i / kMostTokens * p.tokens + token] : 0.0f;
  }
}

// One warp's part of a tile of 8 rows.
template <int kRuns>
struct Held {
  uint4 words[kRuns][kLoads];
  float scales[kRuns];  // FP8: of the weights
};

// Where a lane finds its weights and what it does with them.
template <Format kFormat, int kWarps, int kRuns, bool kSixteen>
class Worker {
 public:
  static constexpr int kColumns = kFormat == Format::kBf16 ? kRunBytes / 2 : kRunBytes;  // of a run
  static constexpr int kStep = kColumns / kLoads;  // columns of a row that one load brings
  static constexpr int kElement = kFormat == Format::kBf16 ? 2 : 1;

  __device__ __forceinline__ Worker(const Params& p, const uint16_t* tokens, const float* scales)
      : p_(p), runs_((p.k + kColumns - 1) / kColumns), warp_(threadIdx.x / 32) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int pitch = p.k + kPadding;
    low_ = tokens + min(g, p.tokens - 1) * pitch + t * (kStep / 4);
    high_ = tokens + min(g + 8, p.tokens - 1) * pitch + t * (kStep / 4);
    scales_ = scales + g;
  }

  // Requests the warp's runs of the 8 rows from `row`.
  __device__ __forceinline__ void fetch(int row, Held<kRuns>& held) const {
    const int lane = threadIdx.x % 32;
    const int64_t mine = min(row + lane / 4, p_.n - 1);
    const uint8_t* at = p_.weight + mine * p_.k * kElement + lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int run = warp_ + i * kWarps;
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        const int column = run * kColumns + load * kStep;
        held.words[i][load] =
            column < p_.k ? load_weights(at + column * kElement) : make_uint4(0, 0, 0, 0);
      }
      if constexpr (kFormat == Format::kFp8) {
        const int64_t line = static_cast<int64_t>(row_of_scales(p_, min(row, p_.n - 1))) * runs_;
        held.scales[i] = run < runs_ ? __ldg(p_.weight_scale + line + run) : 0.0f;
      }
    }
  }

  // sum = the warp's part of tokens x rows.
  __device__ __forceinline__ void multiply(const Held<kRuns>& held, float (&sum)[4]) const {
    sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int run = warp_ + i * kWarps;
      if (run >= runs_) break;
      float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        // Columns behind k have zero weights; tokens are read where there are some.
        const int column = min(run * kColumns + load * kStep, p_.k - kStep);
        if constexpr (kFormat == Format::kBf16) {
          multiply_load<kFormat, kSixteen>(held.words[i][load], low_ + column, high_ + column, sum);
        } else {
          multiply_load<kFormat, kSixteen>(held.words[i][load], low_ + column, high_ + column, acc);
        }
      }
      if constexpr (kFormat == Format::kFp8) {
        const float low = held.scales[i] * scales_[run * kMostTokens];
        const float high = held.scales[i] * scales_[run * kMostTokens + 8];
        sum[0] = fmaf(acc[0], low, sum[0]);
        sum[1] = fmaf(acc[1], low, sum[1]);
        sum[2] = fmaf(acc[2], high, sum[2]);
        sum[3] = fmaf(acc[3], high, sum[3]);
      }
    }
  }

 private:
  const Params& p_;
  int runs_;
  int warp_;
  const uint16_t* low_;
  const uint16_t* high_;
  const float* scales_;
};

// Adds the warps' parts [tiles][kWarps][c][32] and stores the block's rows.
template <int kWarps, bool kSixteen>
__device__ inline void finish(const Params& p, const float* partial, int first) {
  constexpr int kSums = kSixteen ? 4 : 2;
  const int rows = p.tiles * kTileRows;
  for (int i = threadIdx.x; i < p.tokens * rows; i += 32 * kWarps) {
    const int token = i / rows, row = i % rows;
    if (first + row >= p.n) continue;
    const int c = row % 2 + (token >= 8 ? 2 : 0), lane = token % 8 * 4 + row % kTileRows / 2;
    const float* part = partial + (row / kTileRows * kWarps * kSums + c) * 32 + lane;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += part[w * kSums * 32];
    if (p.bias != nullptr) {
      total += __uint_as_float(static_cast<uint32_t>(p.bias[first + row]) << 16);
    }
    const int64_t at = static_cast<int64_t>(token) * p.n + first + row;
    if (p.out_fp32) {
      static_cast<float*>(p.out)[at] = total;
    } else {
      static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16_rn(total);
    }
  }
}

// A warp keeps kAhead tiles under way: the first of them are requested before the wait.
template <Format kFormat, int kWarps, int kRuns, int kAhead, int kBlocks, bool kSixteen>
__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    dense_few_kernel(const __grid_constant__ Params p) {
  constexpr int kThreads = 32 * kWarps, kSums = kSixteen ? 4 : 2;
  extern __shared__ __align__(16) uint8_t few_shared[];
  auto* tokens = reinterpret_cast<uint16_t*>(few_shared);
  auto* scales = reinterpret_cast<float*>(few_shared + p.scales_at);
  auto* partial = reinterpret_cast<float*>(few_shared + p.partial_at);
  const int first = blockIdx.x * p.tiles * kTileRows;
  dependents_launch();
  using Work = Worker<kFormat, kWarps, kRuns, kSixteen>;
  const Work worker(p, tokens, scales);
  Held<kRuns> held[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < p.tiles) worker.fetch(first + i * kTileRows, held[i]);
  }
  dependency_wait();
  const int runs = (p.k + Work::kColumns - 1) / Work::kColumns;
  load_tokens<kFormat>(p, tokens, kThreads);
  if constexpr (kFormat == Format::kFp8) load_scales(p, scales, runs, kThreads);
  __syncthreads();
  float* mine = partial + threadIdx.x / 32 * kSums * 32 + threadIdx.x % 32;
  for (int start = 0; start < p.tiles; start += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int tile = start + i;
      if (tile >= p.tiles) break;
      float sum[4];
      worker.multiply(held[i], sum);
      if (tile + kAhead < p.tiles) worker.fetch(first + (tile + kAhead) * kTileRows, held[i]);
#pragma unroll
      for (int c = 0; c < kSums; ++c) mine[(tile * kWarps * kSums + c) * 32] = sum[c];
    }
  }
  __syncthreads();
  finish<kWarps, kSixteen>(p, partial, first);
}

}  // namespace gptoss::dense

#endif  // GPTOSS_TRT_DENSE_FEW_KERNEL_CUH_
