#include "moe_gemm_fp8/gather_kernel.cuh"
#include "moe_gemm_fp8/launch.h"
#include "moe_gemm_fp8/prefill_kernel.cuh"

namespace gptoss::moe {
namespace {

using Kernel = void (*)(const Params);

// GATE_UP has one kernel for all scales of h.
template <Storage kStorage>
Kernel select(const LaunchOptions& options) {
  if (options.gate_up) return moe_gemm_prefill_kernel<kStorage, Kind::kGateUpGroups>;
  return options.x_scale_per_64 ? moe_gemm_prefill_kernel<kStorage, Kind::kDownPer64>
                                : moe_gemm_prefill_kernel<kStorage, Kind::kDown>;
}

}  // namespace

cudaError_t launch_prefill(Storage storage, const Params& params, const LaunchOptions& options) {
  const Kernel kernel = storage == Storage::kMxfp4 ? select<Storage::kMxfp4>(options)
                                                   : select<Storage::kFp8>(options);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, params.prefill.total_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.stream = options.stream;
  config.attrs = &attribute;
  config.numAttrs = options.dependent_launch ? 1 : 0;
  config.gridDim = dim3(ceil_div(params.rows, kGatherRows));
  config.blockDim = dim3(kGatherThreads);
  config.dynamicSmemBytes = gather_shared_bytes(params.experts);
  const cudaError_t gathered = cudaLaunchKernelEx(
      &config, options.gate_up ? gather_kernel<true> : gather_kernel<false>, params);
  if (gathered != cudaSuccess) return gathered;
  config.gridDim = dim3(options.multiprocessors);
  config.blockDim = dim3(kPrefillThreads);
  config.dynamicSmemBytes = params.prefill.total_bytes;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace gptoss::moe
