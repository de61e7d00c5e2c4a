// Few new tokens a sequence: a block of warps reads one part of the keys of one token for one KV
// head (tokens of one sequence read the same keys side by side, from the second-level cache).
//
// Scores are made transposed, [keys, queries], so that the eight heads of a group fill an
// instruction's eight columns, and keys and values go from device memory to the fragments'
// registers as they lie: the contraction over the head's columns may run in any order that q
// follows, and the output's rows are handed to the fragment so that one thread ends with eight
// neighbouring columns. Each warp takes every kWarps-th tile of 16 keys on its own, the next one
// already on its way; warps meet once at the end. The block that finishes a sequence's last part
// adds the parts, in their order; the sink enters there, once.
#ifndef GPTOSS_TRT_ATTENTION_DECODE_KERNEL_CUH_
#define GPTOSS_TRT_ATTENTION_DECODE_KERNEL_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/params.h"
#include "attention/quantise.cuh"
#include "attention/warp_mma.cuh"
#include "core/ptx.cuh"

namespace gptoss::attention {

constexpr int kOutValues = kGroup * kHeadDim;
constexpr int kRowWords = kHeadDim / 8;  // 16-byte words of a row of the cache

// A warp's state over its keys. With lane = 4g + t: queries 2t and 2t + 1; top and total per query
// (total of this lane's keys only), out[j] columns 8g + 2j and 8g + 2j + 1 (see mma_bf16).
struct WarpState {
  float top[2] = {-INFINITY, -INFINITY};
  float total[2] = {0.f, 0.f};
  float out[4][4] = {};
};

// Sixteen keys and values: rows g and g + 8 of k (columns 8t.. and 32 + 8t..), rows 2t, 2t + 1,
// 2t + 8, 2t + 9 of v (columns 8g..).
struct Tile {
  uint4 k[2][2];
  uint4 v[4];
};

// Where a warp's tiles lie. Up to 32 pages a sequence, lane i holds page i of the table; else that
// of the warp's i-th tile, modulo 32. Neither waits for the sequence's length.
struct Pages {
  const int32_t* row;  // of the block table
  int width;
  int first_page;  // logical page of row[0]
  int first_tile;
  int stride;
  int count;
  int shift;  // tiles of a page, log2
  int held;

  __device__ __forceinline__ int tile(int i) const { return first_tile + stride * i; }
  __device__ __forceinline__ int entry(int i) const { return (tile(i) >> shift) - first_page; }
  __device__ __forceinline__ bool whole() const { return width <= 32; }
  __device__ __forceinline__ void fetch(int i, int lane) {
    const int place = whole() ? lane : entry(i + lane);
    held = static_cast<uint32_t>(place) < static_cast<uint32_t>(width) ? row[place] : 0;
  }
  __device__ __forceinline__ int page(int i, int lane) {
    if (!whole() && (i & 31) == 0 && i > 0) fetch(i, lane);
    return __shfl_sync(0xffffffffu, held, whole() ? entry(i) : i & 31);
  }
};

__device__ __forceinline__ bool between(int key, int begin, int end) {
  return key >= begin && key < end;
}

__device__ __forceinline__ void load_tile(const DecodeParams& p, Pages& pages, int i, int kv_head,
                                          int begin, int end, int lane, Tile& tile) {
  const int g = lane >> 2, t = lane & 3;
  const int page = pages.page(i, lane);
  const int first = pages.tile(i) * kTileKeys;
  const int row = first & ((1 << p.block_shift) - 1);
  const int64_t base =
      ((((static_cast<int64_t>(page) * p.kv_heads + kv_head) << p.block_shift) + row) * kRowWords);
  const uint4* k = reinterpret_cast<const uint4*>(p.k) + base;
  const uint4* v = reinterpret_cast<const uint4*>(p.v) + base;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = g + 8 * half;
    const bool present = between(first + key, begin, end);
    tile.k[half][0] = load_once(k + key * kRowWords + t, present);
    tile.k[half][1] = load_once(k + key * kRowWords + 4 + t, present);
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int key = 2 * t + (n & 1) + 8 * (n >> 1);
    tile.v[n] = load_once(v + key * kRowWords + g, between(first + key, begin, end));
  }
}

__device__ __forceinline__ uint32_t word(const uint4& value, int i) {
  return i == 0 ? value.x : i == 1 ? value.y : i == 2 ? value.z : value.w;
}

