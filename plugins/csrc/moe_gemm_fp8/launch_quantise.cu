#include "moe_gemm_fp8/launch.h"
#include "moe_gemm_fp8/quantise_kernel.cuh"

namespace gptoss::moe {

cudaError_t launch_quantise(const Params& params, const LaunchOptions& options) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(params.rows);
  config.blockDim = dim3(kQuantiseWarps * 32);
  config.stream = options.stream;
  config.attrs = &attribute;
  config.numAttrs = options.dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, quantise_kernel, params);
}

}  // namespace gptoss::moe
