// Which work a block of threads does in the plan of FP8 tiles. A token block is some chunks of
// kChunkRows rows of one expert. An item is a token block and the tiles of weights that a cluster
// takes at once; items are ordered by (expert, tiles, token block), so that neighbours read the
// same weights.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_TILES_SCHEDULE_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_TILES_SCHEDULE_CUH_

#include <cstdint>

#include "moe_gemm_fp8/params.h"

namespace gptoss::moe {

GPTOSS_HOST_DEVICE constexpr int tile_chunks(int rows) { return ceil_div(rows, kChunkRows); }

// In shared memory, for e <= E.
struct TileTables {
  int32_t* rows_before;
  int32_t* blocks_before;

  __device__ TileTables(int32_t* base, int experts)
      : rows_before(base), blocks_before(base + experts + 1) {}

  // All threads of the block; synchronises at its end.
  __device__ void fill(const Params& p) const {
    for (int i = threadIdx.x; i <= p.experts; i += blockDim.x) {
      rows_before[i] = __ldcg(p.expert_offsets + i);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x;
      int32_t base = 0;
      for (int first = 0; first < p.experts; first += 32) {
        const int expert = first + lane;
        const int rows = expert < p.experts ? rows_before[expert + 1] - rows_before[expert] : 0;
        const int32_t blocks = ceil_div(rows, p.cluster_rows);
        int32_t sum = blocks;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
          if (lane >= step) sum += other;
        }
        if (expert < p.experts) blocks_before[expert] = base + sum - blocks;
        base += __shfl_sync(0xFFFFFFFFu, sum, 31);
      }
      if (lane == 0) blocks_before[p.experts] = base;
    }
    __syncthreads();
  }

  __device__ __forceinline__ int rows(int expert) const {
    return rows_before[expert + 1] - rows_before[expert];
  }
  __device__ __forceinline__ int blocks(int expert) const {
    return blocks_before[expert + 1] - blocks_before[expert];
  }
};

// What one block of threads does with one item.
struct __align__(16) TileItem {
  int expert;  // negative: no more items
  int tile;    // the first, of the weights
  int tiles;   // at once
  int first;   // sorted row of its first token
  int rows;    // none: the stages pass by
  int chunks;
  int shared;  // the cluster's blocks have the same tokens; where tiles go in pairs the same tiles
  int scales;  // GATE_UP: place of the first token's scales (gather_tiles_kernel.cuh)
};

// Of the item `index` (0 to blocks x groups - 1) for the block `rank` of a cluster; `expert` is at
// or before its expert, and moved on. A pair of tiles is for all of a cluster, half of the chunks
// each; so is the last of an odd number of single tiles.
template <typename S>
__device__ __forceinline__ TileItem make_item(const Params& p, const TileTables& tables, int index,
                                              int rank, int& expert) {
  constexpr int kTiles = S::kClusterTiles;
  const int groups = ceil_div(p.weight_tiles, kTiles);
  while (tables.blocks_before[expert + 1] * groups <= index) ++expert;
  const int blocks = tables.blocks(expert);
  const int inside = index - tables.blocks_before[expert] * groups;
  const int group = inside / blocks, block = inside - group * blocks;
  const int all = tile_chunks(tables.rows(expert));
  int first_chunk = block * S::kClusterChunks, most = S::kClusterChunks;
  if constexpr (S::kEvens) {
    if (blocks > 1 && all % S::kClusterChunks == 1) {
      if (block + 2 == blocks) --most;
      if (block + 1 == blocks) --first_chunk;
    }
  }
  const bool alone = !S::kPairs && group * kTiles + 1 == p.weight_tiles;
  TileItem item;
  item.expert = expert;
  item.tile = group * kTiles;
  item.tiles = S::kPairs ? min(p.weight_tiles - item.tile, kTiles) : 1;
  item.chunks = min(all - first_chunk, most);
  item.first = tables.rows_before[expert] + first_chunk * kChunkRows;
  item.scales = (tables.blocks_before[expert] + block) * p.records * p.cluster_rows;
  item.shared = S::kShare > 1;
  if (S::kShare > 1 && (S::kPairs || alone)) {
    const int low = (item.chunks + 1) / 2;
    item.shared = !alone && item.chunks > 1;
    item.chunks = rank == 0 ? low : item.chunks - low;
    item.first += rank * low * kChunkRows;
    item.scales += rank * low * kChunkRows;
  } else if (!S::kPairs) {
    item.tile += rank;
  }
  item.rows = min(item.chunks * kChunkRows, tables.rows_before[expert + 1] - item.first);
  if (item.chunks == 0) item.rows = 0;
  return item;
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_TILES_SCHEDULE_CUH_
