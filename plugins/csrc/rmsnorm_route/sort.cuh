// The rows of each expert: (token, slot) pairs by (expert, token, slot), by counting.
//
// Invariant: no atomics; a warp ranks its run of entries, and runs lie in order.
#ifndef GPTOSS_TRT_RMSNORM_ROUTE_SORT_CUH_
#define GPTOSS_TRT_RMSNORM_ROUTE_SORT_CUH_

#include <cstdint>

#include "core/cluster.cuh"
#include "core/ptx.cuh"
#include "rmsnorm_route/choose.cuh"
#include "rmsnorm_route/params.h"

namespace gptoss::rmsnorm_route {

// The inclusive sum over lanes.
__device__ __forceinline__ int lanes_up_to(int value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAll, value, step);
    if (threadIdx.x % 32 >= step) value += other;
  }
  return value;
}

// One warp: offsets of the experts from their rows, and which have some; stored if `store`.
__device__ __forceinline__ void list_experts(const RowsParams& p, int32_t* rows, bool store) {
  constexpr int kEach = kMostExperts / 32;
  const int lane = threadIdx.x % 32;
  int own[kEach], total = 0, used = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = lane * kEach + i;
    own[i] = expert < p.local_experts ? rows[expert] : 0;
    total += own[i];
    used += own[i] > 0;
  }
  int offset = lanes_up_to(total) - total;
  int place = lanes_up_to(used) - used;
  const int number = __shfl_sync(kAll, place + used, 31);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = lane * kEach + i;
    if (expert < p.local_experts) {
      rows[expert] = offset;
      const bool some = own[i] > 0;
      if (store) {
        p.expert_offsets[expert] = offset;
        // Those without rows are ranked behind the others, as -1.
        p.active_experts[1 + (some ? place : number + expert - place)] = some ? expert : -1;
      }
      place += some;
      offset += own[i];
    }
  }
  if (lane == 31) {
    rows[p.local_experts] = offset;  // behind the last row
    if (store) {
      p.expert_offsets[p.local_experts] = offset;
      p.active_experts[0] = number;
    }
  }
}

// Rows of tokens by (expert, token, slot), sorted by kBlocks of kSortingWarps warps: each warp has
// a run of entries.
template <int kSortingWarps, int kBlocks, int kMost>
struct Sorting {
  static constexpr int kWarps = kSortingWarps, kThreads = 32 * kWarps;
  static constexpr int kEntries = kMost * kTopK / kBlocks;  // of a block, at most
  int32_t before[kWarps][kMostExperts + 1];   // rows of an expert in warps ahead; [E]: of none here
  int32_t others[kBlocks][kMostExperts + 1];  // rows of an expert in each block
  int32_t offset[kMostExperts + 1];
  uint16_t rank[kEntries];  // among the entries of its warp that have the same expert
  uint8_t expert[kEntries];
};
using SortingFew = Sorting<kWarps, 1, kFewTokens>;
using SortingMany = Sorting<kSortWarps, kSortBlocks, kMostTokens>;

// `block` of kBlocks.
template <int kSortingWarps, int kBlocks, int kMost>
__device__ inline void sort_rows(const RowsParams& p,
                                 Sorting<kSortingWarps, kBlocks, kMost>& memory, int block) {
  using Memory = Sorting<kSortingWarps, kBlocks, kMost>;
  constexpr int kWarps = Memory::kWarps, kThreads = Memory::kThreads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int entries = p.tokens * kTopK, none = p.local_experts;
  const int each = (entries + 32 * kWarps * kBlocks - 1) / (32 * kWarps * kBlocks) * 32;
  const int first = block * kWarps * each;  // of this block
  for (int i = threadIdx.x; i < kWarps * (kMostExperts + 1); i += kThreads) {
    memory.before[0][i] = 0;
  }
  __syncthreads();
  for (int at = warp * each + lane; at < (warp + 1) * each; at += 32) {
    int expert = none + 1;
    if (first + at < entries) {
      const int local = __ldcg(p.expert_ids + first + at) - p.first_expert;
      expert = local >= 0 && local < none ? local : none;
    }
    const uint32_t same = __match_any_sync(kAll, expert);
    const int ahead = __popc(same & ((1u << lane) - 1));
    if (expert <= none) {
      memory.rank[at] = static_cast<uint16_t>(memory.before[warp][expert] + ahead);
      memory.expert[at] = static_cast<uint8_t>(expert);
    }
    __syncwarp();
    if (expert <= none && ahead == 0) memory.before[warp][expert] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
  if (threadIdx.x <= none) {
    int rows = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int own = memory.before[w][threadIdx.x];
      memory.before[w][threadIdx.x] = rows;
      rows += own;
    }
    if constexpr (kBlocks == 1) {
      memory.offset[threadIdx.x] = rows;
    } else {
      const uint32_t place = shared_address(&memory.others[block][threadIdx.x]);
      for (int to = 0; to < kBlocks; ++to) cluster_store(cluster_address(place, to), rows);
    }
  }
  if constexpr (kBlocks > 1) {
    cluster_sync();
    if (threadIdx.x <= none) {
      int rows = 0, ahead = 0;
#pragma unroll
      for (int from = 0; from < kBlocks; ++from) {
        if (from == block) ahead = rows;
        rows += memory.others[from][threadIdx.x];
      }
      memory.offset[threadIdx.x] = rows;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) memory.before[w][threadIdx.x] += ahead;
    }
  }
  __syncthreads();
  if (warp == 0) list_experts(p, memory.offset, block == 0);
  __syncthreads();
  for (int at = warp * each + lane; at < min((warp + 1) * each, entries - first); at += 32) {
    const int expert = memory.expert[at];
    const int row = memory.offset[expert] + memory.before[warp][expert] + memory.rank[at];
    p.row_slots[row] = expert < none ? first + at : -1;
  }
}

__global__ void __launch_bounds__(SortingMany::kThreads, 1)
    route_rows_kernel(const __grid_constant__ RowsParams p) {
  extern __shared__ __align__(16) uint8_t route_shared[];
  dependents_launch();
  cluster_sync();  // all blocks run, so their shared memory may be written
  dependency_wait();
  sort_rows(p, *reinterpret_cast<SortingMany*>(route_shared), static_cast<int>(cluster_rank()));
}

}  // namespace gptoss::rmsnorm_route

#endif  // GPTOSS_TRT_RMSNORM_ROUTE_SORT_CUH_
