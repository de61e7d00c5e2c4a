// The output of attention in e4m3, by the rule of the op act_quant on its bf16 values: what the
// product behind it reads.
#ifndef GPTOSS_TRT_ATTENTION_QUANTISE_CUH_
#define GPTOSS_TRT_ATTENTION_QUANTISE_CUH_

#include <cstdint>

#include "core/bf16.cuh"
#include "core/turn_quad.cuh"

namespace gptoss::attention {

__device__ __forceinline__ float low_value(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_value(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

// The largest magnitude of bf16 pairs.
template <int kPairs>
__device__ __forceinline__ float most_of(const uint32_t (&pairs)[kPairs]) {
  uint32_t most = 0;  // of either half
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    asm("max.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(pairs[i] & 0x7FFF7FFFu));
  }
  return fmaxf(low_value(most), high_value(most));
}

// The largest over kLanes neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ float most_over_lanes(float most) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
  }
  return most;
}

// The codes of a bf16 pair, in the low half. kLifts: the scale may be tiny.
template <bool kLifts = true>
__device__ __forceinline__ uint32_t code_pair(uint32_t pair, const GroupDivision& divide) {
  const float low = low_value(pair), high = high_value(pair);
  const float2 values = kLifts ? make_float2(divide(low), divide(high))
                               : make_float2(divide.unlifted(low), divide.unlifted(high));
  return __nv_cvt_float2_to_fp8x2(values, __NV_SATFINITE, __NV_E4M3);
}

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_QUANTISE_CUH_
