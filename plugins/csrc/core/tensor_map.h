// Tensor maps, encoded by the driver; the library links none, so its function is asked for at run
// time.
#ifndef GPTOSS_TRT_CORE_TENSOR_MAP_H_
#define GPTOSS_TRT_CORE_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace gptoss {

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

// Null where the driver has no such function.
inline EncodeTensorMap find_tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<EncodeTensorMap>(function);
}

// A matrix of bytes, contiguous, cut into boxes of box_rows by box_bytes with 128-byte swizzle.
inline cudaError_t encode_byte_map(CUtensorMap* map, const void* base, int rows, int row_bytes,
                                   int box_rows, int box_bytes) {
  static const EncodeTensorMap encode = find_tensor_map_encoder();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_bytes), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(base), sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace gptoss

#endif  // GPTOSS_TRT_CORE_TENSOR_MAP_H_
