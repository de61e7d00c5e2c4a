// Chunks of prompts: a block takes 8 x kConsumers queries of one sequence with the eight heads of
// one KV head as rows, and walks the keys they see from the last to the first.
//
// A producer thread copies pages of keys and values into two rings; each consumer warpgroup has 64
// rows. The products of one key block run beside the softmax of another. The sink enters at the
// end.
//
// Three shapes (plan.h): three warpgroups of 192 rows, whose registers hold the scores of two
// blocks (prefill_wide.cuh); two of 128 whose registers hold the weights of two blocks, so that
// these are ready ahead of the wait, and whose sums come out of the product, from a column of ones
// beside the values; and, for windows, two blocks of two warpgroups a multiprocessor, whose few
// keys all fit the rings and are copied ahead. In the last two, while the scores of one key block
// are made, the values of the block before are added, and the softmax of the scores runs beside
// that.
#ifndef GPTOSS_TRT_ATTENTION_PREFILL_KERNEL_CUH_
#define GPTOSS_TRT_ATTENTION_PREFILL_KERNEL_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "attention/params.h"
#include "attention/prefill_products.cuh"
#include "attention/prefill_wide.cuh"
#include "attention/quantise.cuh"
#include "attention/warp_mma.cuh"
#include "attention/wgmma_bf16.cuh"
#include "core/ptx.cuh"

namespace gptoss::attention {

constexpr int kPageKeys = 64;
constexpr int kPageBytes = kPageKeys * kRowBytes;
constexpr int kGroupThreads = 128;
constexpr int kGroupQueries = 8;  // queries of a warpgroup: 64 rows of eight heads

enum class PrefillStyle { kWide, kSums, kWindow };

template <int kConsumerGroups, int kBlockKeys, int kRingStages, PrefillStyle kStyle>
struct PrefillShape {
  static constexpr int kConsumers = kConsumerGroups;
  static constexpr int kKeys = kBlockKeys;
  static constexpr int kStages = kRingStages;
  static constexpr bool kWide = kStyle == PrefillStyle::kWide;
  static constexpr bool kSums = kStyle == PrefillStyle::kSums;
  static constexpr bool kAhead = kStyle == PrefillStyle::kWindow;  // no producer
  static constexpr int kQueries = kConsumers * kGroupQueries;
  static constexpr int kThreads = (kConsumers + (kAhead ? 0 : 1)) * kGroupThreads;
  static constexpr int kBlocks = kAhead ? 2 : 1;  // that share a multiprocessor
  static constexpr int kQueryBytes = kConsumers * 64 * kRowBytes;
  static constexpr int kBlockBytes = kKeys * kRowBytes;  // of keys; values as many
  static constexpr int kOnesBytes = kSums ? 16 * kRowBytes : 0;
  static constexpr int kBarriers = 1 + 4 * kStages;
  static constexpr int kSharedBytes = 1024 + kQueryBytes + 2 * kStages * kBlockBytes + kOnesBytes +
                                      kBarriers * 8;  // 1,024: alignment
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
};

// Addresses in shared memory.
template <class Shape>
struct PrefillMemory {
  static constexpr int kStages = Shape::kStages;
  uint32_t query, keys, values, ones, barriers;

  __device__ __forceinline__ explicit PrefillMemory(uint32_t raw)
      : query((raw + 1023) & ~1023u),
        keys(query + Shape::kQueryBytes),
        values(keys + kStages * Shape::kBlockBytes),
        ones(values + kStages * Shape::kBlockBytes),
        barriers(ones + Shape::kOnesBytes) {}
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

// The queries of one block: [token, end) of the step, of a sequence whose keys are [0, context).
struct PrefillTile {
  int sequence;  // -1: none
  int token;
  int end;
  int position;  // of `token`
  int context;
};

// Tiles are numbered sequence by sequence. Executed by whole warps, each for itself.
__device__ __forceinline__ PrefillTile find_tile(const PrefillParams& p, int number, int queries) {
  const int lane = threadIdx.x & 31;
  int counted = 0;
  for (int base = 0; base < p.sequences; base += 32) {
    const int s = base + lane;
    const int begin = s < p.sequences ? p.query_start[s] : 0;
    const int end = s < p.sequences ? p.query_start[s + 1] : 0;
    const int tiles = (end - begin + queries - 1) / queries;
    int sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += below;
    }
    const uint32_t reached = __ballot_sync(0xffffffffu, counted + sum > number);
    if (reached != 0) {
      const int owner = __ffs(reached) - 1;
      const int first = counted + __shfl_sync(0xffffffffu, sum - tiles, owner);
      PrefillTile tile;
      tile.sequence = base + owner;
      const int start = __shfl_sync(0xffffffffu, begin, owner);
      tile.end = __shfl_sync(0xffffffffu, end, owner);
      tile.token = start + (number - first) * queries;
      tile.context = p.context_lens[tile.sequence];
      tile.position = tile.context - tile.end + tile.token;
      return tile;
    }
    counted += __shfl_sync(0xffffffffu, sum, 31);
  }
  return PrefillTile{-1, 0, 0, 0, 0};
}

// The key blocks of a tile: from `last` down to `first`.
struct KeyBlocks {
  int first, last;

