// What prefill's kernels share: pages of keys, a sequence's queries cut into tiles, rows that no
// sequence owns, and the output of a thread's two rows.
#ifndef GPTOSS_TRT_ATTENTION_PREFILL_TILES_CUH_
#define GPTOSS_TRT_ATTENTION_PREFILL_TILES_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/params.h"
#include "attention/prefill_products.cuh"
#include "attention/quantise.cuh"
#include "attention/warp_mma.cuh"
#include "core/ptx.cuh"
#include "core/turn_quad.cuh"

namespace gptoss::attention {

constexpr int kPageKeys = 64;
constexpr int kPageBytes = kPageKeys * kRowBytes;
constexpr int kGroupThreads = 128;
constexpr int kGroupQueries = 8;  // queries of a warpgroup: 64 rows of eight heads

// The same in all lanes, and known to be.
__device__ __forceinline__ int of_first_lane(int value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

// The queries of one block: [token, end) of the step, of a sequence whose keys are [0, context).
struct PrefillTile {
  int sequence;  // -1: none
  int token;
  int end;
  int position;  // of `token`
  int context;
};

// Tiles are numbered sequence by sequence. Executed by whole warps, each for itself.
__device__ __forceinline__ PrefillTile find_tile(const PrefillParams& p, int number, int queries) {
  const int lane = threadIdx.x & 31;
  int counted = 0;
  for (int base = 0; base < p.sequences; base += 32) {
    const int s = base + lane;
    const int begin = s < p.sequences ? p.query_start[s] : 0;
    const int end = s < p.sequences ? p.query_start[s + 1] : 0;
    const int tiles = (end - begin + queries - 1) / queries;
    int sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += below;
    }
    const uint32_t reached = __ballot_sync(0xffffffffu, counted + sum > number);
    if (reached != 0) {
      const int owner = __ffs(reached) - 1;
      const int first = counted + __shfl_sync(0xffffffffu, sum - tiles, owner);
      PrefillTile tile;
      tile.sequence = base + owner;
      const int start = __shfl_sync(0xffffffffu, begin, owner);
      tile.end = __shfl_sync(0xffffffffu, end, owner);
      tile.token = start + (number - first) * queries;
      tile.context = p.context_lens[tile.sequence];
      tile.position = tile.context - tile.end + tile.token;
      return tile;
    }
    counted += __shfl_sync(0xffffffffu, sum, 31);
  }
  return PrefillTile{-1, 0, 0, 0, 0};
}

// The key blocks of a tile: from `last` down to `first`.
struct KeyBlocks {
  int first, last;

  __device__ __forceinline__ KeyBlocks(const PrefillTile& tile, int queries, int keys, int window) {
    const int end = min(tile.position + queries, tile.context);
    const int low = window ? max(tile.position - window + 1, 0) : 0;
    first = low / keys;
    last = (end - 1) / keys;
  }
  __device__ __forceinline__ int count() const { return last - first + 1; }
};

// Zeros for the rows that no sequence owns, behind query_start[S]; block `number` takes `queries`
// of them.
__device__ __forceinline__ void zero_padding(const PrefillParams& p, int number, int queries,
                                             int kv_head) {
  const int begin = p.query_start[p.sequences] + number * queries;
  const int end = min(begin + queries, p.tokens);
  const int words = kGroup * kHeadDim * (p.out_scale == nullptr ? 2 : 1) / 16;
  for (int i = threadIdx.x; i < (end - begin) * words; i += blockDim.x) {
    const int64_t run = static_cast<int64_t>(begin + i / words) * p.kv_heads + kv_head;
    static_cast<uint4*>(p.out)[run * words + i % words] = make_uint4(0, 0, 0, 0);
  }
  if (p.out_scale == nullptr) return;
  constexpr int kScales = kGroup * kHeadDim / kScaleChannels;  // of zeros: 1
  for (int i = threadIdx.x; i < (end - begin) * kScales; i += blockDim.x) {
    const int64_t row = kv_head * kScales + i % kScales;
    p.out_scale[row * p.tokens + begin + i / kScales] = 1.f;
  }
}

// Values behind the sequence's end are what the block's last owner left there: zero weights do not
// hide a NaN. All consumers meet.
template <class Shape>
__device__ __forceinline__ void clear_values(uint32_t values, int from_row) {
  constexpr int kConsuming = Shape::kConsumers * kGroupThreads;
  for (int at = from_row * kRowBytes + threadIdx.x * 16; at < Shape::kBlockBytes;
       at += kConsuming * 16) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(values + at), "r"(0) : "memory");
  }
  async_proxy_fence();
  named_barrier_sync(1, kConsuming);
}

