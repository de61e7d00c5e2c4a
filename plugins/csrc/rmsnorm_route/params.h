// What the device code of rmsnorm_route and route_rows is given, by value, and the sizes that it
// works in.
#ifndef GPTOSS_TRT_RMSNORM_ROUTE_PARAMS_H_
#define GPTOSS_TRT_RMSNORM_ROUTE_PARAMS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gptoss::rmsnorm_route {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTokens = 8;      // of a cluster: a warp's token, and columns of an instruction
constexpr int kColumns = 512;   // of the hidden states that one block of a cluster has
constexpr int kMostBlocks = 8;  // of a cluster
constexpr int kGroup = 128;     // channels that share a scale
constexpr int kTopK = 4;
constexpr int kMostExperts = 128;
constexpr int kFewTokens = 512;  // whose rows one block of rmsnorm_route sorts
// Where the router stays in shared memory while many tokens pass.
constexpr int kTeams = 2;       // of warps in a block, each with tiles of kTokens
constexpr int kTeamWarps = 12;  // of a team, each with kWarpColumns of its tokens
constexpr int kWarpColumns = 256;
constexpr int kResidentExperts = 32;
constexpr int kResidentHidden = kTeamWarps * kWarpColumns;
constexpr int kSortBlocks = 8;  // of the cluster that sorts the rows of more tokens
constexpr int kSortWarps = 32;  // of each
constexpr int kMostTokens = 1 << 15;

struct RowsParams {
  const int32_t* expert_ids;  // [tokens, kTopK]
  int32_t* expert_offsets;    // [local_experts + 1]
  int32_t* active_experts;    // [local_experts + 1]
  int32_t* row_slots;         // [tokens * kTopK]
  int tokens;
  int first_expert;
  int local_experts;
};

struct Params {
  const uint16_t* residual;    // bf16 bits [tokens, hidden], as are delta and updated
  const uint16_t* delta;       // or null
  const uint16_t* gain;        // bf16 bits [hidden]
  const uint16_t* router;      // bf16 bits [experts, hidden]
  const uint16_t* bias;        // bf16 bits [experts]
  const int32_t* token_count;  // or null
  uint16_t* updated;
  uint8_t* quantised;       // e4m3 [tokens, hidden]
  float* scales;            // [ceil(hidden / kGroup), tokens]
  int32_t* expert_ids_out;  // what rows.expert_ids reads
  float* expert_weights;    // [tokens, kTopK]
  uint32_t* ticket;         // 0 between calls
  float eps;
  int hidden;
  int experts;
  int blocks;  // of a cluster, or warps of a team that have columns: parts of a sum
  RowsParams rows;
};

struct LaunchOptions {
  bool dependent_launch;
  int multiprocessors;
  cudaStream_t stream;
};

// Each fills in params.blocks. Resident: up to kResidentExperts and kResidentHidden.
cudaError_t launch_rmsnorm_route(Params params, const LaunchOptions& options);
cudaError_t launch_resident(Params params, const LaunchOptions& options);
cudaError_t launch_route_rows(const RowsParams& params, const LaunchOptions& options);

}  // namespace gptoss::rmsnorm_route

#endif  // GPTOSS_TRT_RMSNORM_ROUTE_PARAMS_H_
