#include "core/tensor_map.h"
#include "decode_one/kernel.cuh"

namespace gptoss::one {
namespace {

template <Format kFormat>
cudaError_t launch(Params& params, const void* lm_head, int blocks, cudaStream_t stream) {
  constexpr int kElement = element_bytes(kFormat);
  cudaError_t error = encode_byte_map(&params.lm_head, lm_head, params.vocabulary,
                                      kHidden * kElement, kLmHeadStripRows, kTileRowBytes);
  for (int l = 0; l < params.num_layers && error == cudaSuccess; ++l) {
    error = encode_byte_map(params.qkv + l, params.layers[l].qkv_weight, kQkvRows,
                            kHidden * kElement, kQkvStripRows, kTileRowBytes);
    if (error != cudaSuccess) break;
    error = encode_byte_map(params.out + l, params.layers[l].out_weight, kHidden,
                            kAttended * kElement, kOutStripRows, kTileRowBytes);
  }
  const auto kernel = decode_one_kernel<kFormat>;
  constexpr int kShared = sizeof(Shared);
  static_assert(kShared <= 227 * 1024, "more shared memory than a block may have");
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  }
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

cudaError_t launch_decode_one(Format format, Params& params, const void* lm_head, int blocks,
                              cudaStream_t stream) {
  return format == Format::kFp8 ? launch<Format::kFp8>(params, lm_head, blocks, stream)
                                : launch<Format::kBf16>(params, lm_head, blocks, stream);
}

}  // namespace gptoss::one
