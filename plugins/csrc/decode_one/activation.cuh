// The residual stream, in registers of every block alike, and what becomes of an activation ahead
// of a product: norm, quantisation, and the order that the product wants.
//
// Invariant: a warp has whole groups of 128 channels, block b of them in warp b % kWarps, a lane
// four neighbours; so a group's scale is found inside a warp. Rounding is that of the ops
// rmsnorm_quant and act_quant; sums are added in another order.
#ifndef GPTOSS_TRT_DECODE_ONE_ACTIVATION_CUH_
#define GPTOSS_TRT_DECODE_ONE_ACTIVATION_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "decode_one/exchange.cuh"
#include "decode_one/shared.cuh"
#include "moe_gemm_fp8/epilogue.cuh"

namespace gptoss::one {

using moe::bf16_to_float;
using moe::to_e4m3;

__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float low_float(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}
__device__ __forceinline__ float round_bf16(float value) {
  return bf16_to_float(__bfloat16_as_ushort(__float2bfloat16_rn(value)));
}

__device__ __forceinline__ float4 four_floats(uint2 pairs) {
  return make_float4(low_float(pairs.x), high_float(pairs.x), low_float(pairs.y),
                     high_float(pairs.y));
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
  return x;
}

// 1 / value to an ulp, and x / value rounded to nearest (but for results below the normal range),
// by the steps of IEEE division without its detour for extreme values, which would be a call.
__device__ __forceinline__ float reciprocal(float value) {
  const float first = approximate_reciprocal(value);
  return fmaf(fmaf(-value, first, 1.0f), first, first);
}
__device__ __forceinline__ float divide(float x, float value, float reciprocal_value) {
  const float quotient = x * reciprocal_value;
  return fmaf(fmaf(-quotient, value, x), reciprocal_value, quotient);
}

// Four values of a lane as e4m3 codes under their group's scale, which it returns.
__device__ __forceinline__ float quantise_group(float4 y, uint32_t& codes) {
  const float most = fmaxf(fmaxf(fabsf(y.x), fabsf(y.y)), fmaxf(fabsf(y.z), fabsf(y.w)));
  // No value is negative: their bits are in the same order.
  const float amax = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(most)));
  float scale = divide(amax, moe::kE4m3Max, 1.0f / moe::kE4m3Max);
  if (scale == 0.0f) scale = 1.0f;
  const float inverse = reciprocal(scale);
  codes = to_e4m3(divide(y.x, scale, inverse)) | to_e4m3(divide(y.y, scale, inverse)) << 8 |
          to_e4m3(divide(y.z, scale, inverse)) << 16 |
          static_cast<uint32_t>(to_e4m3(divide(y.w, scale, inverse))) << 24;
  return scale;
}

// Where word w of a run of 64 e4m3 columns goes in an operand of WGMMA (see token_run.cuh).
__device__ __forceinline__ int permuted_word(int word) {
  return word / 16 * 16 + word % 4 * 4 + word % 16 / 4;
}

__device__ __forceinline__ void store_bf16(Shared& shared, int block, int lane, float4 value) {
  reinterpret_cast<uint2*>(shared.activation.dense)[block * 32 + lane] =
      make_uint2(pack_pair(value.x, value.y), pack_pair(value.z, value.w));
}

// Group b of `value` for a dense product: bf16 (of values that are bf16 already), or e4m3 with the
// group's scale. Called by whole warps.
template <Format kFormat>
__device__ __forceinline__ void store_dense(Shared& shared, int block, int lane, bool inside,
                                            float4 value) {
  if constexpr (kFormat == Format::kFp8) {
    uint32_t codes;
    const float scale = quantise_group(value, codes);
    if (lane == 0) shared.x_scale[block] = scale;
    // Columns behind the last have zero weights; their codes are zeros too.
    reinterpret_cast<uint32_t*>(shared.activation.dense)[block * 32 + lane] = codes;
  } else {
    if (inside) store_bf16(shared, block, lane, value);
  }
}

// Group b of a bf16 norm for the router (bf16) and the experts (e4m3, permuted).
__device__ __forceinline__ void store_experts(Shared& shared, int block, int lane, bool inside,
                                              float4 value) {
  uint32_t codes;
  const float scale = quantise_group(value, codes);
  if (lane == 0) shared.x_scale[block] = scale;
  const int word = block * 32 + lane;
  // Columns behind kHidden have zero weights; their codes are zeros too.
  reinterpret_cast<uint32_t*>(shared.activation.experts)[permuted_word(word)] = codes;
  if (inside) store_bf16(shared, block, lane, value);
}

// One lane's part of the residual stream.
class Stream {
 public:
  static constexpr int kBlocks = moe::ceil_div(kScaleBlocks, kWarps);  // of a warp, at most

