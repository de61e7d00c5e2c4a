// Rotation, append and attention of one token: block b serves KV head b % 8 and one part of its
// keys, a tile of 16 keys a warp at a time, by the first warps; the parts' results meet in the
// mailbox, where each part adds up its share of the columns. Arithmetic of a tile is that of
// attention/decode_kernel.cuh.
//
// Invariant: which keys a block has, and the angles, are the same in all layers of a kind, so they
// are found once a launch; the token's own key never comes from the cache.
#ifndef GPTOSS_TRT_DECODE_ONE_ATTENTION_PHASE_CUH_
#define GPTOSS_TRT_DECODE_ONE_ATTENTION_PHASE_CUH_

#include <cstdint>

#include "attention/decode_kernel.cuh"
#include "decode_one/activation.cuh"
#include "decode_one/exchange.cuh"
#include "decode_one/shared.cuh"

namespace gptoss::one {

using attention::kTileKeys;
using attention::Tile;
using attention::WarpState;

constexpr int kHeadValues = kGroup * kHeadDim;
constexpr int kRowWords = kHeadDim / 8;  // 16-byte words of a row of the cache
constexpr int kNoRow = -1;
constexpr int kAttentionThreads = 32 * kAttentionWarps;

// Barrier of the warps of attention.
__device__ __forceinline__ void attention_sync() { named_barrier_sync(2, kAttentionThreads); }

// ---- once a launch ------------------------------------------------------------------------------

// Parts of `tiles` tiles of keys: a tile for each warp while there are blocks.
__device__ __forceinline__ int parts_of(int tiles) {
  int parts = 1;
  while (parts < kMostParts && tiles > parts * kAttentionWarps) parts *= 2;
  return parts;
}

__device__ __forceinline__ int kv_head_of_block() {
  return static_cast<int>(blockIdx.x) % kKvHeads;
}

// Whether a warp has more than one tile of the block's keys.
__device__ __forceinline__ bool is_long(const KeyRange& keys) {
  return keys.tiles > kAttentionWarps;
}

// The keys of this block in layers without a window (0) or with one.
__device__ __forceinline__ KeyRange find_keys(int context, int window) {
  const int part = static_cast<int>(blockIdx.x) / kKvHeads;
  const int tiles = (context + kTileKeys - 1) / kTileKeys;
  KeyRange keys;
  keys.parts = window ? 1 : parts_of(tiles);
  const int part_keys = window ? context : (tiles + keys.parts - 1) / keys.parts * kTileKeys;
  keys.begin = window ? max(context - window, 0) : min(part * part_keys, context);
  keys.end = window ? context : min(keys.begin + part_keys, context);
  keys.first_tile = keys.begin / kTileKeys;
  keys.tiles = keys.begin < keys.end ? (keys.end - 1) / kTileKeys - keys.first_tile + 1 : 0;
  keys.owner = keys.begin < keys.end && keys.end == context;
  if (part >= keys.parts) keys.parts = 0;  // no work
  return keys;
}

// Ranges and angles into shared memory, by 64 threads.
__device__ __forceinline__ void prepare_attention(const Params& p, Shared& shared, int thread) {
  const int position = max(__ldg(p.positions), 0);
  shared.angles[thread] = __ldg(p.cos_sin + static_cast<int64_t>(position) * kHeadDim + thread);
  if (thread >= 2) return;
  int window = 0;
  for (int l = 0; thread == 1 && l < p.num_layers; ++l) {
    window = max(window, static_cast<int>(p.layers[l].window));
  }
  shared.keys[thread] = find_keys(__ldg(p.context_lens), window);
}

// Row of `tile`'s first key in a cache of [blocks, heads, block tokens]; kNoRow without a block.
__device__ __forceinline__ int row_of_tile(const Params& p, bool window, int tile) {
  const int first = window ? __ldg(p.window_first_block) : 0;
  const int entry = (tile * kTileKeys >> p.block_shift) - first;
  const int width = window ? p.window_width : p.full_width;
  if (entry < 0 || entry >= width) return kNoRow;
  const int block = __ldg((window ? p.window_blocks : p.full_blocks) + entry);
  if (block < 0) return kNoRow;
  return ((block * kKvHeads + kv_head_of_block()) << p.block_shift) +
         (tile * kTileKeys & ((1 << p.block_shift) - 1));
}

// Row of this warp's first tile in either kind of layer.
struct FirstRows {
  int full;
  int window;

