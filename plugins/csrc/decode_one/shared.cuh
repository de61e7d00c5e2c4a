// The shared memory of one block of threads.
#ifndef GPTOSS_TRT_DECODE_ONE_SHARED_CUH_
#define GPTOSS_TRT_DECODE_ONE_SHARED_CUH_

#include <cstdint>

#include "decode_one/ring.cuh"
#include "moe_gemm_fp8/weight_reader.cuh"

namespace gptoss::one {

constexpr int kScaleRows = 16;  // of a dense weight, that a block's rows span at most
constexpr int kToeplitz = 112;  // bytes behind an operand of WGMMA: its seven rows of no account

// What the warps of attention leave for each other. A window of 128 keys touches nine tiles.
constexpr int kAttentionWarps = 9;
struct AttentionShared {
  float out[kAttentionWarps][kGroup * kHeadDim];
  float top[kAttentionWarps][kGroup];
  float total[kAttentionWarps][kGroup];
  __align__(16) uint16_t rows[kGroup + 2][kHeadDim];  // of this token: queries, key, value
};

// Which keys a block of threads has in layers of one kind; the same in all of them.
struct KeyRange {
  int begin;
  int end;
  int first_tile;
  int tiles;
  int parts;   // of this KV head's keys; 0: the block has none of them
  bool owner;  // of the token's own key, the last of the range
};

// An activation made ready for a product.
struct ActivationShared {
  // bf16 (the router's too), or e4m3 as bytes.
  __align__(16) uint8_t dense[kAttended * 2 + kToeplitz];
  __align__(16) uint8_t experts[moe::ceil_div(kHidden, 128) * 128 + kToeplitz];
  __align__(16) uint8_t h[kTopK][moe::ceil_div(kChannels, 128) * 128 + kToeplitz];
};

struct Shared {
  __align__(1024) uint8_t ring[kStages * kStageBytes];
  union {
    AttentionShared attention;  // between the phases that use
    ActivationShared activation;
  };
  moe::ReaderTable table;
  __align__(16) float dense_partial[2][kWarpgroups][moe::kStripRows];
  __align__(16) float strip_partial[kMostStrips][kStageRecords][moe::kStripRows];
  float weight_scale[kScaleRows][kAttended / kScaleColumns];
  float x_scale[kAttended / kScaleColumns];
  __align__(16) float reduced[kWarps];
  float angles[kHeadDim];  // cosines, then sines
  KeyRange keys[2];        // of layers without a window, with one
  int expert[kTopK];
  float expert_weight[kTopK];
  Layer layers[kMostLayers];
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t routed;
  int attended;  // layers whose attention is over in this block
};

}  // namespace gptoss::one

#endif  // GPTOSS_TRT_DECODE_ONE_SHARED_CUH_
