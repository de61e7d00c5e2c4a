// What becomes of a sum: SwiGLU and the static quantisation of the first product, routing weight
// and output of the second. Shared by both plans, so that they round alike.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_EPILOGUE_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_EPILOGUE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "moe_gemm_fp8/params.h"

namespace gptoss::moe {

constexpr float kE4m3Max = 448.0f;
constexpr float kStaticScale = 0.125f;  // |h| <= limit x (limit + 1) = 56 = 448 / 8

__device__ __forceinline__ float bf16_to_float(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// Nearest even, saturated at 448.
__device__ __forceinline__ uint8_t to_e4m3(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

// gate x sigmoid(alpha gate) x (up + 1), gate and up clamped.
__device__ __forceinline__ float swiglu(float gate, float up, float limit, float alpha) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return __fdividef(gate, 1.0f + __expf(-alpha * gate)) * (up + 1.0f);
}

__device__ __forceinline__ uint8_t quantise_static(float value) {
  return to_e4m3(value * (1.0f / kStaticScale));
}

// out[slot, channel .. channel + 1] = weight x the two sums, rounded once.
__device__ __forceinline__ void store_pair(const Params& p, int slot, int channel, float weight,
                                           float low, float high) {
  const int64_t at = static_cast<int64_t>(slot) * p.n + channel;
  if (p.out_fp32) {
    *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) =
        make_float2(weight * low, weight * high);
  } else {
    *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.out) + at) =
        __floats2bfloat162_rn(weight * low, weight * high);
  }
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_EPILOGUE_CUH_
