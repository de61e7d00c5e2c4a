// Ahead of the prefill product: the rows of x, sorted by expert, into tiles that one bulk copy
// brings into shared memory as WGMMA wants them. A tile is one token block and one record:
//   codes  [8 chunks of 16 columns][columns / 8][8 rows][16 bytes], columns in the weights' order
//   scales f32 [1 or 2][columns], token 8j + 2t + c at (j / 2) 16 + 4t + 2 (j % 2) + c, so that a
//          thread of the product finds its own by fours
// Rows of a tile that no token has are not written: their sums are never read. DOWN's output slots
// and routing weights are laid out by column too.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_GATHER_KERNEL_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_GATHER_KERNEL_CUH_

#include <cstdint>

#include "core/ptx.cuh"
#include "moe_gemm_fp8/epilogue.cuh"
#include "moe_gemm_fp8/prefill_schedule.cuh"
#include "moe_gemm_fp8/token_run.cuh"

namespace gptoss::moe {

constexpr int kGatherThreads = 256;
constexpr int kGatherRows = 32;  // of a block of threads

GPTOSS_HOST_DEVICE constexpr int gather_shared_bytes(int experts) {
  return 3 * (experts + 1) * static_cast<int>(sizeof(int32_t));
}

struct GatherRow {
  uint8_t* tiles;  // of its token block; null: no such row
  int source;      // row of x
  int columns;     // of its tiles
  int inside;      // row of its tiles
};

template <bool kGateUp>
__device__ inline GatherRow find_row(const Params& p, const ExpertTables& tables, int sorted) {
  if (sorted >= tables.rows_before[p.experts]) return {nullptr, 0, 0, 0};
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
  const int block = row / kPrefillBlock;
  const int left = tables.rows_before[low + 1] - tables.rows_before[low] - block * kPrefillBlock;
  const int64_t before = tables.columns_before[low] + block * kPrefillBlock;
  if (!kGateUp) {
    const int slot = __ldg(p.row_slots + sorted);
    p.row_info[before + row % kPrefillBlock] =
        make_uint2(slot, __float_as_uint(__ldg(p.expert_weights + slot)));
  }
  return {p.gathered + before * p.records * p.tile_row_bytes,
          kGateUp ? __ldg(p.row_slots + sorted) / p.top_k : sorted,
          block_columns(min(left, kPrefillBlock)), row % kPrefillBlock};
}

__device__ __forceinline__ int scale_place(int token) {
  return token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
}

// Eight rows times four runs of 64 columns a warp.
__device__ inline void gather_codes(const Params& p, const GatherRow* rows) {
  const int lane = threadIdx.x % 32;
  constexpr int kRowGroups = kGatherRows / kCoreRows;
  const int runs = p.records * (kRecordColumns / kHalfColumns);
  for (int unit = threadIdx.x / 32; unit < kRowGroups * ceil_div(runs, 4);
       unit += kGatherThreads / 32) {
    const GatherRow row = rows[unit % kRowGroups * kCoreRows + lane % kCoreRows];
    const int run = unit / kRowGroups * 4 + lane / kCoreRows;
    if (row.tiles == nullptr || run >= runs) continue;
    const int chunk_stride = row.columns * 16;
    uint8_t* tile = row.tiles + static_cast<int64_t>(run / 2) * row.columns * p.tile_row_bytes;
    copy_token_run(p, p.x + static_cast<int64_t>(row.source) * p.k, run * kHalfColumns,
                   tile + run % 2 * 4 * chunk_stride + row.inside * 16, chunk_stride);
  }
}

__device__ inline void gather_scales(const Params& p, const GatherRow* rows, int per_record) {
  const int groups = p.records * per_record;
  const int scale_rows = ceil_div(p.k, kRecordColumns / per_record);
  for (int i = threadIdx.x; i < groups * kGatherRows; i += kGatherThreads) {
    const GatherRow row = rows[i % kGatherRows];
    const int group = i / kGatherRows;
    if (row.tiles == nullptr) continue;
    float scale = 0.0f;
    if (group < scale_rows) {
      scale = p.x_scale == nullptr
                  ? kStaticScale
                  : __ldg(p.x_scale + static_cast<int64_t>(group) * p.x_rows + row.source);
    }
    uint8_t* tile =
        row.tiles + static_cast<int64_t>(group / per_record) * row.columns * p.tile_row_bytes;
    float* scales = reinterpret_cast<float*>(tile + row.columns * kRecordColumns);
    scales[group % per_record * row.columns + scale_place(row.inside)] = scale;
  }
}

template <bool kGateUp>
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const __grid_constant__ Params p) {
  extern __shared__ int32_t gather_shared[];
  __shared__ GatherRow rows[kGatherRows];
  dependency_wait();
  dependents_launch();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.items_taken = 0;
  const ExpertTables tables(gather_shared, p.experts);
  tables.fill(p);
  if (threadIdx.x < kGatherRows) {
    rows[threadIdx.x] = find_row<kGateUp>(p, tables, blockIdx.x * kGatherRows + threadIdx.x);
  }
  __syncthreads();
  gather_codes(p, rows);
  gather_scales(p, rows, (p.tile_row_bytes - kRecordColumns) / static_cast<int>(sizeof(float)));
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_GATHER_KERNEL_CUH_
