// Which tiles and clusters multiply a shape: a pure function of its sizes.
#ifndef GPTOSS_TRT_DENSE_FP8_PLAN_H_
#define GPTOSS_TRT_DENSE_FP8_PLAN_H_

namespace gptoss::dense_fp8 {

struct Plan {
  int tile_tokens;  // 64, 128 or 256
  int share;        // blocks of a cluster with the same tokens: 1 or 2
  int parts;        // of K, a cluster's blocks: 1 to kMostParts
  int resident;     // blocks that a multiprocessor holds: 1, or 2 with tiles of 64 and a short ring
};

// `tiles`: blocks of 128 rows of the weight.
Plan choose_plan(int tokens, int tiles, int k_blocks, int multiprocessors);

}  // namespace gptoss::dense_fp8

#endif  // GPTOSS_TRT_DENSE_FP8_PLAN_H_
