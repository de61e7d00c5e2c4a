#include "rmsnorm_quant/kernel.cuh"

namespace gptoss::rmsnorm_quant {
namespace {

// From so many tokens on a multiprocessor is filled again and again, and the loads on their way
// need more first-level cache than the kernel ahead of much shared memory has left: 76 us for 90
// with expert rows (8,192 tokens).
constexpr int kManyTokens = 1024;

template <Source kSource>
cudaError_t launch(const Params& params, const LaunchOptions& options) {
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (options.dependent_launch) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (params.tokens >= kManyTokens) {
    attributes[count].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[count++].val.sharedMemCarveout = cudaSharedmemCarveoutMaxL1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(params.tokens);
  config.blockDim = dim3((params.hidden + 32 * kLane - 1) / (32 * kLane) * 32);
  config.stream = options.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, rmsnorm_quant_kernel<kSource>, params);
}

}  // namespace

cudaError_t launch_rmsnorm_quant(const Params& params, const LaunchOptions& options) {
  if (params.rows != nullptr) return launch<Source::kRows>(params, options);
  return params.delta != nullptr ? launch<Source::kDelta>(params, options)
                                 : launch<Source::kResidual>(params, options);
}

}  // namespace gptoss::rmsnorm_quant
