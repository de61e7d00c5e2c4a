#include "attention/plan.h"

#include <algorithm>

#include "attention/params.h"

namespace gptoss::attention {
namespace {

constexpr int kRoundBlocks = 256;      // of eight warps: one round on 132 multiprocessors, two each
constexpr int kLeastPartKeys = 128;    // one tile for each of eight warps
constexpr int kMostPartKeys = 8192;    // a block reads them in some 55 us: more, and others wait for it
constexpr int kShortKeys = 2048;       // up to here blocks of four warps begin sooner than they lack bytes
constexpr int kFewPairs = 256;         // windowed: up to here eight warps answer sooner
constexpr int kAlignment = 256;

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

int warps_of(const gptoss_trt_attention_args& args, int chosen) {
  return args.plan != 0 ? 1 << args.plan : chosen;
}

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

// Measured on an H200 at contexts of 1k and 8k, batches 1 to 128 (tests/perf/NOTES.md).
DecodePlan decode_plan(const gptoss_trt_attention_args& args) {
  const int pairs = std::max(1, args.tokens * args.kv_heads);
  if (args.window != 0) return {warps_of(args, pairs <= kFewPairs ? 8 : 4), 1, 0};
  const int64_t keys = static_cast<int64_t>(args.table_width) * args.block_tokens;
  const bool crowded = pairs >= kRoundBlocks && keys <= kShortKeys;
  const int round = crowded ? 2 * kRoundBlocks : kRoundBlocks;
  const int chosen = std::max(ceil_div(round, pairs), ceil_div(keys, kMostPartKeys));
  const int wanted = args.parts != 0 ? args.parts : chosen;
  const int least = args.parts != 0 ? args.block_tokens : kLeastPartKeys;
  const int part = std::max(ceil_div(keys, std::min(wanted, kMaxParts)), least);
  const int part_keys = ceil_div(part, args.block_tokens) * args.block_tokens;
  return {warps_of(args, crowded ? 4 : 8), std::max(1, ceil_div(keys, part_keys)), part_keys};
}

PrefillKind prefill_plan(const gptoss_trt_attention_args& args) {
  if (args.plan != 0) return static_cast<PrefillKind>(args.plan);
  return args.window != 0 ? PrefillKind::kFour64 : PrefillKind::kThree128;
}

DecodeWorkspace decode_workspace(const gptoss_trt_attention_args& args) {
  const DecodePlan plan = decode_plan(args);
  if (plan.parts == 1) return {0, 0};
  const int64_t slots = static_cast<int64_t>(args.tokens) * args.kv_heads * plan.parts;
  const int64_t stats = aligned(slots * kGroup * kHeadDim * static_cast<int64_t>(sizeof(float)));
  return {stats, stats + aligned(slots * kGroup * 2 * static_cast<int64_t>(sizeof(float)))};
}

}  // namespace gptoss::attention
