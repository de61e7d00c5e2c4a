// The product's instruction, and the choice of a token's experts from its logits.
#ifndef GPTOSS_TRT_RMSNORM_ROUTE_CHOOSE_CUH_
#define GPTOSS_TRT_RMSNORM_ROUTE_CHOOSE_CUH_

#include <cstdint>

#include "core/bf16.cuh"
#include "rmsnorm_route/params.h"

namespace gptoss::rmsnorm_route {

constexpr uint32_t kAll = 0xFFFFFFFFu;  // lanes of a warp

// c[16, 8] += a[16, 16] b[16, 8], bf16.
__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// In the order of (bf16 logit, lowest index); the least for an expert that is not there.
__device__ __forceinline__ int order(float logit, int expert, bool present) {
  if (!present) return INT32_MIN;
  if (logit == 0.0f) logit = 0.0f;  // -0 ties with 0
  const int bits = static_cast<int>(__float_as_uint(logit)) >> 16;
  return (bits < 0 ? bits ^ 0x7FFF : bits) * 65536 + (65535 - expert);
}

// One warp: the token's experts, of kExperts at most, and their weights. `sums` are logits in
// p.blocks parts, kTokens rows apart.
template <int kExperts, int kPitch>
__device__ __forceinline__ void choose(const Params& p, int token, bool real,
                                       const float (*sums)[kPitch], const float* bias) {
  constexpr int kEach = kExperts / 32;
  const int lane = threadIdx.x % 32;
  int key[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = lane + 32 * i;
    const bool present = expert < p.experts;
    float logit = 0.0f;
    if (present) {
      for (int block = 0; block < p.blocks; ++block) {
        logit += sums[block * kTokens][expert];
      }
      logit = bf16_value(bf16_bits(logit + bias[expert]));
    }
    key[i] = order(logit, expert, present);
  }
  int chosen[kTopK];
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) {
    int most = key[0];
#pragma unroll
    for (int i = 1; i < kEach; ++i) most = max(most, key[i]);
    chosen[slot] = __reduce_max_sync(kAll, most);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (key[i] == chosen[slot]) key[i] = INT32_MIN;
    }
  }
  float weight[kTopK], sum = 0.0f;
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) {
    const int ordered = chosen[slot] >> 16;
    weight[slot] =
        __uint_as_float(static_cast<uint32_t>(ordered < 0 ? ordered ^ 0x7FFF : ordered) << 16);
  }
  const float first = weight[0];
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) sum += weight[slot] = __expf(weight[slot] - first);
  if (lane != 0) return;
  int ids[kTopK];
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) {
    ids[slot] = real ? 65535 - (chosen[slot] & 65535) : -1;
    weight[slot] = real ? bf16_value(bf16_bits(__fdividef(weight[slot], sum))) : 0.0f;
  }
  reinterpret_cast<int4*>(p.expert_ids_out)[token] = make_int4(ids[0], ids[1], ids[2], ids[3]);
  reinterpret_cast<float4*>(p.expert_weights)[token] =
      make_float4(weight[0], weight[1], weight[2], weight[3]);
}

}  // namespace gptoss::rmsnorm_route

#endif  // GPTOSS_TRT_RMSNORM_ROUTE_CHOOSE_CUH_