  __device__ __forceinline__ Stream() {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) x_[i] = make_uint2(0, 0);
  }

  // x = a row of the embedding.
  __device__ __forceinline__ void embed(const uint16_t* row) {
    const Place at;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (at.inside(i)) x_[i] = __ldg(reinterpret_cast<const uint2*>(row + at.column(i)));
    }
  }

  // A norm's weight, asked for ahead of what it will multiply.
  struct Gain {
    uint2 pairs[kBlocks];
  };
  __device__ __forceinline__ Gain load_gain(const void* weight) const {
    const Place at;
    Gain gain;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      gain.pairs[i] = make_uint2(0, 0);
      if (at.inside(i)) {
        gain.pairs[i] = __ldg(
            reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(weight) + at.column(i)));
      }
    }
    return gain;
  }

  // x = bf16(x + the sum of kCount bf16 vectors of packets, added in their order).
  template <int kCount>
  __device__ __forceinline__ void add(const uint64_t* vectors, uint32_t flag) {
    const Place at;
    await_senders<kCount>(at, vectors, flag);
    uint2 pairs[kBlocks * kCount];
    receive_pairs<kBlocks * kCount>(
        [at, vectors](int i) {
          return vectors + i % kCount * (kHidden / 2) + at.column(i / kCount) / 2;
        },
        [at](int i) { return i < kCount || at.inside(i / kCount); }, flag, pairs);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      float4 total = four_floats(pairs[i * kCount]);
#pragma unroll
      for (int v = 1; v < kCount; ++v) {
        const float4 more = four_floats(pairs[i * kCount + v]);
        total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
      }
      if (!at.inside(i)) continue;
      const float4 x = four_floats(x_[i]);
      x_[i] = make_uint2(pack_pair(x.x + total.x, x.y + total.y),
                         pack_pair(x.z + total.z, x.w + total.w));
    }
  }
  // Hands each group of the norm of x to `store` (block, lane, inside, value), then all warps meet.
  template <class Store>
  __device__ __forceinline__ void norm(Shared& shared, const Gain& gain, float eps,
                                       Store store) const {
    const Place at;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const float4 x = four_floats(x_[i]);
      squares += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
    }
    squares = warp_sum(squares);
    if (at.lane == 0) shared.reduced[at.warp] = squares;
    compute_sync();
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += shared.reduced[w];
    const float mean = fmaf(total, 1.0f / kHidden, eps);
    float inverse = rsqrtf(mean);
    inverse = fmaf(fmaf(-mean * inverse, inverse, 1.0f), 0.5f * inverse, inverse);  // to an ulp
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int block = at.warp + i * kWarps;
      if (block >= kScaleBlocks) break;
      const float4 weight = four_floats(gain.pairs[i]), x = four_floats(x_[i]);
      store(
          block, at.lane, at.inside(i),
          make_float4(round_bf16(x.x * inverse * weight.x), round_bf16(x.y * inverse * weight.y),
                      round_bf16(x.z * inverse * weight.z), round_bf16(x.w * inverse * weight.w)));
    }
    async_proxy_fence();  // WGMMA reads some of it
    compute_sync();
  }

 private:
  struct Place;

  // Waits for a packet of each block that sends to the warp's columns: while it waits, a warp asks
  // for one packet a lane, not for all of them. The others come with those or shortly behind.
  template <int kCount>
  __device__ __forceinline__ static void await_senders(const Place& at, const uint64_t* vectors,
                                                       uint32_t flag) {
    constexpr int kOfBlock = 8, kPlaces = kOfBlock / kCount;  // in a group, some in every strip
    constexpr int kApart = kCount == kOutParts ? kOutStripRows - 8 : moe::kStripRows;
    static_assert(kBlocks * kOfBlock <= 32 && (kPlaces - 1) * kApart < kScaleColumns);
    const int block = at.warp + at.lane / kOfBlock * kWarps;
    const int column = block * kScaleColumns + at.lane % kOfBlock / kCount * kApart;
    const bool asks = at.lane < kBlocks * kOfBlock && column < kHidden;
    const uint64_t* packet = vectors + at.lane % kCount * (kHidden / 2) + column / 2;
    Patience patience;
    while (!__all_sync(0xFFFFFFFFu, !asks || flag_of(peek(packet)) == flag)) patience.turn();
  }

  // Which columns the thread has.
  struct Place {
    int warp = thread_index() / 32;
    int lane = thread_index() % 32;

    __device__ __forceinline__ int column(int i) const {
      return (warp + i * kWarps) * kScaleColumns + 4 * lane;
    }
    __device__ __forceinline__ bool inside(int i) const { return column(i) < kHidden; }
  };

  uint2 x_[kBlocks];  // bf16, as it is rounded after every sum
};

}  // namespace gptoss::one

#endif  // GPTOSS_TRT_DECODE_ONE_ACTIVATION_CUH_
