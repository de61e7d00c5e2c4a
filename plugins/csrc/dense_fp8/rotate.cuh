// The end of the product of q, k and v: what the op rope_kv_append does with its results, rounded
// to bf16 first as they would be between the two.
#ifndef GPTOSS_TRT_DENSE_FP8_ROTATE_CUH_
#define GPTOSS_TRT_DENSE_FP8_ROTATE_CUH_

#include <cstdint>

#include "core/bf16.cuh"
#include "dense_fp8/params.h"

namespace gptoss::dense_fp8 {

// Cosines and sines of `position` for columns of a head's half: `column` + 8i and the next.
__device__ __forceinline__ void load_angles(const Params& p, int position, int column,
                                            float2 (&cos)[4], float2 (&sin)[4]) {
  const float* from = p.cos_sin + static_cast<int64_t>(position) * kHeadDim + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    cos[i] = __ldg(reinterpret_cast<const float2*>(from + 8 * i));
    sin[i] = __ldg(reinterpret_cast<const float2*>(from + kHeadDim / 2 + 8 * i));
  }
}

// The same for `column` and the three behind it.
__device__ __forceinline__ void load_angles(const Params& p, int position, int column, float4& cos,
                                            float4& sin) {
  const float* from = p.cos_sin + static_cast<int64_t>(position) * kHeadDim + column;
  cos = __ldg(reinterpret_cast<const float4*>(from));
  sin = __ldg(reinterpret_cast<const float4*>(from + kHeadDim / 2));
}

// Turns two columns of a head's first half and those of its second.
__device__ __forceinline__ void turn(const float2& cos, const float2& sin, uint32_t& first,
                                     uint32_t& second) {
  const float a = __uint_as_float(first << 16), b = __uint_as_float(first & 0xFFFF0000u);
  const float c = __uint_as_float(second << 16), d = __uint_as_float(second & 0xFFFF0000u);
  first = bf16_pair(a * cos.x - c * sin.x, b * cos.y - d * sin.y);
  second = bf16_pair(c * cos.x + a * sin.x, d * cos.y + b * sin.y);
}

// Whether a row of the weight belongs to q or k.
__device__ __forceinline__ bool is_turned(const Params& p, int row) {
  return row < p.segments[0] + p.segments[1];
}

// Which of q, k and v a block of the weight belongs to, and where its heads go.
class Destination {
 public:
  // `row` is the block's first.
  __device__ __forceinline__ Destination(const Params& p, int row)
      : kept_(row >= p.segments[0]),
        turned_(is_turned(p, row)),
        first_(row - (kept_ ? p.segments[0] + (turned_ ? 0 : p.segments[1]) : 0)) {}

  __device__ __forceinline__ bool turned() const { return turned_; }  // q and k
  __device__ __forceinline__ bool kept() const { return kept_; }      // k and v

  __device__ __forceinline__ int head() const { return first_ / kHeadDim; }
  __device__ __forceinline__ uint16_t* cache(const Params& p) const {
    return turned_ ? p.k_cache : p.v_cache;
  }

  // The head whose first row is `inside` behind the block's, of `token` with `slot`, which is not
  // negative where the head is kept.
  template <bool kKept>
  __device__ __forceinline__ uint16_t* row(const Params& p, int token, int slot, int inside) const {
    const int at = first_ + inside;
    if (!kKept) {
      return static_cast<uint16_t*>(p.out) + static_cast<int64_t>(token) * p.segments[0] + at;
    }
    const int64_t block = slot >> p.block_shift;
    const int64_t line = ((block * p.kv_heads + at / kHeadDim) << p.block_shift) +
                         (slot & ((1 << p.block_shift) - 1));
    return cache(p) + line * kHeadDim;
  }

 private:
  bool kept_, turned_;
  int first_;  // of the block's rows, in its segment
};

}  // namespace gptoss::dense_fp8

#endif  // GPTOSS_TRT_DENSE_FP8_ROTATE_CUH_
