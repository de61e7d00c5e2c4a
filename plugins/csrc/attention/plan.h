// Which kernel and which cut of the keys: pure functions of a call's sizes.
#ifndef GPTOSS_TRT_ATTENTION_PLAN_H_
#define GPTOSS_TRT_ATTENTION_PLAN_H_

#include <cstdint>

#include "gptoss_trt.h"

namespace gptoss::attention {

struct DecodePlan {
  int warps;      // of a block: 4 or 8
  int parts;      // blocks that share one sequence's keys for one KV head
  int part_keys;  // of each: a multiple of block_tokens
};

// Decode: eight warps a block and a part every 4,096 keys, so that a token's result depends on its
// own position and keys alone.
constexpr int kFixedPlan = 4;
constexpr int kFixedWarps = 8;

enum class PrefillKind {  // consumer warpgroups x keys of a block
  kFull = 1,              // 3 x 64, two sets of scores; no window
  kSums = 2,              // 2 x 128, sums of weights by the tensor cores
  kLongStrips = 3,        // a window: strips of a sequence, all their keys in shared memory,
  kShortStrips = 4,       // four warpgroups, or two and two blocks a multiprocessor
};

constexpr int kWindowKeys = 128;    // of the window that strips are for
constexpr int kLongStripPages = 8;  // of 64 tokens, at most
constexpr int kShortStripPages = 2;

struct PrefillPlan {
  PrefillKind kind;
  int strip;   // tokens of a block of strips, whole pages
  int blocks;  // of kFull, at most
};

DecodePlan decode_plan(const gptoss_trt_attention_args& args);
PrefillPlan prefill_plan(const gptoss_trt_attention_args& args);

// Where a decode call's parts lie in its workspace.
struct DecodeWorkspace {
  int64_t stats;  // offset in bytes; the parts' outputs are at 0
  int64_t total_bytes;
};

DecodeWorkspace decode_workspace(const gptoss_trt_attention_args& args);

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_PLAN_H_
