#include <algorithm>

#include "core/tensor_map.h"
#include "dense_fp8/kernel.cuh"
#include "dense_fp8/launch.h"
#include "dense_fp8/wide.cuh"

namespace gptoss::dense_fp8 {
namespace {

constexpr int ceil_div(int value, int divisor) { return (value + divisor - 1) / divisor; }

// Of x and the weight, for a kernel of Shape S, which gets its shared memory.
struct Maps {
  CUtensorMap x, weight;
};

template <typename S, typename Kernel>
cudaError_t prepare(const Kernel& kernel, const Params& params, const Tensors& tensors,
                    int weight_rows, Maps* maps) {
  cudaError_t error =
      encode_byte_map(&maps->x, tensors.x, params.tokens, tensors.k, S::kTokens, kBlock);
  if (error == cudaSuccess) {
    error =
        encode_byte_map(&maps->weight, tensors.weight, params.n, tensors.k, weight_rows, kBlock);
  }
  if (error == cudaSuccess) {
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
  }
  return error;
}

template <typename S, typename Kernel, typename... Arguments>
cudaError_t launch_clusters(const Kernel& kernel, int blocks, int cluster,
                            const LaunchOptions& options, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = S::kSharedBytes;
  config.stream = options.stream;
  config.attrs = attributes;
  config.numAttrs = options.dependent_launch ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename S>
cudaError_t launch(Params params, const Tensors& tensors, const LaunchOptions& options) {
  const auto kernel = dense_fp8_kernel<S>;
  Maps maps;
  const cudaError_t error = prepare<S>(kernel, params, tensors, kBlock, &maps);
  if (error != cudaSuccess) return error;
  params.token_tiles = ceil_div(params.tokens, S::kTokens);
  params.tokens_first = params.n > params.tokens;  // the larger operand is read once
  const int work = params.tiles * params.token_tiles;
  const int cluster = S::kSplit ? params.parts : 1;
  const int blocks = S::kSplit ? cluster * work : std::min(work, options.multiprocessors);
  return launch_clusters<S>(kernel, blocks, cluster, options, params, maps.x, maps.weight);
}

// Whether groups of rows lie in one segment each.
bool is_grouped(const Params& p) {
  return (p.segments[0] == p.n || p.segments[0] % kGroupRows == 0) &&
         (p.segments[0] + p.segments[1] == p.n || p.segments[1] % kGroupRows == 0);
}

template <End kEnd>
cudaError_t launch_wide(Params params, const Tensors& tensors, const LaunchOptions& options) {
  using S = WideShape<kEnd>;
  const auto kernel = dense_fp8_wide_kernel<S>;
  Maps maps;
  CUtensorMap out_map{};
  cudaError_t error = prepare<S>(kernel, params, tensors, S::kHalfRows, &maps);
  const int columns = S::kRotates ? params.segments[0] : params.n;  // q may have none
  if (error == cudaSuccess && columns > 0) {
    error = encode_byte_map(&out_map, params.out, params.tokens, 2 * columns, S::kTokens,
                            2 * kGroupRows);
  }
  if (error != cudaSuccess) return error;
  params.cut = cut_wide(params.tokens, params.n, options.multiprocessors);
  params.tail_halves = (tensors.k - 1) % kBlock < kBlock / 2 ? 1 : 2;
  return launch_clusters<S>(kernel, kWideBlocks * params.cut.clusters, kWideBlocks, options, params,
                            maps.x, maps.weight, out_map);
}

// Of many tokens; by tiles of 128 where that cannot be.
template <End kEnd>
cudaError_t launch_many(const Params& params, const Tensors& tensors,
                        const LaunchOptions& options) {
  return params.out_fp32 || !is_grouped(params)
             ? launch<Shape<128, 6, false, kEnd>>(params, tensors, options)
             : launch_wide<kEnd>(params, tensors, options);
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
      return split ? cudaErrorInvalidValue : launch_many<kEnd>(params, tensors, options);
    default:
      return cudaErrorInvalidValue;
  }
}

// Many tokens only.
cudaError_t launch_adding(int tile_tokens, const Params& params, const Tensors& tensors,
                          const LaunchOptions& options) {
  return tile_tokens == 256 ? launch_many<End::kAdd>(params, tensors, options)
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