// Online softmax over one tile whose first key is `first`; at least one of its keys is in range.
__device__ __forceinline__ void add_tile(const Tile& tile, const uint4 (&q)[2], int first,
                                         int begin, int end, float scale_log2, int lane,
                                         WarpState& state) {
  const int g = lane >> 2;
  float scores[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 &low = tile.k[0][half], &high = tile.k[1][half];
    mma_bf16(scores, low.x, high.x, low.y, high.y, q[half].x, q[half].y);
    mma_bf16(scores, low.z, high.z, low.w, high.w, q[half].z, q[half].w);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const bool seen = between(first + g + 8 * (c >> 1), begin, end);
    scores[c] = seen ? scores[c] * scale_log2 : -INFINITY;
  }
  float shrink[2], weights[4];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float higher = fmaxf(state.top[c], max_over_g(fmaxf(scores[c], scores[c + 2])));
    shrink[c] = exp2_fast(state.top[c] - higher);
    weights[c] = exp2_fast(scores[c] - higher);
    weights[c + 2] = exp2_fast(scores[c + 2] - higher);
    state.total[c] = state.total[c] * shrink[c] + (weights[c] + weights[c + 2]);
    state.top[c] = higher;
  }
  const uint32_t low = transpose_8x8(pack_bf16(weights[0], weights[1]));
  const uint32_t high = transpose_8x8(pack_bf16(weights[2], weights[3]));
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) state.out[j][c] *= shrink[c & 1];
    const uint32_t v0 = word(tile.v[0], j), v1 = word(tile.v[1], j);
    const uint32_t v2 = word(tile.v[2], j), v3 = word(tile.v[3], j);
    mma_bf16(state.out[j], low_halves(v0, v1), high_halves(v0, v1), low_halves(v2, v3),
             high_halves(v2, v3), low, high);
  }
}

template <int kWarps>
struct DecodeShared {
  float out[kWarps][kOutValues];
  float top[kWarps][kGroup];
  float total[kWarps][kGroup];
  float factor[kGroup][kMaxParts];
  float merged_top[kGroup];
  float merged_total[kGroup];
  float sink[kGroup];
  bool last;
};

template <int kWarps>
__device__ __forceinline__ void write_warp_state(DecodeShared<kWarps>& shared, int warp, int lane,
                                                 const WarpState& state) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float total = sum_over_g(state.total[c]);
    float* row = shared.out[warp] + (2 * t + c) * kHeadDim + 8 * g;
    const auto& o = state.out;
    reinterpret_cast<float4*>(row)[0] = make_float4(o[0][c], o[0][c + 2], o[1][c], o[1][c + 2]);
    reinterpret_cast<float4*>(row)[1] = make_float4(o[2][c], o[2][c + 2], o[3][c], o[3][c + 2]);
    if (g == 0) {
      shared.top[warp][2 * t + c] = state.top[c];
      shared.total[warp][2 * t + c] = total;
    }
  }
}

// `maximum`, `total` and `value` of one query with its sink: value over the sum of all weights. No
// keys (a maximum of -inf with a total of 0) give 0.
__device__ __forceinline__ float with_sink(float value, float maximum, float total, float sink) {
  if (maximum == -INFINITY && total == 0.f) return 0.f;
  const float sink2 = sink * kLog2E;
  const float higher = fmaxf(maximum, sink2);
  const float kept = exp2_fast(maximum - higher);
  return value * (kept / (total * kept + exp2_fast(sink2 - higher)));
}

// Four neighbouring columns of this block's (token, KV head) to `out`. All lanes of a warp come
// here with 128 columns in their order: a group that shares a scale.
__device__ __forceinline__ void write_columns(const DecodeParams& p, int64_t first_head, int place,
                                              float a, float b, float c, float d) {
  const int64_t at = first_head * kHeadDim + place;
  const uint32_t words[2] = {pack_bf16(a, b), pack_bf16(c, d)};
  if (p.out_scale == nullptr) {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) = make_uint2(words[0], words[1]);
    return;
  }
  const float scale = group_scale(most_over_lanes<32>(most_of(words)));
  const GroupDivision divide(scale);
  *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.out) + at) =
      code_pair(words[0], divide) | code_pair(words[1], divide) << 16;
  if ((threadIdx.x & 31) == 0) {
    const int group = (blockIdx.x * kOutValues + place) / kScaleChannels;
    p.out_scale[static_cast<int64_t>(group) * gridDim.z + blockIdx.z] = scale;
  }
}

