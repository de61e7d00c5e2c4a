// What the device code of dense_fp8 is given, by value, and the sizes that all its tiles share.
#ifndef GPTOSS_TRT_DENSE_FP8_PARAMS_H_
#define GPTOSS_TRT_DENSE_FP8_PARAMS_H_

#include <cstdint>

namespace gptoss::dense_fp8 {

constexpr int kBlock = 128;    // columns of K that share scales, and rows of a weight's block
constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kMostParts = 8;     // of K, as many as a cluster has blocks
constexpr int kSegmentStep = 8;   // segments are multiples of it: a thread stores eight columns
constexpr int kHeadDim = 64;      // of q, k and v
constexpr int kWideBlocks = 2;    // of a cluster that multiplies wide items (wide.cuh)
constexpr int kWideTokens = 128;  // of each
constexpr int kWideGroups = 3;    // of a whole item
constexpr int kGroupRows = 64;    // of the weight: a head of q, k or v

// Of a tile: the results are stored, rotated and kept (rotate.cuh), or added to what `out` holds.
enum class End { kStore, kRotate, kAdd };

// How a product of many tokens is cut into items (wide_schedule.h).
struct WideCut {
  int clusters;
  int token_tiles;   // of kWideBlocks * kWideTokens
  int groups;        // of kGroupRows
  int whole_items;   // of kWideGroups groups; the others are cut into single
                     // groups
  int whole_tails;   // of the groups behind them
  int tokens_first;  // neighbours in time have the same weights, else the same
                     // tokens
};

struct Params {
  const float* x_scale;       // [k_blocks, tokens]
  const float* weight_scale;  // [tiles, k_blocks]: a tile is a block of the weight
  const uint16_t* bias;       // bf16 bits [n], or null
  void* out;                  // bf16 or fp32 [tokens, n]; with End::kAdd a residual in bf16
  int tokens;
  int n;
  int k_blocks;
  int segments[2];  // rows; each segment begins a new tile
  int tiles;        // of the weight
  int token_tiles;
  int tail_halves;   // of the last 128 columns of K: 1 where 64 will do
  int parts;         // of K
  int tokens_first;  // neighbours in time have the same weights, else the same
                     // tokens
  int out_fp32;
  WideCut cut;  // of many tokens
  // Where rotated results go; `out` then is q, bf16 [tokens, segments[0]]. Null without rotation.
  uint16_t* k_cache;  // bf16 [blocks, kv_heads, block_tokens, 64]
  uint16_t* v_cache;
  const int32_t* positions;  // [tokens]
  const int32_t* slots;      // [tokens], -1: no key is kept
  const float* cos_sin;      // [positions, 64]: cos of 32 angles, then their sin
  int kv_heads;
  int block_shift;  // block_tokens = 1 << block_shift
};

}  // namespace gptoss::dense_fp8

#endif  // GPTOSS_TRT_DENSE_FP8_PARAMS_H_
