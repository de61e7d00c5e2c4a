#include "moe_gemm_fp8/launch.h"
#include "moe_gemm_fp8/wgmma_kernel.cuh"

namespace gptoss::moe {
namespace {

using Kernel = void (*)(const Params);

template <Storage kStorage>
Kernel select(const LaunchOptions& options) {
  if (options.gate_up) return moe_gemm_wgmma_kernel<kStorage, Product::kGateUp, false>;
  if (options.x_scale_per_64) return moe_gemm_wgmma_kernel<kStorage, Product::kDown, true>;
  return moe_gemm_wgmma_kernel<kStorage, Product::kDown, false>;
}

}  // namespace

cudaError_t launch_wgmma(Storage storage, const Params& params, const LaunchOptions& options) {
  const Kernel kernel = storage == Storage::kMxfp4 ? select<Storage::kMxfp4>(options)
                                                   : select<Storage::kFp8>(options);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, params.shared.total_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(options.multiprocessors);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = params.shared.total_bytes;
  config.stream = options.stream;
  config.attrs = &attribute;
  config.numAttrs = options.dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace gptoss::moe
