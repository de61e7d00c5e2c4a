// What the device code of rmsnorm_quant is given, by value.
#ifndef GPTOSS_TRT_RMSNORM_QUANT_PARAMS_H_
#define GPTOSS_TRT_RMSNORM_QUANT_PARAMS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gptoss::rmsnorm_quant {

constexpr int kLane = 8;           // columns of a thread
constexpr int kMostHidden = 4096;  // so a block of threads has a row
constexpr int kGroup = 128;        // channels that share a scale
constexpr int kTopK = 4;
constexpr int kWarpHidden = 3072;  // columns that a warp can have

struct Params {
  const uint16_t* residual;   // bf16 bits [tokens, hidden]
  uint16_t* updated;          // the sum; may be `residual`
  const uint16_t* delta;      // bf16 bits [tokens, hidden], or null
  const uint16_t* rows;       // bf16 bits [tokens, kTopK, hidden], or null
  const int32_t* expert_ids;  // [tokens, kTopK], with rows
  const uint16_t* gain;       // bf16 bits [hidden]
  uint16_t* normed;           // bf16 bits [tokens, hidden], or null
  uint8_t* quantised;         // e4m3 [tokens, hidden], or null
  float* scales;              // [ceil(hidden / kGroup), tokens], with quantised
  float eps;
  int tokens;
  int hidden;
  int first_expert;
  int local_experts;
};

struct LaunchOptions {
  bool dependent_launch;
  cudaStream_t stream;
};

cudaError_t launch_rmsnorm_quant(const Params& params, const LaunchOptions& options);

}  // namespace gptoss::rmsnorm_quant

#endif  // GPTOSS_TRT_RMSNORM_QUANT_PARAMS_H_
