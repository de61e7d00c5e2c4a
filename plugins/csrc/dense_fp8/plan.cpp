#include "dense_fp8/plan.h"

#include <algorithm>
#include <climits>
#include <vector>

#include "dense_fp8/params.h"

namespace gptoss::dense_fp8 {
namespace {

constexpr int ceil_div(int value, int divisor) { return (value + divisor - 1) / divisor; }

// What the busiest cluster has to do. Items of three, two and one groups took as six to five to
// four on an H200.
int longest_work(const WideCut& cut) {
  const int tail = cut.groups % kWideGroups;
  const int items = cut.token_tiles * (cut.groups / kWideGroups);
  const int whole = cut.whole_items + cut.whole_tails;
  const int singles =
      kWideGroups * (items - cut.whole_items) + tail * (cut.token_tiles - cut.whole_tails);
  const auto work_of = [](int groups) { return groups + 3; };
  const int rounds = cut.whole_items / cut.clusters;  // that all clusters have whole items in
  std::vector<int> work(cut.clusters, rounds * work_of(kWideGroups));
  for (int item = rounds * cut.clusters; item < whole + singles; ++item) {
    const int round = item / cut.clusters, place = item % cut.clusters;
    work[round % 2 == 0 ? place : cut.clusters - 1 - place] +=
        work_of(item < cut.whole_items ? kWideGroups
                : item < whole         ? tail
                                       : 1);
  }
  return *std::max_element(work.begin(), work.end());
}

}  // namespace

// Measured on an H200 (132 multiprocessors) with weights of 40, 23 and 1,571 tiles (qkv, out, the
// lm head).
Plan choose_plan(int tokens, int tiles, int k_blocks, int multiprocessors) {
  constexpr int kSmall = 64, kMiddle = 128, kLarge = 256;
  constexpr int kLargeTokens = 768;  // from which on wide items fill the card
  constexpr int kUsefulParts = 3;    // more cost in adding what they save
  const bool few_tiles = 2 * tiles <= multiprocessors;
  if (tokens >= kLargeTokens) return {kLarge, 1};
  const int tile = tokens <= kSmall || (tokens <= kMiddle && few_tiles) ? kSmall : kMiddle;
  const int blocks = tiles * ((tokens + tile - 1) / tile);
  // Clusters want a quarter of the multiprocessors free to find their places.
  const int room = 3 * multiprocessors / (4 * blocks);
  return {tile, std::max(1, std::min({room, k_blocks, kUsefulParts}))};
}

WideCut cut_wide(int tokens, int rows, int multiprocessors) {
  WideCut cut{};
  cut.token_tiles = ceil_div(tokens, kWideBlocks * kWideTokens);
  cut.groups = ceil_div(rows, kGroupRows);
  cut.clusters = std::min(multiprocessors / kWideBlocks, cut.token_tiles * cut.groups);
  cut.tokens_first = rows > tokens;  // the larger operand is read once
  const int items = cut.token_tiles * (cut.groups / kWideGroups);
  const int tails = cut.groups % kWideGroups > 0 ? cut.token_tiles : 0;
  const int filled = (items + tails) / cut.clusters * cut.clusters;
  const int filled_items = items / cut.clusters * cut.clusters;
  const int whole[][2] = {{items, tails},
                          {items, std::clamp(filled - items, 0, tails)},
                          {std::min(items, filled), tails},
                          {filled_items, tails},
                          {filled_items, 0}};
  int least = INT_MAX;
  WideCut best = cut;
  for (const auto& [whole_items, whole_tails] : whole) {
    cut.whole_items = whole_items;
    cut.whole_tails = whole_tails;
    const int work = longest_work(cut);
    if (work < least) {
      least = work;
      best = cut;
    }
  }
  return best;
}

}  // namespace gptoss::dense_fp8
