// One token through all layers in one launch. A block of threads for each multiprocessor, all
// running at once: 16 warps compute, one brings weights (ring.cuh), one asks for what the next
// layer reads beside them (look_ahead.cuh); vectors go from phase to phase through mailboxes
// (exchange.cuh).
//
// A layer: qkv behind the norm, attention, output projection, router behind the norm, gate_up,
// down. The residual stream lives in every block's registers.
#ifndef GPTOSS_TRT_DECODE_ONE_KERNEL_CUH_
#define GPTOSS_TRT_DECODE_ONE_KERNEL_CUH_

#include <cstdint>

#include "decode_one/attention_phase.cuh"
#include "decode_one/dense_phase.cuh"
#include "decode_one/expert_phase.cuh"
#include "decode_one/look_ahead.cuh"
#include "decode_one/ring.cuh"
#include "decode_one/shared.cuh"

namespace gptoss::one {

__constant__ constexpr moe::CodeTable kCodes = moe::make_code_table();

template <Format kFormat>
__device__ inline void bring(const Params& p, const Shared& shared, Ring ring) {
  const uint32_t routed = shared_address(&shared.routed);
  const int block = static_cast<int>(blockIdx.x);
  for (int l = 0; l < p.num_layers; ++l) {
    const Layer& layer = shared.layers[l];
    if (has_qkv()) bring_dense<QkvShape<kFormat>>(ring, p.qkv[l], block * kQkvStripRows, 0);
    if (has_out()) {
      constexpr int kPartBytes = kAttended / kOutParts * element_bytes(kFormat);
      bring_dense<OutShape<kFormat>>(ring, p.out[l], out_strip() * kOutStripRows,
                                     out_part() * kPartBytes);
    }
    if (block < p.experts) bring_router(ring, layer.router_weight);
    barrier_wait(routed, l & 1);
    bring_gate_up(ring, layer.gate_up_weight, shared.expert);
    // A block with a strip less would take memory's time from gate_up of the others, for weights
    // that wait for their h: it asks for them when its own gate_up is used up.
    if (GateUpRange::count() < GateUpRange::kMost) await_room(ring, kStages - 1);
    bring_down(ring, layer.down_weight, shared.expert);
  }
  const StripRange strips(p.vocabulary);
  for (int strip = strips.first; strip < strips.end; ++strip) {
    bring_dense<LmHeadShape<kFormat>>(ring, p.lm_head, strip * kLmHeadStripRows, 0);
  }
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
    x.add<kDownParts>(mailbox_of(p, Mailbox::rows(flag - 1)), flag - 1);
  }
}

template <Format kFormat>
__device__ __forceinline__ void qkv_phase(const Params& p, Shared& shared, Ring& ring, Stream& x,
                                          const FirstRows& rows, int l, uint32_t flag) {
  const Layer& layer = shared.layers[l];
  const bool window = layer.window != 0;
  // Long ones have been asked for since the layer before.
  if (l == 0 || window || !is_long(shared.keys[0])) {
    prefetch_keys(p, layer, shared.keys[window], window);
  }
  const Stream::Gain gain = x.load_gain(layer.attention_norm);
  constexpr int kTiles = QkvShape<Format::kFp8>::kTiles;
  const int row = static_cast<int>(blockIdx.x) * kQkvStripRows;
  float2 bias = make_float2(0.0f, 0.0f);
  if (has_qkv()) {
    bias = load_bias<kQkvStripRows>(layer.qkv_bias, row);
    load_weight_scales<kFormat, kTiles>(shared, layer.qkv_scale, row, kQkvStripRows, kTiles, 0);
  }
  take_rows(p, x, l, flag);
  if (!has_qkv()) return;
  norm_for_dense<kFormat>(x, shared, gain, p.eps);
  dense_phase<kFormat, QkvShape<kFormat>>(shared, ring, row, row, 0, [&](int row, float2 sum) {
    send(mailbox_of(p, Mailbox::kQkv) + row / 2, pack_pair(sum.x + bias.x, sum.y + bias.y), flag);
  });
}

