// The ends of dense_fp8's tiles: sums to the output, to q and the KV cache, or to a cluster's
// blocks, which add their parts of K.
#ifndef GPTOSS_TRT_DENSE_FP8_STORE_CUH_
#define GPTOSS_TRT_DENSE_FP8_STORE_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "core/bf16.cuh"
#include "core/cluster.cuh"
#include "core/ptx.cuh"
#include "core/turn_quad.cuh"
#include "dense_fp8/params.h"
#include "dense_fp8/rotate.cuh"
#include "dense_fp8/tile.cuh"

namespace gptoss::dense_fp8 {

// The sums of a whole K to `out`.
template <typename S>
__device__ __forceinline__ void store_tile(const Params& p, const Lane<S>& lane, const Tile& tile,
                                           const Sums<S>& sum) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int token = tile.token + lane.token + row * 8;
    const int64_t at = static_cast<int64_t>(token) * p.n + tile.row;
    if (p.out_fp32) {
      float* out = static_cast<float*>(p.out) + at;
#pragma unroll
      for (int j = 0; j < S::kColumns / 8; ++j) {
        const int column = lane.column + 8 * j;
        if (token < p.tokens && column < tile.rows) {
          *reinterpret_cast<float2*>(out + column) =
              make_float2(sum[4 * j + 2 * row], sum[4 * j + 2 * row + 1]);
        }
      }
      continue;
    }
    auto* out = static_cast<__nv_bfloat16*>(p.out) + at;
    const int first = lane.column / 8 * 8 + threadIdx.x % 4 * 8;
#pragma unroll
    for (int j = 0; j < S::kColumns / 8; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = sum + 4 * (j + i) + 2 * row;
        words[i] = bf16_pair(pair[0], pair[1]);
      }
      turn_quad(words);
      const int column = first + 8 * j;
      if (token < p.tokens && column < tile.rows) store_global_u128(out + column, words);
    }
  }
}

// bf16(`out` + bf16(sum)) of a whole K to `out`. All of the thread's words are asked for at once.
template <typename S>
__device__ __forceinline__ void add_tile(const Params& p, const Lane<S>& lane, const Tile& tile,
                                         const Sums<S>& sum) {
  constexpr int kWords = S::kColumns / 32;
  const int first = lane.column / 8 * 8 + threadIdx.x % 4 * 8;
  const auto place = [&](int row, int word) {
    return reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) +
                                    static_cast<int64_t>(tile.token + lane.token + 8 * row) * p.n +
                                    tile.row + first + 32 * word);
  };
  const auto present = [&](int row, int word) {
    return tile.token + lane.token + 8 * row < p.tokens && first + 32 * word < tile.rows;
  };
  uint4 held[2][kWords];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      // Where nothing is to be added, what lies nearest: with conditions on them the compiler puts
      // some loads behind stores.
      const int token = min(tile.token + lane.token + 8 * i, p.tokens - 1);
      const int column = min(first + 32 * j, tile.rows - kSegmentStep);
      held[i][j] =
          *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.out) +
                                          static_cast<int64_t>(token) * p.n + tile.row + column);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float* pair = sum + 4 * (4 * j + k) + 2 * i;
        words[k] = bf16_pair(pair[0], pair[1]);
      }
      turn_quad(words);
      float total[8], own[8];
      widen(held[i][j], total);
      widen(make_uint4(words[0], words[1], words[2], words[3]), own);
#pragma unroll
      for (int k = 0; k < 8; ++k) total[k] += own[k];
      const uint4 sums = narrow(total);
      if (present(i, j)) store_global_u128(place(i, j), {sums.x, sums.y, sums.z, sums.w});
    }
  }
}

// Of a thread's two tokens: where they stand, where they are kept, and what they are turned by.
struct Places {
  int slots[2];
  float2 cos[2][4], sin[2][4];

  // All under one latency, then all angles under another.
  template <typename S>
  __device__ __forceinline__ void load(const Params& p, const Lane<S>& lane, const Tile& tile) {
    int positions[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = min(tile.token + lane.token + 8 * i, p.tokens - 1);
      positions[i] = __ldg(p.positions + token);
      slots[i] = __ldg(p.slots + token);
    }
    load_turns(p, positions);
  }

