#include <cuda.h>

#include "moe_gemm_fp8/gather_tiles_kernel.cuh"
#include "moe_gemm_fp8/launch.h"
#include "moe_gemm_fp8/tiles_kernel.cuh"

namespace gptoss::moe {
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

// e4m3 [rows, k], contiguous, cut into boxes of [box_rows, 128] with swizzled rows.
cudaError_t encode_map(CUtensorMap* map, const void* base, int rows, int k, int box_rows) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(k)};
  const cuuint32_t box[2] = {kRecordColumns, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(base), sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename S>
cudaError_t launch(const Params& params, const LaunchOptions& options) {
  const auto kernel = moe_gemm_tiles_kernel<S>;
  const int bytes = S::shared_bytes(params.experts);
  CUtensorMap map;
  const void* tokens = S::kGate ? params.gathered : params.x;
  cudaError_t error = encode_map(&map, tokens, params.rows, params.k, kChunkRows / S::kShare);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = S::kShare;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(options.multiprocessors / S::kShare * S::kShare);
  config.blockDim = dim3(kTileThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = options.stream;
  config.attrs = attributes;
  config.numAttrs = options.dependent_launch ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params, map);
}

cudaError_t sort_rows(const Params& params, const LaunchOptions& options) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ceil_div(params.rows, kSortRows));
  config.blockDim = dim3(kSortThreads);
  config.dynamicSmemBytes = sort_shared_bytes(params.experts);
  config.stream = options.stream;
  config.attrs = &attribute;
  config.numAttrs = options.dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, sort_rows_kernel, params);
}

template <bool kGateUp>
cudaError_t launch_shared(const Params& params, const LaunchOptions& options) {
  return options.share > 1 ? launch<TileShape<kGateUp, 2>>(params, options)
                           : launch<TileShape<kGateUp, 1>>(params, options);
}

}  // namespace

cudaError_t launch_tiles(const Params& params, const LaunchOptions& options) {
  if (!options.gate_up) return launch_shared<false>(params, options);
  const cudaError_t error = sort_rows(params, options);
  return error == cudaSuccess ? launch_shared<true>(params, options) : error;
}

}  // namespace gptoss::moe
