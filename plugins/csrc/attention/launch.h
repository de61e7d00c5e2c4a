// How a checked and planned call is put on a stream.
#ifndef GPTOSS_TRT_ATTENTION_LAUNCH_H_
#define GPTOSS_TRT_ATTENTION_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "attention/plan.h"

namespace gptoss::attention {

struct LaunchOptions {
  bool dependent_launch;
  cudaStream_t stream;
};

cudaError_t launch_decode(const DecodeParams& params, const DecodePlan& plan, int tokens,
                          const LaunchOptions& options);

// The cache's and the queries' addresses, which the kernel sees through tensor maps.
struct PrefillTensors {
  const void* q;
  const void* k;
  const void* v;
};

cudaError_t launch_prefill(const PrefillParams& params, const PrefillTensors& tensors,
                           const PrefillPlan& plan, const LaunchOptions& options);

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_LAUNCH_H_
