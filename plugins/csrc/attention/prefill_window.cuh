// Chunks of prompts in layers with a window of 128 keys. A block takes a strip of one sequence's
// positions for one KV head: its keys and values, the window before it among them, are copied to
// shared memory once and lie there in one run.
//
// Each warpgroup takes units of eight queries and the eight heads as its 64 rows. A unit sees 136
// keys, all of whose scores fit the registers, so its softmax is made at one go. Of the first eight
// and the last eight keys a query sees eight together, which share a place from the maximum to the
// exponentials. Queries are copied two units ahead.
#ifndef GPTOSS_TRT_ATTENTION_PREFILL_WINDOW_CUH_
#define GPTOSS_TRT_ATTENTION_PREFILL_WINDOW_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "attention/params.h"
#include "attention/plan.h"
#include "attention/prefill_products.cuh"
#include "attention/prefill_tiles.cuh"
#include "attention/warp_mma.cuh"
#include "attention/wgmma_bf16.cuh"
#include "core/ptx.cuh"

namespace gptoss::attention {

constexpr int kUnitKeys = kWindowKeys + kGroupQueries;  // that a warpgroup's eight queries see
constexpr int kUnitBytes = 64 * kRowBytes;              // of queries
constexpr int kBehindPages = kWindowKeys / kPageKeys;   // ahead of a strip

// kGroups warpgroups, strips of up to kStripPages pages; kBlocks share a multiprocessor.
template <int kGroupCount, int kMostPages, int kBlockCount>
struct WindowShape {
  static constexpr int kGroups = kGroupCount;
  static constexpr int kStripPages = kMostPages;
  static constexpr int kBlocks = kBlockCount;
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kPages = kStripPages + kBehindPages;
  static constexpr int kQueryBytes = 2 * kGroups * kUnitBytes;
  static constexpr int kBarriers = 2 * kGroups + 2 * kPages;
  static constexpr int kSharedBytes =
      1024 + kQueryBytes + 2 * kPages * kPageBytes + kBarriers * 8;  // 1,024: alignment
};

// Addresses in shared memory.
template <class Shape>
struct WindowMemory {
  uint32_t queries, keys, values, barriers;

  __device__ __forceinline__ explicit WindowMemory(uint32_t raw)
      : queries((raw + 1023) & ~1023u),
        keys(queries + Shape::kQueryBytes),
        values(keys + Shape::kPages * kPageBytes),
        barriers(values + Shape::kPages * kPageBytes) {}
  __device__ __forceinline__ uint32_t query(int group, int buffer) const {
    return queries + (2 * group + buffer) * kUnitBytes;
  }
  __device__ __forceinline__ uint32_t query_full(int group, int buffer) const {
    return barriers + 8 * (2 * group + buffer);
  }
  __device__ __forceinline__ uint32_t keys_full(int page) const {
    return barriers + 8 * (2 * Shape::kGroups + page);
  }
  __device__ __forceinline__ uint32_t values_full(int page) const {
    return keys_full(Shape::kPages + page);
  }
};

// Positions [position, end) of a sequence, from the first that is new on; `position` begins a page.
struct Strip {
  int sequence;  // -1: none
  int position;
  int end;
  int token;  // of `position`; below `first` where that is not new
  int first;  // tokens [first, last) are the sequence's
  int last;
  int context;
};

// Strips are numbered sequence by sequence. Executed by whole warps, each for itself; 128 sequences
// are read at once.
__device__ __forceinline__ Strip find_strip(const PrefillParams& p, int number) {
  constexpr int kEach = 4;
  const int lane = threadIdx.x & 31;
  int counted = 0;
  Strip strip{-1, 0, 0, 0, 0, 0, 0};
  for (int base = 0; base < p.sequences && strip.sequence < 0; base += 32 * kEach) {
    int first[kEach], last[kEach], context[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int s = base + 32 * i + lane;
      const bool is = s < p.sequences;
      first[i] = is ? p.query_start[s] : 0;
      last[i] = is ? p.query_start[s + 1] : 0;
      context[i] = is ? p.context_lens[s] : 0;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int start = (context[i] - (last[i] - first[i])) / kPageKeys * kPageKeys;
      const int strips = last[i] > first[i] ? (context[i] - start + p.strip - 1) / p.strip : 0;
      int sum = strips;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += below;
      }
      const uint32_t reached = __ballot_sync(0xffffffffu, counted + sum > number);
      if (reached != 0 && strip.sequence < 0) {
        const int owner = __ffs(reached) - 1;
        const int before = counted + __shfl_sync(0xffffffffu, sum - strips, owner);
        strip.sequence = base + 32 * i + owner;
        strip.first = __shfl_sync(0xffffffffu, first[i], owner);
        strip.last = __shfl_sync(0xffffffffu, last[i], owner);
        strip.context = __shfl_sync(0xffffffffu, context[i], owner);
        strip.position = __shfl_sync(0xffffffffu, start, owner) + (number - before) * p.strip;
        strip.end = min(strip.position + p.strip, strip.context);
        strip.token = strip.last - strip.context + strip.position;
      }
      counted += __shfl_sync(0xffffffffu, sum, 31);
    }
  }
  return strip;
}

