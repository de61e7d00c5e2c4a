// Chunks of prompts where prefill_full.cuh would leave too many multiprocessors without a tile, and
// windows that prefill_window.cuh does not take: a block takes 16 queries of one sequence with the
// eight heads of one KV head as rows, and walks the keys they see from the last to the first.
//
// A producer thread copies pages of keys and values into two rings; each of two consumer warpgroups
// has 64 rows. Their registers hold the weights of two key blocks, so that these are ready ahead of
// the wait, and sums of weights come out of the product, from a column of ones beside the values.
// While the scores of one key block are made, the values of the block before are added, and the
// softmax of the scores runs beside that. The sink enters at the end.
#ifndef GPTOSS_TRT_ATTENTION_PREFILL_SUMS_CUH_
#define GPTOSS_TRT_ATTENTION_PREFILL_SUMS_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "attention/params.h"
#include "attention/prefill_products.cuh"
#include "attention/prefill_tiles.cuh"
#include "attention/warp_mma.cuh"
#include "attention/wgmma_bf16.cuh"
#include "core/ptx.cuh"

namespace gptoss::attention {

struct SumsShape {
  static constexpr int kConsumers = 2;
  static constexpr int kKeys = 128;
  static constexpr int kStages = 3;
  static constexpr int kQueries = kConsumers * kGroupQueries;
  static constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
  static constexpr int kQueryBytes = kConsumers * 64 * kRowBytes;
  static constexpr int kBlockBytes = kKeys * kRowBytes;  // of keys; values as many
  static constexpr int kBarriers = 1 + 4 * kStages;
  static constexpr int kSharedBytes = 1024 + kQueryBytes + 2 * kStages * kBlockBytes + kOnesBytes +
                                      kBarriers * 8;  // 1,024: alignment
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
};

// Addresses in shared memory.
struct SumsMemory {
  using Shape = SumsShape;
  static constexpr int kStages = Shape::kStages;
  uint32_t query, keys, values, ones, barriers;