  // Positions and slots from `side`, the words beside a tile's last stage.
  template <typename S>
  __device__ __forceinline__ void take(const Params& p, const Lane<S>& lane, uint32_t side) {
    int positions[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t at = side + (lane.token + 8 * i) * 4;
      positions[i] = load_shared_s32(at + S::kPositionsAt);
      slots[i] = load_shared_s32(at + S::kSlotsAt);
    }
    load_turns(p, positions);
  }

 private:
  __device__ __forceinline__ void load_turns(const Params& p, const int (&positions)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_angles(p, positions[i], threadIdx.x % 4 * 2, cos[i], sin[i]);
    }
  }
};

// The ends of heads that are turned (q, k) or kept in the cache (k, v): a head's halves of a token
// are in one thread. Three copies without branches: one with a branch for each pair of columns took
// 27 us more for 8,192 tokens than store_tile.
template <typename S, bool kTurned, bool kKept>
__device__ __forceinline__ void store_heads(const Params& p, const Destination& to,
                                            const Lane<S>& lane, const Tile& tile,
                                            const Places& places, const Sums<S>& sum) {
  constexpr int kHeads = S::kColumns / kHeadDim;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t first[kHeads][4], second[kHeads][4];
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* low = sum + 4 * (8 * head + j) + 2 * i;
        const float* high = low + 4 * 4;
        first[head][j] = bf16_pair(low[0], low[1]);
        second[head][j] = bf16_pair(high[0], high[1]);
        if (kTurned) turn(places.cos[i][j], places.sin[i][j], first[head][j], second[head][j]);
      }
    }
    const int token = tile.token + lane.token + 8 * i;
    const bool present = token < p.tokens && (!kKept || places.slots[i] >= 0);
    // Of the tile's first head in this thread; heads of one KV block lie block_tokens rows apart.
    const int inside = lane.column / kHeadDim * kHeadDim;
    uint16_t* at = to.row<kKept>(p, token, places.slots[i], inside) + threadIdx.x % 4 * 8;
    const int64_t next = kKept ? kHeadDim << p.block_shift : kHeadDim;
#pragma unroll
    for (int head = 0; head < kHeads; ++head, at += next) {
      turn_quad(first[head]);
      turn_quad(second[head]);
      if (present && inside + head * kHeadDim < tile.rows) {
        store_global_u128(at, first[head]);
        store_global_u128(at + kHeadDim / 2, second[head]);
      }
    }
  }
}

// A group's results, rounded, rotated or added to what lies there, to a box in shared memory,
// in the form of fragment_place().
template <typename S, bool kTurned>
__device__ __forceinline__ void fill_box(const Lane<S>& lane, const Places& places, uint32_t box,
                                         const float* sum) {
  constexpr int kPieces = kGroupRows / 16;  // that a warp loads and stores at once
  const uint32_t at = box + lane.warpgroup * 64 * kGroupRows * 2 + fragment_place();
  uint32_t held[kPieces][4], words[2][kGroupRows / 8];
  if constexpr (S::kAdds) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) load_matrices(at ^ (32 * i), held[i]);
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int j = 0; j < kGroupRows / 8; ++j) {
      const float* pair = sum + 4 * j + 2 * row;
      words[row][j] = bf16_pair(pair[0], pair[1]);
    }
    if constexpr (kTurned) {  // a group is a head
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        turn(places.cos[row][j], places.sin[row][j], words[row][j], words[row][j + 4]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    uint32_t piece[4] = {words[0][2 * i], words[1][2 * i], words[0][2 * i + 1],
                         words[1][2 * i + 1]};
    if constexpr (S::kAdds) {
#pragma unroll
      for (int j = 0; j < 4; ++j) piece[j] = add_pairs(held[i][j], piece[j]);
    }
    store_matrices(at ^ (32 * i), piece);
  }
}

template <typename S>
__device__ __forceinline__ void store_rotated(const Params& p, const Lane<S>& lane,
                                              const Tile& tile, const Places& places,
                                              const Sums<S>& sum) {
  const Destination to(p, tile.row);
  if (!to.kept()) {
    store_heads<S, true, false>(p, to, lane, tile, places, sum);
  } else if (to.turned()) {
    store_heads<S, true, true>(p, to, lane, tile, places, sum);
  } else {
    store_heads<S, false, true>(p, to, lane, tile, places, sum);
  }
}

