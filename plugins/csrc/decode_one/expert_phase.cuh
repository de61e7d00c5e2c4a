// Routing of one token and its two expert products: strips of 64 rows from the ring, four records
// of 128 columns a stage, expanded in registers and multiplied by WGMMA as the decode plan of
// moe_gemm_fp8 does, in the same order; sums are bit-equal to its.
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

// This expert's logit, from the block's row of the router in the ring.
__device__ __forceinline__ void route_phase(const Params& p, const Layer& layer, Shared& shared,
                                            Ring& ring, uint32_t flag) {
  if (static_cast<int>(blockIdx.x) >= p.experts) return;
  const int lane = thread_index() % 32;
  constexpr int kColumns = 8;  // of a thread
  const float bias =
      bf16_to_float(__ldg(static_cast<const uint16_t*>(layer.router_bias) + blockIdx.x));
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

// The four best experts by (bf16 logit, lowest index) and their softmax rounded to bf16, by the
// first warp, for the others and for the warp that brings weights.
__device__ __forceinline__ void choose(const Params& p, Shared& shared, uint32_t flag) {
  const int lane = thread_index();
  int keys[kMostExperts / 32];
#pragma unroll
  for (int i = 0; i < kMostExperts / 32; ++i) {
    const int expert = lane + 32 * i;
    keys[i] = INT32_MIN;
    if (32 * i < p.experts) {
      const uint32_t bits_of_logit =
          receive_one(mailbox_of(p, Mailbox::kLogits) + min(expert, p.experts - 1), flag);
      const float rounded = round_bf16(__uint_as_float(bits_of_logit));
      const int bits = __float_as_int(rounded == 0.0f ? 0.0f : rounded) >> 16;
      const int ordered = bits < 0 ? bits ^ 0x7FFF : bits;
      if (expert < p.experts) keys[i] = ordered * 65536 + (65535 - expert);
    }
  }
  float values[kTopK];
  int experts[kTopK];
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) {
    int best = keys[0];
#pragma unroll
    for (int i = 1; i < kMostExperts / 32; ++i) best = max(best, keys[i]);
    best = __reduce_max_sync(0xFFFFFFFFu, best);
#pragma unroll
    for (int i = 0; i < kMostExperts / 32; ++i) {
      if (keys[i] == best) keys[i] = INT32_MIN;
    }
    const int ordered = best >> 16;
    values[slot] = __int_as_float((ordered < 0 ? ordered ^ 0x7FFF : ordered) << 16);
    experts[slot] = 65535 - (best & 65535);
  }
  float total = 0.0f;
#pragma unroll
  for (int slot = kTopK - 1; slot >= 0; --slot) {
    values[slot] = __expf(values[slot] - values[0]);
    total += values[slot];
  }
  if (lane == 0) {
#pragma unroll
    for (int slot = 0; slot < kTopK; ++slot) {
      shared.expert[slot] = min(max(experts[slot], 0), p.experts - 1);  // NaN logits stay inside
      shared.expert_weight[slot] = round_bf16(divide(values[slot], total, reciprocal(total)));
    }
    barrier_arrive(shared_address(&shared.routed));
  }
}

// One warpgroup's stream of records over this block's strips of one product: two of each stage, so
// that two chains of expansion, instructions and addition overlap. The next ones are fetched while
// the instructions run. Records that are 4 apart make one sum, as in moe_gemm_fp8.
class Records {
 public:
  static constexpr int kTogether = kStageRecords / kWarpgroups;

