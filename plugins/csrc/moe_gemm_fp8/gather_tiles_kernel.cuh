// Ahead of GATE_UP on FP8 tiles: the rows of x sorted by expert, so that tensor copies bring a
// token block, and their scales by token block: f32 [token blocks][records][kBlockRows].
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_GATHER_TILES_KERNEL_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_GATHER_TILES_KERNEL_CUH_

#include <cstdint>

#include "core/ptx.cuh"
#include "moe_gemm_fp8/tiles_schedule.cuh"

namespace gptoss::moe {

constexpr int kSortThreads = 256;
constexpr int kSortRows = 32;   // of a block of threads
constexpr int kSortAtOnce = 6;  // 16-byte words of a row that a thread asks for together

GPTOSS_HOST_DEVICE constexpr int sort_shared_bytes(int experts) {
  return 2 * (experts + 1) * static_cast<int>(sizeof(int32_t));
}

struct SortedRow {
  int source;  // row of x; negative: no such row
  int scales;  // place of its first scale
};

__device__ inline SortedRow find_sorted_row(const Params& p, const TileTables& tables, int sorted) {
  if (sorted >= tables.rows_before[p.experts]) return {-1, 0};
  int low = 0, high = p.experts;  // the expert with rows_before[e] <= sorted < [e + 1]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (tables.rows_before[middle] <= sorted) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int row = sorted - tables.rows_before[low];
  const int block = tables.blocks_before[low] + row / kBlockRows;
  return {__ldg(p.row_slots + sorted) / p.top_k, block * p.records * kBlockRows + row % kBlockRows};
}

__global__ void __launch_bounds__(kSortThreads) sort_rows_kernel(const __grid_constant__ Params p) {
  extern __shared__ int32_t sort_shared[];
  __shared__ SortedRow rows[kSortRows];
  dependency_wait();
  dependents_launch();
  const TileTables tables(sort_shared, p.experts);
  tables.fill(p);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = blockIdx.x * kSortRows;
  if (warp == 0) rows[lane] = find_sorted_row(p, tables, first + lane);
  __syncthreads();
  const int words = p.k / 16;
  for (int i = warp; i < kSortRows; i += kSortThreads / 32) {
    if (rows[i].source < 0) continue;
    const auto* from =
        reinterpret_cast<const uint4*>(p.x + static_cast<int64_t>(rows[i].source) * p.k);
    auto* to = reinterpret_cast<uint4*>(p.gathered + static_cast<int64_t>(first + i) * p.k);
    for (int at = lane; at < words; at += 32 * kSortAtOnce) {
      uint4 held[kSortAtOnce];
#pragma unroll
      for (int j = 0; j < kSortAtOnce; ++j) {
        if (at + 32 * j < words) held[j] = __ldg(from + at + 32 * j);
      }
#pragma unroll
      for (int j = 0; j < kSortAtOnce; ++j) {
        if (at + 32 * j < words) to[at + 32 * j] = held[j];
      }
    }
  }
  const SortedRow own = rows[lane];
  for (int record = warp; record < p.records; record += kSortThreads / 32) {
    if (own.source >= 0) {
      p.sorted_scales[own.scales + record * kBlockRows] =
          __ldg(p.x_scale + static_cast<int64_t>(record) * p.x_rows + own.source);
    }
  }
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_GATHER_TILES_KERNEL_CUH_
