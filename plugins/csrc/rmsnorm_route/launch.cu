#include <algorithm>

#include "rmsnorm_route/kernel.cuh"
#include "rmsnorm_route/resident.cuh"

namespace gptoss::rmsnorm_route {
namespace {

constexpr int ceil_div(int value, int divisor) { return (value + divisor - 1) / divisor; }

struct Grid {
  int clusters, blocks, threads, shared;
};

template <typename Kernel, typename Parameters>
cudaError_t launch(Kernel kernel, const Parameters& params, const Grid& grid,
                   const LaunchOptions& options) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, grid.shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = grid.blocks;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.clusters * grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared;
  config.stream = options.stream;
  config.attrs = attributes;
  config.numAttrs = options.dependent_launch ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <typename S>
cudaError_t launch_shape(const Params& params, const LaunchOptions& options) {
  constexpr int kShared = std::max(sizeof(Forming<S>), sizeof(SortingFew));
  const Grid grid{ceil_div(params.rows.tokens, kTokens), params.blocks, kThreads, kShared};
  return launch(rmsnorm_route_kernel<S>, params, grid, options);
}

}  // namespace

cudaError_t launch_rmsnorm_route(Params params, const LaunchOptions& options) {
  params.blocks = ceil_div(params.hidden, kColumns);
  return params.experts <= 32 ? launch_shape<Shape<2>>(params, options)
                              : launch_shape<Shape<8>>(params, options);
}

cudaError_t launch_resident(Params params, const LaunchOptions& options) {
  params.blocks = ceil_div(params.hidden, kWarpColumns);
  const int tiles = ceil_div(params.rows.tokens, kTokens);
  const Grid grid{std::min(tiles, options.multiprocessors), 1, kResidentThreads, sizeof(Resident)};
  const auto kernel = params.delta != nullptr ? rmsnorm_route_resident_kernel<true>
                                              : rmsnorm_route_resident_kernel<false>;
  const cudaError_t error = launch(kernel, params, grid, options);
  return error == cudaSuccess ? launch_route_rows(params.rows, options) : error;
}

cudaError_t launch_route_rows(const RowsParams& params, const LaunchOptions& options) {
  const Grid grid{1, kSortBlocks, SortingMany::kThreads, sizeof(SortingMany)};
  return launch(route_rows_kernel, params, grid, options);
}

}  // namespace gptoss::rmsnorm_route
