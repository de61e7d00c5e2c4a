// What the device code of moe_gemm_fp8 is given, by value.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_PARAMS_H_
#define GPTOSS_TRT_MOE_GEMM_FP8_PARAMS_H_

#include <vector_types.h>

#include <cstdint>

#include "moe_gemm_fp8/plan.h"

namespace gptoss::moe {

struct Params {
  const uint8_t* weights;
  const uint16_t* bias;  // bf16 bits, or null
  const uint8_t* x;
  const float* x_scale;  // null: the static scale
  const int32_t* expert_offsets;
  const int32_t* row_slots;
  const float* expert_weights;
  void* out;
  float* out_scale;
  int32_t* split_tickets;
  float* h_values;
  float* partials;
  int64_t expert_bytes;
  int64_t strip_bytes;
  float limit;
  float alpha;
  int experts;
  int top_k;
  int n;
  int k;
  int strips;
  int records;
  int tail_halves;
  int rows;         // P
  int x_rows;       // rows of x, the stride of x_scale
  int scale_group;  // channels of h that share a scale, 0 static
  int out_fp32;
  int token_block;
  int k_split;
  int routing_ready;  // may be read before dependency_wait
  SharedLayout shared;
  // Of the prefill plan.
  uint8_t* gathered;     // token tiles, gather_kernel.cuh; on FP8 tiles sorted rows of x
  uint2* row_info;       // DOWN: output slot and routing weight of a column of the token blocks
  int32_t* items_taken;  // beyond the first of each block of threads
  int tile_row_bytes;    // of one token in one record: 128 codes and its scales
  PrefillShared prefill;
  // On FP8 tiles.
  float* sorted_scales;  // gather_tiles_kernel.cuh
  int weight_tiles;
  int cluster_rows;  // the most of a token block
};

// One kernel each: what it computes, and how the activations are scaled that it makes or takes.
enum class Kind { kGateUpStatic, kGateUpGroups, kDown, kDownPer64 };

GPTOSS_HOST_DEVICE constexpr bool is_gate_up(Kind kind) {
  return kind == Kind::kGateUpStatic || kind == Kind::kGateUpGroups;
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_PARAMS_H_
