#include "attention/decode_kernel.cuh"
#include "attention/launch.h"

namespace gptoss::attention {

cudaError_t launch_decode(const DecodeParams& params, const DecodePlan& plan, int tokens,
                          const LaunchOptions& options) {
  // Sixteen warps a multiprocessor: 128 registers a thread hold two tiles of keys and values.
  const auto kernel = plan.warps == 2   ? attention_decode_kernel<2, 8>
                      : plan.warps == 4 ? attention_decode_kernel<4, 4>
                                        : attention_decode_kernel<8, 2>;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(params.kv_heads, params.parts, tokens);
  config.blockDim = dim3(plan.warps * 32);
  config.stream = options.stream;
  config.attrs = &attribute;
  config.numAttrs = options.dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace gptoss::attention