  __device__ __forceinline__ KeyBlocks(const PrefillTile& tile, int queries, int keys, int window) {
    const int end = min(tile.position + queries, tile.context);
    const int low = window ? max(tile.position - window + 1, 0) : 0;
    first = low / keys;
    last = (end - 1) / keys;
  }
  __device__ __forceinline__ int count() const { return last - first + 1; }
};

// Zeros for the rows that no sequence owns, behind query_start[S]; block `number` takes `queries`
// of them.
__device__ __forceinline__ void zero_padding(const PrefillParams& p, int number, int queries,
                                             int kv_head) {
  const int begin = p.query_start[p.sequences] + number * queries;
  const int end = min(begin + queries, p.tokens);
  const int words = kGroup * kHeadDim * (p.out_scale == nullptr ? 2 : 1) / 16;
  for (int i = threadIdx.x; i < (end - begin) * words; i += blockDim.x) {
    const int64_t run = static_cast<int64_t>(begin + i / words) * p.kv_heads + kv_head;
    static_cast<uint4*>(p.out)[run * words + i % words] = make_uint4(0, 0, 0, 0);
  }
  if (p.out_scale == nullptr) return;
  constexpr int kScales = kGroup * kHeadDim / kScaleChannels;  // of zeros: 1
  for (int i = threadIdx.x; i < (end - begin) * kScales; i += blockDim.x) {
    const int64_t row = kv_head * kScales + i % kScales;
    p.out_scale[row * p.tokens + begin + i / kScales] = 1.f;
  }
}

template <class Shape>
__device__ __forceinline__ void produce(const PrefillParams& p, const CUtensorMap* q_map,
                                        const CUtensorMap* k_map, const CUtensorMap* v_map,
                                        const PrefillMemory<Shape>& memory, const PrefillTile& tile,
                                        const KeyBlocks& blocks, int kv_head) {
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

// Two rows of a thread, of two neighbouring queries: maximum of raw scores (or what weights are
// relative to, in units of its own), and this lane's sum.
struct RowState {
  float top[2] = {-INFINITY, -INFINITY};
  float total[2] = {0.f, 0.f};
};

// scores become weights; shrink is what the output so far is multiplied by.
template <int kKeys, bool kSums>
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
    float sum = 0.f;
#pragma unroll
    for (int i = 2 * row; i < kKeys / 2; i += 4) {
      scores[i] = exp2_fast(scores[i] * scale_log2 - base);
      scores[i + 1] = exp2_fast(scores[i + 1] * scale_log2 - base);
      if (!kSums) sum += scores[i] + scores[i + 1];
    }
    rows.total[row] = rows.total[row] * shrink[row] + sum;
    rows.top[row] = higher;
  }
}

// Values behind the sequence's end are what the block's last owner left there: zero weights do not
// hide a NaN. All consumers meet.
template <class Shape>
__device__ __forceinline__ void clear_values(uint32_t values, int from_row) {
  constexpr int kConsuming = Shape::kConsumers * kGroupThreads;
  for (int at = from_row * kRowBytes + threadIdx.x * 16; at < Shape::kBlockBytes;
       at += kConsuming * 16) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(values + at), "r"(0) : "memory");
  }
  async_proxy_fence();
  named_barrier_sync(1, kConsuming);
}

