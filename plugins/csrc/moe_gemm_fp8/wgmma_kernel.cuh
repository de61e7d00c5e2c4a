// The decode plan of moe_gemm_fp8. Four warpgroups take the records of a strip in turn, each from a
// ring of its own in shared memory that a producer warp feeds; they expand them in registers and
// multiply them (M operand) with the block's tokens (N operand, whole in shared memory). At the end
// of an item the last of them adds the four sums and finishes the strip while the others go on.
//
// Invariant: a result depends on its own row of x, its expert's weights and (plan, k_split) only,
// never on which block computed it, on its neighbours or on the order of arrival.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_WGMMA_KERNEL_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_WGMMA_KERNEL_CUH_

#include <cstdint>

#include "core/ptx.cuh"
#include "moe_gemm_fp8/epilogue.cuh"
#include "moe_gemm_fp8/params.h"
#include "moe_gemm_fp8/schedule.cuh"
#include "moe_gemm_fp8/token_run.cuh"
#include "moe_gemm_fp8/weight_reader.cuh"

namespace gptoss::moe {

__constant__ constexpr CodeTable kCodeTable = make_code_table();

constexpr int kTokensBarrier = 1;     // named barrier of all consumers
constexpr int kWarpgroupBarrier = 2;  // and of warpgroup w: kWarpgroupBarrier + w
constexpr int kBarrierBytes = 8;

// A launch of kThreads gets 96 registers a thread: 512 x 112 + 128 x 32 are as many.
constexpr int kConsumerRegisters = 112;
constexpr int kProducerRegisters = 32;

// Views of the block's shared memory.
struct Shared {
  uint8_t* base;
  const SharedLayout& at;
  const ReaderTable& table;

