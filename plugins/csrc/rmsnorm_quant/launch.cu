#include "rmsnorm_quant/kernel.cuh"
#include "rmsnorm_quant/warp_kernel.cuh"

namespace gptoss::rmsnorm_quant {
namespace {

// From so many tokens on a multiprocessor is filled again and again, and the loads on their way
// need more first-level cache than the kernel ahead of much shared memory has left: 76 us for 90
// with expert rows (8,192 tokens).
constexpr int kManyTokens = 1024;

cudaError_t launch(void (*kernel)(Params), int blocks, int threads, const Params& params,
                   const LaunchOptions& options) {
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
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = options.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace

cudaError_t launch_rmsnorm_quant(const Params& params, const LaunchOptions& options) {
  const int threads = (params.hidden + 32 * kLane - 1) / (32 * kLane) * 32;
  if (params.rows != nullptr) {
    return launch(rmsnorm_quant_kernel<Source::kRows>, params.tokens, threads, params, options);
  }
  if (params.delta == nullptr && params.tokens >= kManyTokens && params.hidden <= kWarpHidden) {
    return launch(rmsnorm_quant_warp_kernel, (params.tokens + kTokenWarps - 1) / kTokenWarps,
                  32 * kTokenWarps, params, options);
  }
  return launch(params.delta != nullptr ? rmsnorm_quant_kernel<Source::kDelta>
                                        : rmsnorm_quant_kernel<Source::kResidual>,
                params.tokens, threads, params, options);
}

}  // namespace gptoss::rmsnorm_quant
