#include "decode_one/kernel.cuh"

namespace gptoss::one {
namespace {

template <Format kFormat>
cudaError_t launch(const Params& params, int blocks, cudaStream_t stream) {
  const auto kernel = decode_one_kernel<kFormat>;
  constexpr int kShared = sizeof(Shared);
  static_assert(kShared <= 227 * 1024, "more shared memory than a block may have");
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;  // all blocks at once, or an error
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kShared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace

cudaError_t launch_decode_one(Format format, const Params& params, int blocks,
                              cudaStream_t stream) {
  return format == Format::kFp8 ? launch<Format::kFp8>(params, blocks, stream)
                                : launch<Format::kBf16>(params, blocks, stream);
}

}  // namespace gptoss::one
