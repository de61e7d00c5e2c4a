#include "attention/plan.h"

#include <algorithm>

#include "attention/params.h"

namespace gptoss::attention {
namespace {

constexpr int kWantedBlocks = 4096;   // some eight rounds of what an H200 holds at once
constexpr int kLeastPartKeys = 128;   // two tiles for each of four warps
constexpr int kAlignment = 256;

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

DecodePlan decode_plan(const gptoss_trt_attention_args& args) {
  const int warps = args.plan != 0 ? 4 * args.plan : 4;
  if (args.window != 0) return {warps, 1, 0};
  const int pairs = std::max(1, args.sequences * args.kv_heads);
  const int64_t keys = static_cast<int64_t>(args.table_width) * args.block_tokens;
  const int wanted = std::clamp(args.parts != 0 ? args.parts : ceil_div(kWantedBlocks, pairs), 1, kMaxParts);
  const int least = args.parts != 0 ? args.block_tokens : std::max(kLeastPartKeys, args.block_tokens);
  const int blocks = ceil_div(std::max(ceil_div(keys, wanted), least), args.block_tokens);
  const int part_keys = blocks * args.block_tokens;
  return {warps, std::max(1, ceil_div(keys, part_keys)), part_keys};
}

PrefillKind prefill_plan(const gptoss_trt_attention_args& args) {
  if (args.plan != 0) return static_cast<PrefillKind>(args.plan);
  return args.window != 0 ? PrefillKind::kThree64 : PrefillKind::kThree128;
}

DecodeWorkspace decode_workspace(const gptoss_trt_attention_args& args) {
  const DecodePlan plan = decode_plan(args);
  if (plan.parts == 1) return {0, 0};
  const int64_t slots = static_cast<int64_t>(args.sequences) * args.kv_heads * plan.parts;
  const int64_t stats = aligned(slots * kGroup * kHeadDim * static_cast<int64_t>(sizeof(float)));
  return {stats, stats + aligned(slots * kGroup * 2 * static_cast<int64_t>(sizeof(float)))};
}

}  // namespace gptoss::attention
