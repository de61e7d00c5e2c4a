// Quantisation of h where channels share a scale: a group is the work of several blocks of the
// product, so it follows as a kernel of its own (a ticket for the last block to arrive was tried;
// the product's kernel then spilled and lost its uniform registers).
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_QUANTISE_KERNEL_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_QUANTISE_KERNEL_CUH_

#include <cstdint>

#include "core/ptx.cuh"
#include "moe_gemm_fp8/epilogue.cuh"
#include "moe_gemm_fp8/params.h"

namespace gptoss::moe {

constexpr int kQuantiseWarps = 8;
constexpr int kQuantisePerLane = 4;  // of a group of 128

// One warp quantises a group of channels of one sorted row of h: scale = amax / 448 (1 where that
// is 0), value = h / scale, both by IEEE division.
__device__ inline void quantise_group(const Params& p, int row, int group) {
  const int lane = threadIdx.x % 32;
  const int channels = p.n / 2;
  const int first = group * p.scale_group;
  const int last = min(first + p.scale_group, channels);
  const float* values = p.h_values + static_cast<int64_t>(row) * channels;
  float mine[kQuantisePerLane];
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kQuantisePerLane; ++i) {
    const int channel = first + lane + 32 * i;
    mine[i] = channel < last ? values[channel] : 0.0f;
    amax = fmaxf(amax, fabsf(mine[i]));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
  }
  float scale = __fdiv_rn(amax, kE4m3Max);
  if (scale == 0.0f) scale = 1.0f;
  uint8_t* out = static_cast<uint8_t*>(p.out) + static_cast<int64_t>(row) * channels;
#pragma unroll
  for (int i = 0; i < kQuantisePerLane; ++i) {
    const int channel = first + lane + 32 * i;
    if (channel < last) out[channel] = to_e4m3(__fdiv_rn(mine[i], scale));
  }
  if (lane == 0) p.out_scale[static_cast<int64_t>(group) * p.rows + row] = scale;
}

// A block takes a sorted row. In static mode groups of 128 share nothing but the constant.
__global__ void __launch_bounds__(kQuantiseWarps * 32)
    quantise_kernel(const __grid_constant__ Params p) {
  dependency_wait();
  dependents_launch();
  const int row = blockIdx.x;
  if (row >= p.expert_offsets[p.experts]) return;
  const int channels = p.n / 2;
  if (p.scale_group != 0) {
    for (int group = threadIdx.x / 32; group * p.scale_group < channels; group += kQuantiseWarps) {
      quantise_group(p, row, group);
    }
    return;
  }
  const int64_t base = static_cast<int64_t>(row) * channels;
  for (int i = threadIdx.x; i < channels; i += kQuantiseWarps * 32) {
    static_cast<uint8_t*>(p.out)[base + i] = quantise_static(p.h_values[base + i]);
  }
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_QUANTISE_KERNEL_CUH_