template <class Shape>
__device__ __forceinline__ void fill_ones(uint32_t ones) {
  constexpr uint32_t kTwoOnes = 0x3F803F80;
  for (int at = threadIdx.x * 4; at < Shape::kOnesBytes; at += Shape::kThreads * 4) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(ones + at), "r"(kTwoOnes) : "memory");
  }
  async_proxy_fence();
}

template <int kOutputs>
__device__ __forceinline__ void write_rows(const PrefillParams& p, const PrefillTile& tile,
                                           int token, int kv_head, const float (&out)[kOutputs],
                                           RowState& rows, float scale_log2) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int head = kv_head * kGroup + g;
  const float sink2 = bf16_value(p.sinks[head]) * kLog2E;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float total = rows.total[row];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (kOutputs > 32) total = out[kOutputs - 4 + 2 * row];
    const float top = rows.top[row] * scale_log2;
    const float higher = fmaxf(top, sink2);
    const float kept = exp2_fast(top - higher);
    const float factor = kept / (total * kept + exp2_fast(sink2 - higher));
    if (token + row >= tile.end) continue;
    uint32_t words[8];  // columns 8j + 2t and the next
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      words[j] = pack_bf16(out[4 * j + 2 * row] * factor, out[4 * j + 2 * row + 1] * factor);
    }
    const int64_t at = (static_cast<int64_t>(token + row) * p.kv_heads * kGroup + head) * kHeadDim;
    if (p.out_scale == nullptr) {
      uint32_t* target = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at);
#pragma unroll
      for (int j = 0; j < 8; ++j) target[4 * j + t] = words[j];
      continue;
    }
    const float scale = group_scale(most_over_lanes<8>(most_of(words)));  // of two heads
    const GroupDivision divide(scale);
    uint32_t codes[4];  // of columns 16i + 2t and the next, and of those 8 further
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      codes[i] = code_pair(words[2 * i], divide) | code_pair(words[2 * i + 1], divide) << 16;
    }
    turn_quad(codes);  // columns 16t + 2i and the next, and of those 8 further
    reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out) + at)[t] =
        make_uint4(low_halves(codes[0], codes[1]), low_halves(codes[2], codes[3]),
                   high_halves(codes[0], codes[1]), high_halves(codes[2], codes[3]));
    if ((lane & 7) == 0) {
      const int64_t group = head * kHeadDim / kScaleChannels;
      p.out_scale[group * p.tokens + token + row] = scale;
    }
  }
}

template <class Shape>
__device__ __forceinline__ void consume(const PrefillParams& p, const PrefillMemory<Shape>& memory,
                                        const PrefillTile& tile, const KeyBlocks& blocks, int group,
                                        int kv_head) {
  constexpr int kKeys = Shape::kKeys;
  constexpr bool kSums = Shape::kSums;
  using Weights = uint32_t[kKeys / 16][4];
  const int warp = threadIdx.x >> 5 & 3;
  const bool leads = (threadIdx.x & 31) == 0;
  const int offset = group * kGroupQueries + 2 * warp;
  const int position = tile.position + offset;
  const uint64_t query = swizzled_rows(memory.query + group * 64 * kRowBytes);
  float scores[kKeys / 2], out[kSums ? 36 : 32] = {}, shrink[2];
  Weights weights;
  RowState rows;

  barrier_wait(memory.query_full(), 0);
  barrier_wait(memory.keys_full(0), 0);
  wgmma_fence();
  start_scores<kKeys>(scores, query, swizzled_rows(memory.keys));
  wgmma_wait<0>();
  wgmma_settle(scores);
  if (leads) barrier_arrive(memory.keys_free(0));
  soften<kKeys, kSums>(scores, rows, shrink, p.scale_log2, blocks.last * kKeys, position, p.window);
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
    start_output<kKeys>(out, old, memory.values + before * Shape::kBlockBytes, memory.ones);
    wgmma_wait<1>();
    wgmma_settle(scores);
    if (leads) barrier_arrive(memory.keys_free(stage));
    soften<kKeys, kSums>(scores, rows, shrink, p.scale_log2, block * kKeys, position, p.window);
    if (kSums) {
      pack_weights<kKeys>(scores, fresh);
      finish_before_wait<kKeys>(fresh);
    } else {
      finish_before_wait(rows.total[0] + rows.total[1]);
    }
    wgmma_wait<0>();
    wgmma_settle(out);
    wgmma_release(old);
    if (leads) barrier_arrive(memory.values_free(before));
    rescale(out, shrink);
    if (!kSums) pack_weights<kKeys>(scores, fresh);
  };
  const auto finish = [&](Weights& old) {
    barrier_wait(memory.values_full(stage), parity);
    wgmma_fence();
    start_output<kKeys>(out, old, memory.values + stage * Shape::kBlockBytes, memory.ones);
    wgmma_wait<0>();
    wgmma_settle(out);
    wgmma_release(old);
  };
  int block = blocks.last - 1;
  if constexpr (kSums) {  // two sets of weights take turns: copies would serialise the products
    Weights other;
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
  } else {
    for (; block >= blocks.first; --block) advance(block, weights, weights);
    finish(weights);
  }
  write_rows(p, tile, tile.token + offset, kv_head, out, rows, p.scale_log2);
}

