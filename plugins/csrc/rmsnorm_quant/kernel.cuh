// Residual + delta (or + a token's weighted expert rows), its RMSNorm, and that in e4m3: a block of
// threads has a token, a thread eight of its columns, and everything stays in registers.
//
// Invariant: a token's result does not depend on the other tokens; the sum over expert rows starts
// at slot 0 and is formed before it meets the residual.
#ifndef GPTOSS_TRT_RMSNORM_QUANT_KERNEL_CUH_
#define GPTOSS_TRT_RMSNORM_QUANT_KERNEL_CUH_

#include <cstdint>

#include "core/bf16.cuh"
#include "core/ptx.cuh"
#include "rmsnorm_quant/params.h"

namespace gptoss::rmsnorm_quant {

constexpr int kMostThreads = kMostHidden / kLane;

enum class Source { kResidual, kDelta, kRows };

__device__ __forceinline__ uint4 load(const uint16_t* from, bool present) {
  return present ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
}

// The sum over the block, the same in each thread.
__device__ __forceinline__ float sum_over_block(float value) {
  __shared__ float parts[kMostThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < blockDim.x / 32; ++i) sum += parts[i];
  return sum;
}

// ((r0 + r1) + r2) + r3 of this thread's columns; rows of experts that are not here count as zero.
__device__ __forceinline__ void add_rows(const Params& p, int64_t token, int column, bool present,
                                         float (&sum)[8]) {
  const int4 ids = reinterpret_cast<const int4*>(p.expert_ids)[token];
  const int experts[kTopK] = {ids.x, ids.y, ids.z, ids.w};
  uint4 words[kTopK];
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) {
    words[slot] = load(p.rows + (token * kTopK + slot) * p.hidden + column, present);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) {
    const int local = experts[slot] - p.first_expert;
    if (local < 0 || local >= p.local_experts) continue;
    float row[8];
    widen(words[slot], row);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += row[i];
  }
}

template <Source kSource>
__global__ void __launch_bounds__(kMostThreads, 2)
    rmsnorm_quant_kernel(const __grid_constant__ Params p) {
  const int column = threadIdx.x * kLane;
  const bool present = column < p.hidden;
  const int64_t token = blockIdx.x, at = token * p.hidden + column;
  dependents_launch();
  const uint4 gain = load(p.gain + column, present);
  dependency_wait();
  uint4 words = load(p.residual + at, present);
  float x[8];
  widen(words, x);
  if constexpr (kSource != Source::kResidual) {
    float more[8];
    if constexpr (kSource == Source::kDelta) {
      widen(load(p.delta + at, present), more);
    } else {
      add_rows(p, token, column, present, more);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += more[i];
    words = narrow(x);
    widen(words, x);
  }
  if (present && (kSource != Source::kResidual || p.updated != p.residual)) {
    *reinterpret_cast<uint4*>(p.updated + at) = words;
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares = fmaf(x[i], x[i], squares);
  const float inverse = inverse_rms(sum_over_block(squares), p.hidden, p.eps);
  float weight[8];
  widen(gain, weight);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = x[i] * inverse * weight[i];
  words = narrow(x);
  if (p.normed != nullptr && present) *reinterpret_cast<uint4*>(p.normed + at) = words;
  if (p.quantised == nullptr) return;
  widen(words, x);
  float scale;
  const uint2 codes = quantise_group(x, present, &scale);
  if (!present) return;
  *reinterpret_cast<uint2*>(p.quantised + at) = codes;
  if (column % kGroup == 0) {
    p.scales[static_cast<int64_t>(column / kGroup) * p.tokens + token] = scale;
  }
}

}  // namespace gptoss::rmsnorm_quant

#endif  // GPTOSS_TRT_RMSNORM_QUANT_KERNEL_CUH_
