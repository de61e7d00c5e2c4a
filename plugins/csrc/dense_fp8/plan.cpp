#include "dense_fp8/plan.h"

#include <algorithm>

#include "dense_fp8/params.h"

namespace gptoss::dense_fp8 {

Plan choose_plan(int tokens, int tiles, int k_blocks, int multiprocessors) {
  Plan plan{256, 2, 1, 1};
  if (tokens <= 128) {
    plan = {tokens <= 64 ? 64 : 128, 1, 1, 1};
  } else if (tokens <= 1024) {
    plan = {128, 2, 1, 1};
  }
  const int blocks = tiles * ((tokens + plan.tile_tokens - 1) / plan.tile_tokens);
  if (2 * blocks <= multiprocessors) {
    plan.share = 1;
    plan.parts = std::min({multiprocessors / blocks, k_blocks, kMostParts});
  }
  return plan;
}

}  // namespace gptoss::dense_fp8
