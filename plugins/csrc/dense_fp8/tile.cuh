// What the threads of dense_fp8's kernel share: tiles and their order, the ring's place in shared
// memory, and where a consumer's sums lie in a tile.
#ifndef GPTOSS_TRT_DENSE_FP8_TILE_CUH_
#define GPTOSS_TRT_DENSE_FP8_TILE_CUH_

#include <cstdint>

#include "core/cluster.cuh"
#include "core/ptx.cuh"
#include "dense_fp8/instructions.cuh"
#include "dense_fp8/params.h"

namespace gptoss::dense_fp8 {

constexpr int kConsumerThreads = kConsumers * 128;
constexpr int kConsumerWarps = kConsumerThreads / 32;
constexpr int kConsumerBarrier = 1;  // named barrier of the consumers
constexpr int kSwizzleAlignment = 1024;
constexpr int kWeightBytes = kBlock * kBlock;  // of a tile and stage
constexpr int kPartPitch = kBlock + 8;  // floats of a token's sums: rows begin in other banks

// Of wide items. A launch of kThreads has 168 registers a thread: 256 x 224 + 128 x 56.
constexpr int kConsumerRegisters = 224;
constexpr int kProducerRegisters = 56;

// kTokens: of a tile. kSplit: a cluster's blocks have parts of K. kRotates, kAdds: the tile's end.
template <int kTileTokens, int kRingStages, bool kParts, End kEnd>
struct Shape {
  static constexpr int kTokens = kTileTokens, kStages = kRingStages;
  static constexpr bool kSplit = kParts;
  static constexpr bool kRotates = kEnd == End::kRotate, kAdds = kEnd == End::kAdd;
  // Of a warpgroup, which has 64 tokens.
  static constexpr int kColumns = kTokens == 64 ? kBlock / kConsumers : kBlock;
  // Of a stage: tokens, weights; and beside the ring scales of tokens and tile, and bias.
  static constexpr int kTokenBytes = kTokens * kBlock;
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes;
  static constexpr int kWeightScaleAt = kTokens * 4;
  static constexpr int kBiasAt = kWeightScaleAt + 16;
  static constexpr int kSideBytes = kBiasAt + kBlock * 2;
  static constexpr int kSideAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kSideAt + kStages * kSideBytes;
  static constexpr int kSharedBytes = kBarriersAt + 2 * 8 * kStages + kSwizzleAlignment;
  static_assert(!kSplit || kTokens * kPartPitch * 4 <= kSideAt, "sums of a part fit in the ring");
};

// Of bf16 results, as wide items leave: kGroupRows columns of all tokens of a block.
constexpr int kBoxBytes = kWideTokens * kGroupRows * 2;

// Addresses in the block's shared memory.
template <typename S>
struct Memory {
  uint32_t base;

  __device__ uint32_t tokens(int stage) const { return base + stage * S::kStageBytes; }
  __device__ uint32_t weights(int stage) const { return tokens(stage) + S::kTokenBytes; }
  __device__ uint32_t side(int stage) const { return base + S::kSideAt + stage * S::kSideBytes; }
  __device__ uint32_t full(int stage) const { return base + S::kBarriersAt + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(S::kStages) + 8 * stage; }
  // Of wide items.
  __device__ uint32_t boxed(int stage) const { return empty(S::kStages) + 8 * stage; }
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

__device__ __forceinline__ Tile tile_of(const Params& p, int block, int token) {
  const int blocks_0 = (p.segments[0] + kBlock - 1) / kBlock;
  const int blocks_1 = (p.segments[1] + kBlock - 1) / kBlock;
  Tile tile{token, block, block * kBlock, 0};
  int end = p.segments[0];
  if (block >= blocks_0) {
    tile.row = end + (block - blocks_0) * kBlock;
    end += p.segments[1];
  }
  if (block >= blocks_0 + blocks_1) {
    tile.row = end + (block - blocks_0 - blocks_1) * kBlock;
    end = p.n;
  }
  tile.rows = min(end - tile.row, kBlock);
  return tile;
}

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
    const int fast = p_.tokens_first ? p_.token_tiles : p_.tiles;
    const int slow = at_ / fast;
    const int inner = at_ - slow * fast;
    return tile_of(p_, p_.tokens_first ? slow : inner,
                   (p_.tokens_first ? inner : slow) * S::kTokens);
  }

 private:
  const Params& p_;
  int at_, step_, begin_, end_;
};

template <typename S>
using Sums = float[S::kColumns / 2];

// Where a consumer thread's values lie in a tile: rows `token` and 8 further, columns `column` + 8j
// and the next.
template <typename S>
struct Lane {
  int warpgroup, token, column;
  uint32_t leader;  // of its warp

  __device__ __forceinline__ Lane() {
    const int thread = threadIdx.x % 128;
    warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
    token = thread / 32 * 16 + thread % 32 / 4;
    if constexpr (S::kTokens > 64) token += warpgroup * 64;
    column = thread % 4 * 2;
    if constexpr (S::kTokens == 64) column += warpgroup * S::kColumns;
    leader = thread % 32 == 0;
  }
};

}  // namespace gptoss::dense_fp8

#endif  // GPTOSS_TRT_DENSE_FP8_TILE_CUH_
