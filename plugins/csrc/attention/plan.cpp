#include "attention/plan.h"

#include <algorithm>

#include "attention/params.h"

namespace gptoss::attention {
namespace {

constexpr int kMultiprocessors = 132;  // of an H200; other cards get its cuts
constexpr int kRoundBlocks = 256;      // of eight warps: two blocks a multiprocessor
constexpr int kLeastPartKeys = 128;    // one tile for each of eight warps
constexpr int kMostPartKeys = 16384;   // a block reads them in 110 us: more, and others wait for it
constexpr int kShortKeys = 2048;       // up to here adding parts costs more than it gains ...
constexpr int kShortPairs = 64;        // ... from so many pairs on
constexpr int kPlaces = 264;           // of blocks of eight warps on the card
constexpr double kEvenEnough = 0.9;
constexpr int kFixedPartKeys = 4096;  // kFixedPlan: 32 parts hold the model's longest context
constexpr int kAlignment = 256;
constexpr int kPageTokens = 64;

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Where a pair of token and KV head has one block, blocks are made small enough to run all at once.
int warps_of(const gptoss_trt_attention_args& args, int pairs, int64_t keys) {
  if (args.plan != 0) return 1 << args.plan;
  if (args.window != 0 && pairs > 2 * kPlaces) return 2;
  const bool is_short = args.window != 0 || keys <= kShortKeys;
  return is_short && pairs > kPlaces ? 4 : 8;
}

// Parts of the shortest context that a table is this wide for: at least a round of blocks, dealt
// out evenly.
int even_parts(int pairs) {
  const int least = std::min(ceil_div(kRoundBlocks, pairs), kMaxParts / 2);
  for (int parts = least; parts < least + 4; ++parts) {
    const int blocks = pairs * parts;
    const int most = ceil_div(blocks, kMultiprocessors);
    if (blocks >= kEvenEnough * most * kMultiprocessors) return parts;
  }
  return least;
}

// Keys of one part, before they are rounded up to blocks. Contexts are taken to fill half of the
// table or more, because its width is a power of two.
int64_t wanted_part_keys(const gptoss_trt_attention_args& args, int pairs, int64_t keys) {
  if (args.parts != 0) return ceil_div(keys, args.parts);
  if (keys <= kShortKeys) return pairs >= kShortPairs ? keys : kLeastPartKeys;
  const int parts = even_parts(pairs);
  const int64_t part = parts == 1 ? keys : std::max<int64_t>(keys / 2 / parts, kLeastPartKeys);
  return std::max<int64_t>(std::min<int64_t>(part, kMostPartKeys), ceil_div(keys, kMaxParts));
}

// Tokens of a strip, so that `places` blocks of the card have one each, or as few rounds of them as
// strips of `most_pages` need.
int strip_tokens(const gptoss_trt_attention_args& args, int most_pages, int places) {
  const int64_t pages = static_cast<int64_t>(ceil_div(args.tokens, kPageTokens)) * args.kv_heads;
  const int rounds = ceil_div(pages, places * most_pages);
  return ceil_div(pages, places * rounds) * kPageTokens;
}

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

// Measured on an H200 at contexts of 1k and 8k, batches 1 to 128 (tests/perf/NOTES.md).
DecodePlan decode_plan(const gptoss_trt_attention_args& args) {
  const int pairs = std::max(1, args.tokens * args.kv_heads);
  const int64_t keys =
      std::max<int64_t>(1, static_cast<int64_t>(args.table_width) * args.block_tokens);
  if (args.plan == kFixedPlan) {
    return args.window != 0
               ? DecodePlan{kFixedWarps, 1, 0}
               : DecodePlan{kFixedWarps, ceil_div(keys, kFixedPartKeys), kFixedPartKeys};
  }
  const int warps = warps_of(args, pairs, keys);
  if (args.window != 0) return {warps, 1, 0};
  const int part_keys =
      ceil_div(wanted_part_keys(args, pairs, keys), args.block_tokens) * args.block_tokens;
  return {warps, ceil_div(keys, part_keys), part_keys};
}

// Without a window: rounds of tiles over the card times the queries of a tile, over the speed of
// one. In a window: long strips where all of them run at once.
PrefillPlan prefill_plan(const gptoss_trt_attention_args& args) {
  PrefillPlan plan{static_cast<PrefillKind>(args.plan), 0, kMultiprocessors};
  if (args.plan == 0 && args.window == kWindowKeys) {
    const int strips = ceil_div(args.tokens, strip_tokens(args, kLongStripPages, kMultiprocessors));
    const int64_t blocks = (strips + std::max(args.sequences, 1) - 1) * int64_t{args.kv_heads};
    plan.kind = blocks <= kMultiprocessors ? PrefillKind::kLongStrips : PrefillKind::kShortStrips;
  } else if (args.plan == 0) {
    const auto cost = [&](int queries, double speed) {
      const int blocks = ceil_div(args.tokens, queries) * args.kv_heads;
      return ceil_div(blocks, kMultiprocessors) * queries / speed;
    };
    constexpr double kSumsSpeed = 0.88;
    const bool full = args.window == 0 && cost(24, 1.0) <= cost(16, kSumsSpeed);
    plan.kind = full ? PrefillKind::kFull : PrefillKind::kSums;
  }
  plan.strip = plan.kind == PrefillKind::kLongStrips
                   ? strip_tokens(args, kLongStripPages, kMultiprocessors)
                   : strip_tokens(args, kShortStripPages, 2 * kMultiprocessors);
  return plan;
}

DecodeWorkspace decode_workspace(const gptoss_trt_attention_args& args) {
  const DecodePlan plan = decode_plan(args);
  if (plan.parts == 1) return {0, 0};
  const int64_t slots = static_cast<int64_t>(args.tokens) * args.kv_heads * plan.parts;
  const int64_t stats = aligned(slots * kGroup * kHeadDim * static_cast<int64_t>(sizeof(float)));
  return {stats, stats + aligned(slots * kGroup * 2 * static_cast<int64_t>(sizeof(float)))};
}

}  // namespace gptoss::attention
