#include "moe_gemm_fp8/launch.h"
#include "moe_gemm_fp8/wgmma_kernel.cuh"

namespace gptoss::moe {
namespace {

using Kernel = void (*)(const Params);

template <Storage kStorage>
Kernel select(Kind kind) {
  switch (kind) {
    case Kind::kGateUpStatic:
      return moe_gemm_wgmma_kernel<kStorage, Kind::kGateUpStatic>;
    case Kind::kGateUpGroups:
      return moe_gemm_wgmma_kernel<kStorage, Kind::kGateUpGroups>;
    case Kind::kDown:
      return moe_gemm_wgmma_kernel<kStorage, Kind::kDown>;
    case Kind::kDownPer64:
      return moe_gemm_wgmma_kernel<kStorage, Kind::kDownPer64>;
  }
  return nullptr;
}

}  // namespace

cudaError_t launch_wgmma(Storage storage, const Params& params, const LaunchOptions& options) {
  const Kind gate_up = params.scale_group == 0 ? Kind::kGateUpStatic : Kind::kGateUpGroups;
  const Kind down = options.x_scale_per_64 ? Kind::kDownPer64 : Kind::kDown;
  const Kind kind = options.gate_up ? gate_up : down;
  const Kernel kernel =
      storage == Storage::kMxfp4 ? select<Storage::kMxfp4>(kind) : select<Storage::kFp8>(kind);
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
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, params);
  if (launched != cudaSuccess || kind != Kind::kGateUpGroups) return launched;
  return launch_quantise(params, options);
}

}  // namespace gptoss::moe
