// What a layer reads beside the weights that the ring brings, asked for to come into the
// second-level cache while the layer before runs: small vectors, and the keys and values of a long
// context. By a warp of its own, when attention is over: from there to the routing memory idles.
//
// Invariant: it waits for the others, and they never for it.
#ifndef GPTOSS_TRT_DECODE_ONE_LOOK_AHEAD_CUH_
#define GPTOSS_TRT_DECODE_ONE_LOOK_AHEAD_CUH_

#include <cstdint>

#include "decode_one/attention_phase.cuh"
#include "decode_one/ring.cuh"
#include "decode_one/shared.cuh"

namespace gptoss::one {

// Each block of threads asks for some of the lines.
template <Format kFormat>
__device__ __forceinline__ void prefetch_vectors(const Params& p, const Layer& layer) {
  // Found for all layers, each vector's first thread would be a register.
  const int thread = static_cast<int>(keep_in_register(blockIdx.x * 32 + threadIdx.x % 32));
  int first = 0;
  const auto ask = [&](const void* vector, int bytes) {
    const int line = thread - first, lines = (bytes + 127) / 128;
    if (line >= 0 && line < lines) {
      asm volatile(
          "prefetch.global.L2 [%0];" ::"l"(static_cast<const uint8_t*>(vector) + line * 128));
    }
    first += lines;
  };
  constexpr int kBlocks = moe::ceil_div(kHidden, kScaleColumns);
  ask(layer.attention_norm, kHidden * 2);
  ask(layer.moe_norm, kHidden * 2);
  ask(layer.qkv_bias, kQkvRows * 2);
  ask(layer.out_bias, kHidden * 2);
  ask(layer.router_bias, p.experts * 2);
  ask(layer.sinks, kKvHeads * kGroup * 2);
  if constexpr (kFormat == Format::kFp8) {
    ask(layer.qkv_scale, kQkvRows / kScaleColumns * kBlocks * 4);
    ask(layer.out_scale, kBlocks * (kAttended / kScaleColumns) * 4);
  }
}

// The block's keys and values. They are to outlive a layer's experts in the cache.
__device__ __forceinline__ void prefetch_long_keys(const Params& p, const Layer& layer,
                                                   const KeyRange& keys) {
  constexpr int kTileBytes = kTileKeys * kHeadDim * 2;
  for (int i = threadIdx.x % 32; i < keys.tiles; i += 32) {
    const int row = row_of_tile(p, false, keys.first_tile + i);
    if (row == kNoRow) continue;
    const int64_t offset = static_cast<int64_t>(row) * (kHeadDim * 2);
    prefetch_to_keep(static_cast<const uint8_t*>(layer.k_cache) + offset, kTileBytes);
    prefetch_to_keep(static_cast<const uint8_t*>(layer.v_cache) + offset, kTileBytes);
  }
  __syncwarp();
}

// The mailboxes are to stay in the cache: a packet that has left it is read from memory twice, by
// who sends and by who asks.
__device__ __forceinline__ void keep_mailboxes(const Params& p) {
  constexpr int kLine = 128;
  constexpr int kLines = moe::ceil_div(Mailbox::kPackets * sizeof(uint64_t), kLine);
  const int threads = static_cast<int>(gridDim.x) * 32;
  for (int i = static_cast<int>(blockIdx.x) * 32 + threadIdx.x % 32; i < kLines; i += threads) {
    asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(
        reinterpret_cast<const uint8_t*>(p.mailbox) + i * kLine));
  }
}

template <Format kFormat>
__device__ inline void look_ahead(const Params& p, const Shared& shared) {
  keep_mailboxes(p);
  for (int l = 1; l < p.num_layers; ++l) {
    while (load_volatile(&shared.attended) < l) __nanosleep(100);
    const Layer& layer = shared.layers[l];
    prefetch_vectors<kFormat>(p, layer);
    if (threadIdx.x % 32 == 0) {
      prefetch_map(p.qkv[l]);
      prefetch_map(p.out[l]);
    }
    __syncwarp();
    if (is_long(shared.keys[0]) && layer.window == 0) prefetch_long_keys(p, layer, shared.keys[0]);
  }
}

}  // namespace gptoss::one

#endif  // GPTOSS_TRT_DECODE_ONE_LOOK_AHEAD_CUH_
