// One token through all layers in one launch. A block of threads for each multiprocessor, all
// running at once: 16 warps compute, one brings weights (ring.cuh); vectors go from phase to phase
// through mailboxes (exchange.cuh).
//
// A layer: qkv behind the norm, attention, output projection, router behind the norm, gate_up,
// down. The residual stream lives in every block's registers.
#ifndef GPTOSS_TRT_DECODE_ONE_KERNEL_CUH_
#define GPTOSS_TRT_DECODE_ONE_KERNEL_CUH_

#include <cstdint>

#include "decode_one/attention_phase.cuh"
#include "decode_one/dense_phase.cuh"
#include "decode_one/expert_phase.cuh"
#include "decode_one/ring.cuh"
#include "decode_one/shared.cuh"

namespace gptoss::one {

__constant__ constexpr moe::CodeTable kCodes = moe::make_code_table();

template <Format kFormat>
__device__ inline void bring(const Params& p, const Shared& shared, Ring ring) {
  const uint32_t routed = shared_address(&shared.routed);
  for (int l = 0; l < p.num_layers; ++l) {
    const Layer& layer = shared.layers[l];
    bring_dense<kFormat, kHidden>(ring, layer.qkv_weight, shared.qkv_tiles);
    bring_dense<kFormat, kAttended>(ring, layer.out_weight, shared.out_tiles);
    if (static_cast<int>(blockIdx.x) < p.experts) bring_router(ring, layer.router_weight);
    barrier_wait(routed, l & 1);
    bring_strips<false>(ring, layer.gate_up_weight, shared.expert);
    bring_strips<true>(ring, layer.down_weight, shared.expert);
  }
  bring_dense<kFormat, kHidden>(ring, p.lm_head, shared.lm_head_tiles);
}

// norm(x) for a dense product of kHidden columns.
template <Format kFormat>
__device__ __forceinline__ void norm_for_dense(const Stream& x, Shared& shared,
                                               const Stream::Gain& gain, float eps) {
  x.norm(shared, gain, eps, [&shared](int block, int lane, bool inside, float4 value) {
    store_dense<kFormat>(shared, block, lane, inside, value);
  });
}

// x = embedding in the first layer, x + the experts' rows of the layer before in the others.
__device__ __forceinline__ void take_rows(const Params& p, Stream& x, int layer, uint32_t flag) {
  if (layer == 0) {
    const int64_t token = max(__ldg(p.token_ids), 0);
    x.embed(p.embedding + min(token, static_cast<int64_t>(p.vocabulary) - 1) * kHidden);
  } else {
    x.add<kTopK>(mailbox_of(p, Mailbox::kRows), flag - 1);
  }
}

template <Format kFormat>
__device__ __forceinline__ void qkv_phase(const Params& p, Shared& shared, Ring& ring, Stream& x,
                                          const FirstRows& rows, int l, uint32_t flag) {
  const Layer& layer = shared.layers[l];
  const bool window = layer.window != 0;
  prefetch_keys(layer, shared.keys[window], window ? rows.window : rows.full);
  const Stream::Gain gain = x.load_gain(layer.attention_norm);
  const float2 bias = load_bias(layer.qkv_bias, shared.qkv_tiles);
  load_weight_scales<kFormat, kHidden>(shared, layer.qkv_scale, shared.qkv_tiles);
  take_rows(p, x, l, flag);
  norm_for_dense<kFormat>(x, shared, gain, p.eps);
  dense_phase<kFormat, kHidden>(shared, ring, shared.qkv_tiles, [&](int row, float2 sum) {
    send(mailbox_of(p, Mailbox::kQkv) + row / 2, pack_pair(sum.x + bias.x, sum.y + bias.y), flag);
  });
}

template <Format kFormat>
__device__ __forceinline__ void out_phase(const Params& p, const Layer& layer, Shared& shared,
                                          Ring& ring, uint32_t flag) {
  const float2 bias = load_bias(layer.out_bias, shared.out_tiles);
  load_weight_scales<kFormat, kAttended>(shared, layer.out_scale, shared.out_tiles);
  take_attended<kFormat>(p, shared, flag);
  dense_phase<kFormat, kAttended>(shared, ring, shared.out_tiles, [&](int row, float2 sum) {
    send(mailbox_of(p, Mailbox::kOut) + row / 2, pack_pair(sum.x + bias.x, sum.y + bias.y), flag);
  });
}

template <Format kFormat>
__device__ inline void compute(const Params& p, Shared& shared, Ring ring, uint32_t epoch) {
  Stream x;
  const FirstRows rows(p, shared);
  for (int l = 0; l < p.num_layers; ++l) {
    const Layer& layer = shared.layers[l];
    const uint32_t flag = epoch + l + 1;
    qkv_phase<kFormat>(p, shared, ring, x, rows, l, flag);
    attention_phase(p, layer, shared, rows, flag);
    out_phase<kFormat>(p, layer, shared, ring, flag);
    const Stream::Gain gain = x.load_gain(layer.moe_norm);
    x.add<1>(mailbox_of(p, Mailbox::kOut), flag);
    x.norm(shared, gain, p.eps, [&shared](int block, int lane, bool inside, float4 value) {
      store_experts(shared, block, lane, inside, value);
    });
    route_phase(p, layer, shared, ring, flag);
    gate_up_phase(p, layer, shared, ring, flag);
    down_phase(p, layer, shared, ring, flag);
  }
  const Stream::Gain gain = x.load_gain(p.final_norm);
  load_weight_scales<kFormat, kHidden>(shared, p.lm_head_scale, shared.lm_head_tiles);
  take_rows(p, x, p.num_layers, epoch + p.num_layers + 1);
  norm_for_dense<kFormat>(x, shared, gain, p.eps);
  dense_phase<kFormat, kHidden>(shared, ring, shared.lm_head_tiles, [&p](int row, float2 sum) {
    *reinterpret_cast<float2*>(p.logits + row) = sum;
  });
}

template <Format kFormat>
__global__ void __launch_bounds__(kThreads, 1) decode_one_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int thread = threadIdx.x;
  if (thread < kStages) {
    barrier_init(shared_address(shared.full + thread), 1);
    barrier_init(shared_address(shared.empty + thread), kWarps);
  } else if (thread == kStages) {
    barrier_init(shared_address(&shared.routed), 1);
    shared.qkv_tiles = TileRange::of(kQkvRows);
    shared.out_tiles = TileRange::of(kHidden);
    shared.lm_head_tiles = TileRange::of(p.vocabulary);
  } else if (thread >= 32 && thread < 32 + moe::kTableRows) {
    const int row = thread - 32;
    shared.table.rows[row].codes = make_uint2(kCodes.words[row][0], kCodes.words[row][1]);
    if (row == 0) shared.table.zeros = make_uint4(0, 0, 0, 0);
  }
  barrier_init_fence();
  if (thread >= 64 && thread < 64 + kHeadDim) prepare_attention(p, shared, thread - 64);
  constexpr int kLayerWords = sizeof(Layer) / 8;
  for (int i = thread; i < p.num_layers * kLayerWords; i += kThreads) {
    reinterpret_cast<uint64_t*>(shared.layers)[i] =
        __ldg(reinterpret_cast<const unsigned long long*>(p.layers) + i);
  }
  uint32_t epoch;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(epoch) : "l"(p.epoch) : "memory");
  __syncthreads();
  const Ring ring{shared_address(shared.ring), shared_address(shared.full),
                  shared_address(shared.empty)};
  if (thread >= kComputeThreads) {
    registers_release<kBringRegisters>();
    if (thread < kComputeThreads + 32) bring<kFormat>(p, shared, ring);
  } else {
    registers_claim<kComputeRegisters>();
    compute<kFormat>(p, shared, ring, epoch);
    // All blocks have read the epoch: this one has had their work.
    if (blockIdx.x == 0 && thread == 0) *p.epoch = epoch + p.num_layers;
  }
}

}  // namespace gptoss::one

#endif  // GPTOSS_TRT_DECODE_ONE_KERNEL_CUH_
