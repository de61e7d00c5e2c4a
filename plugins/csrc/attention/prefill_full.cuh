// Chunks of prompts in layers without a window. A tile is 24 queries of one sequence with the eight
// heads of one KV head as rows, for three warpgroups; the keys they see are walked from the last to
// the first (prefill_wide.cuh). The sink enters at the end.
//
// A block of each multiprocessor lives as long as the call and takes tile after tile: while one
// ends, a producer warp copies the queries of the next, and pages of keys and values go on through
// the same two rings.
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
  static constexpr int kStages = 8;
  static constexpr int kQueries = kConsumers * kGroupQueries;
  static constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
  static constexpr int kQueryBytes = kConsumers * 64 * kRowBytes;
  static constexpr int kBlockBytes = kKeys * kRowBytes;  // of keys; values as many
  static constexpr int kTileBytes = 32;
  static constexpr int kBarriers = 4 + 4 * kStages;
  static constexpr int kSharedBytes = 1024 + 2 * kQueryBytes + 2 * kStages * kBlockBytes +
                                      2 * kTileBytes + kBarriers * 8;  // 1,024: alignment
  static constexpr int kProducerRegisters = 32;
  static constexpr int kConsumerRegisters = 160;
};

// Addresses in shared memory. Queries and what a tile is have two places, which tiles take in turn.
struct FullMemory {
  static constexpr int kStages = FullShape::kStages;
  uint32_t queries, keys, values, tiles, barriers;

  __device__ __forceinline__ explicit FullMemory(uint32_t raw)
      : queries((raw + 1023) & ~1023u),
        keys(queries + 2 * FullShape::kQueryBytes),
        values(keys + kStages * FullShape::kBlockBytes),
        tiles(values + kStages * FullShape::kBlockBytes),
        barriers(tiles + 2 * FullShape::kTileBytes) {}
  __device__ __forceinline__ uint32_t query(int place) const {
    return queries + place * FullShape::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t tile(int place) const {
    return tiles + place * FullShape::kTileBytes;
  }
  __device__ __forceinline__ uint32_t query_full(int place) const { return barriers + 8 * place; }
  __device__ __forceinline__ uint32_t query_free(int place) const { return query_full(2 + place); }
  __device__ __forceinline__ uint32_t keys_full(int s) const { return query_full(4 + s); }
  __device__ __forceinline__ uint32_t keys_free(int s) const { return keys_full(kStages + s); }
  __device__ __forceinline__ uint32_t values_full(int s) const {
    return keys_full(2 * kStages + s);
  }
  __device__ __forceinline__ uint32_t values_free(int s) const {
    return keys_full(3 * kStages + s);
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
  const bool leads = (threadIdx.x & 31) == 0;
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
    if (leads) {
      const int kv_head = items.kv_head(item);
      barrier_wait(memory.query_free(place), parity);
      store_tile(memory.tile(place), tile, kv_head);
      barrier_expect_bytes(memory.query_full(place), Shape::kQueryBytes);
      tensor_copy_3d(memory.query(place), q_map, 0, kv_head * kGroup, tile.token,
                     memory.query_full(place));
      const int skipped = p.first_block == nullptr ? 0 : p.first_block[tile.sequence];
      const int32_t* table = p.block_table + static_cast<int64_t>(tile.sequence) * p.table_width;
      const KeyBlocks pages(tile, Shape::kQueries, Shape::kKeys, 0);
      for (int page = pages.last; page >= pages.first; --page, ++step) {
        const int stage = step % Shape::kStages;
        const uint32_t used = (step / Shape::kStages & 1) ^ 1;
        const int row =
            page < skipped ? outside : (table[page - skipped] * p.kv_heads + kv_head) * kPageKeys;
        barrier_wait(memory.keys_free(stage), used);
        barrier_expect_bytes(memory.keys_full(stage), Shape::kBlockBytes);
        tensor_copy_2d(memory.keys + stage * Shape::kBlockBytes, k_map, 0, row,
                       memory.keys_full(stage));
        barrier_wait(memory.values_free(stage), used);
        barrier_expect_bytes(memory.values_full(stage), Shape::kBlockBytes);
        tensor_copy_2d(memory.values + stage * Shape::kBlockBytes, v_map, 0, row,
                       memory.values_full(stage));
      }
    }
    __syncwarp();
    place ^= 1;
    if (place == 0) parity ^= 1;
  }
  if (leads) {
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
    const WidePlace walk{swizzled_rows(memory.query(place) + group * 64 * kRowBytes), p.scale_log2,
                         tile.position + offset, blocks.last + step, (threadIdx.x & 31) == 0};
    const int filled = tile.context - blocks.last * Shape::kKeys;
    if (filled < Shape::kKeys) {
      const int stage = step % Shape::kStages;
      barrier_wait(memory.values_full(stage), step / Shape::kStages & 1);
      clear_values<Shape>(memory.values + stage * Shape::kBlockBytes, filled);
    }
    float out[32] = {};
    WideRows rows;
    wide_walk<FullMemory, Shape::kKeys>(out, rows, memory, walk, step, blocks.count(),
                                        tile.position, memory.query_free(place));
    RowState ended;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      ended.top[row] = rows.base[row];
      ended.total[row] = rows.total[row];
    }
    write_rows(p, tile.token, tile.end, tile.token + offset, kv_head, sink_of(p, kv_head), out,
               ended, 1.f);
    step += blocks.count();
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
  if (threadIdx.x == 0) {
    for (int place = 0; place < 2; ++place) {
      barrier_init(memory.query_full(place), 1);
      barrier_init(memory.query_free(place), Shape::kConsumers * 4);
    }
    init_stages<Shape>(memory);
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
