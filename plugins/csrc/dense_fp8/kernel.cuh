// Dense products of FP8 128x128 on tensor cores: out = x W^T + bias for more tokens than dense_few
// takes. Tokens are the M operand and a block of 128 rows of the weight the N operand, both in
// shared memory, where tensor copies put them through a ring of stages of 128 columns of K. The
// tensor cores sum a stage; its sums times scale of token and block go to fp32 sums in registers,
// while the other warpgroup's instructions run.
//
// The blocks of a cluster have parts of K and add their sums through each other's shared memory
// (kSplit). The weights of the first stages are requested ahead of the wait for the kernel before.
// With kRotates the rows of the weight are q, k and v, and the results go where rope_kv_append puts
// them (rotate.cuh).
//
// Invariant: the order in which a result's products are added depends on K and the plan alone.
#ifndef GPTOSS_TRT_DENSE_FP8_KERNEL_CUH_
#define GPTOSS_TRT_DENSE_FP8_KERNEL_CUH_

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "core/bf16.cuh"
#include "core/cluster.cuh"
#include "core/ptx.cuh"
#include "core/turn_quad.cuh"
#include "dense_fp8/instructions.cuh"
#include "dense_fp8/params.h"
#include "dense_fp8/rotate.cuh"

namespace gptoss::dense_fp8 {

constexpr int kConsumerThreads = kConsumers * 128;
constexpr int kConsumerWarps = kConsumerThreads / 32;
constexpr int kConsumerBarrier = 1;  // named barrier of the consumers
constexpr int kSwizzleAlignment = 1024;
constexpr int kPartPitch = kBlock + 8;  // floats of a token's sums: rows begin in other banks

// A launch of kThreads gets 168 registers a thread: 256 x 224 + 128 x 56 are as many.
constexpr int kConsumerRegisters = 224;
constexpr int kProducerRegisters = 56;

// kTokens: of a tile. kSplit: a cluster's blocks have parts of K.
template <int kTileTokens, int kRingStages, bool kParts, bool kTurns>
struct Shape {
  static constexpr int kTokens = kTileTokens, kStages = kRingStages;
  static constexpr bool kSplit = kParts, kRotates = kTurns;
  // Of a warpgroup: rows of 64 tokens and columns of each.
  static constexpr int kHalves = kTokens == 256 ? 2 : 1;
  static constexpr int kColumns = kTokens == 64 ? kBlock / kConsumers : kBlock;
  static constexpr bool kUneven = kTokens == 256;  // consumers need more registers than producers
  // Of a stage: tokens, weights; and beside the ring scales of tokens, scale of weights, bias.
  static constexpr int kTokenBytes = kTokens * kBlock;
  static constexpr int kStageBytes = kTokenBytes + kBlock * kBlock;
  static constexpr int kWeightScaleAt = kTokens * 4;
  static constexpr int kBiasAt = kWeightScaleAt + 16;
  static constexpr int kSideBytes = kBiasAt + kBlock * 2;
  static constexpr int kSideAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kSideAt + kStages * kSideBytes;
  static constexpr int kSharedBytes = kBarriersAt + 2 * 8 * kStages + kSwizzleAlignment;
  static_assert(!kSplit || kTokens * kPartPitch * 4 <= kSideAt, "sums of a part fit in the ring");
};

// Addresses in the block's shared memory.
template <typename S>
struct Memory {
  uint32_t base;

