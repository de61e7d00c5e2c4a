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
  kWide = 1,              // 3 x 64, two sets of scores
  kSums = 2,              // 2 x 128, sums of weights by the tensor cores
  kWindow = 3,            // 2 x 64, two blocks a multiprocessor, all keys of a tile at once
};

constexpr int kWindowStages = 4;  // of 64 keys
constexpr int kMostWindow =
    kWindowStages * 64 - 63 - 15;  // that the window kernel takes, 16 queries

DecodePlan decode_plan(const gptoss_trt_attention_args& args);
PrefillKind prefill_plan(const gptoss_trt_attention_args& args);

// Where a decode call's parts lie in its workspace.
struct DecodeWorkspace {
  int64_t stats;  // offset in bytes; the parts' outputs are at 0
  int64_t total_bytes;
};

DecodeWorkspace decode_workspace(const gptoss_trt_attention_args& args);

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_PLAN_H_
