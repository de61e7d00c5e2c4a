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
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    most = fmaxf(most, fmaxf(fabsf(low_value(pairs[i])), fabsf(high_value(pairs[i]))));
  }
  return most;
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

// The codes of a bf16 pair, in the low half.
__device__ __forceinline__ uint32_t code_pair(uint32_t pair, const GroupDivision& divide) {
  return __nv_cvt_float2_to_fp8x2(make_float2(divide(low_value(pair)), divide(high_value(pair))),
                                  __NV_SATFINITE, __NV_E4M3);
}

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_QUANTISE_CUH_
