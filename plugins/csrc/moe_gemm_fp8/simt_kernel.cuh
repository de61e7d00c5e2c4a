// The plain plan of moe_gemm_fp8: CUDA cores, one weight at a time, any shape. It reads the same
// bytes by layout.h's definition and not by fragments, so it is a second opinion on the fast plan.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_SIMT_KERNEL_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_SIMT_KERNEL_CUH_

#include <cstdint>

#include "core/ptx.cuh"
#include "moe_gemm_fp8/epilogue.cuh"
#include "moe_gemm_fp8/params.h"

namespace gptoss::moe {

constexpr int kSimtLanes = 4;  // threads that share a row, a record in turn each
constexpr int kSimtThreads = kStripRows * kSimtLanes;

__device__ __forceinline__ float e4m3_to_float(uint8_t code) {
  __nv_fp8_e4m3 value;
  value.__x = code;
  return static_cast<float>(value);
}

// The weight at (row of the strip, column of the record), without the block scale.
template <Storage kStorage>
__device__ inline float weight_at(const uint8_t* record, int row, int column) {
  const int high = row % 2;
  const int half = column / kHalfColumns;
  const int inside = column % 16;  // of the thread's 16 columns
  const int quad = column % kHalfColumns / 16;
  const int thread = row / 16 * 32 + row % 16 / 2 * 4 + quad;
  const int instruction = inside / 8;
  const int later = inside / 4 % 2;
  const int byte = inside % 4;
  const uint8_t* at = record + kHeaderBytes + half * half_bytes(kStorage);
  if constexpr (kStorage == Storage::kFp8) {
    return e4m3_to_float(at[instruction * 2048 + thread * 16 + (high + 2 * later) * 4 + byte]);
  } else {
    const uint32_t shifts = at[row / 16 * 16 + row % 16 / 2 * 2 + quad / 2];
    const int shift = static_cast<int>(high ? shifts >> 4 : shifts & 15) + kBottomShift;
    const uint32_t word = *reinterpret_cast<const uint32_t*>(at + kShiftBytes + thread * 16 +
                                                             (instruction * 2 + high) * 4);
    constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const float magnitude = kMagnitudes[(word >> (16 * later + 4 * byte)) & 7];
    const bool negative = (word >> (8 * byte + (later ? 3 : 7))) & 1;
    return ldexpf(negative ? -magnitude : magnitude, shift);
  }
}

// Block (strip, sorted row): 64 outputs. GATE_UP leaves h in h_values for quantise_kernel.cuh.
template <Storage kStorage>
__global__ void __launch_bounds__(kSimtThreads)
    moe_gemm_simt_kernel(const __grid_constant__ Params p, int gate_up, int x_group) {
  __shared__ float sums[kStripRows];
  dependency_wait();
  const int sorted = blockIdx.y;
  if (sorted >= p.expert_offsets[p.experts]) return;
  int expert = 0;
  while (p.expert_offsets[expert + 1] <= sorted) ++expert;
  const int slot = p.row_slots[sorted];
  const int source = gate_up ? slot / p.top_k : sorted;
  const uint8_t* x = p.x + static_cast<int64_t>(source) * p.k;
  const uint8_t* strip =
      p.weights + expert * p.expert_bytes + static_cast<int64_t>(blockIdx.x) * p.strip_bytes;
  const int row = threadIdx.x / kSimtLanes;
  const int out_row = blockIdx.x * kStripRows + row;
  const int first_record = threadIdx.x % kSimtLanes;
  float sum = 0.0f;
  if (first_record == 0 && p.bias != nullptr && out_row < p.n) {
    sum = bf16_to_float(p.bias[static_cast<int64_t>(expert) * p.n + out_row]);
  }
  for (int record = first_record; record < p.records; record += kSimtLanes) {
    const uint8_t* at = strip + static_cast<int64_t>(record) * record_bytes(kStorage, 2);
    const float weight_scale = *reinterpret_cast<const float*>(at);
    for (int begin = 0; begin < kRecordColumns; begin += x_group) {
      float part = 0.0f;
      for (int i = begin; i < begin + x_group; ++i) {
        const int column = record * kRecordColumns + i;
        if (column >= p.k) break;
        part += weight_at<kStorage>(at, row, i) * e4m3_to_float(x[column]);
      }
      const int group = (record * kRecordColumns + begin) / x_group;
      if (group * x_group >= p.k) break;
      const float scale = p.x_scale == nullptr
                              ? kStaticScale
                              : p.x_scale[static_cast<int64_t>(group) * p.x_rows + source];
      sum += part * (weight_scale * scale);
    }
  }
#pragma unroll
  for (int step = 1; step < kSimtLanes; step *= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  }
  if (first_record == 0) sums[row] = sum;
  __syncthreads();
  const int pair = threadIdx.x;
  const int channel = blockIdx.x * kStripRows + 2 * pair;
  if (pair >= kStripRows / 2 || channel >= p.n) return;
  if (gate_up) {
    p.h_values[static_cast<int64_t>(sorted) * (p.n / 2) + channel / 2] =
        swiglu(sums[2 * pair], sums[2 * pair + 1], p.limit, p.alpha);
  } else {
    store_pair(p, slot, channel, p.expert_weights[slot], sums[2 * pair], sums[2 * pair + 1]);
  }
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_SIMT_KERNEL_CUH_
