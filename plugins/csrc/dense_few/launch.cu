#include <algorithm>

#include "dense_few/kernel.cuh"

namespace gptoss::dense {
namespace {

constexpr int ceil_div(int value, int divisor) { return (value + divisor - 1) / divisor; }

// kWarps x kRuns runs of 128 bytes hold a row; kWide tiles are under way where 9 to 16 tokens need
// registers of their own.
template <Format kFormat, int kWarps, int kRuns, int kAhead, int kWide, int kBlocks>
cudaError_t launch(Params params, const LaunchOptions& options) {
  const bool sixteen = params.tokens > 8;
  const auto kernel = sixteen ? dense_few_kernel<kFormat, kWarps, kRuns, kWide, kBlocks, true>
                              : dense_few_kernel<kFormat, kWarps, kRuns, kAhead, kBlocks, false>;
  const int tiles = ceil_div(params.n, kTileRows);
  params.tiles = std::min(ceil_div(tiles, options.multiprocessors * kBlocks), kMostTiles);
  const int runs = ceil_div(params.k, kScaleColumns);
  params.scales_at = 2 * params.tokens * (params.k + kPadding);
  params.partial_at = params.scales_at + (kFormat == Format::kFp8 ? 4 * kMostTokens * runs : 0);
  const int shared = params.partial_at + params.tiles * kWarps * (sixteen ? 4 : 2) * 32 * 4;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ceil_div(tiles, params.tiles));
  config.blockDim = dim3(32 * kWarps);
  config.dynamicSmemBytes = shared;
  config.stream = options.stream;
  config.attrs = &attribute;
  config.numAttrs = options.dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace

cudaError_t launch_dense_few(Format format, const Params& params, const LaunchOptions& options) {
  // 2880 columns are 45 runs of bf16 and 23 of e4m3, 4096 are 64 and 32.
  if (format == Format::kBf16) {
    return params.k <= 2880 ? launch<Format::kBf16, 15, 3, 3, 3, 1>(params, options)
                            : launch<Format::kBf16, 16, 4, 3, 2, 1>(params, options);
  }
  if (params.k > 3072) return launch<Format::kFp8, 16, 2, 3, 3, 1>(params, options);
  // More rows than a block for each multiprocessor takes (the lm head): two that overlap.
  return params.n > options.multiprocessors * kMostTiles * kTileRows
             ? launch<Format::kFp8, 12, 2, 2, 2, 2>(params, options)
             : launch<Format::kFp8, 12, 2, 5, 5, 1>(params, options);
}

}  // namespace gptoss::dense