  __device__ uint32_t address(int offset) const { return shared_address(base + offset); }
  __device__ uint32_t barrier(int index) const {
    return address(at.barriers) + index * kBarrierBytes;
  }
  __device__ uint32_t partial_full() const { return barrier(0); }
  __device__ uint32_t partial_free() const { return barrier(1); }
  __device__ uint32_t full(int warpgroup) const { return barrier(2 + warpgroup * kMaxStages); }
  __device__ uint32_t empty(int warpgroup) const { return full(kConsumers + warpgroup); }
  __device__ uint32_t ring(int warpgroup) const {
    return address(at.rings) + warpgroup * at.stages * at.stage_bytes;
  }
  __device__ uint16_t* bias() const { return reinterpret_cast<uint16_t*>(base + at.bias); }
  __device__ int32_t* tables() const { return reinterpret_cast<int32_t*>(base + at.offsets); }
  __device__ int32_t* slot() const { return reinterpret_cast<int32_t*>(base + at.row_info); }
  __device__ float* weight() const { return reinterpret_cast<float*>(slot() + kMaxTokenBlock); }
  __device__ float* scales() const { return reinterpret_cast<float*>(base + at.scales); }
};

// ---- tokens ---------------------------------------------------------------------------------

// All consumers bring the token block, its scales and what the epilogue needs of its rows. Every
// load but the tokens' own is asynchronous, so that one latency covers them all.
template <Kind kKind>
__device__ inline void load_tokens(const Params& p, const Shared& shared, const Segment& block,
                                   int tokens) {
  const int thread = threadIdx.x;
  const auto source_row = [&](int token) {
    const int row = block.first_row + token;
    if (!is_gate_up(kKind)) return row;
    return p.x_rows == 1 ? 0 : __ldg(p.row_slots + row) / p.top_k;  // one token: no need to look
  };
  named_barrier_sync(kTokensBarrier, kConsumerThreads);  // nobody reads the old block any more
  if (p.bias != nullptr) {
    const uint16_t* source = p.bias + static_cast<int64_t>(block.expert) * p.n;  // n is even
    const uint32_t target = shared.address(shared.at.bias);
    for (int i = thread; i < p.n / 2; i += kConsumerThreads) {
      copy_word_async(target + i * 4, source + 2 * i, true);
    }
  }
  constexpr bool kScale64 = kKind == Kind::kDownPer64;
  const int scale_rows = kScale64 ? ceil_div(p.k, kHalfColumns) : p.records;
  const int scale_slots = kScale64 ? 2 * p.records : p.records;
  const uint32_t scales = shared.address(shared.at.scales);
  for (int i = thread; i < scale_slots * tokens; i += kConsumerThreads) {
    const int token = i % tokens;
    const int group = i / tokens;
    if (p.x_scale == nullptr) {
      shared.scales()[i] = token < block.rows ? kStaticScale : 0.0f;
      continue;
    }
    const bool present = token < block.rows && group < scale_rows;
    const int64_t at = present ? static_cast<int64_t>(group) * p.x_rows + source_row(token) : 0;
    copy_word_async(scales + i * 4, p.x_scale + at, present);
  }
  if (!is_gate_up(kKind) && thread < block.rows) {
    const int slot = __ldg(p.row_slots + block.first_row + thread);
    shared.slot()[thread] = slot;
    shared.weight()[thread] = __ldg(p.expert_weights + slot);
  }
  // A warp reads 64 columns of eight tokens at a time, four lanes each token: few lines for a load.
  // It writes them word by word in the order that the weights have: word 4a + c becomes 4c + a.
  const int lane = thread % 32;
  const int chunk_stride = tokens / kCoreRows * kCoreBytes;  // bytes between 16-column chunks
  const int runs = p.records * (kRecordColumns / kHalfColumns);
  const uint8_t* sources[kWidths];
#pragma unroll
  for (int group = 0; group < kWidths; ++group) {  // all look-ups under one latency
    const int token = group * kCoreRows + lane / 4;
    sources[group] = token < block.rows
                         ? p.x + static_cast<int64_t>(source_row(token)) * p.k + lane % 4 * 16
                         : nullptr;
  }
  uint8_t* target = shared.base + shared.at.tokens + lane / 4 * 16 + lane % 4 * 4;
#pragma unroll 1
  for (int run = thread / 32; run < runs; run += kConsumerThreads / 32) {
    const int column = run * kHalfColumns;
    const bool inside = column + lane % 4 * 16 < p.k;
    uint4 in[kWidths];
#pragma unroll
    for (int group = 0; group < kWidths; ++group) {
      in[group] = sources[group] != nullptr && inside
                      ? __ldg(reinterpret_cast<const uint4*>(sources[group] + column))
                      : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int group = 0; group < kWidths; ++group) {
      if (group * kCoreRows >= tokens) break;
      uint8_t* to = target + run * 4 * chunk_stride + group * kCoreBytes;
      *reinterpret_cast<uint32_t*>(to) = in[group].x;
      *reinterpret_cast<uint32_t*>(to + chunk_stride) = in[group].y;
      *reinterpret_cast<uint32_t*>(to + 2 * chunk_stride) = in[group].z;
      *reinterpret_cast<uint32_t*>(to + 3 * chunk_stride) = in[group].w;
    }
  }
  copies_wait_all();
  async_proxy_fence();
  named_barrier_sync(kTokensBarrier, kConsumerThreads);
}

// ---- products -------------------------------------------------------------------------------

// The bias of this thread's two rows in every column, or zeros.
template <int kTokens>
__device__ __forceinline__ void start_sum(const Params& p, const Shared& shared, const Item& item,
                                          int thread, bool with_bias, float (&sum)[kTokens / 2]) {
  float low = 0.0f, high = 0.0f;
  const int row = item.strip * kStripRows + thread / 32 * 16 + thread % 32 / 4 * 2;
  if (with_bias && row < p.n) {  // n is even
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(shared.bias() + row);
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xFFFF0000u);
  }
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    sum[4 * j] = low;
    sum[4 * j + 1] = low;
    sum[4 * j + 2] = high;
    sum[4 * j + 3] = high;
  }
}

// Weight scale times the activation scales of this thread's columns: 8j + 2t and the next.
template <int kTokens>
__device__ __forceinline__ void load_scales(float weight_scale, uint32_t row,
                                            float2 (&scales)[kTokens / 8]) {
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    const float2 activation = load_shared_f64(row + j * 32);
    scales[j] = make_float2(weight_scale * activation.x, weight_scale * activation.y);
  }
}