// One warp: a box of k or v goes from shared memory to the cache.
class KeptBox {
 public:
  // Asks where the tokens are kept: what takes long, ahead of the wait for the box.
  __device__ __forceinline__ KeptBox(const Params& p, int token, int row) {
    const Destination to(p, row);
    head_ = to.head();
    cache_ = to.cache(p);
#pragma unroll
    for (int i = 0; i < kWideTokens / 32; ++i) {
      const int own = token + threadIdx.x % 32 + 32 * i;
      const int slot = own < p.tokens ? __ldg(p.slots + own) : -1;
      const int block = slot >> p.block_shift;
      const int line =
          (((block * p.kv_heads) + head_) << p.block_shift) + (slot & ((1 << p.block_shift) - 1));
      lines_[i] = slot < 0 ? -1 : line;
    }
  }

  __device__ __forceinline__ void store(uint32_t from) const {
    const int lane = threadIdx.x % 32, piece = lane % kLanes;
#pragma unroll
    for (int i = 0; i < kWideTokens / 32; ++i) {
      uint4 words[kLanes];
#pragma unroll
      for (int j = 0; j < kLanes; ++j) {
        const int at = kRows * j + lane / kLanes;
        words[j] = load_shared_u128(from + (32 * i + at) * kGroupRows * 2 + 16 * (piece ^ at % 8));
      }
#pragma unroll
      for (int j = 0; j < kLanes; ++j) {
        const int line = __shfl_sync(0xFFFFFFFFu, lines_[i], kRows * j + lane / kLanes);
        uint16_t* row = cache_ + static_cast<int64_t>(line) * kHeadDim + 8 * piece;
        if (line >= 0) {
          store_global_u128(row, {words[j].x, words[j].y, words[j].z, words[j].w});
        }
      }
    }
  }

 private:
  static constexpr int kLanes = 2 * kGroupRows / 16;  // of a token
  static constexpr int kRows = 32 / kLanes;           // that the warp stores at once

  uint16_t* cache_;
  int head_;
  int lines_[kWideTokens / 32];  // of the cache, for tokens lane + 32i; negative: not kept
};

// The sums of a part of K into the block's shared memory, over the ring: [kTokens][kPartPitch].
template <typename S>
__device__ __forceinline__ void keep_part(const Memory<S>& memory, const Lane<S>& lane,
                                          const Sums<S>& sum) {
  named_barrier_sync(kConsumerBarrier,
                     kConsumerThreads);  // nobody multiplies any more
#pragma unroll
  for (int i = 0; i < S::kColumns / 2; i += 2) {
    const int token = lane.token + i % 4 / 2 * 8;
    const int column = lane.column + i / 4 * 8;
    asm volatile(
        "st.shared.v2.f32 [%0], {%1, %2};" ::"r"(memory.base + (token * kPartPitch + column) * 4),
        "f"(sum[i]), "f"(sum[i + 1])
        : "memory");
  }
}

// Four columns of the bias that this thread's results have in add_parts.
__device__ __forceinline__ uint2 bias_of_thread(const Params& p, const Tile& tile) {
  const int column = threadIdx.x % (kBlock / 4) * 4;
  if (p.bias == nullptr || column >= tile.rows) return make_uint2(0, 0);
  return __ldg(reinterpret_cast<const uint2*>(p.bias + tile.row + column));
}

// Of add_parts: a warp has a token at a time, a lane four neighbouring columns.
constexpr int kQuads = kBlock / 4;
constexpr int kTokensAtOnce = kThreads / kQuads;
static_assert(kQuads == 32, "a warp has a token");

// What the first of a thread's tokens are rotated by, and where their keys go: the step had them
// before the kernel ahead, so they are read before the wait.
template <typename S, bool kUsed = S::kSplit && S::kRotates>
struct Angles {
  __device__ __forceinline__ void load(const Params&, const Tile&) {}
};

template <typename S>
struct Angles<S, true> {
  static constexpr int kAhead = S::kTokens == 64 ? 3 : 1;
  float4 cos[kAhead], sin[kAhead];
  int slot[kAhead];

