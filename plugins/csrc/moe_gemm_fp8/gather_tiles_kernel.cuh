// Ahead of GATE_UP on FP8 tiles: the rows of x sorted by expert, so that tensor copies bring a
// token block, each read once and stored where its experts want it; and their scales by token
// block: f32 [token blocks][records][p.cluster_rows].
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_GATHER_TILES_KERNEL_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_GATHER_TILES_KERNEL_CUH_

#include <cstdint>

#include "core/ptx.cuh"
#include "moe_gemm_fp8/tiles_schedule.cuh"

namespace gptoss::moe {

constexpr int kSortThreads = 1024;
constexpr int kSortRows = 256;          // whose scales the block sorts at a time
constexpr int kSortChunk = 8;           // tokens that one copy brings
constexpr int kSortMostChunks = 8;      // of a block of threads
constexpr int kSortMostBytes = 200000;  // that its tokens take

// Tokens of a block of threads: all at once on the multiprocessors, if they fit.
GPTOSS_HOST_DEVICE constexpr int sort_tokens(int tokens, int k, int multiprocessors) {
  const int wanted = ceil_div(ceil_div(tokens, multiprocessors), kSortChunk);
  const int room = kSortMostBytes / (kSortChunk * k);
  const int chunks = wanted < room ? wanted : room;
  return kSortChunk * (chunks < kSortMostChunks ? chunks : kSortMostChunks);
}

GPTOSS_HOST_DEVICE constexpr int sort_shared_bytes(int tokens, int k, int experts) {
  return tokens * k + 2 * (experts + 1) * static_cast<int>(sizeof(int32_t));
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
  const int block = tables.blocks_before[low] + row / p.cluster_rows;
  return {__ldg(p.row_slots + sorted) / p.top_k,
          block * p.records * p.cluster_rows + row % p.cluster_rows};
}

// One warp: the first of an expert's sorted rows [low, high) whose slot is not below `slot`.
__device__ inline int first_row_from(const Params& p, int low, int high, int slot) {
  const int lane = threadIdx.x % 32;
  while (low < high) {
    const int step = (high - low + 31) / 32;  // rows of a lane
    const int last = low + step * (lane + 1) - 1;
    const bool below = last < high && __ldg(p.row_slots + last) < slot;
    const int lanes = __popc(__ballot_sync(0xFFFFFFFFu, below));
    high = min(high, low + step * (lanes + 1) - 1);
    low = min(low + step * lanes, high);
  }
  return low;
}

// A block of threads has `each` tokens in shared memory, from where the copy engine puts them to
// the rows of their experts: an expert's rows lie in the order of tokens, so a block's are
// neighbours. Dynamic shared memory: tokens, then the tables.
__global__ void __launch_bounds__(kSortThreads)
    sort_rows_kernel(const __grid_constant__ Params p, int each) {
  extern __shared__ __align__(128) uint8_t sort_shared[];
  __shared__ uint64_t landed[kSortMostChunks];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = blockIdx.x * each, last = min(first + each, p.x_rows);
  const uint32_t held = shared_address(sort_shared), barriers = shared_address(landed);
  if (threadIdx.x == 0) {
    for (int chunk = 0; chunk < kSortMostChunks; ++chunk) barrier_init(barriers + 8 * chunk, 1);
    barrier_init_fence();
  }
  dependency_wait();
  dependents_launch();
  if (threadIdx.x == 0) {
    for (int at = first; at < last; at += kSortChunk) {
      const int chunk = (at - first) / kSortChunk;
      const uint32_t bytes = min(kSortChunk, last - at) * p.k;
      barrier_expect_bytes(barriers + 8 * chunk, bytes);
      bulk_copy(held + (at - first) * p.k, p.x + static_cast<int64_t>(at) * p.k, bytes,
                barriers + 8 * chunk);
    }
  }
  const TileTables tables(reinterpret_cast<int32_t*>(sort_shared + each * p.k), p.experts);
  tables.fill(p);  // synchronises: the barriers are there
  for (int expert = warp; expert < p.experts; expert += kSortThreads / 32) {
    const int end = tables.rows_before[expert + 1];
    int row = lane + first_row_from(p, tables.rows_before[expert], end, first * p.top_k);
    for (bool more = true; more; row += 32) {
      const int slot = row < end ? __ldg(p.row_slots + row) : INT32_MAX;
      const bool own = slot < last * p.top_k;
      if (own) {
        const int at = slot / p.top_k - first;
        barrier_wait(barriers + 8 * (at / kSortChunk), 0);
        bulk_store(p.gathered + static_cast<int64_t>(row) * p.k, held + at * p.k, p.k);
      }
      more = __all_sync(0xFFFFFFFFu, own);
    }
  }
  bulk_stores_commit();
  const int share = ceil_div(p.rows, static_cast<int>(gridDim.x));
  for (int at = threadIdx.x % kSortRows; at < share; at += kSortRows) {
    const SortedRow own = find_sorted_row(p, tables, blockIdx.x * share + at);
    if (own.source < 0) continue;
#pragma unroll 6
    for (int record = threadIdx.x / kSortRows; record < p.records;
         record += kSortThreads / kSortRows) {
      p.sorted_scales[own.scales + record * p.cluster_rows] =
          __ldg(p.x_scale + static_cast<int64_t>(record) * p.x_rows + own.source);
    }
  }
  bulk_stores_wait();
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_GATHER_TILES_KERNEL_CUH_
