#include <algorithm>
#include <vector>

#include "core/tensor_map.h"
#include "dense_fp8/kernel.cuh"
#include "dense_fp8/launch.h"
#include "dense_fp8/pairs.cuh"

namespace gptoss::dense_fp8 {
namespace {

constexpr int ceil_div(int value, int divisor) { return (value + divisor - 1) / divisor; }

// Of x and the weight, for a kernel of Shape S, which gets its shared memory.
struct Maps {
  CUtensorMap x, weight;
};

template <typename S, typename Kernel>
cudaError_t prepare(const Kernel& kernel, const Params& params, const Tensors& tensors,
                    Maps* maps) {
  cudaError_t error =
      encode_byte_map(&maps->x, tensors.x, params.tokens, tensors.k, S::kTokens, kBlock);
  if (error == cudaSuccess) {
    error = encode_byte_map(&maps->weight, tensors.weight, params.n, tensors.k, kBlock, kBlock);
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
  const cudaError_t error = prepare<S>(kernel, params, tensors, &maps);
  if (error != cudaSuccess) return error;
  params.token_tiles = ceil_div(params.tokens, S::kTokens);
  params.tokens_first = params.n > params.tokens;  // the larger operand is read once
  const int work = params.tiles * params.token_tiles;
  const int cluster = S::kSplit ? params.parts : 1;
  const int blocks = S::kSplit ? cluster * work : std::min(work, options.multiprocessors);
  return launch_clusters<S>(kernel, blocks, cluster, options, params, maps.x, maps.weight);
}

// Rows of the weight's last tile.
int last_rows(const Params& p) {
  const int segments[] = {p.n - p.segments[0] - p.segments[1], p.segments[1], p.segments[0]};
  for (const int rows : segments) {
    if (rows > 0) return (rows - 1) % kBlock + 1;
  }
  return 0;
}

// What the busiest cluster has to do in halves of a tile, when the first `whole` pairs stay pairs.
int longest_work(const Params& p, int clusters, int whole) {
  const int pairs = p.token_tiles * (p.tiles / 2), singles = 2 * (pairs - whole);
  const int items = whole + singles + p.tiles % 2 * p.token_tiles;
  std::vector<int> work(clusters);
  for (int item = 0; item < items; ++item) {
    const int round = item / clusters, place = item % clusters;
    int& own = work[round % 2 == 0 ? place : clusters - 1 - place];
    if (item < whole) {
      own += 4;
    } else {
      own += item < whole + singles || last_rows(p) > kBlock / 2 ? 2 : 1;
    }
  }
  return *std::max_element(work.begin(), work.end());
}

// Pairs while they fill rounds, single tiles behind them where that takes less time.
int cut_pairs(const Params& p, int clusters) {
  const int pairs = p.token_tiles * (p.tiles / 2), filled = pairs / clusters * clusters;
  return longest_work(p, clusters, filled) < longest_work(p, clusters, pairs) ? filled : pairs;
}

template <End kEnd>
cudaError_t launch_pairs(Params params, const Tensors& tensors, const LaunchOptions& options) {
  using S = Shape<kPairTokens, 4, false, kEnd, true>;
  const auto kernel = dense_fp8_pairs_kernel<S>;
  Maps maps;
  CUtensorMap out_map{};
  cudaError_t error = prepare<S>(kernel, params, tensors, &maps);
  if (error == cudaSuccess && S::kAdds) {
    error = encode_byte_map(&out_map, params.out, params.tokens, 2 * params.n, S::kTokens, 128);
  }
  if (error != cudaSuccess) return error;
  params.token_tiles = ceil_div(params.tokens, kPairBlocks * kPairTokens);
  params.tokens_first = params.n > params.tokens;  // the larger operand is read once
  params.tail_halves = (tensors.k - 1) % kBlock < kBlock / 2 ? 1 : 2;
  const int clusters =
      std::min(options.multiprocessors / kPairBlocks, params.token_tiles * params.tiles);
  params.whole_pairs = cut_pairs(params, clusters);
  return launch_clusters<S>(kernel, kPairBlocks * clusters, kPairBlocks, options, params, maps.x,
                            maps.weight, out_map);
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
      return split ? cudaErrorInvalidValue : launch_pairs<kEnd>(params, tensors, options);
    default:
      return cudaErrorInvalidValue;
  }
}

// Many tokens only.
cudaError_t launch_adding(int tile_tokens, const Params& params, const Tensors& tensors,
                          const LaunchOptions& options) {
  return tile_tokens == 256 ? launch_pairs<End::kAdd>(params, tensors, options)
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