// Two rows of a thread, of two neighbouring queries: maximum of raw scores (or what weights are
// relative to, in units of its own), and this lane's sum.
struct RowState {
  float top[2] = {-INFINITY, -INFINITY};
  float total[2] = {0.f, 0.f};
};

// log2, of the head that a thread's rows belong to.
__device__ __forceinline__ float sink_of(const PrefillParams& p, int kv_head) {
  return bf16_value(p.sinks[kv_head * kGroup + ((threadIdx.x & 31) >> 2)]) * kLog2E;
}

// A warp's two rows of heads in bf16 (words j: columns 8j + 2t and the next) to e4m3 and scales.
__device__ __forceinline__ void write_codes(const PrefillParams& p, int begin, int end, int token,
                                            int kv_head, const uint32_t (&words)[2][8]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int head = kv_head * kGroup + g;
  float most[2], scale[2];  // of two heads
#pragma unroll
  for (int row = 0; row < 2; ++row) most[row] = most_over_lanes<8>(most_of(words[row]));
  uint32_t codes[2][4];  // of columns 16i + 2t and the next, and of those 8 further
  const bool usual = UsualDivision::usual(most[0]) && UsualDivision::usual(most[1]);
  if (__all_sync(0xffffffffu, usual)) {
    const UsualDivision divide[2] = {UsualDivision(most[0]), UsualDivision(most[1])};
    code_rows(words, divide, codes);
    scale[0] = divide[0].scale(), scale[1] = divide[1].scale();
  } else {
    scale[0] = group_scale(most[0]), scale[1] = group_scale(most[1]);
    const GroupDivision divide[2] = {GroupDivision(scale[0]), GroupDivision(scale[1])};
    code_rows(words, divide, codes);
  }
  const int64_t at = (static_cast<int64_t>(token) * p.kv_heads * kGroup + head) * kHeadDim + 16 * t;
  float* scales = p.out_scale + static_cast<int64_t>(head * kHeadDim / kScaleChannels) * p.tokens;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    turn_quad(codes[row]);  // columns 16t + 2i and the next, and of those 8 further
    if (token + row < begin || token + row >= end) continue;
    uint8_t* target = static_cast<uint8_t*>(p.out) + at + row * p.kv_heads * (kGroup * kHeadDim);
    *reinterpret_cast<uint4*>(target) = make_uint4(
        low_halves(codes[row][0], codes[row][1]), low_halves(codes[row][2], codes[row][3]),
        high_halves(codes[row][0], codes[row][1]), high_halves(codes[row][2], codes[row][3]));
    if ((lane & 7) == 0) scales[token + row] = scale[row];
  }
}

// Of a thread's two rows those whose tokens, `token` and the next, lie in [begin, end).
template <int kOutputs>
__device__ __forceinline__ void write_rows(const PrefillParams& p, int begin, int end, int token,
                                           int kv_head, float sink2, const float (&out)[kOutputs],
                                           const RowState& rows, float scale_log2) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int head = kv_head * kGroup + g;
  uint32_t words[2][8];  // columns 8j + 2t and the next
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float total = rows.total[row];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (kOutputs > 32) total = out[kOutputs - 4 + 2 * row];
    const float top = rows.top[row] * scale_log2;
    const float higher = fmaxf(top, sink2);
    const float kept = exp2_fast(top - higher);
    const float factor = __fdividef(kept, total * kept + exp2_fast(sink2 - higher));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      words[row][j] = pack_bf16(out[4 * j + 2 * row] * factor, out[4 * j + 2 * row + 1] * factor);
    }
  }
  if (p.out_scale != nullptr) {
    write_codes(p, begin, end, token, kv_head, words);
    return;
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if (token + row < begin || token + row >= end) continue;
    const int64_t at = (static_cast<int64_t>(token + row) * p.kv_heads * kGroup + head) * kHeadDim;
    uint32_t* target = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at);
#pragma unroll
    for (int j = 0; j < 8; ++j) target[4 * j + t] = words[row][j];
  }
}

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_PREFILL_TILES_CUH_
