// Chunks of prompts in layers without a window. A tile is 24 queries of one sequence with the eight
// heads of one KV head as rows, for three warpgroups; the keys they see are walked from the last to
// the first (prefill_wide.cuh). The sink enters at the end.
//
// A block of each multiprocessor lives as long as the call and takes tile after tile: while one
// ends, a producer warp copies the queries of the next, and pages of keys and values go on through
// the same ring, two of each in a stage: a barrier costs the consumers more than copies that wait
// for one another.
#ifndef GPTOSS_TRT_ATTENTION_PREFILL_FULL_CUH_
#define GPTOSS_TRT_ATTENTION_PREFILL_FULL_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "attention/params.h"
#include "attention/prefill_products.cuh"
#include "attention/prefill_tiles.cuh"
#include "attention/prefill_wide.cuh"
#include "attention/wgmma_bf16.cuh"
#include "core/ptx.cuh"

namespace gptoss::attention {

struct FullShape {
  static constexpr int kConsumers = 3;
  static constexpr int kKeys = kPageKeys;
  static constexpr int kStages = 4;  // of a pair of pages
  static constexpr int kQueries = kConsumers * kGroupQueries;
  static constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
  static constexpr int kQueryBytes = kConsumers * 64 * kRowBytes;
  static constexpr int kBlockBytes = kKeys * kRowBytes;  // of keys; values as many
  static constexpr int kTileBytes = 32;
  static constexpr int kBarriers = 4 + 2 * kStages;
  static constexpr int kSharedBytes = 1024 + 2 * kQueryBytes + 4 * kStages * kBlockBytes +
                                      kOnesBytes + 2 * kTileBytes +
                                      kBarriers * 8;  // 1,024: alignment
  static constexpr int kProducerRegisters = 32;
  static constexpr int kConsumerRegisters = 160;
};

// Addresses in shared memory. Queries and what a tile is have two places, which tiles take in turn.
// Pairs of pages, numbered through all tiles, take the stages in turn; a stage has the keys and the
// values of a tile's last page but an even number, then those of the page before.
struct FullMemory {
  static constexpr uint32_t kStages = FullShape::kStages;
  static constexpr int kHalfBytes = 2 * FullShape::kBlockBytes;
  static constexpr int kStageBytes = 2 * kHalfBytes;
  static_assert((kStages & (kStages - 1)) == 0);
  // From the descriptor of the first keys to that of the first values, whose next columns are the
  // ones.
  static constexpr uint32_t kToValues =
      FullShape::kBlockBytes / 16 +
      (((kStages * kStageBytes - FullShape::kBlockBytes) / 16 - 1) << 16);
  uint32_t queries, stages, ones, tiles, barriers;
  uint64_t first_keys, first_values;  // descriptors

  __device__ __forceinline__ explicit FullMemory(uint32_t raw)
      : queries((raw + 1023) & ~1023u),
        stages(queries + 2 * FullShape::kQueryBytes),
        ones(stages + kStages * kStageBytes),
        tiles(ones + kOnesBytes),
        barriers(tiles + 2 * FullShape::kTileBytes),
        first_keys(swizzled_rows(stages)),
        first_values(moved_rows(first_keys, kToValues)) {}
  __device__ __forceinline__ uint32_t query(int place) const {
    return queries + place * FullShape::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t tile(int place) const {
    return tiles + place * FullShape::kTileBytes;
  }
  __device__ __forceinline__ uint32_t query_full(int place) const { return barriers + 8 * place; }
  __device__ __forceinline__ uint32_t query_free(int place) const { return query_full(2 + place); }

  __device__ __forceinline__ static uint32_t stage(uint32_t pair) { return pair % kStages; }
  __device__ __forceinline__ uint32_t keys(int pair, int half) const {
    return stages + stage(pair) * kStageBytes + half * kHalfBytes;
  }
  __device__ __forceinline__ uint32_t values(int pair, int half) const {
    return keys(pair, half) + FullShape::kBlockBytes;
  }
  __device__ __forceinline__ uint64_t key_rows(int pair, int half) const {
    return moved_rows(first_keys, stage(pair) * (kStageBytes / 16) + half * (kHalfBytes / 16));
  }
  __device__ __forceinline__ uint64_t value_rows(int pair, int half) const {
    return moved_rows(first_values, stage(pair) * moved_values<kWideOutputs>(kStageBytes / 16) +
                                        half * moved_values<kWideOutputs>(kHalfBytes / 16));
  }
  __device__ __forceinline__ uint32_t full(int pair) const {
    return query_full(4) + 8 * stage(pair);
  }
  __device__ __forceinline__ uint32_t free(int pair) const { return full(pair) + 8 * kStages; }
  __device__ __forceinline__ static uint32_t parity(uint32_t pair) { return pair / kStages & 1; }
  __device__ __forceinline__ void wait_full(int pair) const {
    barrier_wait(full(pair), parity(pair));
  }
};

// Items are pairs of tile and KV head, the tiles with the most keys first. A block takes them there
// and back, so that each block gets as much of a falling row.
struct Items {
  int tiles;  // as many as any cut of the tokens into sequences can give
  int kv_heads;
  bool by_head;  // most keys are older than the call: tiles cost about the same, and those of one
                 // head follow each other, so that its keys stay in the second-level cache