template <class Shape>
__device__ __forceinline__ void consume_wide(const PrefillParams& p,
                                             const PrefillMemory<Shape>& memory,
                                             const PrefillTile& tile, const KeyBlocks& blocks,
                                             int group, int kv_head) {
  constexpr int kKeys = Shape::kKeys, kNoWindow = 1 << 30;
  const int offset = group * kGroupQueries + 2 * (threadIdx.x >> 5 & 3);
  const WidePlace place{swizzled_rows(memory.query + group * 64 * kRowBytes),
                        p.scale_log2,
                        tile.position + offset,
                        p.window != 0 ? p.window : kNoWindow,
                        blocks.last,
                        (threadIdx.x & 31) == 0};
  barrier_wait(memory.query_full(), 0);
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {  // the sequence's end is in the second where the first is behind it
    const int filled = tile.context - (blocks.last - i) * kKeys;
    if (filled <= 0 || filled >= kKeys) continue;
    barrier_wait(memory.values_full(i), 0);
    clear_values<Shape>(memory.values + i * Shape::kBlockBytes, filled);
  }
  float out[32] = {};
  WideRows rows;
  wide_walk<PrefillMemory<Shape>, kKeys>(out, rows, memory, place, blocks.count(), tile.position,
                                         p.window != 0);
  RowState ended;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    ended.top[row] = rows.base[row];
    ended.total[row] = rows.total[row];
  }
  write_rows(p, tile, tile.token + offset, kv_head, out, ended, 1.f);
}

// Grid (tiles, kv_heads): as many tiles as any cut of the tokens into sequences can give. The
// blocks of one head follow each other, so its keys stay in the second-level cache; those with the
// most keys begin.
template <class Shape>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void attention_prefill_kernel(
    const PrefillParams p, const __grid_constant__ CUtensorMap q_map,
    const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ uint8_t raw[];
  const PrefillMemory<Shape> memory(shared_address(raw));
  const int number = gridDim.x - 1 - blockIdx.x, kv_head = blockIdx.y;
  const int group = threadIdx.x / kGroupThreads;
  if (Shape::kSums) fill_ones<Shape>(memory.ones);
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
  if (Shape::kWide && blocks.count() % 2 != 0) ++blocks.last;  // an even number: one without keys
  if constexpr (Shape::kAhead) {
    if (threadIdx.x == 0) produce(p, &q_map, &k_map, &v_map, memory, tile, blocks, kv_head);
    __syncwarp();
    consume(p, memory, tile, blocks, group, kv_head);
  } else if (group == Shape::kConsumers) {
    registers_release<Shape::kProducerRegisters>();
    if (threadIdx.x == Shape::kConsumers * kGroupThreads) {
      produce(p, &q_map, &k_map, &v_map, memory, tile, blocks, kv_head);
    }
  } else {
    registers_claim<Shape::kConsumerRegisters>();
    if constexpr (Shape::kWide) {
      consume_wide(p, memory, tile, blocks, group, kv_head);
    } else {
      consume(p, memory, tile, blocks, group, kv_head);
    }
  }
}

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_PREFILL_KERNEL_CUH_
