#include "dense_fp8/plan.h"

#include <algorithm>

#include "dense_fp8/params.h"

namespace gptoss::dense_fp8 {

// Measured on an H200 (132 multiprocessors) with weights of 40, 23 and 1,571 tiles (qkv, out, the
// lm head).
Plan choose_plan(int tokens, int tiles, int k_blocks, int multiprocessors) {
  constexpr int kSmall = 64, kMiddle = 128, kLarge = 256;
  constexpr int kLargeTokens = 768;  // from which on pairs of tiles fill the card
  constexpr int kUsefulParts = 3;    // more cost in adding what they save
  const bool few_tiles = 2 * tiles <= multiprocessors;
  if (tokens >= kLargeTokens) return {kLarge, 1};
  const int tile = tokens <= kSmall || (tokens <= kMiddle && few_tiles) ? kSmall : kMiddle;
  const int blocks = tiles * ((tokens + tile - 1) / tile);
  // Clusters want a quarter of the multiprocessors free to find their places.
  const int room = 3 * multiprocessors / (4 * blocks);
  return {tile, std::max(1, std::min({room, k_blocks, kUsefulParts}))};
}

}  // namespace gptoss::dense_fp8
