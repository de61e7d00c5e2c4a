#include "rmsnorm_quant/kernel.cuh"

namespace gptoss::rmsnorm_quant {
namespace {

template <Source kSource>
cudaError_t launch(const Params& params, const LaunchOptions& options) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(params.tokens);
  config.blockDim = dim3((params.hidden + 32 * kLane - 1) / (32 * kLane) * 32);
  config.stream = options.stream;
  config.attrs = &attribute;
  config.numAttrs = options.dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, rmsnorm_quant_kernel<kSource>, params);
}

}  // namespace

cudaError_t launch_rmsnorm_quant(const Params& params, const LaunchOptions& options) {
  if (params.rows != nullptr) return launch<Source::kRows>(params, options);
  return params.delta != nullptr ? launch<Source::kDelta>(params, options)
                                 : launch<Source::kResidual>(params, options);
}

}  // namespace gptoss::rmsnorm_quant