// sum += acc x scale of the column.
template <int kTokens>
__device__ __forceinline__ void promote(const float (&acc)[kTokens / 2],
                                        const float2 (&scales)[kTokens / 8],
                                        float (&sum)[kTokens / 2]) {
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    sum[4 * j] = fmaf(acc[4 * j], scales[j].x, sum[4 * j]);
    sum[4 * j + 1] = fmaf(acc[4 * j + 1], scales[j].y, sum[4 * j + 1]);
    sum[4 * j + 2] = fmaf(acc[4 * j + 2], scales[j].x, sum[4 * j + 2]);
    sum[4 * j + 3] = fmaf(acc[4 * j + 3], scales[j].y, sum[4 * j + 3]);
  }
}

// What a warpgroup keeps over all its items.
struct Lane {
  int warpgroup;
  int thread;  // in the warpgroup
  uint32_t full;
  uint32_t empty;
  uint32_t stages;
  RingPosition ring;
};

// One warpgroup's stream of records: those with record % kConsumers == warpgroup, item after item.
// The next one is fetched while the instructions of this one run, over the end of an item too.
template <Storage kStorage, bool kScale64, int kTokens>
class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(const Params& p, const Shared& shared, Lane& lane)
      : p_(p),
        shared_(shared),
        lane_(lane),
        tokens_(shared.address(shared.at.tokens), kChunkStride, kCoreBytes),
        scales_(keep_in_register(shared.address(shared.at.scales) + lane.thread % 4 * 8)),
        reader_(lane.thread),
        table_(shared.table),
        halved_(keep_in_register(p.tail_halves == 2 ? -1 : p.records - 1)) {}

  __device__ __forceinline__ void fetch(int record) {
    barrier_wait(lane_.full + lane_.ring.stage * kBarrierBytes, lane_.ring.parity);
    const uint32_t stage = lane_.stages + lane_.ring.stage * shared_.at.stage_bytes;
    raw_ = reader_.fetch(stage, table_, record != static_cast<int>(halved_));
    weight_scale_ = load_shared_f32(stage);
  }

  // sum += the products of `record`, which was fetched; fetches `next` unless it is negative.
  __device__ __forceinline__ void multiply(int record, int next, float (&sum)[kTokens / 2]) {
    Fragments a;
    const float weight_scale = weight_scale_;
    const uint32_t b = record * (kInstructionsPerRecord * kInstructionStep);
    raw_.settle();
    __syncwarp();
    if (lane_.thread % 32 == 0) barrier_arrive(lane_.empty + lane_.ring.stage * kBarrierBytes);
    lane_.ring.step(shared_.at.stages);
    float acc[kTokens / 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      WeightReader<kStorage>::expand_half(raw_, table_, half, a);
#pragma unroll
      for (int i = 0; i < kInstructionsPerHalf; ++i) {
        wgmma_operand_ready(a[kInstructionsPerHalf * half + i]);
      }
      wgmma_fence();
#pragma unroll
      for (int i = 2 * half; i < 2 * half + kInstructionsPerHalf; ++i) {
        // Halves that have scales of their own begin sums of their own.
        wgmma_e4m3<kTokens>(acc, a[i], tokens_.moved(b + i * kInstructionStep),
                            kScale64 ? i - 2 * half : i);
      }
      wgmma_commit();
      if (!kScale64 && half == 0) continue;
      const int group = kScale64 ? 2 * record + half : record;
      const uint32_t row = scales_ + group * kTokens * 4;
      float2 scales[kTokens / 8];
      load_scales<kTokens>(weight_scale, row, scales);
      if (kEarlyFetch && half == 1 && next >= 0) fetch(next);
      wgmma_wait_all();
      wgmma_settle(acc);
      promote<kTokens>(acc, scales, sum);
    }
    // The instructions read their operands until the wait: no fetch may take these registers.
    wgmma_operands_ready(a);
    if (!kEarlyFetch && next >= 0) fetch(next);
  }

 private:
  // FP8 fragments are too many to hold twice while the instructions run.
  static constexpr bool kEarlyFetch = kStorage == Storage::kMxfp4;
  static constexpr int kChunkStride = kTokens / kCoreRows * kCoreBytes;
  static constexpr int kInstructionStep = 2 * kChunkStride / 16;  // in descriptor units

  const Params& p_;
  const Shared& shared_;
  Lane& lane_;
  WgmmaDescriptor tokens_;
  uint32_t scales_;
  WeightReader<kStorage> reader_;
  KeptTable table_;
  uint32_t halved_;  // the record with one half, if there is one
  typename WeightReader<kStorage>::Raw raw_;
  float weight_scale_;
};