  __device__ __forceinline__ FirstRows(const Params& p, const Shared& shared) {
    const int warp = thread_index() / 32;
    full = warp < min(shared.keys[0].tiles, kAttentionWarps)
               ? row_of_tile(p, false, shared.keys[0].first_tile + warp)
               : kNoRow;
    window = warp < min(shared.keys[1].tiles, kAttentionWarps)
                 ? row_of_tile(p, true, shared.keys[1].first_tile + warp)
                 : kNoRow;
  }
};

// ---- in every layer -----------------------------------------------------------------------------

// Asks for the block's tiles to come into the second-level cache.
__device__ __forceinline__ void prefetch_keys(const Params& p, const Layer& layer,
                                              const KeyRange& keys, bool window) {
  if (keys.parts == 0) return;
  const int lane = thread_index() % 32;
  const void* cache = lane < kTileKeys ? layer.k_cache : layer.v_cache;
#pragma unroll 1
  for (int i = thread_index() / 32; i < keys.tiles; i += kWarps) {
    const int row = row_of_tile(p, window, keys.first_tile + i);
    if (row == kNoRow) continue;
    const auto* line =
        static_cast<const uint4*>(cache) + static_cast<int64_t>(row + lane % kTileKeys) * kRowWords;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  }
}

// Keys and values of one tile, as attention::load_tile lays them into registers; zeros for keys
// outside [begin, end).
__device__ __forceinline__ void load_tile(const Layer& layer, int begin, int end, int tile, int row,
                                          Tile& out) {
  const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  const int first = tile * kTileKeys;
  const int64_t offset = static_cast<int64_t>(row) * kRowWords;
  const uint4* k = static_cast<const uint4*>(layer.k_cache) + offset + g * kRowWords + t;
  const uint4* v = static_cast<const uint4*>(layer.v_cache) + offset + 2 * t * kRowWords + g;
  if (row == kNoRow) end = begin;
  const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool present = attention::between(first + g + 8 * half, begin, end);
    out.k[half][0] = present ? __ldcg(k + 8 * half * kRowWords) : none;
    out.k[half][1] = present ? __ldcg(k + 8 * half * kRowWords + 4) : none;
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int key = (n & 1) + 8 * (n >> 1);
    const bool present = attention::between(first + 2 * t + key, begin, end);
    out.v[n] = present ? __ldcg(v + key * kRowWords) : none;
  }
}

// Puts the token's own key and value into its tile.
__device__ __forceinline__ void insert_new(const AttentionShared& shared, int key, Tile& tile) {
  const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  const auto* k = reinterpret_cast<const uint4*>(shared.rows[kGroup]);
  const auto* v = reinterpret_cast<const uint4*>(shared.rows[kGroup + 1]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (key != g + 8 * half) continue;
    tile.k[half][0] = k[t];
    tile.k[half][1] = k[4 + t];
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (key == 2 * t + (n & 1) + 8 * (n >> 1)) tile.v[n] = v[g];
  }
}

// Takes this head's rows of qkv, turns queries and key and leaves them in shared memory; the block
// whose part holds the token's position writes its key and value into the cache.
__device__ __forceinline__ void rotate(const Params& p, const Layer& layer, Shared& shared,
                                       const KeyRange& keys, bool window, uint32_t flag) {
  constexpr int kHalf = kHeadDim / 2, kPairsOfHalf = kHalf / 2;
  const int head = thread_index() / kPairsOfHalf, pair = thread_index() % kPairsOfHalf;
  if (head >= kGroup + 2) return;
  const int kv_head = kv_head_of_block();
  const int kind = max(head - kGroup + 1, 0);  // 0 query, 1 key, 2 value
  const int first_row = kind == 0   ? (kv_head * kGroup + head) * kHeadDim
                        : kind == 1 ? kAttended + kv_head * kHeadDim
                                    : kAttended + (kKvHeads + kv_head) * kHeadDim;
  const auto* angles = reinterpret_cast<const float2*>(shared.angles);
  const float2 cosine = angles[pair], sine = angles[kPairsOfHalf + pair];
  uint32_t words[2];
  const uint64_t* packets = mailbox_of(p, Mailbox::kQkv) + first_row / 2 + pair;
  receive_each<2>([packets](int i) { return packets + i * (kHalf / 2); }, flag, words);
  if (kind < 2) {
    const float2 first = make_float2(low_float(words[0]), high_float(words[0]));
    const float2 second = make_float2(low_float(words[1]), high_float(words[1]));
    words[0] =
        pack_pair(first.x * cosine.x - second.x * sine.x, first.y * cosine.y - second.y * sine.y);
    words[1] =
        pack_pair(second.x * cosine.x + first.x * sine.x, second.y * cosine.y + first.y * sine.y);
  }
  auto* row = reinterpret_cast<uint32_t*>(shared.attention.rows[head]);
  row[pair] = words[0];
  row[kPairsOfHalf + pair] = words[1];
  if (kind == 0 || !keys.owner) return;
  const int key = keys.end - 1;
  const int first = row_of_tile(p, window, key / kTileKeys);
  if (first == kNoRow) return;
  void* cache = kind == 1 ? layer.k_cache : layer.v_cache;
  auto* target = static_cast<uint32_t*>(cache) +
                 static_cast<int64_t>(first + key % kTileKeys) * (kHeadDim / 2);
  target[pair] = words[0];
  target[kPairsOfHalf + pair] = words[1];
}

