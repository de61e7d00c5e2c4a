// kernel.cuh's norm of many tokens with nothing to add: a warp has a token, so nothing waits for
// other warps, and a lane has all its loads under way at once.
//
// Invariant: the bits of kernel.cuh; squares are added as its warps and blocks add them.
#ifndef GPTOSS_TRT_RMSNORM_QUANT_WARP_KERNEL_CUH_
#define GPTOSS_TRT_RMSNORM_QUANT_WARP_KERNEL_CUH_

#include <cstdint>

#include "core/bf16.cuh"
#include "core/ptx.cuh"
#include "rmsnorm_quant/params.h"

namespace gptoss::rmsnorm_quant {

constexpr int kTokenWarps = 4;   // of a block
constexpr int kTokenBlocks = 5;  // of a multiprocessor

__global__ void __launch_bounds__(32 * kTokenWarps, kTokenBlocks)
    rmsnorm_quant_warp_kernel(const __grid_constant__ Params p) {
  constexpr int kStep = 32 * kLane, kLoads = kWarpHidden / kStep;
  const int lane = threadIdx.x % 32, first = lane * kLane;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kTokenWarps + threadIdx.x / 32;
  dependents_launch();
  dependency_wait();
  if (token >= p.tokens) return;
  const auto load = [&](const uint16_t* row, int i) {
    const int column = first + kStep * i;
    return column < p.hidden ? *reinterpret_cast<const uint4*>(row + column)
                             : make_uint4(0, 0, 0, 0);
  };
  const int64_t at = token * p.hidden;
  uint4 words[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) words[i] = load(p.residual + at, i);
  if (p.updated != p.residual) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first + kStep * i;
      if (column < p.hidden) *reinterpret_cast<uint4*>(p.updated + at + column) = words[i];
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    float x[8], squares = 0.0f;
    widen(words[i], x);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares = fmaf(x[j], x[j], squares);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
    }
    sum += squares;
  }
  const float inverse = inverse_rms(sum, p.hidden, p.eps);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int column = first + kStep * i;
    if (kStep * i >= p.hidden) break;
    const bool present = column < p.hidden;
    float x[8], weight[8];
    widen(words[i], x);
    widen(load(p.gain, i), weight);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = x[j] * inverse * weight[j];
    const uint4 rounded = narrow(x);
    if (p.normed != nullptr && present) {
      *reinterpret_cast<uint4*>(p.normed + at + column) = rounded;
    }
    if (p.quantised == nullptr) continue;
    widen(rounded, x);
    float scale;
    const uint2 codes = quantise_group(x, present, &scale);
    if (!present) continue;
    *reinterpret_cast<uint2*>(p.quantised + at + column) = codes;
    if (lane % (kGroup / kLane) == 0) {
      p.scales[static_cast<int64_t>(column / kGroup) * p.tokens + token] = scale;
    }
  }
}

}  // namespace gptoss::rmsnorm_quant

#endif  // GPTOSS_TRT_RMSNORM_QUANT_WARP_KERNEL_CUH_