// The parts of one (token, KV head), added in their order by the block that came last.
template <int kWarps>
__device__ __forceinline__ void merge_parts(const DecodeParams& p, DecodeShared<kWarps>& shared,
                                            int64_t pair, int used, int64_t first_head) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int query = warp; query < kGroup; query += kWarps) {
    float2 stats = make_float2(-INFINITY, 0.f);
    if (lane < used) stats = __ldcg(p.partial_stats + (pair * p.parts + lane) * kGroup + query);
    float top = stats.x;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    }
    const float factor = lane < used ? exp2_fast(stats.x - top) : 0.f;
    float total = stats.y * factor;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
    shared.factor[query][lane] = factor;
    if (lane == 0) {
      shared.merged_top[query] = top;
      shared.merged_total[query] = total;
    }
  }
  __syncthreads();
  for (int place = threadIdx.x * 4; place < kOutValues; place += kWarps * 32 * 4) {
    const int query = place / kHeadDim;
    const float* source = p.partial_out + pair * p.parts * kOutValues + place;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int part = 0; part < used; ++part) {
      const float4 more = __ldcg(reinterpret_cast<const float4*>(source + part * kOutValues));
      const float factor = shared.factor[query][part];
      sum.x += more.x * factor, sum.y += more.y * factor;
      sum.z += more.z * factor, sum.w += more.w * factor;
    }
    const float top = shared.merged_top[query], total = shared.merged_total[query];
    const float sink = shared.sink[query];
    write_columns(p, first_head, place, with_sink(sum.x, top, total, sink),
                  with_sink(sum.y, top, total, sink), with_sink(sum.z, top, total, sink),
                  with_sink(sum.w, top, total, sink));
  }
}

// Whether this block's part is the last of `used` to arrive; then all of them are visible.
template <int kWarps>
__device__ __forceinline__ bool arrives_last(const DecodeParams& p, DecodeShared<kWarps>& shared,
                                             int64_t pair, int used) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool last = atomicAdd(p.tickets + pair, 1u) + 1 == static_cast<uint32_t>(used);
    if (last) p.tickets[pair] = 0;
    shared.last = last;
  }
  __syncthreads();
  if (!shared.last) return false;
  __threadfence();
  return true;
}

// The warps' states as one: stored as a part, or with the sink as the result of an only part.
template <int kWarps>
__device__ __forceinline__ void merge_warps(const DecodeParams& p, DecodeShared<kWarps>& shared,
                                            int64_t pair, int part, int used, int64_t first_head) {
  for (int place = threadIdx.x * 4; place < kOutValues; place += kWarps * 32 * 4) {
    const int query = place / kHeadDim;
    float top = shared.top[0][query];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) top = fmaxf(top, shared.top[w][query]);
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      // A warp without keys has -inf, a block without keys has it everywhere.
      const float factor = top == -INFINITY ? 1.f : exp2_fast(shared.top[w][query] - top);
      const float4 more = *reinterpret_cast<const float4*>(shared.out[w] + place);
      total += shared.total[w][query] * factor;
      sum.x += more.x * factor, sum.y += more.y * factor;
      sum.z += more.z * factor, sum.w += more.w * factor;
    }
    if (used > 1) {
      const int64_t slot = pair * p.parts + part;
      *reinterpret_cast<float4*>(p.partial_out + slot * kOutValues + place) = sum;
      if (place % kHeadDim == 0) p.partial_stats[slot * kGroup + query] = make_float2(top, total);
      continue;
    }
    const float sink = shared.sink[query];
    write_columns(p, first_head, place, with_sink(sum.x, top, total, sink),
                  with_sink(sum.y, top, total, sink), with_sink(sum.z, top, total, sink),
                  with_sink(sum.w, top, total, sink));
  }
}

// Whose keys a token sees: the first `keys` of `sequence`, none for padding. The step wrote those
// from `written` on.
struct Reader {
  int sequence;
  int keys;
  int written;
};

