// Routing of one token and its two expert products: strips of 64 rows from the ring, four records
// of 128 columns a stage, expanded in registers and multiplied by WGMMA as the decode plan of
// moe_gemm_fp8 does. Biases are added last; `down` is summed over experts before it is rounded.
//
// The operand in shared memory is the plain vector: with 16 bytes between its core matrices, row j
// of a matrix is row 0 of the j-th matrix behind it, so columns 1 to 7 of the result mean nothing
// and nobody reads them.
#ifndef GPTOSS_TRT_DECODE_ONE_EXPERT_PHASE_CUH_
#define GPTOSS_TRT_DECODE_ONE_EXPERT_PHASE_CUH_

#include <cstdint>

#include "decode_one/activation.cuh"
#include "decode_one/exchange.cuh"
#include "decode_one/shared.cuh"
#include "moe_gemm_fp8/epilogue.cuh"
#include "moe_gemm_fp8/weight_reader.cuh"

namespace gptoss::one {

using Reader = moe::WeightReader<moe::Storage::kMxfp4>;

constexpr int kOperandStep = 16;                          // bytes between core matrices
constexpr int kInstructionUnits = 2 * kOperandStep / 16;  // of a descriptor: 32 columns
constexpr int kPairs = moe::kStripRows / 2;

// Of the block's expert; asked for ahead of the wait for what is routed.
__device__ __forceinline__ float load_router_bias(const Params& p, const Layer& layer) {
  if (static_cast<int>(blockIdx.x) >= p.experts) return 0.0f;
  return bf16_to_float(__ldg(static_cast<const uint16_t*>(layer.router_bias) + blockIdx.x));
}

// This expert's logit, from the block's row of the router in the ring.
__device__ __forceinline__ void route_phase(const Params& p, Shared& shared, Ring& ring, float bias,
                                            uint32_t flag) {
  if (static_cast<int>(blockIdx.x) >= p.experts) return;
  const int lane = thread_index() % 32;
  constexpr int kColumns = 8;  // of a thread
  ring.wait();
  float sum = 0.0f;
#pragma unroll
  for (int i = thread_index(); i < kHidden / kColumns; i += kComputeThreads) {
    const uint4 w = load_shared_u128(ring.address() + i * 16);
    const uint4 x = reinterpret_cast<const uint4*>(shared.activation.dense)[i];
    const uint32_t weights[4] = {w.x, w.y, w.z, w.w}, values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum = fmaf(low_float(weights[j]), low_float(values[j]), sum);
      sum = fmaf(high_float(weights[j]), high_float(values[j]), sum);
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) shared.reduced[thread_index() / 32] = sum;
  ring.release();
  compute_sync();
  if (thread_index() == 0) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += shared.reduced[w];
    send(mailbox_of(p, Mailbox::kLogits) + blockIdx.x, __float_as_uint(total + bias), flag);
  }
}

// The four best experts by (bf16 logit, lowest index), by the first warp, for the others and for
// the warp that brings weights.
struct Choice {
  float logits[kTopK];

  __device__ __forceinline__ Choice(const Params& p, Shared& shared, uint32_t flag) {
    constexpr int kOfLane = kMostExperts / 32;
    const int lane = thread_index();
    const auto expert_of = [lane](int i) { return lane + 32 * i; };
    uint32_t bits[kOfLane];
    const uint64_t* packets = mailbox_of(p, Mailbox::kLogits);
    receive_each<kOfLane>([&](int i) { return packets + min(expert_of(i), p.experts - 1); }, flag,
                          bits);
    int keys[kOfLane];
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const float rounded = round_bf16(__uint_as_float(bits[i]));
      const int high = __float_as_int(rounded == 0.0f ? 0.0f : rounded) >> 16;
      const int ordered = high < 0 ? high ^ 0x7FFF : high;
      keys[i] = expert_of(i) < p.experts ? ordered * 65536 + (65535 - expert_of(i)) : INT32_MIN;
    }
    int experts[kTopK];
#pragma unroll
    for (int slot = 0; slot < kTopK; ++slot) {
      int best = keys[0];
#pragma unroll
      for (int i = 1; i < kOfLane; ++i) best = max(best, keys[i]);
      best = __reduce_max_sync(0xFFFFFFFFu, best);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        if (keys[i] == best) keys[i] = INT32_MIN;
      }
      const int ordered = best >> 16;
      logits[slot] = __int_as_float((ordered < 0 ? ordered ^ 0x7FFF : ordered) << 16);
      experts[slot] = 65535 - (best & 65535);
    }
    if (lane == 0) {
#pragma unroll
      for (int slot = 0; slot < kTopK; ++slot) {
        shared.expert[slot] = min(max(experts[slot], 0), p.experts - 1);  // NaN logits stay inside
      }
      barrier_arrive(shared_address(&shared.routed));
    }
  }

  // The experts' softmax rounded to bf16, when nobody waits for it.
  __device__ __forceinline__ void weigh(Shared& shared) const {
    float values[kTopK], total = 0.0f;
#pragma unroll
    for (int slot = kTopK - 1; slot >= 0; --slot) {
      values[slot] = __expf(logits[slot] - logits[0]);
      total += values[slot];
    }
    if (thread_index() != 0) return;
#pragma unroll
    for (int slot = 0; slot < kTopK; ++slot) {
      shared.expert_weight[slot] = round_bf16(divide(values[slot], total, reciprocal(total)));
    }
  }
};