// ---- the end of an item -----------------------------------------------------------------------

// Brings the warpgroups' sums together, in their order: true in the last one, which then holds the
// total. It is the one to add because it has a record less than the others where their number is no
// multiple of kConsumers (2880 columns: 6, 6, 6, 5).
template <int kTokens>
__device__ __forceinline__ bool collect(const Shared& shared, int ordinal, int warpgroup,
                                        int thread, float (&sum)[kTokens / 2]) {
  const uint32_t parity = ordinal & 1;
  constexpr int kFragmentBytes = kStripRows * kTokens * 4;
  constexpr int kColumnBytes = 128 * 16;  // a float4 of every thread
  uint8_t* partials = shared.base + shared.at.partials + thread * 16;
  if (warpgroup != kConsumers - 1) {
    barrier_wait(shared.partial_free(), parity ^ 1);
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      *reinterpret_cast<float4*>(partials + warpgroup * kFragmentBytes + j * kColumnBytes) =
          make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
    }
    barrier_arrive(shared.partial_full());
    return false;
  }
  barrier_wait(shared.partial_full(), parity);
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    float4 total = *reinterpret_cast<const float4*>(partials + j * kColumnBytes);
#pragma unroll
    for (int w = 1; w < kConsumers - 1; ++w) {
      const float4 part =
          *reinterpret_cast<const float4*>(partials + w * kFragmentBytes + j * kColumnBytes);
      total.x += part.x;
      total.y += part.y;
      total.z += part.z;
      total.w += part.w;
    }
    sum[4 * j] += total.x;
    sum[4 * j + 1] += total.y;
    sum[4 * j + 2] += total.z;
    sum[4 * j + 3] += total.w;
  }
  barrier_arrive(shared.partial_free());
  return true;
}

// Counts an arrival at `ticket`; true in every thread of the warpgroup for the last of `expected`,
// which finds the others' writes visible and the ticket at zero again.
__device__ inline bool last_to_arrive(int32_t* ticket, int expected, int warpgroup, int thread) {
  __shared__ int arrived[kConsumers];
  __threadfence();
  named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
  if (thread == 0) {
    const int before = atomicAdd(ticket, 1);
    if (before == expected - 1) *ticket = 0;
    arrived[warpgroup] = before;
  }
  named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
  const bool last = arrived[warpgroup] == expected - 1;
  if (last) __threadfence();
  return last;
}

// Adds the parts of K in order through the workspace: true in the warpgroup that came last.
template <int kTokens>
__device__ inline bool collect_parts(const Params& p, const Segment& block, const Item& item,
                                     int warpgroup, int thread, float (&sum)[kTokens / 2]) {
  if (p.k_split == 1) return true;
  const int64_t strip = static_cast<int64_t>(block.block) * p.strips + item.strip;
  const int64_t part_floats = static_cast<int64_t>(kStripRows) * p.token_block;
  float* parts = p.partials + strip * p.k_split * part_floats + thread * 4;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    __stcg(reinterpret_cast<float4*>(parts + item.part * part_floats + j * 512),
           make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
  }
  if (!last_to_arrive(p.split_tickets + strip, p.k_split, warpgroup, thread)) return false;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    float4 total = __ldcg(reinterpret_cast<const float4*>(parts + j * 512));
    for (int part = 1; part < p.k_split; ++part) {
      const float4 value =
          __ldcg(reinterpret_cast<const float4*>(parts + part * part_floats + j * 512));
      total.x += value.x;
      total.y += value.y;
      total.z += value.z;
      total.w += value.w;
    }
    sum[4 * j] = total.x;
    sum[4 * j + 1] = total.y;
    sum[4 * j + 2] = total.z;
    sum[4 * j + 3] = total.w;
  }
  return true;
}

