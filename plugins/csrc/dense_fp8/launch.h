// From checked arguments to a kernel on a stream.
#ifndef GPTOSS_TRT_DENSE_FP8_LAUNCH_H_
#define GPTOSS_TRT_DENSE_FP8_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "dense_fp8/params.h"
#include "dense_fp8/plan.h"

namespace gptoss::dense_fp8 {

struct Tensors {
  const void* x;       // e4m3 [tokens, k]
  const void* weight;  // e4m3 [n, k]
  int k;
};

struct LaunchOptions {
  bool dependent_launch;
  bool adds;  // to what the output holds; tiles of 128 or 256 tokens that keep K whole
  int multiprocessors;
  cudaStream_t stream;
};

// Fills in what of `params` the plan decides.
cudaError_t launch_dense_fp8(const Plan& plan, Params params, const Tensors& tensors,
                             const LaunchOptions& options);

}  // namespace gptoss::dense_fp8

#endif  // GPTOSS_TRT_DENSE_FP8_LAUNCH_H_
