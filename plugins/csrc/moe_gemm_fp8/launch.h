// How a checked and planned product is put on a stream.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_LAUNCH_H_
#define GPTOSS_TRT_MOE_GEMM_FP8_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "moe_gemm_fp8/params.h"

namespace gptoss::moe {

struct LaunchOptions {
  bool gate_up;
  bool x_scale_per_64;  // DOWN in BLOCK64 mode
  bool dependent_launch;
  int multiprocessors;
  int share;  // of the plan
  bool pairs;
  cudaStream_t stream;
};

cudaError_t launch_wgmma(Storage storage, const Params& params, const LaunchOptions& options);
// From h_values to out and out_scale; behind a product that left h there.
cudaError_t launch_quantise(const Params& params, const LaunchOptions& options);
// Behind a kernel that brings the activations into tiles.
cudaError_t launch_prefill(Storage storage, const Params& params, const LaunchOptions& options);
// On FP8 tiles, or MXFP4 that is expanded into such; behind a kernel that sorts the rows of x.
cudaError_t launch_tiles(Storage storage, const Params& params, const LaunchOptions& options);
cudaError_t launch_simt(Storage storage, const Params& params, const LaunchOptions& options);

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_LAUNCH_H_