  __device__ __forceinline__ Records(Shared& shared, Ring& ring)
      : shared_(shared),
        ring_(ring),
        table_(shared.table),
        warpgroup_(__shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0)),
        reader_(thread_index() % 128) {}

  // Sums of `strips` strips into strip_partial. `operand` (strip) is where its activation lies,
  // `scale` (record) the activation's scale, `start` (strip) what this thread's two rows begin with
  // in the first sum.
  template <class Operand, class Scale, class Start>
  __device__ __forceinline__ void multiply(int strips, Operand operand, Scale scale, Start start) {
    fetch(0);
#pragma unroll 1
    for (int strip = 0; strip < strips; ++strip) {
      const uint64_t x = wgmma_descriptor(operand(strip), kOperandStep, moe::kStripRows * 2);
      float2 sums[kTogether] = {};
      if (warpgroup_ == 0) sums[0] = start(strip);
#pragma unroll 1
      for (int stage = 0; stage < kStripStages; ++stage) {
        const bool last = stage + 1 == kStripStages;
        const int following = last ? (strip + 1 < strips ? 0 : -1) : stage + 1;
        one(stage, x, scale, following, sums);
      }
      leave(strip, sums);
    }
  }

 private:
  __device__ __forceinline__ int record_of(int stage, int i) const {
    return stage * kStageRecords + warpgroup_ + i * kWarpgroups;
  }

  // This warpgroup's records in the ring's next stage, which is number `stage` of its strip. One
  // that the strip does not have is zeros.
  __device__ __forceinline__ void fetch(int stage) {
    ring_.wait();
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int record = record_of(stage, i);
      const bool present = record < kRecords;
      const uint32_t address = ring_.address() + (warpgroup_ + i * kWarpgroups) * kRecordBytes;
      raw_[i] = reader_.fetch(present ? address : ring_.address(), table_, record + 1 < kRecords);
      weight_scale_[i] = present ? load_shared_f32(address) : 0.0f;
    }
  }

  template <class Scale>
  __device__ __forceinline__ void one(int stage, uint64_t x, Scale scale, int following,
                                      float2 (&sums)[kTogether]) {
    moe::Fragments a[kTogether];
    float acc[kTogether][4], scales[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int record = min(record_of(stage, i), kRecords - 1);
      scales[i] = weight_scale_[i] * scale(record);
      Reader::expand(raw_[i], table_, a[i]);
      wgmma_operands_ready(a[i]);
    }
    ring_.release();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int record = min(record_of(stage, i), kRecords - 1);
#pragma unroll
      for (int j = 0; j < moe::kInstructionsPerRecord; ++j) {
        wgmma_e4m3<8>(acc[i], a[i][j],
                      x + (record * moe::kInstructionsPerRecord + j) * kInstructionUnits, j);
      }
    }
    wgmma_commit();
    if (following >= 0) fetch(following);
    wgmma_wait_all();
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      wgmma_settle(acc[i]);
      sums[i].x = fmaf(acc[i][0], scales[i], sums[i].x);
      sums[i].y = fmaf(acc[i][2], scales[i], sums[i].y);
      wgmma_operands_ready(a[i]);  // they are read until the wait
    }
  }

  __device__ __forceinline__ void leave(int strip, const float2 (&sums)[kTogether]) {
    const int lane = thread_index() % 32;
    if (lane % 4 != 0) return;
    const int pair = thread_index() % 128 / 32 * 8 + lane / 4;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      float* partial = shared_.strip_partial[strip][warpgroup_ + i * kWarpgroups];
      *reinterpret_cast<float2*>(partial + 2 * pair) = sums[i];
    }
  }

  Shared& shared_;
  Ring& ring_;
  moe::KeptTable table_;
  int warpgroup_;
  Reader reader_;
  Reader::Raw raw_[kTogether];
  float weight_scale_[kTogether];
};

static_assert(moe::tail_halves(kHidden) == 1, "the last record has one half");

// Sums of one pair of rows over the records, in the order of moe_gemm_fp8.
__device__ __forceinline__ float2 collect(const Shared& shared, int strip, int pair) {
  const auto part = [&shared, strip, pair](int w) {
    return *reinterpret_cast<const float2*>(shared.strip_partial[strip][w] + 2 * pair);
  };
  float2 total = part(0);
#pragma unroll
  for (int w = 1; w < kStageRecords - 1; ++w) {
    const float2 more = part(w);
    total.x += more.x, total.y += more.y;
  }
  const float2 last = part(kStageRecords - 1);
  return make_float2(last.x + total.x, last.y + total.y);
}

