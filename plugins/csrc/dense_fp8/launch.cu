#include <algorithm>

#include "core/tensor_map.h"
#include "dense_fp8/kernel.cuh"
#include "dense_fp8/launch.h"

namespace gptoss::dense_fp8 {
namespace {

constexpr int ceil_div(int value, int divisor) { return (value + divisor - 1) / divisor; }

template <typename S>
cudaError_t launch(Params params, const Tensors& tensors, const LaunchOptions& options) {
  const auto kernel = dense_fp8_kernel<S>;
  CUtensorMap x_map, weight_map;
  cudaError_t error =
      encode_byte_map(&x_map, tensors.x, params.tokens, tensors.k, S::kTokens, kBlock);
  if (error == cudaSuccess) {
    error = encode_byte_map(&weight_map, tensors.weight, params.n, tensors.k, kBlock, kBlock);
  }
  if (error == cudaSuccess) {
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
  }
  if (error != cudaSuccess) return error;
  params.token_tiles = ceil_div(params.tokens, S::kTokens);
  params.tokens_first = params.n > params.tokens;  // the larger operand is read once
  const int work = params.tiles * params.token_tiles;
  const int cluster = S::kSplit ? params.parts : 1;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(S::kSplit ? cluster * work : std::min(work, options.multiprocessors));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = S::kSharedBytes;
  config.stream = options.stream;
  config.attrs = attributes;
  config.numAttrs = options.dependent_launch ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params, x_map, weight_map);
}

template <End kEnd>
cudaError_t launch_shape(int tile_tokens, const Params& params, const Tensors& tensors,
                         const LaunchOptions& options) {
  const bool split = params.parts > 1;
  switch (tile_tokens) {
    case 64:
      return split ? launch<Shape<64, 8, true, kEnd>>(params, tensors, options)
                   : launch<Shape<64, 8, false, kEnd>>(params, tensors, options);
    case 128:
      return split ? launch<Shape<128, 6, true, kEnd>>(params, tensors, options)
                   : launch<Shape<128, 6, false, kEnd>>(params, tensors, options);
    case 256:
      return split ? cudaErrorInvalidValue
                   : launch<Shape<256, 4, false, kEnd>>(params, tensors, options);
    default:
      return cudaErrorInvalidValue;
  }
}

// Many tokens only.
cudaError_t launch_adding(int tile_tokens, const Params& params, const Tensors& tensors,
                          const LaunchOptions& options) {
  return tile_tokens == 256 ? launch<Shape<256, 4, false, End::kAdd>>(params, tensors, options)
                            : launch<Shape<128, 6, false, End::kAdd>>(params, tensors, options);
}

}  // namespace

cudaError_t launch_dense_fp8(const Plan& plan, Params params, const Tensors& tensors,
                             const LaunchOptions& options) {
  params.parts = plan.parts;
  if (options.adds) return launch_adding(plan.tile_tokens, params, tensors, options);
  return params.k_cache != nullptr
             ? launch_shape<End::kRotate>(plan.tile_tokens, params, tensors, options)
             : launch_shape<End::kStore>(plan.tile_tokens, params, tensors, options);
}

}  // namespace gptoss::dense_fp8