  __device__ __forceinline__ explicit SumsMemory(uint32_t raw)
      : query((raw + 1023) & ~1023u),
        keys(query + Shape::kQueryBytes),
        values(keys + kStages * Shape::kBlockBytes),
        ones(values + kStages * Shape::kBlockBytes),
        barriers(ones + kOnesBytes) {}
  __device__ __forceinline__ uint64_t value_rows(int s) const {
    return rows_of_values<36>(values + s * Shape::kBlockBytes, ones);
  }
  __device__ __forceinline__ uint32_t query_full() const { return barriers; }
  __device__ __forceinline__ uint32_t keys_full(int s) const { return barriers + 8 + 8 * s; }
  __device__ __forceinline__ uint32_t keys_free(int s) const { return keys_full(kStages + s); }
  __device__ __forceinline__ uint32_t values_full(int s) const {
    return keys_full(2 * kStages + s);
  }
  __device__ __forceinline__ uint32_t values_free(int s) const {
    return keys_full(3 * kStages + s);
  }
};

__device__ __forceinline__ void produce(const PrefillParams& p, const CUtensorMap* q_map,
                                        const CUtensorMap* k_map, const CUtensorMap* v_map,
                                        const SumsMemory& memory, const PrefillTile& tile,
                                        const KeyBlocks& blocks, int kv_head) {
  using Shape = SumsShape;
  constexpr int kStages = Shape::kStages, kKeys = Shape::kKeys;
  barrier_expect_bytes(memory.query_full(), Shape::kQueryBytes);
  tensor_copy_3d(memory.query, q_map, 0, kv_head * kGroup, tile.token, memory.query_full());
  const int skipped = p.first_block == nullptr ? 0 : p.first_block[tile.sequence];
  const int32_t* table = p.block_table + static_cast<int64_t>(tile.sequence) * p.table_width;
  const int pages = (tile.context + kPageKeys - 1) / kPageKeys;
  const int outside = p.blocks * p.kv_heads * kPageKeys;  // a row behind the cache: zeros
  for (int i = 0; i < blocks.count(); ++i) {
    const int stage = i % kStages;
    const uint32_t parity = (i / kStages & 1) ^ 1;
    int rows[kKeys / kPageKeys];
#pragma unroll
    for (int n = 0; n < kKeys / kPageKeys; ++n) {
      const int page = (blocks.last - i) * (kKeys / kPageKeys) + n;
      const bool known = page >= skipped && page < pages;
      rows[n] = known ? (table[page - skipped] * p.kv_heads + kv_head) * kPageKeys : outside;
    }
    barrier_wait(memory.keys_free(stage), parity);
    barrier_expect_bytes(memory.keys_full(stage), Shape::kBlockBytes);
#pragma unroll
    for (int n = 0; n < kKeys / kPageKeys; ++n) {
      tensor_copy_2d(memory.keys + stage * Shape::kBlockBytes + n * kPageBytes, k_map, 0, rows[n],
                     memory.keys_full(stage));
    }
    barrier_wait(memory.values_free(stage), parity);
    barrier_expect_bytes(memory.values_full(stage), Shape::kBlockBytes);
#pragma unroll
    for (int n = 0; n < kKeys / kPageKeys; ++n) {
      tensor_copy_2d(memory.values + stage * Shape::kBlockBytes + n * kPageBytes, v_map, 0, rows[n],
                     memory.values_full(stage));
    }
  }
}

// scores become weights; shrink is what the output so far is multiplied by.
template <int kKeys>
__device__ __forceinline__ void soften(float (&scores)[kKeys / 2], RowState& rows,
                                       float (&shrink)[2], float scale_log2, int first_key,
                                       int position, int window) {
  const int t = threadIdx.x & 3;
  const bool whole =
      first_key + kKeys - 1 <= position && (window == 0 || first_key > position + 1 - window);
  if (!whole) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int key = first_key + 8 * (i >> 2) + 2 * t + (i & 1);
      const int at = position + ((i & 2) >> 1);
      const bool seen = key <= at && (window == 0 || key > at - window);
      if (!seen) scores[i] = -INFINITY;
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float higher = rows.top[row];
#pragma unroll
    for (int i = 2 * row; i < kKeys / 2; i += 4) {
      higher = fmaxf(higher, fmaxf(scores[i], scores[i + 1]));
    }
    higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 1));
    higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 2));
    // A row without a key so far has -inf: from 0, so that its weights are 0 and not NaN.
    const float base = higher == -INFINITY ? 0.f : higher * scale_log2;
    shrink[row] = exp2_fast(rows.top[row] * scale_log2 - base);
#pragma unroll
    for (int i = 2 * row; i < kKeys / 2; i += 4) {
      scores[i] = exp2_fast(scores[i] * scale_log2 - base);
      scores[i + 1] = exp2_fast(scores[i + 1] * scale_log2 - base);
    }
    rows.top[row] = higher;
  }
}