  __device__ __forceinline__ void load(const Params& p, const Tile& tile) {
    const int first = tile.token + cluster_rank() * kTokensAtOnce + threadIdx.x / kQuads;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int token = min(first + i * p.parts * kTokensAtOnce, p.tokens - 1);
      load_token(p, tile, token, cos[i], sin[i], slot[i]);
    }
  }

  __device__ __forceinline__ static void load_token(const Params& p, const Tile& tile, int token,
                                                    float4& cos, float4& sin, int& slot) {
    const Destination to(p, tile.row);
    if (to.turned()) load_angles(p, p.positions[token], threadIdx.x % 8 * 4, cos, sin);
    slot = to.kept() ? p.slots[token] : 0;
  }

  // `total` are columns `column` to `column` + 3 of the tile, of its token number `token`, the
  // thread's number `count`; eight lanes further are those of the head's other half.
  __device__ __forceinline__ void store(const Params& p, const Tile& tile, int token, int column,
                                        int count, const float4& total) const {
    const Destination to(p, tile.row);
    float4 cosines, sines;
    int at_slot;
    bool known = false;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (count == i) cosines = cos[i], sines = sin[i], at_slot = slot[i], known = true;
    }
    if (!known) load_token(p, tile, tile.token + token, cosines, sines, at_slot);
    uint32_t own[2] = {bf16_pair(total.x, total.y), bf16_pair(total.z, total.w)}, other[2];
    const uint32_t lanes = tile.rows > kHeadDim ? 0xFFFFFFFFu : 0xFFFFu;
#pragma unroll
    for (int i = 0; i < 2; ++i) other[i] = __shfl_xor_sync(lanes, own[i], kHeadDim / 2 / 4);
    if (to.turned()) {
      const bool second = column % kHeadDim >= kHeadDim / 2;
      const float2 cos2[2] = {make_float2(cosines.x, cosines.y), make_float2(cosines.z, cosines.w)};
      const float2 sin2[2] = {make_float2(sines.x, sines.y), make_float2(sines.z, sines.w)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t low = second ? other[i] : own[i], high = second ? own[i] : other[i];
        turn(cos2[i], sin2[i], low, high);
        own[i] = second ? high : low;
      }
    }
    if (at_slot < 0) return;
    const int head = column / kHeadDim * kHeadDim;
    uint16_t* at = to.kept() ? to.row<true>(p, tile.token + token, at_slot, head)
                             : to.row<false>(p, tile.token + token, at_slot, head);
    *reinterpret_cast<uint2*>(at + column % kHeadDim) = make_uint2(own[0], own[1]);
  }
};

// Adds the cluster's parts in their order: each of its blocks some of the tile's tokens.
template <typename S>
__device__ inline void add_parts(const Params& p, const Memory<S>& memory, const Tile& tile,
                                 uint2 bias, const Angles<S>& angles) {
  const int column = threadIdx.x % kQuads * 4;
  const int tokens = min(S::kTokens, p.tokens - tile.token);
  if (column >= tile.rows) return;
  int count = 0;
  for (int token = cluster_rank() * kTokensAtOnce + threadIdx.x / kQuads; token < tokens;
       token += p.parts * kTokensAtOnce, ++count) {
    float4 total =
        make_float4(__uint_as_float(bias.x << 16), __uint_as_float(bias.x & 0xFFFF0000u),
                    __uint_as_float(bias.y << 16), __uint_as_float(bias.y & 0xFFFF0000u));
    const uint32_t at = memory.base + (token * kPartPitch + column) * 4;
    float4 parts[kMostParts];
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) {
      if (part < p.parts) parts[part] = cluster_load(cluster_address(at, part));
    }
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) {
      if (part >= p.parts) break;
      total.x += parts[part].x;
      total.y += parts[part].y;
      total.z += parts[part].z;
      total.w += parts[part].w;
    }
    if constexpr (S::kRotates) {
      angles.store(p, tile, token, column, count, total);
      continue;
    }
    const int64_t to = static_cast<int64_t>(tile.token + token) * p.n + tile.row + column;
    if (p.out_fp32) {
      *reinterpret_cast<float4*>(static_cast<float*>(p.out) + to) = total;
    } else {
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + to) =
          make_uint2(bf16_pair(total.x, total.y), bf16_pair(total.z, total.w));
    }
  }
}

}  // namespace gptoss::dense_fp8

#endif  // GPTOSS_TRT_DENSE_FP8_STORE_CUH_
