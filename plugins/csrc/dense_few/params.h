// What the device code of dense_few is given, by value.
#ifndef GPTOSS_TRT_DENSE_FEW_PARAMS_H_
#define GPTOSS_TRT_DENSE_FEW_PARAMS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gptoss::dense {

constexpr int kMostTokens = 16;
constexpr int kTileRows = 8;
constexpr int kScaleColumns = 128;  // of K that share a scale
constexpr int kPadding = 8;         // 16-bit numbers behind a token in shared memory: other banks
constexpr int kMostTiles = 8;       // of 8 rows a block of threads
constexpr int kMostColumns = 4096;  // as many as a block's warps hold of a row

enum class Format : int { kBf16 = 1, kFp8 = 2 };

struct Params {
  const uint8_t* x;           // bf16 or e4m3 [tokens, k]
  const float* x_scale;       // FP8: [ceil(k / 128), tokens]
  const uint8_t* weight;      // bf16 or e4m3 [n, k]
  const float* weight_scale;  // FP8: [rows of scales, ceil(k / 128)]
  const uint16_t* bias;       // bf16 bits [n], or null
  void* out;                  // bf16 or fp32 [tokens, n]
  int tokens;
  int n;
  int k;
  int segments[2];  // rows; each segment begins a new row of scales
  int out_fp32;
  int tiles;      // of 8 rows a block of threads
  int scales_at;  // byte offsets into the block's shared memory
  int partial_at;
};

struct LaunchOptions {
  bool dependent_launch;
  int multiprocessors;
  cudaStream_t stream;
};

cudaError_t launch_dense_few(Format format, const Params& params, const LaunchOptions& options);

}  // namespace gptoss::dense

#endif  // GPTOSS_TRT_DENSE_FEW_PARAMS_H_