__device__ __forceinline__ void consume(const PrefillParams& p, const SumsMemory& memory,
                                        const PrefillTile& tile, const KeyBlocks& blocks, int group,
                                        int kv_head) {
  using Shape = SumsShape;
  constexpr int kKeys = Shape::kKeys;
  using Weights = uint32_t[kKeys / 16][4];
  const int warp = threadIdx.x >> 5 & 3;
  const bool leads = (threadIdx.x & 31) == 0;
  const int offset = group * kGroupQueries + 2 * warp;
  const int position = tile.position + offset;
  const uint64_t query = swizzled_rows(memory.query + group * 64 * kRowBytes);
  float scores[kKeys / 2], out[36] = {}, shrink[2];
  Weights weights;
  RowState rows;

  barrier_wait(memory.query_full(), 0);
  barrier_wait(memory.keys_full(0), 0);
  wgmma_fence();
  start_scores<kKeys>(scores, query, swizzled_rows(memory.keys));
  wgmma_wait<0>();
  wgmma_settle(scores);
  if (leads) barrier_arrive(memory.keys_free(0));
  soften<kKeys>(scores, rows, shrink, p.scale_log2, blocks.last * kKeys, position, p.window);
  pack_weights<kKeys>(scores, weights);
  barrier_wait(memory.values_full(0), 0);
  const int filled = tile.context - blocks.last * kKeys;
  if (filled < kKeys) clear_values<Shape>(memory.values, filled);

  int stage = 0, before = 0;
  uint32_t parity = 0, parity_before = 0;
  // Adds the block before with its weights, `old`; those of `block` become `fresh`.
  const auto advance = [&](int block, Weights& old, Weights& fresh) {
    before = stage, parity_before = parity;
    if (++stage == Shape::kStages) stage = 0, parity ^= 1;
    barrier_wait(memory.keys_full(stage), parity);
    wgmma_fence();
    start_scores<kKeys>(scores, query, swizzled_rows(memory.keys + stage * Shape::kBlockBytes));
    barrier_wait(memory.values_full(before), parity_before);
    start_output<kKeys>(out, old, memory.value_rows(before));
    wgmma_wait<1>();
    wgmma_settle(scores);
    if (leads) barrier_arrive(memory.keys_free(stage));
    soften<kKeys>(scores, rows, shrink, p.scale_log2, block * kKeys, position, p.window);
    pack_weights<kKeys>(scores, fresh);
    finish_before_wait<kKeys>(fresh);
    wgmma_wait<0>();
    wgmma_settle(out);
    wgmma_release(old);
    if (leads) barrier_arrive(memory.values_free(before));
    rescale(out, shrink);
  };
  const auto finish = [&](Weights& old) {
    barrier_wait(memory.values_full(stage), parity);
    wgmma_fence();
    start_output<kKeys>(out, old, memory.value_rows(stage));
    wgmma_wait<0>();
    wgmma_settle(out);
    wgmma_release(old);
  };
  int block = blocks.last - 1;
  Weights other;  // two sets take turns: copies would serialise the products
  for (; block > blocks.first; block -= 2) {
    advance(block, weights, other);
    advance(block - 1, other, weights);
  }
  if (block == blocks.first) {
    advance(block, weights, other);
    finish(other);
  } else {
    finish(weights);
  }
  write_rows(p, tile.token, tile.end, tile.token + offset, kv_head, sink_of(p, kv_head), out, rows,
             p.scale_log2);
}

// Grid (tiles, kv_heads): as many tiles as any cut of the tokens into sequences can give. The
// blocks of one head follow each other, so its keys stay in the second-level cache; those with the
// most keys begin.
__global__ __launch_bounds__(SumsShape::kThreads, 1) void attention_sums_kernel(
    const PrefillParams p, const __grid_constant__ CUtensorMap q_map,
    const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
  using Shape = SumsShape;
  extern __shared__ uint8_t raw[];
  const SumsMemory memory(shared_address(raw));
  const int number = gridDim.x - 1 - blockIdx.x, kv_head = blockIdx.y;
  const int group = threadIdx.x / kGroupThreads;
  fill_ones(memory.ones);
  if (threadIdx.x == 0) {
    barrier_init(memory.query_full(), 1);
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(memory.keys_full(s), 1);
      barrier_init(memory.values_full(s), 1);
      barrier_init(memory.keys_free(s), Shape::kConsumers * 4);
      barrier_init(memory.values_free(s), Shape::kConsumers * 4);
    }
    barrier_init_fence();
  }
  dependents_launch();
  dependency_wait();
  zero_padding(p, number, Shape::kQueries, kv_head);
  const PrefillTile tile = find_tile(p, number, Shape::kQueries);
  __syncthreads();
  if (tile.sequence < 0) return;
  KeyBlocks blocks(tile, Shape::kQueries, Shape::kKeys, p.window);
  if (group == Shape::kConsumers) {
    registers_release<Shape::kProducerRegisters>();
    if (of_first_lane(threadIdx.x / 32) == Shape::kConsumers * 4 && elect_lane()) {
      produce(p, &q_map, &k_map, &v_map, memory, tile, blocks, kv_head);
    }
  } else {
    registers_claim<Shape::kConsumerRegisters>();
    consume(p, memory, tile, blocks, group, kv_head);
  }
}

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_PREFILL_SUMS_CUH_