// Executed by one thread of each warpgroup: its first two units' queries, and its share of pages.
template <class Shape>
__device__ __forceinline__ void copy_strip(const PrefillParams& p, const CUtensorMap* q_map,
                                           const CUtensorMap* k_map, const CUtensorMap* v_map,
                                           const WindowMemory<Shape>& memory, const Strip& strip,
                                           int unit, int units, int group, int kv_head) {
  constexpr int kShare = (Shape::kPages + Shape::kGroups - 1) / Shape::kGroups;
  const int skipped = p.first_block == nullptr ? 0 : p.first_block[strip.sequence];
  const int32_t* table = p.block_table + static_cast<int64_t>(strip.sequence) * p.table_width;
  const int outside = p.blocks * p.kv_heads * kPageKeys;  // a row behind the cache: zeros
  const int first = strip.position / kPageKeys - kBehindPages;
  const int pages = (strip.end + kPageKeys - 1) / kPageKeys - first;
  int rows[kShare];
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int page = first + group + i * Shape::kGroups;
    const bool known = page >= skipped && page < first + pages;
    rows[i] = known ? (table[page - skipped] * p.kv_heads + kv_head) * kPageKeys : outside;
  }
  dependency_wait();
#pragma unroll
  for (int i = 0; i < kShare + 2; ++i) {
    if (i < 2) {
      const int at = unit + i * Shape::kGroups;
      if (at < units) {
        barrier_expect_bytes(memory.query_full(group, i), kUnitBytes);
        tensor_copy_3d(memory.query(group, i), q_map, 0, kv_head * kGroup,
                       strip.token + at * kGroupQueries, memory.query_full(group, i));
      }
    }
    if (i < kShare) {
      const int slot = group + i * Shape::kGroups;
      if (slot < pages) {
        barrier_expect_bytes(memory.keys_full(slot), kPageBytes);
        tensor_copy_2d(memory.keys + slot * kPageBytes, k_map, 0, rows[i], memory.keys_full(slot));
        barrier_expect_bytes(memory.values_full(slot), kPageBytes);
        tensor_copy_2d(memory.values + slot * kPageBytes, v_map, 0, rows[i],
                       memory.values_full(slot));
      }
    }
  }
}

// Scores of a unit's keys, 64 and 72: the registers of the first are free while the others' weights
// are made.
struct UnitScores {
  float low[32];
  float high[36];

  __device__ __forceinline__ void settle() {
    wgmma_settle(low);
    wgmma_settle(high);
  }
};

// 32 scores of a thread become weights.
__device__ __forceinline__ void make_unit_weights(float (&scores)[32], uint32_t (*weights)[4],
                                                  float (&sum)[2], const float (&base)[2],
                                                  float scale_log2) {
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int row = (i & 2) >> 1;
    scores[i] = exp2_fast(__fmaf_rn(scores[i], scale_log2, -base[row]));
    scores[i + 1] = exp2_fast(__fmaf_rn(scores[i + 1], scale_log2, -base[row]));
    sum[row] += scores[i] + scores[i + 1];
    weights[i / 8][i / 2 % 4] = pack_bf16(scores[i], scores[i + 1]);
  }
}

constexpr float kSinkSlack = 60.f;  // log2

// What weights are relative to (log2), and the score, as bits, from which on they are not.
struct UsualBase {
  float base;
  int limit;