// A warp's state for the others.
__device__ __forceinline__ void leave_state(AttentionShared& shared, const WarpState& state) {
  const int warp = thread_index() / 32, lane = thread_index() % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float total = attention::sum_over_g(state.total[c]);
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

// Of a pair of columns of one query.
struct Merged {
  float2 value;
  float top;
  float total;
};

// Columns 2 thread_index() and the next over all warps. A warp has a query; lane w has the weight
// of warp w.
__device__ __forceinline__ Merged merge_warps(const AttentionShared& shared, int warps) {
  const int query = thread_index() / 32, lane = thread_index() % 32;
  const float own = lane < warps ? shared.top[lane][query] : -INFINITY;
  Merged merged{make_float2(0.0f, 0.0f), warp_max(own), 0.0f};
  if (merged.top == -INFINITY) return merged;
  const float factor = attention::exp2_fast(own - merged.top);
  merged.total = warp_sum(lane < warps ? shared.total[lane][query] * factor : 0.0f);
#pragma unroll
  for (int w = 0; w < kAttentionWarps; ++w) {
    if (w >= warps) break;
    const float weight = __shfl_sync(0xFFFFFFFFu, factor, w);
    const float2 more = *reinterpret_cast<const float2*>(shared.out[w] + 2 * thread_index());
    merged.value.x = fmaf(more.x, weight, merged.value.x);
    merged.value.y = fmaf(more.y, weight, merged.value.y);
  }
  return merged;
}
static_assert(kAttentionWarps >= kGroup && 32 * kGroup == kHeadValues / 2, "a pair a thread");

// Exchanges the parts of one head: the result of pair `part` * 256 / parts + thread_index() /
// parts, in every thread of it.
__device__ __forceinline__ Merged merge_parts(const Params& p, const Merged& mine, int kv_head,
                                              int part, int parts, int pair, uint32_t flag) {
  const int place = kv_head * kMostParts + part;
  send_pair(mailbox_of(p, Mailbox::kPartial) + place * kHeadValues + 2 * thread_index(),
            __float_as_uint(mine.value.x), __float_as_uint(mine.value.y), flag);
  if (thread_index() % 32 == 0) {
    send_pair(mailbox_of(p, Mailbox::kStats) + (place * kGroup + thread_index() / 32) * 2,
              __float_as_uint(mine.top), __float_as_uint(mine.total), flag);
  }
  const int source = kv_head * kMostParts + thread_index() % parts;
  const uint64_t* value = mailbox_of(p, Mailbox::kPartial) + source * kHeadValues + 2 * pair;
  const uint64_t* stats = mailbox_of(p, Mailbox::kStats) + (source * kGroup + pair / 32) * 2;
  uint2 words[2];
  receive_pairs<2>([value, stats](int i) { return i == 0 ? value : stats; },
                   [](int) { return true; }, flag, words);
  Merged merged{make_float2(__uint_as_float(words[0].x), __uint_as_float(words[0].y)),
                __uint_as_float(words[1].x), __uint_as_float(words[1].y)};
  float top = merged.top;
  for (int step = parts / 2; step > 0; step /= 2) {
    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
  }
  const float factor = top == -INFINITY ? 0.0f : attention::exp2_fast(merged.top - top);
  merged.value.x *= factor;
  merged.value.y *= factor;
  merged.total *= factor;
  for (int step = parts / 2; step > 0; step /= 2) {
    merged.value.x += __shfl_xor_sync(0xFFFFFFFFu, merged.value.x, step);
    merged.value.y += __shfl_xor_sync(0xFFFFFFFFu, merged.value.y, step);
    merged.total += __shfl_xor_sync(0xFFFFFFFFu, merged.total, step);
  }
  merged.top = top;
  return merged;
}

// The values over the sum of all weights, the sink's among them, as a pair of bf16; no keys give 0.
__device__ __forceinline__ uint32_t with_sink(const Merged& merged, float sink) {
  if (merged.top == -INFINITY) return 0;
  const float sink2 = sink * kLog2E;
  const float higher = fmaxf(merged.top, sink2);
  const float kept = attention::exp2_fast(merged.top - higher);
  const float total = fmaf(merged.total, kept, attention::exp2_fast(sink2 - higher));
  const float factor = kept * reciprocal(total);
  return pack_pair(merged.value.x * factor, merged.value.y * factor);
}

__device__ __forceinline__ void attention_phase(const Params& p, const Layer& layer, Shared& shared,
                                                const FirstRows& rows, uint32_t flag) {
  const bool window = layer.window != 0;
  const KeyRange keys = shared.keys[window];
  if (keys.parts == 0) return;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  if (warp >= kAttentionWarps) {
    compute_sync();
    return;
  }
  const int part = static_cast<int>(blockIdx.x) / kKvHeads, kv_head = kv_head_of_block();
  const int cached = keys.owner ? keys.end - 1 : keys.end;  // keys of earlier steps end here
  Tile tile;
  const auto load = [&](int i, int row) {
    load_tile(layer, keys.begin, cached, keys.first_tile + i, row, tile);
  };
  if (warp < keys.tiles) load(warp, window ? rows.window : rows.full);
  const int pair = part * ((kHeadValues / 2) / keys.parts) + thread_index() / keys.parts;
  // Warps behind the group's have no query; they may read a sink, but none behind the last.
  const float sink = bf16_to_float(
      __ldg(static_cast<const uint16_t*>(layer.sinks) + kv_head * kGroup + pair / 32 % kGroup));
  rotate(p, layer, shared, keys, window, flag);
  attention_sync();
  auto& meeting = shared.attention;
  const auto* query = reinterpret_cast<const uint4*>(meeting.rows[lane / 4]);
  const uint4 q[2] = {query[lane % 4], query[4 + lane % 4]};
  WarpState state;
  // One tile at a time: two take more registers than there are, and later ones are in the
  // second-level cache by now.
#pragma unroll 1
  for (int i = warp; i < keys.tiles; i += kAttentionWarps) {
    const int number = keys.first_tile + i;
    if (i != warp) load(i, row_of_tile(p, window, number));
    if (keys.owner && number == (keys.end - 1) / kTileKeys) {
      insert_new(meeting, (keys.end - 1) % kTileKeys, tile);
    }
    attention::add_tile(tile, q, number * kTileKeys, keys.begin, keys.end, p.scale_log2, lane,
                        state);
  }
  if (warp < keys.tiles) leave_state(meeting, state);
  attention_sync();
  if (warp >= kGroup) {
    compute_sync();
    return;
  }
  Merged merged = merge_warps(meeting, min(keys.tiles, kAttentionWarps));
  if (keys.parts > 1) merged = merge_parts(p, merged, kv_head, part, keys.parts, pair, flag);
  if (thread_index() % keys.parts == 0) {
    send(mailbox_of(p, Mailbox::kAttention) + kv_head * (kHeadValues / 2) + pair,
         with_sink(merged, sink), flag);
  }
  compute_sync();  // what comes next takes the same shared memory
}

// This block's part of the attended vector, ready for the output projection.
template <Format kFormat>
__device__ __forceinline__ void take_attended(const Params& p, Shared& shared, int part,
                                              uint32_t flag) {
  constexpr int kColumns = kAttended / kOutParts;
  static_assert(kColumns == kWarps * kScaleColumns, "a group of columns a warp");
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const uint64_t* mine = mailbox_of(p, Mailbox::kAttention) + part * (kColumns / 2) +
                         (warp * kScaleColumns + 4 * lane) / 2;
  uint2 pairs[1];
  receive_pairs<1>([mine](int) { return mine; }, [](int) { return true; }, flag, pairs);
  store_dense<kFormat>(shared, warp, lane, true, four_floats(pairs[0]));
  async_proxy_fence();  // WGMMA reads it
  compute_sync();
}

}  // namespace gptoss::one

#endif  // GPTOSS_TRT_DECODE_ONE_ATTENTION_PHASE_CUH_
