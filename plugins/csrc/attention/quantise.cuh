// The output of attention in e4m3, by the rule of the op act_quant on its bf16 values: what the
// product behind it reads.
#ifndef GPTOSS_TRT_ATTENTION_QUANTISE_CUH_
#define GPTOSS_TRT_ATTENTION_QUANTISE_CUH_

#include <cstdint>

#include "core/bf16.cuh"
#include "core/ptx.cuh"
#include "core/turn_quad.cuh"

namespace gptoss::attention {

__device__ __forceinline__ float low_value(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_value(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

// The largest magnitude of bf16 pairs.
template <int kPairs>
__device__ __forceinline__ float most_of(const uint32_t (&pairs)[kPairs]) {
  uint32_t most = 0;  // of either half, with some sign
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(pairs[i]));
  }
  return fmaxf(low_value(most & 0x7FFF7FFFu), high_value(most & 0x7FFF7FFFu));
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

// group_scale and division by it for bf16 values of a group whose largest is `usual`: neither tiny
// nor huge. Two operations a value instead of three: the inverse has a low part, which is enough
// for the quotient, to 2^-46, to round as the quotient itself where e4m3 has a tie (all 128 x 128
// significands were tried, with an inverse that is off by two in its last place).
class UsualDivision {
 public:
  __device__ __forceinline__ static bool usual(float most) { return most > 1e-10f && most < 1e20f; }
  __device__ __forceinline__ explicit UsualDivision(float most) {
    constexpr float kUnit = 1.0f / 448.0f;
    const float near = most * kUnit;
    scale_ = fmaf(fmaf(-near, 448.0f, most), kUnit, near);
    high_ = approximate_reciprocal(scale_);
    low_ = fmaf(-high_, scale_, 1.0f) * high_;
  }
  __device__ __forceinline__ float scale() const { return scale_; }
  __device__ __forceinline__ float operator()(float value) const {
    return fmaf(value, high_, value * low_);
  }

 private:
  float scale_, high_, low_;
};

// The codes of a bf16 pair, in the low half.
template <class Division>
__device__ __forceinline__ uint32_t code_pair(uint32_t pair, const Division& divide) {
  return __nv_cvt_float2_to_fp8x2(make_float2(divide(low_value(pair)), divide(high_value(pair))),
                                  __NV_SATFINITE, __NV_E4M3);
}

// Of two rows' pairs 2i and 2i + 1: words 2i + (0, 1) of row r become codes[r][i].
template <class Division>
__device__ __forceinline__ void code_rows(const uint32_t (&words)[2][8],
                                          const Division (&divide)[2], uint32_t (&codes)[2][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = i / 4, j = 2 * (i % 4);
    codes[row][j / 2] =
        code_pair(words[row][j], divide[row]) | code_pair(words[row][j + 1], divide[row]) << 16;
  }
}

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_QUANTISE_CUH_
