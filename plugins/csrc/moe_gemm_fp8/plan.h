// From a description of the product to a configuration: a pure function of sizes, tested without a
// GPU. Knows no pointers and no CUDA.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_PLAN_H_
#define GPTOSS_TRT_MOE_GEMM_FP8_PLAN_H_

#include <cstdint>

#include "gptoss_trt.h"
#include "moe_gemm_fp8/layout.h"

namespace gptoss::moe {

// Warpgroups that multiply; they take the records of K in turn, so the order of a sum depends on
// this number. Each has a ring of its own and a warp that feeds it: whoever waits on a barrier must
// see all of its phases, because a parity tells apart no more than two.
constexpr int kConsumers = 4;
constexpr int kConsumerThreads = kConsumers * 128;
constexpr int kThreads = kConsumerThreads + kConsumers * 32;
constexpr int kMaxTokenBlock = 32;
constexpr int kColumnStep = 8;  // an instruction serves 8, 16, 24 or 32 tokens
constexpr int kWidths = kMaxTokenBlock / kColumnStep;
// Of one ring. More were slower from 8 tokens on (measured, 8 against 3: 82 us for 77 at 64
// tokens).
constexpr int kMaxStages = 3;
constexpr int kShareWords = 4;  // of a block's Share (schedule.cuh)
constexpr int kMinStages = 2;
constexpr int kMaxSplit = 8;
// sm_90: what one block may take, less what the kernels declare statically.
constexpr int kSharedBytesLimit = 227 * 1024 - 512;
// Up to this many tokens the experts in use are too few strips for all multiprocessors.
constexpr int kSplitTokens = 2;
constexpr int kFewTokensSplit = 1;

// Byte offsets into the block's dynamic shared memory.
struct SharedLayout {
  int barriers;  // full and empty [kConsumers][kMaxStages], partial full, partial free
  int offsets;   // [E + 1] rows, token blocks and their costs before an expert; then Share
  int row_info;  // per token of the block: output slot, routing weight
  int bias;      // bf16 [n] of the block's expert
  int tokens;    // e4m3 core matrices [K / 16][token block / 8][8][16]
  int scales;    // f32 [scale groups][token block]
  int partials;  // kConsumers - 1 fragments of f32 [64 x token block]
  int rings;     // [kConsumers][stages] of one record
  int stage_bytes;
  int stages;  // of one ring
  int total_bytes;
};

// The prefill plan: warpgroups that multiply, each a strip of its own, with the same block of
// tokens.
constexpr int kPrefillConsumers = 2;
constexpr int kPrefillConsumerThreads = kPrefillConsumers * 128;
constexpr int kPrefillThreads = kPrefillConsumerThreads + 128;
constexpr int kPrefillBlock = 128;  // tokens
constexpr int kPrefillMaxStages = 8;
// GATE_UP finishes 4 strips, 128 channels of h, at a time: the most that share a scale.
constexpr int kPrefillChannels = 128;
constexpr int kPrefillValuePitch = kPrefillChannels + 4;  // floats; other rows, other banks
// AUTO takes the prefill plan from this many rows an expert on average and behind this many tokens,
// which decode batches do not exceed (measured: below, it is slower by up to a half).
constexpr int kPrefillRows = 32;
constexpr int kMostDecodeTokens = 256;

// Byte offsets into the block's dynamic shared memory, prefill plan.
struct PrefillShared {
  int barriers;  // full and empty [kPrefillMaxStages]
  int items;     // item of each stage, and of the values: 16 bytes each
  int tables;    // i32 [3][E + 1]: rows, token blocks, columns of token blocks before an expert
  int row_info;  // DOWN, [kPrefillConsumers][kPrefillBlock]: output slot and routing weight
  int values;    // GATE_UP, f32 [kPrefillBlock][kPrefillValuePitch]: h of an item
  int ring;      // [stages]: token tile, then a record of each warpgroup's strip
  int record_offset;
  int record_pitch;
  int stage_bytes;
  int stages;
  int total_bytes;
};

// Columns of the instruction that serves the `rows` (1 to kPrefillBlock) of a token block.
GPTOSS_HOST_DEVICE constexpr int block_columns(int rows) {
  return rows <= 16 ? 16 : rows <= 32 ? 32 : rows <= 64 ? 64 : rows <= 96 ? 96 : kPrefillBlock;
}

// Columns of all token blocks of an expert with `rows` rows.
GPTOSS_HOST_DEVICE constexpr int expert_columns(int rows) {
  const int tail = rows % kPrefillBlock;
  return rows - tail + (tail > 0 ? block_columns(tail) : 0);
}
constexpr int kMostPadding = 31;  // expert_columns(rows) - rows

// The prefill plan on FP8 tiles: rows of an expert go in chunks, and a block of threads takes up to
// kBlockChunks of them at a time, dealt to its warpgroups in turn (of pairs of tiles: half).
constexpr int kChunkRows = 64;
constexpr int kTileConsumers = 2;
constexpr int kOwnBlocks = 2;  // products of a chunk and a tile that a warpgroup has at once
constexpr int kBlockChunks = kTileConsumers * kOwnBlocks;
constexpr int kBlockRows = kBlockChunks * kChunkRows;
// From this many rows an expert on average two blocks of threads share tokens (measured: 5% faster
// at 1,024, 2% slower at 256).
constexpr int kSharedRows = 512;
// DOWN takes FP8 tiles in pairs below this many (measured: 6% faster at 64, 4% at 128, as fast to
// 3% slower at 256), GATE_UP always.
constexpr int kPairedDownRows = 192;
// MXFP4 is expanded into FP8 tiles from this many rows an expert on average (measured: GATE_UP as
// fast at 256 of 20b, 8% slower at 128 of 120b; DOWN 8% faster at 128 of 20b, 13% at 256).
constexpr int kExpandedGateUpRows = 256;
constexpr int kExpandedDownRows = 128;
constexpr int kMostExpandedExperts = 384;  // whose tables have room in shared memory

// Byte offsets into the caller's workspace. `counter_bytes` from the start are counters.
struct WorkspaceLayout {
  uint64_t split_tickets;  // i32 [token blocks][strips]
  uint64_t tile_items;     // i32, items taken on FP8 tiles
  uint64_t counter_bytes;
  uint64_t h_values;       // f32 [P, n / 2] before quantisation
  uint64_t partials;       // f32 [token blocks][strips][k_split][64 x token block]
  uint64_t items_taken;    // i32, prefill
  uint64_t row_info;       // prefill DOWN
  uint64_t gathered;       // token tiles, prefill
  uint64_t sorted_scales;  // on FP8 tiles
  uint64_t total_bytes;
};

struct Plan {
  gptoss_trt_moe_plan kind;
  int token_block;  // rows of an expert that one pass over its weights serves
  int k_split;
  bool tiles;           // the kernel on FP8 tiles, into which it expands MXFP4
  int share;            // blocks of threads with the same tokens, on FP8 tiles
  bool pairs;           // of tiles, on FP8 tiles that lie ready
  SharedLayout shared;  // of the WGMMA plan
  PrefillShared prefill;
};

// Rows of h (pairs of weight rows) that share one scale: 128, 64, or 0 for static.
int scale_group(int scale_mode);

// Bytes of one token in one record of a token tile: 128 codes and one or two scales.
int tile_row_bytes(const gptoss_trt_moe_gemm_args& args);

// Tiles for a call with args->tokens tokens. `shared.total_bytes` and `prefill.total_bytes` may
// exceed kSharedBytesLimit: the caller refuses then.
Plan make_plan(const gptoss_trt_moe_gemm_args& args);

// Depends on max_tokens, not on tokens.
WorkspaceLayout make_workspace(const gptoss_trt_moe_gemm_args& args);

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_PLAN_H_