  __device__ __forceinline__ explicit Items(const PrefillParams& p)
      : tiles(p.tokens / FullShape::kQueries + p.sequences), kv_heads(p.kv_heads), by_head(false) {
    const int last = p.sequences - 1;
    if (last < 0) return;
    const int queries = p.query_start[last + 1] - p.query_start[last];
    by_head = p.context_lens[last] >= 4 * static_cast<int64_t>(queries);
  }
  __device__ __forceinline__ int count() const { return tiles * kv_heads; }
  __device__ __forceinline__ int number(int item) const {
    return tiles - 1 - (by_head ? item % tiles : item / kv_heads);
  }
  __device__ __forceinline__ int kv_head(int item) const {
    return by_head ? item / tiles : item % kv_heads;
  }
};

// What consumers are told of a tile; sequence -1: that none follows.
__device__ __forceinline__ void store_tile(uint32_t target, const PrefillTile& tile, int kv_head) {
  store_shared_u128(target, tile.sequence, tile.token, tile.end, tile.position);
  store_shared_u128(target + 16, tile.context, kv_head, 0, 0);
}

// Executed by one warp.
__device__ __forceinline__ void produce_tiles(const PrefillParams& p, const CUtensorMap* q_map,
                                              const CUtensorMap* k_map, const CUtensorMap* v_map,
                                              const FullMemory& memory) {
  using Shape = FullShape;
  const int outside = p.blocks * p.kv_heads * kPageKeys;  // a row behind the cache: zeros
  const int blocks = gridDim.x;
  const Items items(p);
  int step = 0, place = 0;
  uint32_t parity = 1;  // of query_free
  for (int round = 0; round * blocks < items.count(); ++round) {
    const int turn = round % 2 == 0 ? blockIdx.x : blocks - 1 - blockIdx.x;
    const int item = round * blocks + turn;
    if (item >= items.count()) continue;
    const PrefillTile tile = find_tile(p, items.number(item), Shape::kQueries);
    if (tile.sequence < 0) continue;
    const int kv_head = items.kv_head(item);
    const KeyBlocks pages(tile, Shape::kQueries, Shape::kKeys, 0);
    if (elect_lane()) {
      int at = step;
      barrier_wait(memory.query_free(place), parity);
      store_tile(memory.tile(place), tile, kv_head);
      barrier_expect_bytes(memory.query_full(place), Shape::kQueryBytes);
      tensor_copy_3d(memory.query(place), q_map, 0, kv_head * kGroup, tile.token,
                     memory.query_full(place));
      const int skipped = p.first_block == nullptr ? 0 : p.first_block[tile.sequence];
      const int32_t* table = p.block_table + static_cast<int64_t>(tile.sequence) * p.table_width;
      for (int page = pages.last; page >= pages.first; page -= 2, ++at) {
        barrier_wait(memory.free(at), memory.parity(at) ^ 1);
        const int both = min(page - pages.first + 1, 2);
        barrier_expect_bytes(memory.full(at), both * 2 * Shape::kBlockBytes);
#pragma unroll 1
        for (int half = 0; half < both; ++half) {
          const int number = page - half;
          const int row = number < skipped
                              ? outside
                              : (table[number - skipped] * p.kv_heads + kv_head) * kPageKeys;
          tensor_copy_2d(memory.keys(at, half), k_map, 0, row, memory.full(at));
          tensor_copy_2d(memory.values(at, half), v_map, 0, row, memory.full(at));
        }
      }
    }
    __syncwarp();
    step += (pages.count() + 1) / 2;
    place ^= 1;
    if (place == 0) parity ^= 1;
  }
  if (elect_lane()) {
    barrier_wait(memory.query_free(place), parity);
    store_tile(memory.tile(place), PrefillTile{-1, 0, 0, 0, 0}, 0);
    barrier_arrive(memory.query_full(place));
  }
}

__device__ __forceinline__ void consume_tiles(const PrefillParams& p, const FullMemory& memory,
                                              int group) {
  using Shape = FullShape;
  const int offset = group * kGroupQueries + 2 * of_first_lane(threadIdx.x >> 5 & 3);
  int step = 0, place = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (;;) {
    barrier_wait(memory.query_full(place), parity);
    const uint4 where = load_shared_u128(memory.tile(place));
    const uint2 what = load_shared_u64(memory.tile(place) + 16);
    const PrefillTile tile{of_first_lane(where.x), of_first_lane(where.y), of_first_lane(where.z),
                           of_first_lane(where.w), of_first_lane(what.x)};
    const int kv_head = of_first_lane(what.y);
    if (tile.sequence < 0) return;
    const KeyBlocks blocks(tile, Shape::kQueries, Shape::kKeys, 0);
    const uint32_t queries = memory.query(place) + group * 64 * kRowBytes;
    const WidePlace walk{swizzled_rows(queries), queries + (threadIdx.x >> 5 & 3) * 16 * kRowBytes,
                         p.scale_log2, tile.position + offset, p.tokens < 1};
    const int filled = tile.context - blocks.last * Shape::kKeys;
    if (filled < Shape::kKeys) {
      memory.wait_full(step);
      clear_values<Shape>(memory.values(step, 0), filled);
    }
    float out[kWideOutputs] = {};
    WideRows rows;
    wide_walk<FullMemory, Shape::kKeys>(out, rows, memory, walk, step, blocks.last, blocks.count(),
                                        tile.position, memory.query_free(place));
    RowState ended;
#pragma unroll
    for (int row = 0; row < 2; ++row) ended.top[row] = rows.base[row];
    write_rows(p, tile.token, tile.end, tile.token + offset, kv_head, sink_of(p, kv_head), out,
               ended, 1.f);
    step += (blocks.count() + 1) / 2;
    place ^= 1;
    if (place == 0) parity ^= 1;
  }
}

// Grid (blocks): as many as there are multiprocessors, or items.
__global__ __launch_bounds__(FullShape::kThreads, 1) void attention_full_kernel(
    const PrefillParams p, const __grid_constant__ CUtensorMap q_map,
    const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
  using Shape = FullShape;
  extern __shared__ uint8_t raw[];
  const FullMemory memory(shared_address(raw));
  const int group = of_first_lane(threadIdx.x / kGroupThreads);
  fill_ones(memory.ones);
  if (threadIdx.x == 0) {
    for (int place = 0; place < 2; ++place) {
      barrier_init(memory.query_full(place), 1);
      barrier_init(memory.query_free(place), Shape::kConsumers * 4);
    }
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(memory.full(s), 1);
      barrier_init(memory.free(s), Shape::kConsumers * 4);
    }
    barrier_init_fence();
  }
  dependents_launch();
  dependency_wait();
  const int share = (p.tokens + gridDim.x - 1) / gridDim.x;
  for (int head = 0; head < p.kv_heads; ++head) zero_padding(p, blockIdx.x, share, head);
  __syncthreads();
  if (group == Shape::kConsumers) {
    registers_release<Shape::kProducerRegisters>();
    if (threadIdx.x / 32 == Shape::kConsumers * 4) {
      produce_tiles(p, &q_map, &k_map, &v_map, memory);
    }
  } else {
    registers_claim<Shape::kConsumerRegisters>();
    consume_tiles(p, memory, group);
  }
}

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_PREFILL_FULL_CUH_