// One warpgroup's stream of records: its own one of each stage. The next one is fetched while the
// instructions run. What bounds a block is the integer pipe, so everything that is the same in all
// stages is found ahead of them.
class Records {
 public:
  static_assert(kStageRecords == kWarpgroups);

  // `stages` is how many this block will take from the ring, one product's all.
  __device__ __forceinline__ Records(Shared& shared, Ring& ring, int stages)
      : ring_(ring),
        table_(shared.table),
        warpgroup_(__shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0)),
        left_(stages),
        record_(keep_in_register(warpgroup_ * kRecordBytes)),
        nibbles_(keep_in_register(record_ + moe::kHeaderBytes + moe::kShiftBytes +
                                  thread_index() % 128 * 16)),
        shifts_(keep_in_register(record_ + moe::kHeaderBytes + thread_index() % 128 / 32 * 16 +
                                 thread_index() % 32 / 2)) {
    fetch();
  }

  // sums += stages [stage, end) of a strip. `operand` is where the activation lies, `scale`
  // (record) what a record is multiplied by beside the weight's own scale.
  template <class Scale>
  __device__ __forceinline__ void add(int stage, int end, uint32_t operand, Scale scale,
                                      float2& sums) {
    constexpr int kStageUnits = kStageRecords * kRecordUnits;
    uint32_t x = ((operand & 0x3FFFF) >> 4) + (stage * kStageRecords + warpgroup_) * kRecordUnits +
                 (kOperandStep >> 4 << 16);
    int record = stage * kStageRecords + warpgroup_;
    const int last = end * kStageRecords;
#pragma unroll 1
    for (; record < last; record += kStageRecords, x += kStageUnits) {
      moe::Fragments a;
      float acc[4];
      const float factor = weight_scale_ * scale(record);
      Reader::expand(raw_, table_, a);
      wgmma_operands_ready(a);
      ring_.release();
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < moe::kInstructionsPerRecord; ++j) {
        wgmma_e4m3<8>(acc, a[j], kOperandHigh | (x + j * kInstructionUnits), j);
      }
      wgmma_commit();
      if (--left_ > 0) fetch();
      wgmma_wait_all();
      wgmma_settle(acc);
      // A record that the strip does not have is what lay in the ring.
      if (record < kRecords) {
        sums.x = fmaf(acc[0], factor, sums.x);
        sums.y = fmaf(acc[2], factor, sums.y);
      }
      wgmma_operands_ready(a);  // they are read until the wait
    }
  }

  // Sums of this warpgroup, for the others.
  __device__ __forceinline__ void leave(float (&partial)[kStageRecords][moe::kStripRows],
                                        float2 sums) const {
    const int lane = thread_index() % 32;
    if (lane % 4 != 0) return;
    const int pair = thread_index() % 128 / 32 * 8 + lane / 4;
    *reinterpret_cast<float2*>(partial[warpgroup_] + 2 * pair) = sums;
  }

 private:
  static constexpr int kRecordUnits = moe::kInstructionsPerRecord * kInstructionUnits;
  static constexpr uint64_t kOperandHigh = static_cast<uint64_t>(128 >> 4) << 32;

  // This warpgroup's record in the ring's next stage. Of a record with one half the other is what
  // lay in the ring: it meets zeros.
  __device__ __forceinline__ void fetch() {
    ring_.wait();
    constexpr int kHalf = moe::half_bytes(moe::Storage::kMxfp4);
    const uint32_t stage = ring_.address();
    raw_.shifts[0] = load_shared_u8(stage + shifts_);
    raw_.shifts[1] = load_shared_u8(stage + shifts_ + kHalf);
    raw_.words[0] = load_shared_u128(stage + nibbles_);
    raw_.words[1] = load_shared_u128(stage + nibbles_ + kHalf);
    weight_scale_ = load_shared_f32(stage + record_);
  }

  Ring& ring_;
  moe::KeptTable table_;
  int warpgroup_;
  int left_;
  uint32_t record_;  // offsets in a stage: of the record, of what this thread has of it
  uint32_t nibbles_;
  uint32_t shifts_;
  Reader::Raw raw_;
  float weight_scale_;
};