  __device__ __forceinline__ UsualBase(float sink2, float scale_log2) {
    base = sink2 + kSinkSlack;
    const float most = base + kSinkSlack;
    limit = most > 0.f ? __float_as_int(most / scale_log2) : INT_MIN;
  }
};

// The scores of a unit at `position` become its weights.
__device__ __forceinline__ void soften_unit(UnitScores& scores, uint32_t (&weights)[9][4],
                                            RowState& rows, const UsualBase& usual,
                                            float scale_log2, int position) {
  const int t = threadIdx.x & 3, query = 2 * (threadIdx.x >> 5 & 3);
  if (position < kWindowKeys) {  // keys before the sequence's first
    const int hidden = (kWindowKeys - position) / 8;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i / 4 < hidden) scores.low[i] = -INFINITY;
      if (i / 4 + 8 < hidden) scores.high[i] = -INFINITY;
    }
  }
  bool early[4];  // whether of key 2t + (c & 1) of the first and of the last eight it is the first
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    early[c] = 2 * t + (c & 1) > query + (c >> 1);
    scores.low[c] = early[c] ? scores.low[c] : scores.high[32 + c];
  }
  // Weights are relative to kSinkSlack above the sink unless a score exceeds that by as much:
  // floats do not mind, and what is smaller than the sink by 2^-kSinkSlack does not count.
  int most[2] = {INT_MIN, INT_MIN};
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    int& row = most[(i & 2) >> 1];
    row = most_bits(row, scores.low[i], scores.low[i + 1]);
    row = most_bits(row, scores.high[i], scores.high[i + 1]);
  }
  float base[2] = {usual.base, usual.base};
  if (__any_sync(0xffffffffu, max(most[0], most[1]) >= usual.limit)) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float higher = -INFINITY;
#pragma unroll
      for (int i = 2 * row; i < 32; i += 4) {
        higher = fmaxf(higher, fmaxf(scores.low[i], scores.low[i + 1]));
        higher = fmaxf(higher, fmaxf(scores.high[i], scores.high[i + 1]));
      }
      higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 1));
      higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 2));
      const bool exceeds = usual.limit == INT_MIN || higher >= __int_as_float(usual.limit);
      if (exceeds) base[row] = fmaxf(higher * scale_log2, usual.base);
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    rows.top[row] = base[row];
    rows.total[row] = 0.f;
  }
  float others[32];  // without the last eight keys'
#pragma unroll
  for (int i = 0; i < 32; ++i) others[i] = scores.high[i];
  make_unit_weights(scores.low, weights, rows.total, base, scale_log2);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const uint32_t pair = weights[0][c];
    const uint32_t of_first = (early[2 * c] ? 0xFFFFu : 0u) | (early[2 * c + 1] ? 0xFFFF0000u : 0u);
    weights[0][c] = pair & of_first;
    weights[8][c] = pair & ~of_first;
    weights[8][c + 2] = 0;
  }
  make_unit_weights(others, weights + 4, rows.total, base, scale_log2);
}

// Values behind the sequence's end are what the page's last owner left there: zero weights do not
// hide a NaN. Only the last unit reads them.
__device__ __forceinline__ void clear_rows(uint32_t values, int from_row, int barrier) {
  const int at = from_row * kRowBytes + (threadIdx.x % kGroupThreads) * 16;
  if (at < kGroupQueries * kRowBytes) store_shared_u128(values + at, 0, 0, 0, 0);
  async_proxy_fence();
  named_barrier_sync(barrier, kGroupThreads);
}

// The last eight keys are half of an instruction's: it reads them twice, and the weights of the
// second time are 0.
__device__ __forceinline__ void start_unit_output(float (&out)[32], uint32_t (&weights)[9][4],
                                                  uint32_t values) {
  constexpr uint64_t kStep = 16 * kRowBytes / 16, kDistance = 0x3FFFull << 32;
  const uint64_t rows = swizzled_rows(values);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (k == 0) {
      wgmma_bf16_turned_first(out, weights[0], rows);
    } else {
      wgmma_bf16_turned(out, weights[k], rows + k * kStep);
    }
  }
  wgmma_bf16_turned(out, weights[8], (rows + 8 * kStep) & ~kDistance);
  wgmma_commit();
}

