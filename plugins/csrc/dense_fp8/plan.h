// Which tiles multiply a shape: a pure function of its sizes.
#ifndef GPTOSS_TRT_DENSE_FP8_PLAN_H_
#define GPTOSS_TRT_DENSE_FP8_PLAN_H_

#include "dense_fp8/params.h"

namespace gptoss::dense_fp8 {

struct Plan {
  int tile_tokens;  // 64, 128 or 256
  int parts;        // of K, a cluster's blocks: 1 to kMostParts, 1 with 256
};

// `tiles`: blocks of 128 rows of the weight.
Plan choose_plan(int tokens, int tiles, int k_blocks, int multiprocessors);

// Of the products of so many tokens with a weight of `rows` rows.
WideCut cut_wide(int tokens, int rows, int multiprocessors);

}  // namespace gptoss::dense_fp8

#endif  // GPTOSS_TRT_DENSE_FP8_PLAN_H_