template <bool kGroups, int kTokens>
__device__ inline void finish_gate_up(const Params& p, const Segment& block, const Item& item,
                                      int thread, const float (&sum)[kTokens / 2]) {
  const int channels = p.n / 2;
  const int channel = item.strip * (kStripRows / 2) + thread / 32 * 8 + thread % 32 / 4;
  // All values ahead of the first store: one at a time would take each one's whole latency.
  float h[kTokens / 4];
#pragma unroll
  for (int i = 0; i < kTokens / 4; ++i) {
    const int low = i / 2 * 4 + i % 2;
    h[i] = swiglu(sum[low], sum[low + 2], p.limit, p.alpha);
  }
  wgmma_settle(h);
  const int first = thread % 4 * 2;
  const int64_t at = static_cast<int64_t>(block.first_row + first) * channels + channel;
  const int present = channel < channels ? block.rows - first : 0;
#pragma unroll
  for (int i = 0; i < kTokens / 4; ++i) {
    const int token = i / 2 * 8 + i % 2;
    if (token >= present) continue;
    if constexpr (!kGroups) {
      static_cast<uint8_t*>(p.out)[at + token * channels] = quantise_static(h[i]);
    } else {
      p.h_values[at + token * channels] = h[i];
    }
  }
}

template <int kTokens>
__device__ inline void finish_down(const Params& p, const Shared& shared, const Segment& block,
                                   const Item& item, int thread, const float (&sum)[kTokens / 2]) {
  const int channel = item.strip * kStripRows + thread / 32 * 16 + thread % 32 / 4 * 2;
  const int first = thread % 4 * 2;
  int2 slots[kTokens / 8];
  float2 weights[kTokens / 8];
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {  // all ahead of the first store
    slots[j] = *reinterpret_cast<const int2*>(shared.slot() + 8 * j + first);
    weights[j] = *reinterpret_cast<const float2*>(shared.weight() + 8 * j + first);
  }
  const int present = channel < p.n ? block.rows - first : 0;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    if (8 * j < present) {
      store_pair(p, slots[j].x, channel, weights[j].x, sum[4 * j], sum[4 * j + 2]);
    }
    if (8 * j + 1 < present) {
      store_pair(p, slots[j].y, channel, weights[j].y, sum[4 * j + 1], sum[4 * j + 3]);
    }
  }
}

template <Storage kStorage, Kind kKind, int kTokens>
__device__ __forceinline__ void consume_block(const Params& p, const Shared& shared,
                                              const Segment& block, Lane& lane, int& ordinal) {
  const int warpgroup = lane.warpgroup, thread = lane.thread;
  Multiplier<kStorage, kKind == Kind::kDownPer64, kTokens> multiplier(p, shared, lane);
  bool fetched = false;
#pragma unroll 1
  for (int index = block.begin; index < block.end; ++index, ++ordinal) {
    const Item item = make_item(p, index);
    float sum[kTokens / 2];
    const bool with_bias = warpgroup == 0 && item.part == 0 && p.bias != nullptr;
    start_sum<kTokens>(p, shared, item, thread, with_bias, sum);
    int record = first_record(item, warpgroup);
    int following = -1;  // this warpgroup's first record of the next item
    if (index + 1 < block.end) {
      const Item next = make_item(p, index + 1);
      following = first_record(next, warpgroup);
      if (following >= next.record_end) following = -1;
    }
    const bool has_records = record < item.record_end;
    if (has_records) {
      if (!fetched) multiplier.fetch(record);
      fetched = following >= 0;
    }
#pragma unroll 1
    for (; record < item.record_end; record += kConsumers) {
      const int next = record + kConsumers;
      multiplier.multiply(record, next < item.record_end ? next : following, sum);
    }
    if (!collect<kTokens>(shared, ordinal, warpgroup, thread, sum)) continue;
    if (!collect_parts<kTokens>(p, block, item, warpgroup, thread, sum)) continue;
    if constexpr (is_gate_up(kKind)) {
      finish_gate_up<kKind == Kind::kGateUpGroups, kTokens>(p, block, item, thread, sum);
    } else {
      finish_down<kTokens>(p, shared, block, item, thread, sum);
    }
  }
}

// ---- roles ----------------------------------------------------------------------------------

