// The two products of prefill's attention for the 64 rows of a warpgroup, and what lies between
// them in registers: scores or weights of row g (pairs c = 0, 1 of every four) and g + 8 of a warp.
#ifndef GPTOSS_TRT_ATTENTION_PREFILL_PRODUCTS_CUH_
#define GPTOSS_TRT_ATTENTION_PREFILL_PRODUCTS_CUH_

#include <cstdint>

#include "attention/params.h"
#include "attention/warp_mma.cuh"
#include "attention/wgmma_bf16.cuh"
#include "core/ptx.cuh"

namespace gptoss::attention {

constexpr int kRowBytes = kHeadDim * 2;

// The largest of three, compared as integers: right where it is positive. The scores stay floats
// for the compiler, which would otherwise copy them while WGMMA writes them.
__device__ __forceinline__ int most_bits(int most, float a, float b) {
  int result;
  asm("{\n"
      ".reg .b32 x, y;\n"
      "mov.b32 x, %2;\n"
      "mov.b32 y, %3;\n"
      "max.s32 x, x, y;\n"
      "max.s32 %0, x, %1;\n"
      "}\n"
      : "=r"(result)
      : "r"(most), "f"(a), "f"(b));
  return result;
}

// A branch that is never taken and needs all weights: the assembler, which would rather wait first
// and make the exponentials afterwards, does not move the wait across it.
template <int kKeys>
__device__ __forceinline__ void finish_before_wait(const uint32_t (&weights)[kKeys / 16][4]) {
  uint32_t signs = 0;
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) signs |= weights[i / 4][i % 4];
  if (__any_sync(0xffffffffu, (signs & 0x80008000u) != 0)) __nanosleep(32);
}

template <int kKeys>
__device__ __forceinline__ void pack_weights(const float (&weights)[kKeys / 2],
                                             uint32_t (&packed)[kKeys / 16][4]) {
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      packed[i][c] = pack_bf16(weights[8 * i + 2 * c], weights[8 * i + 2 * c + 1]);
    }
  }
}

template <int kKeys>
__device__ __forceinline__ void start_scores(float (&scores)[kKeys / 2], uint64_t query,
                                             uint64_t keys) {
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    wgmma_bf16<kKeys>(scores, query + 2 * k, keys + 2 * k, k != 0);
  }
  wgmma_commit();
}

// With 36 outputs the last four are sums of weights: the eight columns behind the values' are rows
// of ones, the same sixteen for every instruction, so their distance shrinks as the values advance.
template <int kOutputs>
__device__ __forceinline__ uint64_t rows_of_values(uint32_t values, uint32_t ones) {
  return kOutputs == 36 ? swizzled_rows(values, ones - values) : swizzled_rows(values);
}
template <int kOutputs>
__host__ __device__ constexpr uint32_t moved_values(uint32_t units) {
  return kOutputs == 36 ? units - (units << 16) : units;
}

template <int kKeys, int kOutputs>
__device__ __forceinline__ void start_output(float (&out)[kOutputs],
                                             uint32_t (&weights)[kKeys / 16][4], uint64_t values) {
  constexpr int64_t kUnits = 16 * kRowBytes / 16;
  constexpr int64_t kStep = kOutputs == 36 ? kUnits - (kUnits << 16) : kUnits;
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    wgmma_bf16_turned(out, weights[k], values + k * kStep);
  }
  wgmma_commit();
}

// Executed by all threads of the block.
constexpr int kOnesBytes = 16 * kRowBytes;
__device__ __forceinline__ void fill_ones(uint32_t ones) {
  for (int at = threadIdx.x * 16; at < kOnesBytes; at += blockDim.x * 16) {
    constexpr uint32_t kTwoOnes = 0x3F803F80;
    store_shared_u128(ones + at, kTwoOnes, kTwoOnes, kTwoOnes, kTwoOnes);
  }
  async_proxy_fence();
}

template <int kOutputs>
__device__ __forceinline__ void rescale(float (&out)[kOutputs], const float (&shrink)[2]) {
  if (!__any_sync(0xffffffffu, shrink[0] != 1.f || shrink[1] != 1.f)) return;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) out[i] *= shrink[(i & 2) >> 1];
}

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_PREFILL_PRODUCTS_CUH_
