// What attention needs of a warp's tensor cores and exponentials, on bf16 pairs in 32-bit words.
#ifndef GPTOSS_TRT_ATTENTION_WARP_MMA_CUH_
#define GPTOSS_TRT_ATTENTION_WARP_MMA_CUH_

#include <cstdint>

#include "core/numbers.h"

namespace gptoss::attention {

// d[16, 8] += a[16, 16] b[16, 8] in bf16. With lane = 4g + t: d[c] is row g (c < 2) or g + 8,
// column 2t + (c & 1); a[0], a[1] are columns 2t, 2t + 1 of rows g and g + 8, a[2], a[3] columns 2t
// + 8, 2t + 9 of them; b[0], b[1] are rows 2t, 2t + 1 and 2t + 8, 2t + 9 of column g.
__device__ __forceinline__ void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The transpose of an 8 x 8 matrix of bf16 whose row g, columns 2t and 2t + 1 lane 4g + t holds.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// bf16 pair, rounded to nearest even, `low` in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// The low (or high) halves of two words, the first one's in the low half.
__device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7632);
}

__device__ __forceinline__ float bf16_value(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// Sixteen bytes that this kernel reads once: kept out of the first-level cache.
__device__ __forceinline__ uint4 load_once(const uint4* source, bool present) {
  uint4 value = make_uint4(0, 0, 0, 0);
  if (present) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(source));
  }
  return value;
}

// The largest (or the sum) over the lanes that share t, that is over g.
__device__ __forceinline__ float max_over_g(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ __forceinline__ float sum_over_g(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_WARP_MMA_CUH_
