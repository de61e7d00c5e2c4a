#include "moe_gemm_fp8/launch.h"
#include "moe_gemm_fp8/simt_kernel.cuh"

namespace gptoss::moe {

cudaError_t launch_simt(Storage storage, const Params& params, const LaunchOptions& options) {
  const auto kernel = storage == Storage::kMxfp4 ? moe_gemm_simt_kernel<Storage::kMxfp4>
                                                 : moe_gemm_simt_kernel<Storage::kFp8>;
  const dim3 grid(params.strips, params.rows);
  kernel<<<grid, kSimtThreads, 0, options.stream>>>(params, options.gate_up ? 1 : 0,
                                                    options.x_scale_per_64 ? 64 : 128);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || !options.gate_up) return error;
  return launch_quantise(params, options);
}

}  // namespace gptoss::moe