  __device__ uint32_t tokens(int stage) const { return base + stage * S::kStageBytes; }
  __device__ uint32_t weights(int stage) const { return tokens(stage) + S::kTokenBytes; }
  __device__ uint32_t side(int stage) const { return base + S::kSideAt + stage * S::kSideBytes; }
  __device__ uint32_t full(int stage) const { return base + S::kBarriersAt + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(S::kStages) + 8 * stage; }
};

template <typename S>
struct Position {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void step() {
    if (++stage == S::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Tile {
  int token;  // first of its tokens
  int block;  // of the weight
  int row;    // first of the block's rows
  int rows;   // of the block, at most kBlock
};

// The tiles of a block of threads, one after another, and its part of K.
template <typename S>
class Schedule {
 public:
  __device__ __forceinline__ explicit Schedule(const Params& p) : p_(p) {
    const int part = S::kSplit ? static_cast<int>(cluster_rank()) : 0;
    const int together = S::kSplit ? p.parts : 1;
    step_ = gridDim.x / together;
    at_ = blockIdx.x / together;
    begin_ = part * p.k_blocks / p.parts;
    end_ = (part + 1) * p.k_blocks / p.parts;
  }

  __device__ __forceinline__ bool done() const { return at_ >= p_.tiles * p_.token_tiles; }
  __device__ __forceinline__ void advance() { at_ += step_; }
  __device__ __forceinline__ int begin() const { return begin_; }
  __device__ __forceinline__ int end() const { return end_; }

  __device__ __forceinline__ Tile tile() const {
    Tile tile;
    const int fast = p_.tokens_first ? p_.token_tiles : p_.tiles;
    const int slow = at_ / fast;
    const int inner = at_ - slow * fast;
    tile.token = (p_.tokens_first ? inner : slow) * S::kTokens;
    tile.block = p_.tokens_first ? slow : inner;
    const int blocks_0 = (p_.segments[0] + kBlock - 1) / kBlock;
    const int blocks_1 = (p_.segments[1] + kBlock - 1) / kBlock;
    int end = p_.segments[0];
    tile.row = tile.block * kBlock;
    if (tile.block >= blocks_0) {
      tile.row = end + (tile.block - blocks_0) * kBlock;
      end += p_.segments[1];
    }
    if (tile.block >= blocks_0 + blocks_1) {
      tile.row = end + (tile.block - blocks_0 - blocks_1) * kBlock;
      end = p_.n;
    }
    tile.rows = min(end - tile.row, kBlock);
    return tile;
  }

 private:
  const Params& p_;
  int at_, step_, begin_, end_;
};

// ---- producers ------------------------------------------------------------------------------

// One thread: tokens and weights.
template <typename S>
__device__ inline void produce_tiles(const Params& p, const Memory<S>& memory,
                                     const CUtensorMap& x_map, const CUtensorMap& weight_map) {
  Schedule<S> schedule(p);
  const auto request_weights = [&](int stage, int block, int row) {
    barrier_expect_bytes(memory.full(stage), S::kStageBytes);
    copy_box(memory.weights(stage), weight_map, block * kBlock, row, memory.full(stage));
  };
  int ahead = 0;  // stages whose weights are under way
  if (!schedule.done()) {
    ahead = min(S::kStages, schedule.end() - schedule.begin());
    const int row = schedule.tile().row;
    for (int i = 0; i < ahead; ++i) request_weights(i, schedule.begin() + i, row);
  }
  dependency_wait();
  Position<S> position;
  for (; !schedule.done(); schedule.advance()) {
    const Tile tile = schedule.tile();
    for (int block = schedule.begin(); block < schedule.end(); ++block, position.step()) {
      const int stage = position.stage;
      barrier_wait(memory.empty(stage), position.parity ^ 1);
      if (ahead > 0) {
        --ahead;
      } else {
        request_weights(stage, block, tile.row);
      }
      copy_box(memory.tokens(stage), x_map, block * kBlock, tile.token, memory.full(stage));
    }
  }
}

// One warp: scales, and the bias with the last of them.
template <typename S>
__device__ inline void produce_scales(const Params& p, const Memory<S>& memory) {
  const int lane = threadIdx.x % 32;
  dependency_wait();
  Position<S> position;
  for (Schedule<S> schedule(p); !schedule.done(); schedule.advance()) {
    const Tile tile = schedule.tile();
    const float* unit = p.weight_scale + static_cast<int64_t>(tile.block) * p.k_blocks;
    for (int block = schedule.begin(); block < schedule.end(); ++block, position.step()) {
      const uint32_t side = memory.side(position.stage);
      const float* scales = p.x_scale + static_cast<int64_t>(block) * p.tokens;
      barrier_wait(memory.empty(position.stage), position.parity ^ 1);
#pragma unroll
      for (int i = 0; i < S::kTokens / 32; ++i) {
        const int token = tile.token + lane + 32 * i;
        copy_word_async(side + (lane + 32 * i) * 4, scales + min(token, p.tokens - 1),
                        token < p.tokens);
      }
      if (lane == 0) copy_word_async(side + S::kWeightScaleAt, unit + block, true);
      if (!S::kSplit && p.bias != nullptr && block + 1 == schedule.end()) {
#pragma unroll
        for (int i = 0; i < kBlock / 64; ++i) {
          const int column = 2 * (lane + 32 * i);
          copy_word_async(side + S::kBiasAt + column * 2, p.bias + min(tile.row + column, p.n - 2),
                          column < tile.rows);
        }
      }
      copies_arrive(memory.full(position.stage));
    }
  }
}

// ---- consumers ------------------------------------------------------------------------------

template <typename S>
using Sums = float[S::kHalves][S::kColumns / 2];

// Where a consumer thread's values lie in a tile: rows `token` + 64 half and 8 further, columns
// `column` + 8j and the next.
template <typename S>
struct Lane {
  int warpgroup, token, column;
  uint32_t leader;  // of its warp

  __device__ __forceinline__ Lane() {
    const int thread = threadIdx.x % 128;
    warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
    token = thread / 32 * 16 + thread % 32 / 4;
    if constexpr (S::kTokens > 64) token += warpgroup * 64 * S::kHalves;
    column = thread % 4 * 2;
    if constexpr (S::kTokens == 64) column += warpgroup * S::kColumns;
    leader = thread % 32 == 0;
  }
};

template <typename S>
__device__ __forceinline__ void release(const Memory<S>& memory, int stage, uint32_t leader) {
  __syncwarp();
  if (leader != 0) barrier_arrive(memory.empty(stage));
}

// sum = the products of a tile (and bias), stage by stage.
template <typename S>
__device__ __forceinline__ void multiply_tile(const Memory<S>& memory, const Lane<S>& lane,
                                              int blocks, bool with_bias, Position<S>& position,
                                              Sums<S>& sum) {
  constexpr int kInstructions = kBlock / 32, kValues = S::kColumns / 2;
#pragma unroll
  for (int half = 0; half < S::kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum[half][i] = 0.0f;
  }
  const uint32_t own_tokens = S::kTokens > 64 ? lane.warpgroup * 64 * S::kHalves * kBlock : 0;
  const uint32_t own_weights = S::kTokens > 64 ? 0 : lane.warpgroup * S::kColumns * kBlock;
#pragma unroll 1
  for (int left = blocks - 1; left >= 0; --left, position.step()) {
    const int stage = position.stage;
    const uint32_t side = memory.side(stage);
    const bool finish = with_bias && left == 0;
    barrier_wait(memory.full(stage), position.parity);
    const float unit = load_shared_f32(side + S::kWeightScaleAt);
    const uint64_t weights = swizzled_rows(memory.weights(stage) + own_weights);
#pragma unroll
    for (int half = 0; half < S::kHalves; ++half) {
      const uint64_t tokens = swizzled_rows(memory.tokens(stage) + own_tokens + half * 64 * kBlock);
      const uint32_t scales = side + (lane.token + half * 64) * 4;
      const float low = unit * load_shared_f32(scales);
      const float high = unit * load_shared_f32(scales + 32);
      float part[kValues];
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kInstructions; ++i) {
        multiply<S::kColumns>(part, tokens + 2 * i, weights + 2 * i, i);
      }
      wgmma_commit();
      wgmma_wait_all();
      wgmma_settle(part);
      if (half + 1 == S::kHalves && !finish) release(memory, stage, lane.leader);
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        sum[half][i] = fmaf(part[i], i % 4 < 2 ? low : high, sum[half][i]);
      }
    }
    if (finish) {
#pragma unroll
      for (int j = 0; j < S::kColumns / 8; ++j) {
        const uint32_t pair =
            __float_as_uint(load_shared_f32(side + S::kBiasAt + (lane.column + 8 * j) * 2));
        const float even = __uint_as_float(pair << 16);
        const float odd = __uint_as_float(pair & 0xFFFF0000u);
#pragma unroll
        for (int half = 0; half < S::kHalves; ++half) {
          sum[half][4 * j] += even;
          sum[half][4 * j + 1] += odd;
          sum[half][4 * j + 2] += even;
          sum[half][4 * j + 3] += odd;
        }
      }
      release(memory, stage, lane.leader);
    }
  }
}

// The sums of a whole K to `out`.
template <typename S>
__device__ __forceinline__ void store_tile(const Params& p, const Lane<S>& lane, const Tile& tile,
                                           const Sums<S>& sum) {
#pragma unroll
  for (int half = 0; half < S::kHalves; ++half) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int token = tile.token + lane.token + half * 64 + row * 8;
      const int64_t at = static_cast<int64_t>(token) * p.n + tile.row;
      if (p.out_fp32) {
        float* out = static_cast<float*>(p.out) + at;
#pragma unroll
        for (int j = 0; j < S::kColumns / 8; ++j) {
          const int column = lane.column + 8 * j;
          if (token < p.tokens && column < tile.rows) {
            *reinterpret_cast<float2*>(out + column) =
                make_float2(sum[half][4 * j + 2 * row], sum[half][4 * j + 2 * row + 1]);
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
          const float* pair = sum[half] + 4 * (j + i) + 2 * row;
          words[i] = bf16_pair(pair[0], pair[1]);
        }
        turn_quad(words);
        const int column = first + 8 * j;
        if (token < p.tokens && column < tile.rows) {
          *reinterpret_cast<uint4*>(out + column) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
}

// Number `i` of the tokens that a thread has in a tile.
template <typename S>
__device__ __forceinline__ int token_of(const Lane<S>& lane, const Tile& tile, int i) {
  return tile.token + lane.token + i / 2 * 64 + i % 2 * 8;
}

// The same of heads that are turned (q, k) or kept in the cache (k, v): a head's halves of a token
// are in one thread. Three copies without branches: one with a branch for each pair of columns took
// 27 us more for 8,192 tokens than store_tile.
template <typename S, bool kTurned, bool kKept>
__device__ __forceinline__ void store_heads(const Params& p, const Destination& to,
                                            const Lane<S>& lane, const Tile& tile,
                                            const Sums<S>& sum) {
  constexpr int kRows = 2 * S::kHalves, kHeads = S::kColumns / kHeadDim;
  const int column = threadIdx.x % 4 * 2;  // of a head's half, and 8i further
  float2 cos[4], sin[4];
  int positions[kRows], slots[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {  // one latency for all
    const int token = min(token_of(lane, tile, i), p.tokens - 1);
    if (kTurned) positions[i] = __ldg(p.positions + token);
    slots[i] = kKept ? __ldg(p.slots + token) : 0;
  }
  if (kTurned) load_angles(p, positions[0], column, cos, sin);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    uint32_t first[kHeads][4], second[kHeads][4];
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* low = sum[i / 2] + 4 * (8 * head + j) + 2 * (i % 2);
        const float* high = low + 4 * 4;
        first[head][j] = bf16_pair(low[0], low[1]);
        second[head][j] = bf16_pair(high[0], high[1]);
        if (kTurned) turn(cos[j], sin[j], first[head][j], second[head][j]);
      }
    }
    if (kTurned && i + 1 < kRows) load_angles(p, positions[i + 1], column, cos, sin);
    const int token = token_of(lane, tile, i);
    const bool present = token < p.tokens && slots[i] >= 0;
    // Of the tile's first head in this thread; heads of one KV block lie block_tokens rows apart.
    const int inside = lane.column / kHeadDim * kHeadDim;
    uint16_t* at = to.row<kKept>(p, token, slots[i], inside) + threadIdx.x % 4 * 8;
    const int64_t next = kKept ? kHeadDim << p.block_shift : kHeadDim;
#pragma unroll
    for (int head = 0; head < kHeads; ++head, at += next) {
      turn_quad(first[head]);
      turn_quad(second[head]);
      if (present && inside + head * kHeadDim < tile.rows) {
        *reinterpret_cast<uint4*>(at) =
            make_uint4(first[head][0], first[head][1], first[head][2], first[head][3]);
        *reinterpret_cast<uint4*>(at + kHeadDim / 2) =
            make_uint4(second[head][0], second[head][1], second[head][2], second[head][3]);
      }
    }
  }
}

template <typename S>
__device__ __forceinline__ void store_rotated(const Params& p, const Lane<S>& lane,
                                              const Tile& tile, const Sums<S>& sum) {
  const Destination to(p, tile.block, tile.row);
  if (!to.kept()) {
    store_heads<S, true, false>(p, to, lane, tile, sum);
  } else if (to.turned()) {
    store_heads<S, true, true>(p, to, lane, tile, sum);
  } else {
    store_heads<S, false, true>(p, to, lane, tile, sum);
  }
}

// The sums of a part of K into the block's shared memory, over the ring: [kTokens][kPartPitch].
template <typename S>
__device__ __forceinline__ void keep_part(const Memory<S>& memory, const Lane<S>& lane,
                                          const Sums<S>& sum) {
  named_barrier_sync(kConsumerBarrier, kConsumerThreads);  // nobody multiplies any more
#pragma unroll
  for (int half = 0; half < S::kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < S::kColumns / 2; i += 2) {
      const int token = lane.token + half * 64 + i % 4 / 2 * 8;
      const int column = lane.column + i / 4 * 8;
      asm volatile(
          "st.shared.v2.f32 [%0], {%1, %2};" ::"r"(memory.base + (token * kPartPitch + column) * 4),
          "f"(sum[half][i]), "f"(sum[half][i + 1])
          : "memory");
    }
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
    const Destination to(p, tile.block, tile.row);
    if (to.turned()) load_angles(p, p.positions[token], threadIdx.x % 8 * 4, cos, sin);
    slot = to.kept() ? p.slots[token] : 0;
  }

  // `total` are columns `column` to `column` + 3 of the tile, of its token number `token`, the
  // thread's number `count`; eight lanes further are those of the head's other half.
  __device__ __forceinline__ void store(const Params& p, const Tile& tile, int token, int column,
                                        int count, const float4& total) const {
    const Destination to(p, tile.block, tile.row);
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

template <typename S>
__device__ __forceinline__ void consume(const Params& p, const Memory<S>& memory) {
  const Lane<S> lane;
  Position<S> position;
  for (Schedule<S> schedule(p); !schedule.done(); schedule.advance()) {
    const Tile tile = schedule.tile();
    const int blocks = schedule.end() - schedule.begin();
    Sums<S> sum;
    if constexpr (S::kSplit) {
      multiply_tile(memory, lane, blocks, false, position, sum);
      keep_part(memory, lane, sum);
    } else if constexpr (S::kRotates) {
      multiply_tile(memory, lane, blocks, p.bias != nullptr, position, sum);
      store_rotated(p, lane, tile, sum);
    } else {
      multiply_tile(memory, lane, blocks, p.bias != nullptr, position, sum);
      store_tile(p, lane, tile, sum);
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    dense_fp8_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap x_map,
                     const __grid_constant__ CUtensorMap weight_map) {
  extern __shared__ uint8_t dense_shared[];
  const Memory<S> memory{(shared_address(dense_shared) + kSwizzleAlignment - 1) /
                         kSwizzleAlignment * kSwizzleAlignment};
  if (threadIdx.x < S::kStages) {
    barrier_init(memory.full(threadIdx.x), 1 + 32);  // one thread's expected bytes, a warp's scales
    barrier_init(memory.empty(threadIdx.x), kConsumerWarps);
  }
  barrier_init_fence();
  dependents_launch();
  __syncthreads();
  Tile tile;
  uint2 bias;
  Angles<S> angles;
  if constexpr (S::kSplit) {
    tile = Schedule<S>(p).tile();
    bias = bias_of_thread(p, tile);
    angles.load(p, tile);
  }
  if (threadIdx.x >= kConsumerThreads) {
    if constexpr (S::kUneven) registers_release<kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) {
      produce_tiles<S>(p, memory, x_map, weight_map);
    } else if (threadIdx.x / 32 == kConsumerWarps + 1) {
      produce_scales<S>(p, memory);
    }
  } else {
    if constexpr (S::kUneven) registers_claim<kConsumerRegisters>();
    consume<S>(p, memory);
  }
  if constexpr (S::kSplit) {
    cluster_sync();  // the sums of all are in place
    dependency_wait();
    add_parts<S>(p, memory, tile, bias, angles);
    cluster_sync();  // the others have read this block's sums
  }
}

}  // namespace gptoss::dense_fp8

#endif  // GPTOSS_TRT_DENSE_FP8_KERNEL_CUH_
