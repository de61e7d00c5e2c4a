// Which work a block does in the prefill plan. An item is a group of strips of one expert for one
// block of up to kPrefillBlock of its rows. Items are ordered by (expert, group, token block), so
// that blocks which run side by side read the same weights and the same tokens, and taken from a
// counter, because they cost as much as their rows.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_PREFILL_SCHEDULE_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_PREFILL_SCHEDULE_CUH_

#include <cstdint>

#include "moe_gemm_fp8/params.h"

namespace gptoss::moe {

// In shared memory, for e <= E.
struct ExpertTables {
  int32_t* rows_before;
  int32_t* blocks_before;
  int32_t* columns_before;

  __device__ ExpertTables(int32_t* base, int experts)
      : rows_before(base),
        blocks_before(base + experts + 1),
        columns_before(base + 2 * (experts + 1)) {}

  // All threads of the block; synchronises at its end.
  __device__ void fill(const Params& p) const {
    for (int i = threadIdx.x; i <= p.experts; i += blockDim.x) {
      rows_before[i] = __ldcg(p.expert_offsets + i);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x;
      int32_t blocks_base = 0, columns_base = 0;
      for (int first = 0; first < p.experts; first += 32) {
        const int expert = first + lane;
        const int rows = expert < p.experts ? rows_before[expert + 1] - rows_before[expert] : 0;
        const int32_t blocks = ceil_div(rows, kPrefillBlock);
        const int32_t columns = expert_columns(rows);
        int32_t blocks_sum = blocks, columns_sum = columns;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int32_t other_blocks = __shfl_up_sync(0xFFFFFFFFu, blocks_sum, step);
          const int32_t other_columns = __shfl_up_sync(0xFFFFFFFFu, columns_sum, step);
          if (lane >= step) {
            blocks_sum += other_blocks;
            columns_sum += other_columns;
          }
        }
        if (expert < p.experts) {
          blocks_before[expert] = blocks_base + blocks_sum - blocks;
          columns_before[expert] = columns_base + columns_sum - columns;
        }
        blocks_base += __shfl_sync(0xFFFFFFFFu, blocks_sum, 31);
        columns_base += __shfl_sync(0xFFFFFFFFu, columns_sum, 31);
      }
      if (lane == 0) {
        blocks_before[p.experts] = blocks_base;
        columns_before[p.experts] = columns_base;
      }
    }
    __syncthreads();
  }
};

// What the producer tells the consumers with an item's first stage.
struct __align__(16) PrefillItem {
  int expert;  // negative: no more items
  int first;   // GATE_UP: sorted row of its first token; DOWN: its first column in row_info
  int rows;    // 1 to kPrefillBlock
  int group;
};

template <bool kGateUp>
struct StripGroup {
  static constexpr int kStrips = kGateUp ? 2 * kPrefillChannels / kStripRows : kPrefillConsumers;

  static __device__ __forceinline__ int count(const Params& p) {
    return ceil_div(p.strips, kStrips);
  }
  // The warpgroups take kPrefillConsumers strips of a group at a time.
  static __device__ __forceinline__ int passes(const Params& p, int group) {
    return ceil_div(min(p.strips - group * kStrips, kStrips), kPrefillConsumers);
  }
};

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_PREFILL_SCHEDULE_CUH_