static_assert(moe::tail_halves(kHidden) == 1, "the last record has one half");

// Sums of one pair of rows over the warpgroups.
__device__ __forceinline__ float2 collect(const Shared& shared, int strip, int pair) {
  float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < kStageRecords; ++w) {
    const float2 more = *reinterpret_cast<const float2*>(shared.strip_partial[strip][w] + 2 * pair);
    total.x += more.x, total.y += more.y;
  }
  return total;
}

// The bias of rows 2 pair and 2 pair + 1 of a strip, two bf16.
template <bool kDown>
__device__ __forceinline__ uint32_t strip_bias(const void* bias, int expert, int strip, int pair) {
  constexpr int kRows = kDown ? kHidden : 2 * kChannels;
  return __ldg(static_cast<const uint32_t*>(bias) +
               (static_cast<int64_t>(expert) * kRows + strip * moe::kStripRows) / 2 + pair);
}

__device__ __forceinline__ void gate_up_phase(const Params& p, const Layer& layer, Shared& shared,
                                              Ring& ring, uint32_t flag) {
  if (thread_index() < 32) {
    const Choice choice(p, shared, flag);
    compute_sync();
    choice.weigh(shared);
  } else {
    compute_sync();
  }
  const int count = GateUpRange::count();
  const int mine = thread_index() / kPairs, pair = thread_index() % kPairs;
  uint32_t bias = 0;
  if (mine < count) {
    bias = strip_bias<false>(layer.gate_up_bias, shared.expert[GateUpRange::slot(mine)],
                             GateUpRange::strip(mine), pair);
  }
  const uint32_t x = shared_address(shared.activation.experts);
  Records records(shared, ring, count * kStripStages);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    float2 sums = make_float2(0.0f, 0.0f);
    records.add(0, kStripStages, x, [&shared](int record) { return shared.x_scale[record]; }, sums);
    records.leave(shared.strip_partial[i], sums);
  }
  compute_sync();
  if (mine < count) {
    const float2 sum = collect(shared, mine, pair);
    uint32_t code = moe::quantise_static(
        moe::swiglu(sum.x + low_float(bias), sum.y + high_float(bias), p.limit, p.alpha));
    code <<= 8 * (pair % 4);
    code |= __shfl_xor_sync(0xFFFFFFFFu, code, 1);
    code |= __shfl_xor_sync(0xFFFFFFFFu, code, 2);
    if (pair % 4 == 0) {
      const int channel =
          GateUpRange::slot(mine) * kChannels + GateUpRange::strip(mine) * kPairs + pair;
      send(mailbox_of(p, Mailbox::kH) + channel / 4, code, flag);
    }
  }
}