template <class Shape>
__device__ __forceinline__ void walk_strip(const PrefillParams& p, const CUtensorMap* q_map,
                                           const WindowMemory<Shape>& memory, const Strip& strip,
                                           int unit, int units, int group, int kv_head) {
  const int warp = threadIdx.x >> 5 & 3;
  const float sink2 = sink_of(p, kv_head);
  const UsualBase usual(sink2, p.scale_log2);
  UnitScores scores;
  int keys_here = 0, values_here = 0;  // pages
#pragma unroll 1
  for (int n = 0; unit < units; ++n) {
    const int position = strip.position + unit * kGroupQueries;
    const int token = strip.token + unit * kGroupQueries + 2 * warp;
    uint32_t weights[9][4];
    float out[32];
    RowState rows;
    const int page = (unit * kGroupQueries + kUnitKeys - 1) / kPageKeys;  // the last it needs
    const uint32_t keys = memory.keys + unit * kGroupQueries * kRowBytes;
    const uint32_t values = memory.values + unit * kGroupQueries * kRowBytes;
    const uint64_t query = swizzled_rows(memory.query(group, n & 1));
    barrier_wait(memory.query_full(group, n & 1), n >> 1 & 1);
#pragma unroll 1
    for (; keys_here <= page; ++keys_here) barrier_wait(memory.keys_full(keys_here), 0);
    wgmma_fence();
    start_scores<64>(scores.low, query, swizzled_rows(keys));
    start_scores<72>(scores.high, query, swizzled_rows(keys + 64 * kRowBytes));
    wgmma_wait<0>();
    scores.settle();
    if (warp != 0) named_barrier_arrive(1 + group, kGroupThreads);
    soften_unit(scores, weights, rows, usual, p.scale_log2, position);
    if (warp == 0) {  // the queries are read: the next but one take their place
      named_barrier_sync(1 + group, kGroupThreads);
      const int later = unit + 2 * Shape::kGroups;
      if (later < units && elect_lane()) {
        barrier_expect_bytes(memory.query_full(group, n & 1), kUnitBytes);
        tensor_copy_3d(memory.query(group, n & 1), q_map, 0, kv_head * kGroup,
                       strip.token + later * kGroupQueries, memory.query_full(group, n & 1));
      }
      __syncwarp();
    }
#pragma unroll 1
    for (; values_here <= page; ++values_here) barrier_wait(memory.values_full(values_here), 0);
    if (strip.context - position < kGroupQueries) {
      clear_rows(values + kWindowKeys * kRowBytes, strip.context - position,
                 1 + Shape::kGroups + group);
    }
    wgmma_fence();
    start_unit_output(out, weights, values);
    wgmma_wait<0>();
    wgmma_settle(out);
    wgmma_release(weights);
    write_rows(p, strip.first, strip.last, token, kv_head, sink2, out, rows, 1.f);
    unit += Shape::kGroups;
  }
}

// Grid (strips, kv_heads): as many strips as any cut of the tokens into sequences can give.
template <class Shape>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void attention_window_kernel(
    const PrefillParams p, const __grid_constant__ CUtensorMap q_map,
    const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ uint8_t raw[];
  const WindowMemory<Shape> memory(shared_address(raw));
  const int number = blockIdx.x, kv_head = blockIdx.y;
  const int group = of_first_lane(threadIdx.x / kGroupThreads);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kBarriers; ++i) barrier_init(memory.barriers + 8 * i, 1);
    barrier_init_fence();
  }
  dependents_launch();
  const Strip strip = find_strip(p, number);
  __syncthreads();
  const int skip = max(strip.first - strip.token, 0) / kGroupQueries;  // units of older positions
  const int units = (strip.end - strip.position + kGroupQueries - 1) / kGroupQueries;
  const int unit = of_first_lane(skip + group);
  const bool first_warp = of_first_lane(threadIdx.x / 32) % 4 == 0;
  if (strip.sequence >= 0 && first_warp && elect_lane()) {
    copy_strip(p, &q_map, &k_map, &v_map, memory, strip, unit, units, group, kv_head);
  }
  __syncwarp();
  dependency_wait();
  zero_padding(p, number, p.strip, kv_head);
  if (strip.sequence < 0 || unit >= units) return;
  walk_strip(p, &q_map, memory, strip, unit, units, group, kv_head);
}

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_PREFILL_WINDOW_CUH_
