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

enum class PrefillKind {  // consumer warpgroups, keys of a block
  kThree128 = 1,
  kTwo128 = 2,
  kThree64 = 3,
  kFour64 = 4,
  kThree128Turns = 5,
  kTwo128Early = 6,
  kTwo128EarlyTurns = 7,
  kTwo128SumsTurns = 8,
  kFour64Turns = 9,
  kTwo128Sums = 10,
  kThree128Deep = 11,
  kTwo128Turns = 12,
};

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
