// What the attention kernels are told: pointers and sizes of one call, already checked.
#ifndef GPTOSS_TRT_ATTENTION_PARAMS_H_
#define GPTOSS_TRT_ATTENTION_PARAMS_H_

#include <vector_types.h>

#include <cstdint>

namespace gptoss::attention {

constexpr int kHeadDim = 64;
constexpr int kGroup = 8;            // query heads of one KV head
constexpr int kTileKeys = 16;        // keys that a warp of the decode kernel takes at once
constexpr int kMaxParts = 32;        // of one sequence's keys: the merge gives each a lane
constexpr int kScaleChannels = 128;  // of a token's output in e4m3, that share a scale: two heads

// bf16 but for `out`; cache k, v [blocks, kv_heads, block_tokens, 64]; q, out [tokens, heads, 64].
struct DecodeParams {
  const uint16_t* q;
  const uint16_t* k;
  const uint16_t* v;
  const int32_t* block_table;   // [sequences, table_width]
  const int32_t* first_block;   // [sequences] or null
  const int32_t* context_lens;  // [sequences]
  const int32_t* query_start;   // [sequences + 1], or null: as many tokens of every sequence
  const uint16_t* sinks;        // [heads]
  void* out;                    // bf16, or e4m3 with out_scale
  float* out_scale;             // [heads / 2, tokens], or null
  float* partial_out;     // [tokens, kv_heads, parts, 8, 64], relative to partial_stats' maximum
  float2* partial_stats;  // [tokens, kv_heads, parts, 8]: maximum (log2), sum of weights
  uint32_t* tickets;      // [tokens, kv_heads], zero between calls
  float scale_log2;       // the softmax scale times log2(e)
  int sequences;
  int kv_heads;
  int table_width;
  int block_shift;  // block_tokens = 1 << block_shift, at least 16
  int window;       // 0: none
  int queries;      // tokens of a sequence, without query_start
  int parts;
  int part_keys;
};

struct PrefillParams {
  const int32_t* block_table;
  const int32_t* first_block;
  const int32_t* query_start;  // [sequences + 1]
  const int32_t* context_lens;
  const uint16_t* sinks;
  void* out;         // bf16, or e4m3 with out_scale
  float* out_scale;  // [heads / 2, tokens], or null
  float scale_log2;
  int tokens;
  int sequences;
  int kv_heads;
  int table_width;
  int blocks;  // of the cache
  int window;
  int strip;  // tokens of a block of the window kernel, a multiple of 64
};

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_PARAMS_H_