// The bias of this thread's two rows of a strip.
template <bool kDown>
__device__ __forceinline__ float2 strip_bias(const void* bias, int expert, int strip) {
  constexpr int kRows = kDown ? kHidden : 2 * kChannels;
  const int pair = thread_index() % 128 / 32 * 8 + thread_index() % 32 / 4;
  const uint32_t words =
      __ldg(static_cast<const uint32_t*>(bias) +
            (static_cast<int64_t>(expert) * kRows + strip * moe::kStripRows) / 2 + pair);
  return make_float2(low_float(words), high_float(words));
}

__device__ __forceinline__ void gate_up_phase(const Params& p, const Layer& layer, Shared& shared,
                                              Ring& ring, uint32_t flag) {
  if (thread_index() < 32) choose(p, shared, flag);
  compute_sync();
  const StripRange<false> range;
  Records records(shared, ring);
  const uint32_t x = shared_address(shared.activation.experts);
  records.multiply(
      range.count(), [x](int) { return x; },
      [&shared](int record) { return shared.x_scale[record]; },
      [&](int i) {
        return strip_bias<false>(layer.gate_up_bias, shared.expert[range.slot(i)], range.strip(i));
      });
  compute_sync();
  if (thread_index() < range.count() * kPairs) {
    const int i = thread_index() / kPairs, pair = thread_index() % kPairs;
    const float2 sum = collect(shared, i, pair);
    uint32_t code = moe::quantise_static(moe::swiglu(sum.x, sum.y, p.limit, p.alpha));
    code <<= 8 * (pair % 4);
    code |= __shfl_xor_sync(0xFFFFFFFFu, code, 1);
    code |= __shfl_xor_sync(0xFFFFFFFFu, code, 2);
    if (pair % 4 == 0) {
      const int channel = range.slot(i) * kChannels + range.strip(i) * kPairs + pair;
      send(mailbox_of(p, Mailbox::kH) + channel / 4, code, flag);
    }
  }
}

__device__ __forceinline__ void down_phase(const Params& p, const Layer& layer, Shared& shared,
                                           Ring& ring, uint32_t flag) {
  const StripRange<true> range;
  constexpr int kWords = kChannels / 4, kPaddedWords = kRecords * moe::kRecordColumns / 4;
  for (int i = 0; i < range.count(); ++i) {
    const uint64_t* packets = mailbox_of(p, Mailbox::kH) + range.slot(i) * kWords;
    auto* h = reinterpret_cast<uint32_t*>(shared.activation.h[i]);
    constexpr int kTurns = moe::ceil_div(kPaddedWords / 2, kComputeThreads);
    const auto word = [](int turn) {
      return 2 * static_cast<int>(thread_index() + turn * kComputeThreads);
    };
    uint2 codes[kTurns];
    receive_pairs<kTurns>(
        [&](int turn) { return packets + (word(turn) < kWords ? word(turn) : 0); }, flag, codes);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (word(turn) >= kPaddedWords) break;
      // Columns behind kChannels meet zero weights, and must be no NaN.
      const bool real = word(turn) < kWords;
      h[permuted_word(word(turn))] = real ? codes[turn].x : 0;
      h[permuted_word(word(turn) + 1)] = real ? codes[turn].y : 0;
    }
  }
  async_proxy_fence();
  compute_sync();
  Records records(shared, ring);
  records.multiply(
      range.count(), [&shared](int i) { return shared_address(shared.activation.h[i]); },
      [](int) { return moe::kStaticScale; },
      [&](int i) {
        return strip_bias<true>(layer.down_bias, shared.expert[range.slot(i)], range.strip(i));
      });
  compute_sync();
  if (thread_index() < range.count() * kPairs) {
    const int i = thread_index() / kPairs, pair = thread_index() % kPairs;
    const float2 sum = collect(shared, i, pair);
    const float weight = shared.expert_weight[range.slot(i)];
    const int row = range.slot(i) * kHidden + range.strip(i) * moe::kStripRows + 2 * pair;
    send(mailbox_of(p, Mailbox::kRows) + row / 2, pack_pair(weight * sum.x, weight * sum.y), flag);
  }
}

}  // namespace gptoss::one

#endif  // GPTOSS_TRT_DECODE_ONE_EXPERT_PHASE_CUH_
