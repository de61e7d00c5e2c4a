#include <cuda.h>

#include "decode_one/kernel.cuh"

namespace gptoss::one {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, asked for at run time: the library links no driver.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Encode>(function);
}

// A weight of `rows` rows as bytes, cut into boxes of a strip's rows by kTileBytes, swizzled.
cudaError_t encode_map(CUtensorMap* map, const void* base, int rows, int row_bytes,
                       int strip_rows) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[2] = {kTileRowBytes, static_cast<cuuint32_t>(strip_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(base), sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <Format kFormat>
cudaError_t launch(Params& params, const void* lm_head, int blocks, cudaStream_t stream) {
  constexpr int kElement = element_bytes(kFormat);
  cudaError_t error =
      encode_map(&params.lm_head, lm_head, params.vocabulary, kHidden * kElement, kLmHeadStripRows);
  for (int l = 0; l < params.num_layers && error == cudaSuccess; ++l) {
    error = encode_map(params.qkv + l, params.layers[l].qkv_weight, kQkvRows, kHidden * kElement,
                       kQkvStripRows);
    if (error != cudaSuccess) break;
    error = encode_map(params.out + l, params.layers[l].out_weight, kHidden, kAttended * kElement,
                       kOutStripRows);
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