template <Format kFormat>
__device__ __forceinline__ void out_phase(const Params& p, const Layer& layer, Shared& shared,
                                          Ring& ring, uint32_t flag) {
  if (!has_out()) return;
  constexpr int kTiles = OutShape<Format::kFp8>::kTiles;
  const int row = out_strip() * kOutStripRows, part = out_part();
  const float2 bias = load_bias<kOutStripRows>(layer.out_bias, row);
  const float share = part == 0 ? 1.0f : 0.0f;
  load_weight_scales<kFormat, kTiles>(shared, layer.out_scale, row, kOutStripRows,
                                      kTiles * kOutParts, part * kTiles);
  take_attended<kFormat>(p, shared, part, flag);
  dense_phase<kFormat, OutShape<kFormat>>(shared, ring, row, row, 0, [&](int row, float2 sum) {
    send(mailbox_of(p, Mailbox::kOut) + part * (kHidden / 2) + row / 2,
         pack_pair(fmaf(bias.x, share, sum.x), fmaf(bias.y, share, sum.y)), flag);
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
    if (thread_index() == 0) store_volatile(&shared.attended, l + 1);
    out_phase<kFormat>(p, layer, shared, ring, flag);
    const Stream::Gain gain = x.load_gain(layer.moe_norm);
    const float router_bias = load_router_bias(p, layer);
    x.add<kOutParts>(mailbox_of(p, Mailbox::kOut), flag);
    x.norm(shared, gain, p.eps, [&shared](int block, int lane, bool inside, float4 value) {
      store_experts(shared, block, lane, inside, value);
    });
    route_phase(p, shared, ring, router_bias, flag);
    gate_up_phase(p, layer, shared, ring, flag);
    down_phase(p, layer, shared, ring, flag);
  }
  const Stream::Gain gain = x.load_gain(p.final_norm);
  const StripRange strips(p.vocabulary);
  const int first = strips.first * kLmHeadStripRows, end = strips.end * kLmHeadStripRows;
  constexpr int kTiles = LmHeadShape<Format::kFp8>::kTiles;
  load_weight_scales<kFormat, kTiles>(shared, p.lm_head_scale, first,
                                      min(end, p.vocabulary) - first, kTiles, 0);
  take_rows(p, x, p.num_layers, epoch + p.num_layers + 1);
  norm_for_dense<kFormat>(x, shared, gain, p.eps);
#pragma unroll 1
  for (int row = first; row < end; row += kLmHeadStripRows) {
    dense_phase<kFormat, LmHeadShape<kFormat>>(shared, ring, row, first, row / kLmHeadStripRows % 2,
                                               [&p](int row, float2 sum) {
                                                 if (row < p.vocabulary)
                                                   *reinterpret_cast<float2*>(p.logits + row) = sum;
                                               });
  }
}

template <Format kFormat>
__global__ void __launch_bounds__(kThreads, 1) decode_one_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int thread = threadIdx.x;
  if (thread < kStages) {
    barrier_init(shared_address(shared.full + thread), 1);
    barrier_init(shared_address(shared.empty + thread), kWarps);
  } else if (thread == kStages) {
    barrier_init(shared_address(&shared.routed), 1);
    shared.attended = 0;
  } else if (thread >= 32 && thread < 32 + moe::kTableRows) {
    const int row = thread - 32;
    shared.table.rows[row].codes = make_uint2(kCodes.words[row][0], kCodes.words[row][1]);
    if (row == 0) shared.table.zeros = make_uint4(0, 0, 0, 0);
  }
  barrier_init_fence();
  if (thread >= 64 && thread < 64 + kHeadDim) prepare_attention(p, shared, thread - 64);
  constexpr int kLayerWords = sizeof(Layer) / 8;
  for (int i = thread; i < p.num_layers * kLayerWords; i += kThreads) {
    reinterpret_cast<uint64_t*>(shared.layers)[i] = reinterpret_cast<const uint64_t*>(p.layers)[i];
  }
  uint32_t epoch;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(epoch) : "l"(p.epoch) : "memory");
  __syncthreads();
  const Ring ring{shared_address(shared.ring), shared_address(shared.full),
                  shared_address(shared.empty)};
  if (thread >= kComputeThreads) {
    registers_release<kBringRegisters>();
    if (thread < kComputeThreads + 32) {
      bring<kFormat>(p, shared, ring);
    } else if (thread < kComputeThreads + 64) {
      look_ahead<kFormat>(p, shared);
    }
  } else {
    registers_claim<kComputeRegisters>();
    compute<kFormat>(p, shared, ring, epoch);
    // All blocks have read the epoch: this one has had their work.
    if (blockIdx.x == 0 && thread == 0) *p.epoch = epoch + p.num_layers;
  }
}

}  // namespace gptoss::one

#endif  // GPTOSS_TRT_DECODE_ONE_KERNEL_CUH_