// The block's part of h, in the order that WGMMA wants.
__device__ __forceinline__ void take_h(const Params& p, Shared& shared, const DownRange& range,
                                       uint32_t flag) {
  constexpr int kWords = kChannels / 4, kPaddedWords = kRecords * moe::kRecordColumns / 4;
  constexpr int kPairsOfStage = kStageRecords * moe::kRecordColumns / 8;
  constexpr int kMostStages = moe::ceil_div(DownRange::kAll, kLeastBlocks);
  constexpr int kTurns = moe::ceil_div(kMostStages * kPairsOfStage, kComputeThreads);
  const auto stage_of = [&range](int turn) {
    return range.first + static_cast<int>(thread_index() + turn * kComputeThreads) / kPairsOfStage;
  };
  const auto word_of = [&](int turn) {
    return stage_of(turn) % kStripStages * (2 * kPairsOfStage) +
           2 * (thread_index() % kPairsOfStage);
  };
  uint2 codes[kTurns];
  receive_pairs<kTurns>(
      [&](int turn) {
        return mailbox_of(p, Mailbox::kH) + DownRange::slot(stage_of(turn)) * kWords +
               word_of(turn);
      },
      [&](int turn) { return stage_of(turn) < range.end && word_of(turn) < kWords; }, flag, codes);
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if (stage_of(turn) >= range.end || word_of(turn) >= kPaddedWords) continue;
    auto* h = reinterpret_cast<uint32_t*>(shared.activation.h[DownRange::slot(stage_of(turn))]);
    // Columns behind kChannels meet zero weights, and must be no NaN.
    const bool real = word_of(turn) < kWords;
    h[permuted_word(word_of(turn))] = real ? codes[turn].x : 0;
    h[permuted_word(word_of(turn) + 1)] = real ? codes[turn].y : 0;
  }
}

// What the biases add to a pair of rows: of the experts whose first stage the block has. Asked for
// ahead of h.
struct DownBias {
  uint32_t words[2];
  float weights[2];

  __device__ __forceinline__ DownBias(const Layer& layer, const Shared& shared,
                                      const DownRange& range, int strip, int pair) {
    const int begin = max(range.first, strip * DownRange::kOfStrip);
    const int end = min(range.end, (strip + 1) * DownRange::kOfStrip);
    int at = (begin + kStripStages - 1) / kStripStages * kStripStages;
#pragma unroll
    for (int i = 0; i < 2; ++i, at += kStripStages) {
      words[i] = 0;
      weights[i] = 0.0f;
      if (at >= end) continue;
      const int slot = DownRange::slot(at);
      words[i] = strip_bias<true>(layer.down_bias, shared.expert[slot], strip, pair);
      weights[i] = shared.expert_weight[slot];
    }
  }
};
static_assert(moe::ceil_div(DownRange::kAll, kLeastBlocks) <= 2 * kStripStages);

__device__ __forceinline__ void down_phase(const Params& p, const Layer& layer, Shared& shared,
                                           Ring& ring, uint32_t flag) {
  const DownRange range;
  const int pair = thread_index() % kPairs;
  const int i = thread_index() / kPairs, strip = DownRange::strip(range.first) + i;
  const DownBias bias(layer, shared, range, min(strip, kDownStrips - 1), pair);
  take_h(p, shared, range, flag);
  async_proxy_fence();
  compute_sync();
  Records records(shared, ring, range.end - range.first);
  float2 sums = make_float2(0.0f, 0.0f);
  int done = 0;
#pragma unroll 1
  for (int at = range.first; at < range.end;) {
    const int slot = DownRange::slot(at), stage = at % kStripStages;
    const int end = min(kStripStages, stage + range.end - at);
    const float factor = moe::kStaticScale * shared.expert_weight[slot];
    records.add(
        stage, end, shared_address(shared.activation.h[slot]), [factor](int) { return factor; },
        sums);
    at += end - stage;
    if (at % DownRange::kOfStrip == 0 || at == range.end) {
      records.leave(shared.strip_partial[done++], sums);
      sums = make_float2(0.0f, 0.0f);
    }
  }
  compute_sync();
  if (i < range.strips()) {
    float2 sum = collect(shared, i, pair);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      sum.x = fmaf(bias.weights[b], low_float(bias.words[b]), sum.x);
      sum.y = fmaf(bias.weights[b], high_float(bias.words[b]), sum.y);
    }
    int part = DownRange::part(strip);
    uint64_t* target = mailbox_of(p, Mailbox::rows(flag)) + strip * kPairs + pair;
    send(target + part * (kHidden / 2), pack_pair(sum.x, sum.y), flag);
    // The last of a strip's blocks fills the parts that nobody has.
    if (range.end >= (strip + 1) * DownRange::kOfStrip) {
      while (++part < kDownParts) send(target + part * (kHidden / 2), 0, flag);
    }
  }
}

}  // namespace gptoss::one

#endif  // GPTOSS_TRT_DECODE_ONE_EXPERT_PHASE_CUH_