// Executed by whole warps, each for itself.
__device__ __forceinline__ Reader find_reader(const DecodeParams& p, int token) {
  if (p.query_start == nullptr) {
    const int sequence = token / p.queries;
    const int written = p.context_lens[sequence] - p.queries;
    return {sequence, max(written + 1 + token % p.queries, 0), written};
  }
  int sequence = 0;
  for (int base = 0; base < p.sequences; base += 32) {
    const int s = base + static_cast<int>(threadIdx.x & 31);
    const bool before = s < p.sequences && p.query_start[s + 1] <= token;
    sequence += __popc(__ballot_sync(0xffffffffu, before));
  }
  if (sequence == p.sequences) return {0, 0, 0};
  const int first = p.query_start[sequence], next = p.query_start[sequence + 1];
  const int written = p.context_lens[sequence] - (next - first);
  return {sequence, written + token - first + 1, written};
}

// Parts that have keys. The last one takes up to an eighth more: a short part would have to be
// added for little.
__device__ __forceinline__ int parts_of(int keys, int part_keys) {
  return max(1, (keys - part_keys / 8 + part_keys - 1) / part_keys);
}

// Grid (kv_heads, parts, tokens). kBlocks: blocks that share a multiprocessor.
template <int kWarps, int kBlocks>
__global__ __launch_bounds__(kWarps * 32,
                             kBlocks) void attention_decode_kernel(const DecodeParams p) {
  __shared__ DecodeShared<kWarps> shared;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int kv_head = blockIdx.x, part = blockIdx.y, token = blockIdx.z;
  dependents_launch();
  // Tables and lengths come from the host's copy ahead of the step, not from the kernel ahead.
  const auto [sequence, context, written] = find_reader(p, token);
  const int used = p.window ? 1 : parts_of(context, p.part_keys);
  const int begin = p.window ? max(context - p.window, 0) : part * p.part_keys;
  const int end = part + 1 == used ? context : part < used ? begin + p.part_keys : begin;
  const int first_tile = begin / kTileKeys + warp;
  const int tiles = (end + kTileKeys - 1) / kTileKeys - first_tile;
  const int first = p.first_block == nullptr ? 0 : p.first_block[sequence];
  Pages pages{p.block_table + static_cast<int64_t>(sequence) * p.table_width,
              p.table_width,
              first,
              first_tile,
              kWarps,
              max(0, (tiles + kWarps - 1) / kWarps),
              p.block_shift - 4,
              0};
  pages.fetch(0, lane);
  const uint16_t sink = threadIdx.x < kGroup ? p.sinks[kv_head * kGroup + threadIdx.x] : 0;
  // So were keys of earlier steps: a warp's first two tiles are on their way before the wait,
  // unless this step writes into them.
  Tile even, odd;
  const auto ahead = [&](int i) {
    return i < pages.count && (pages.tile(i) + 1) * kTileKeys <= written;
  };
  const bool even_ahead = ahead(0), odd_ahead = ahead(1);
  if (even_ahead) load_tile(p, pages, 0, kv_head, begin, end, lane, even);
  if (odd_ahead) load_tile(p, pages, 1, kv_head, begin, end, lane, odd);
  dependency_wait();
  if (part >= used) return;

  const int64_t pair = static_cast<int64_t>(token) * p.kv_heads + kv_head;
  const int64_t first_head = pair * kGroup;
  const uint4* query = reinterpret_cast<const uint4*>(p.q) + (first_head + (lane >> 2)) * kRowWords;
  const uint4 q[2] = {query[lane & 3], query[4 + (lane & 3)]};
  WarpState state;
  if (pages.count > 0 && !even_ahead) load_tile(p, pages, 0, kv_head, begin, end, lane, even);
  for (int i = 0; i < pages.count; i += 2) {
    if (i + 1 < pages.count && !(i == 0 && odd_ahead)) {
      load_tile(p, pages, i + 1, kv_head, begin, end, lane, odd);
    }
    add_tile(even, q, pages.tile(i) * kTileKeys, begin, end, p.scale_log2, lane, state);
    if (i + 1 >= pages.count) break;
    if (i + 2 < pages.count) load_tile(p, pages, i + 2, kv_head, begin, end, lane, even);
    add_tile(odd, q, pages.tile(i + 1) * kTileKeys, begin, end, p.scale_log2, lane, state);
  }
  if (threadIdx.x < kGroup) shared.sink[threadIdx.x] = bf16_value(sink);
  write_warp_state(shared, warp, lane, state);
  __syncthreads();
  merge_warps(p, shared, pair, part, used, first_head);
  if (used > 1 && arrives_last(p, shared, pair, used)) {
    merge_parts(p, shared, pair, used, first_head);
  }
}

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_DECODE_KERNEL_CUH_
