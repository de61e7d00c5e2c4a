// bf16 in words: eight numbers of 16 bits are sixteen bytes, as a lane loads and stores them. And
// their way to e4m3, by the rule of the op act_quant.
#ifndef GPTOSS_TRT_CORE_BF16_CUH_
#define GPTOSS_TRT_CORE_BF16_CUH_

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace gptoss {

__device__ __forceinline__ float bf16_value(uint32_t bits) { return __uint_as_float(bits << 16); }

// Rounded to nearest even.
__device__ __forceinline__ uint32_t bf16_bits(float value) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Two sums, each rounded once: what fp32 sums of the same terms are rounded to.
__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
  const __nv_bfloat162 pair = __hadd2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                      *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void widen(uint4 words, float (&values)[8]) {
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(pairs[i] << 16);
    values[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000u);
  }
}

__device__ __forceinline__ uint4 narrow(const float (&values)[8]) {
  return make_uint4(bf16_pair(values[0], values[1]), bf16_pair(values[2], values[3]),
                    bf16_pair(values[4], values[5]), bf16_pair(values[6], values[7]));
}

// Of a group of 128 values, what they are divided by: amax / 448, or 1 where that is 0.
__device__ __forceinline__ float group_scale(float most) {
  constexpr float kLeast = 1.3e-29f;  // 2^-96: from here on the correction below is exact
  if (most < kLeast) {
    const float scale = __fdiv_rn(most, 448.0f);
    return scale == 0.0f ? 1.0f : scale;
  }
  constexpr float kUnit = 1.0f / 448.0f;
  const float scale = most * kUnit;
  return fmaf(fmaf(-scale, 448.0f, most), kUnit, scale);
}

// Division by a group's scale, as IEEE has it: a reciprocal and one correction, without the
// compiler's branch for each value. Tiny scales are lifted, so that the correction does not
// underflow.
class GroupDivision {
 public:
  __device__ __forceinline__ explicit GroupDivision(float scale) {
    lift_ = scale < 5.4e-20f ? 1.8446744e19f : 1.0f;  // below 2^-64: 2^64
    scale_ = scale * lift_;
    inverse_ = __frcp_rn(scale_);
  }

  __device__ __forceinline__ float operator()(float value) const {
    const float lifted = value * lift_, quotient = lifted * inverse_;
    return fmaf(fmaf(-quotient, scale_, lifted), inverse_, quotient);
  }

 private:
  float lift_, scale_, inverse_;
};

__device__ __forceinline__ uint2 codes_of(const float (&values)[8], const GroupDivision& divide) {
  uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    codes[i] = __nv_cvt_float2_to_fp8x2(
        make_float2(divide(values[2 * i]), divide(values[2 * i + 1])), __NV_SATFINITE, __NV_E4M3);
  }
  return make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16);
}

// Sixteen neighbouring lanes have a group of 128 values, eight each; all lanes of a warp come here.
// The lane's codes, and the group's scale, where the lane's values are `present`.
__device__ __forceinline__ uint2 quantise_group(const float (&values)[8], bool present,
                                                float* scale) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(values[i]));
#pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
  }
  if (!present) return make_uint2(0, 0);
  *scale = group_scale(most);
  return codes_of(values, GroupDivision(*scale));
}

// Of a row's sum of squares: what its values are multiplied by.
__device__ __forceinline__ float inverse_rms(float squares, int count, float eps) {
  return __frcp_rn(__fsqrt_rn(__fdiv_rn(squares, static_cast<float>(count)) + eps));
}

}  // namespace gptoss

#endif  // GPTOSS_TRT_CORE_BF16_CUH_
