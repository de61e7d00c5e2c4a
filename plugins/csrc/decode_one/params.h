// What the whole-step kernel is told: the model's shape, one record a layer, one call's tensors.
#ifndef GPTOSS_TRT_DECODE_ONE_PARAMS_H_
#define GPTOSS_TRT_DECODE_ONE_PARAMS_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "gptoss_trt.h"

namespace gptoss::one {

// gpt-oss-20b and -120b; they differ in layers and experts.
constexpr int kHidden = 2880;
constexpr int kKvHeads = 8;
constexpr int kGroup = 8;  // query heads of one KV head
constexpr int kHeadDim = 64;
constexpr int kAttended = kKvHeads * kGroup * kHeadDim;
constexpr int kQkvRows = kAttended + 2 * kKvHeads * kHeadDim;
constexpr int kChannels = 2880;  // of h
constexpr int kTopK = 4;
constexpr int kMostExperts = 128;
constexpr int kMostLayers = 36;
constexpr int kScaleColumns = 128;  // of K that share an activation's scale
constexpr int kScaleBlocks = (kHidden + kScaleColumns - 1) / kScaleColumns;

// Rows of a dense weight that a block has; of qkv a strip for each of the first blocks, of the
// output projection half of the columns of a strip.
constexpr int kQkvStripRows = 40;
constexpr int kOutStripRows = 48;
constexpr int kOutParts = 2;
constexpr int kLmHeadStripRows = 64;

// Blocks of threads. Each one needs at most kMostStrips of gate_up, and a strip of `down` for all
// four experts at most kDownParts of them.
constexpr int kLeastBlocks = 128;
constexpr int kMostBlocks = 135;
constexpr int kDownParts = 4;
constexpr int kMostStrips = 4;

constexpr int kMostParts = 16;  // of a sequence's keys, for each KV head

// First packet of each vector that blocks of threads hand each other (exchange.cuh).
struct Mailbox {
  static constexpr int kQkv = 0;                        // bf16 pairs
  static constexpr int kPartial = kQkv + kQkvRows / 2;  // f32 [KV head][part][8 x 64]
  static constexpr int kStats = kPartial + kKvHeads * kMostParts * kGroup * kHeadDim;
  static constexpr int kAttention = kStats + kKvHeads * kMostParts * kGroup * 2;  // bf16 pairs
  static constexpr int kOut = kAttention + kAttended / 2;         // bf16 pairs [part][row]
  static constexpr int kLogits = kOut + kOutParts * kHidden / 2;  // f32 [experts]
  static constexpr int kH = kLogits + kMostExperts;               // e4m3 fours [slot][channel]
  static constexpr int kRows = kH + kTopK * kChannels / 4;  // bf16 pairs [layer % 2][part][row]
  static constexpr int kPackets = kRows + 2 * kDownParts * kHidden / 2;

  static __host__ __device__ constexpr int rows(uint32_t flag) {
    return kRows + static_cast<int>(flag & 1) * (kDownParts * kHidden / 2);
  }
};

constexpr uint64_t kEpochBytes = 256;
constexpr uint64_t kWorkspaceBytes = kEpochBytes + Mailbox::kPackets * sizeof(uint64_t);

enum class Format : int { kBf16 = 1, kFp8 = 2 };

using Layer = gptoss_trt_decode_one_layer;

struct Params {
  // Boxes of a strip's rows by 128 bytes.
  CUtensorMap qkv[kMostLayers];
  CUtensorMap out[kMostLayers];
  CUtensorMap lm_head;
  Layer layers[kMostLayers];
  int num_layers;
  int experts;
  const uint16_t* embedding;  // bf16 [vocabulary, kHidden]
  const uint16_t* final_norm;
  const float* lm_head_scale;
  const float* cos_sin;  // [positions, 64]
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* context_lens;
  const int32_t* full_blocks;
  const int32_t* window_blocks;
  const int32_t* window_first_block;
  float* logits;
  uint32_t* epoch;    // of the last layer whose exchanges were made
  uint64_t* mailbox;  // exchange.cuh
  int full_width;     // of the block tables
  int window_width;
  int block_shift;  // log2 of the tokens of a KV block
  int vocabulary;
  float eps;
  float limit;
  float alpha;
  float scale_log2;  // of scores, times log2(e)
};

// Encodes the tensor maps of `params` (whose layers are set), then launches.
cudaError_t launch_decode_one(Format format, Params& params, const void* lm_head, int blocks,
                              cudaStream_t stream);

}  // namespace gptoss::one

#endif  // GPTOSS_TRT_DECODE_ONE_PARAMS_H_
