#include "core/tensor_map.h"
#include "moe_gemm_fp8/gather_tiles_kernel.cuh"
#include "moe_gemm_fp8/launch.h"
#include "moe_gemm_fp8/tiles_kernel.cuh"

namespace gptoss::moe {
namespace {

template <typename S>
cudaError_t launch(const Params& params, const LaunchOptions& options) {
  static_assert(!S::kExpand || S::shared_bytes(kMostExpandedExperts) <= kSharedBytesLimit);
  const auto kernel = moe_gemm_tiles_kernel<S>;
  const int bytes = S::shared_bytes(params.experts);
  CUtensorMap map;
  const void* tokens = S::kGate ? params.gathered : params.x;
  cudaError_t error =
      encode_byte_map(&map, tokens, params.rows, params.k, kChunkRows / S::kBoxes, kRecordColumns);
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
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = options.stream;
  config.attrs = attributes;
  config.numAttrs = options.dependent_launch ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params, map);
}

cudaError_t sort_rows(const Params& params, const LaunchOptions& options) {
  const int tokens = sort_tokens(params.x_rows, params.k, options.multiprocessors);
  const int bytes = sort_shared_bytes(tokens, params.k, params.experts);
  if (tokens == 0) return cudaErrorInvalidValue;
  const cudaError_t error =
      cudaFuncSetAttribute(sort_rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ceil_div(params.x_rows, tokens));
  config.blockDim = dim3(kSortThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = options.stream;
  config.attrs = &attribute;
  config.numAttrs = options.dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, sort_rows_kernel, params, tokens);
}

template <typename S>
cudaError_t launch_sorted(Params params, const LaunchOptions& options) {
  params.cluster_rows = S::kClusterChunks * kChunkRows;
  if constexpr (S::kGate) {
    const cudaError_t error = sort_rows(params, options);
    if (error != cudaSuccess) return error;
  }
  return launch<S>(params, options);
}

template <bool kGateUp, Storage kStorage, bool kPairs>
cudaError_t launch_shared(const Params& params, const LaunchOptions& options) {
  return options.share > 1
             ? launch_sorted<TileShape<kGateUp, 2, kStorage, kPairs>>(params, options)
             : launch_sorted<TileShape<kGateUp, 1, kStorage, kPairs>>(params, options);
}

// DOWN in pairs is for few rows, which two blocks do not share.
cudaError_t launch_down_tiles(const Params& params, const LaunchOptions& options) {
  constexpr auto kTiles = Storage::kFp8Tiles;
  return options.pairs ? launch_sorted<TileShape<false, 1, kTiles, true>>(params, options)
                       : launch_shared<false, kTiles, false>(params, options);
}

}  // namespace

cudaError_t launch_tiles(Storage storage, const Params& params, const LaunchOptions& options) {
  if (storage == Storage::kMxfp4) {
    return options.gate_up ? launch_shared<true, Storage::kMxfp4, false>(params, options)
                           : launch_shared<false, Storage::kMxfp4, false>(params, options);
  }
  return options.gate_up ? launch_shared<true, Storage::kFp8Tiles, true>(params, options)
                         : launch_down_tiles(params, options);
}

}  // namespace gptoss::moe
