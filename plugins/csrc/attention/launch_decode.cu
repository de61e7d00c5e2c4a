#include "attention/decode_kernel.cuh"
#include "attention/launch.h"

namespace gptoss::attention {

// Percent of a multiprocessor's 228 KB of shared memory: 64 KB, which the blocks that share it fit
// in. Without a wish a block that comes in beside a kernel ahead, or right behind it, finds all of
// it given to shared memory, and too little first-level cache for its loads on their way: 289 us
// for 249 behind a dense product (64 sequences, 8,192 keys).
constexpr int kCarveout = 28;

cudaError_t launch_decode(const DecodeParams& params, const DecodePlan& plan, int tokens,
                          const LaunchOptions& options) {
  // Sixteen warps a multiprocessor: 128 registers a thread hold two tiles of keys and values.
  const auto kernel = plan.warps == 2   ? attention_decode_kernel<2, 8>
                      : plan.warps == 4 ? attention_decode_kernel<4, 4>
                                        : attention_decode_kernel<8, 2>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, kCarveout);
  if (error != cudaSuccess) return error;
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