template <Storage kStorage>
__device__ inline void produce(const Params& p, const Shared& shared, int warpgroup) {
  const uint32_t full = shared.full(warpgroup), empty = shared.empty(warpgroup);
  const uint32_t stages = shared.ring(warpgroup);
  RingPosition ring;
  for (Cursor cursor(p, Tables(shared.tables(), p.experts)); !cursor.done(); cursor.advance()) {
    const Segment block = cursor.segment();
    const uint8_t* weights = p.weights + block.expert * p.expert_bytes;
    for (int index = block.begin; index < block.end; ++index) {
      const Item item = make_item(p, index);
      const uint8_t* strip = weights + item.strip * p.strip_bytes;
#pragma unroll 1  // few registers: the consumers have the others
      for (int record = first_record(item, warpgroup); record < item.record_end;
           record += kConsumers) {
        const int halves = record + 1 < p.records ? 2 : p.tail_halves;
        const uint32_t bytes = record_bytes(kStorage, halves);
        const uint32_t filled = full + ring.stage * kBarrierBytes;
        barrier_wait(empty + ring.stage * kBarrierBytes, ring.parity ^ 1);
        barrier_expect_bytes(filled, bytes);
        bulk_copy_once(stages + ring.stage * shared.at.stage_bytes,
                       strip + static_cast<int64_t>(record) * record_bytes(kStorage, 2), bytes,
                       filled);
        ring.step(shared.at.stages);
      }
    }
  }
}

template <Storage kStorage, Kind kKind>
__device__ inline void consume(const Params& p, const Shared& shared) {
  Lane lane;
  lane.warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  lane.thread = threadIdx.x % 128;
  lane.full = keep_in_register(shared.full(lane.warpgroup));
  lane.empty = keep_in_register(shared.empty(lane.warpgroup));
  lane.stages = keep_in_register(shared.ring(lane.warpgroup));
  int ordinal = 0;
  for (Cursor cursor(p, Tables(shared.tables(), p.experts)); !cursor.done(); cursor.advance()) {
    const Segment block = cursor.segment();
    // FP8 fragments leave no registers for 24 columns.
    const bool wide = kStorage == Storage::kFp8 && block.rows > 16;
    const int tokens = wide ? kMaxTokenBlock : instruction_tokens(block.rows);
    load_tokens<kKind>(p, shared, block, tokens);
    if (tokens == 8) {
      consume_block<kStorage, kKind, 8>(p, shared, block, lane, ordinal);
    } else if (tokens == 16) {
      consume_block<kStorage, kKind, 16>(p, shared, block, lane, ordinal);
    } else if (kStorage == Storage::kMxfp4 && tokens == 24) {
      constexpr int kColumns = kStorage == Storage::kMxfp4 ? 24 : kMaxTokenBlock;
      consume_block<kStorage, kKind, kColumns>(p, shared, block, lane, ordinal);
    } else {
      consume_block<kStorage, kKind, 32>(p, shared, block, lane, ordinal);
    }
  }
}

template <Storage kStorage, Kind kKind>
__global__ void __launch_bounds__(kThreads, 1)
    moe_gemm_wgmma_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  __shared__ __align__(128) ReaderTable table;
  const Shared shared{dynamic_shared, p.shared, table};
  if (threadIdx.x < kConsumers * kMaxStages) {
    barrier_init(shared.full(0) + threadIdx.x * kBarrierBytes, 1);
    // The warps of the warpgroup that reads the stage.
    barrier_init(shared.empty(0) + threadIdx.x * kBarrierBytes, 4);
  } else if (threadIdx.x == kConsumers * kMaxStages) {
    barrier_init(shared.partial_full(), (kConsumers - 1) * 128);
    barrier_init(shared.partial_free(), 128);
  } else if (threadIdx.x >= 64 && threadIdx.x < 64 + kTableRows) {
    const int row = threadIdx.x - 64;
    table.rows[row].codes = make_uint2(kCodeTable.words[row][0], kCodeTable.words[row][1]);
    if (row == 0) table.zeros = make_uint4(0, 0, 0, 0);
  }
  barrier_init_fence();
  if (!p.routing_ready) dependency_wait();
  make_tables(p, Tables(shared.tables(), p.experts));
  if (threadIdx.x >= kConsumerThreads) {
    registers_release<kProducerRegisters>();
    const int warp = threadIdx.x / 32 - kConsumerThreads / 32;
    if (threadIdx.x % 32 == 0) produce<kStorage>(p, shared, warp);
  } else {
    registers_claim<kConsumerRegisters>();
    if (p.routing_ready) dependency_wait();
    dependents_launch();
    consume<kStorage, kKind>(p, shared);
  }
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_WGMMA_KERNEL_CUH_
