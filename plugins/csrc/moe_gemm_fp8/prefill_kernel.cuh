// The prefill plan of moe_gemm_fp8. Two warpgroups take a strip of weights each and share a block
// of up to 128 tokens: a strip's record is expanded in registers (M operand) once for all of them.
// One thread brings token tiles (gather_kernel.cuh) and records through a ring in shared memory.
// While the instructions of a record run, a warpgroup expands the next one; while one warpgroup
// adds its products to their sums, the other's instructions run.
//
// Invariant: a result depends on its own row of x and its expert's weights only: records are added
// in their order, whatever the block's size and whoever computes it.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_PREFILL_KERNEL_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_PREFILL_KERNEL_CUH_

#include <cstdint>

#include "core/ptx.cuh"
#include "core/wgmma_wide.cuh"
#include "moe_gemm_fp8/epilogue.cuh"
#include "moe_gemm_fp8/prefill_schedule.cuh"
#include "moe_gemm_fp8/schedule.cuh"
#include "moe_gemm_fp8/token_run.cuh"
#include "moe_gemm_fp8/weight_reader.cuh"

namespace gptoss::moe {

__constant__ constexpr CodeTable kPrefillCodes = make_code_table();

constexpr int kItemBarrier = 1;    // named barrier of all consumers
constexpr int kOrderBarrier = 2;   // of warpgroup w's turn: kOrderBarrier + w
constexpr int kWarpgroupTurn = 4;  // of warpgroup w alone: kWarpgroupTurn + w
constexpr int kStageBarrierBytes = 8;

// A launch of kPrefillThreads gets 168 registers a thread: 256 x 224 + 128 x 56 are as many.
constexpr int kPrefillConsumerRegisters = 224;
constexpr int kPrefillProducerRegisters = 56;

#ifndef GPTOSS_PREFILL_ORDERED
#define GPTOSS_PREFILL_ORDERED 1
#endif

// Views of the block's shared memory.
struct PrefillMemory {
  uint8_t* base;
  const PrefillShared& at;
  const ReaderTable& table;

  __device__ uint32_t full() const { return shared_address(base + at.barriers); }
  __device__ uint32_t empty() const { return full() + kPrefillMaxStages * kStageBarrierBytes; }
  __device__ uint32_t ring() const { return shared_address(base + at.ring); }
  __device__ PrefillItem* items() const { return reinterpret_cast<PrefillItem*>(base + at.items); }
  __device__ int32_t* tables() const { return reinterpret_cast<int32_t*>(base + at.tables); }
  __device__ int32_t* slots(int warpgroup) const {
    return reinterpret_cast<int32_t*>(base + at.row_info) + warpgroup * 2 * kPrefillBlock;
  }
  __device__ float* weights(int warpgroup) const {
    return reinterpret_cast<float*>(slots(warpgroup) + kPrefillBlock);
  }
  __device__ float* values() const { return reinterpret_cast<float*>(base + at.values); }
};

// What a consumer thread keeps over all its items.
struct PrefillLane {
  int warpgroup;
  int thread;  // in the warpgroup
  uint32_t full;
  uint32_t empty;
  uint32_t ring;
  RingPosition position;
};

// ---- products -------------------------------------------------------------------------------

// sum += the products of one warpgroup's strip with kTokens columns, record by record.
template <Storage kStorage, bool kScale64, int kTokens>
class PrefillMultiplier {
 public:
  __device__ __forceinline__ PrefillMultiplier(const Params& p, const PrefillMemory& memory,
                                               PrefillLane& lane)
      : p_(p),
        memory_(memory),
        lane_(lane),
        reader_(lane.thread),
        record_(
            keep_in_register(memory.at.record_offset + lane.warpgroup * memory.at.record_pitch)) {}

  __device__ __forceinline__ void run(float (&sum)[kTokens / 2]) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.0f;
    Fragments a, b;
    fetch(a, p_.records > 1 || p_.tail_halves == 2);
#pragma unroll 1
    for (int left = p_.records - 1;; left -= 2) {  // records behind the one in `a`
      multiply(a, b, left, sum);
      if (left == 0) break;
      multiply(b, a, left - 1, sum);
      if (left == 1) break;
    }
  }

 private:
  static constexpr int kChunkStride = kTokens / kCoreRows * kCoreBytes;
  static constexpr int kInstructionStep = 2 * kChunkStride / 16;  // in descriptor units

  __device__ __forceinline__ uint32_t stage_address(int stage) const {
    return lane_.ring + stage * memory_.at.stage_bytes;
  }

  // Waits for the stage at lane_.position and expands this warpgroup's record.
  __device__ __forceinline__ void fetch(Fragments& a, bool second_half) {
    barrier_wait(lane_.full + lane_.position.stage * kStageBarrierBytes, lane_.position.parity);
    const uint32_t record = stage_address(lane_.position.stage) + record_;
    weight_scale_ = load_shared_f32(record);
    const auto raw = reader_.fetch(record, memory_.table, second_half);
    WeightReader<kStorage>::expand(raw, memory_.table, a);
  }

  // The record in `a`, of the stage at lane_.position, `left` before the strip's last; expands the
  // next one into `next`.
  __device__ __forceinline__ void multiply(Fragments& a, Fragments& next, int left,
                                           float (&sum)[kTokens / 2]) {
    const int stage = lane_.position.stage;
    const uint32_t tile = stage_address(stage);
    const float weight_scale = weight_scale_;
    const WgmmaDescriptor tokens(tile, kChunkStride, kCoreBytes);
    const uint32_t scales = tile + kTokens * kRecordColumns + lane_.thread % 4 * 16;
    lane_.position.step(memory_.at.stages);
    constexpr int kTogether = kScale64 ? kInstructionsPerHalf : kInstructionsPerRecord;
    wgmma_operands_ready(a);
#pragma unroll
    for (int first = 0; first < kInstructionsPerRecord; first += kTogether) {
      float acc[kTokens / 2];
      if (kOrdered) named_barrier_sync(kOrderBarrier + lane_.warpgroup, kPrefillConsumerThreads);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        wgmma_e4m3<kTokens>(acc, a[first + i], tokens.moved((first + i) * kInstructionStep), i);
      }
      wgmma_commit();
      if (kOrdered) {
        named_barrier_arrive(kOrderBarrier + (lane_.warpgroup ^ 1), kPrefillConsumerThreads);
      }
      if (kEarlyFetch && first == 0 && left > 0) {
        fetch(next, left > 1 || p_.tail_halves == 2);
      }
      // Half of the scales before the wait: all would be more registers than there are.
      constexpr int kQuads = kTokens / 16, kEarly = kQuads > 4 ? kQuads / 2 : kQuads;
      const uint32_t row = scales + first / kTogether * kTokens * 4;
      float4 scale[kQuads];
#pragma unroll
      for (int j = 0; j < kEarly; ++j) scale[j] = load_shared_f128(row + j * 64);
      wgmma_wait_all();
      wgmma_settle(acc);
      wgmma_operands_ready(a);  // read until the wait: nothing may take these registers
#pragma unroll
      for (int j = kEarly; j < kQuads; ++j) scale[j] = load_shared_f128(row + j * 64);
      promote(acc, scale, weight_scale, sum);
      if (first + kTogether == kInstructionsPerRecord) {
        if (!kEarlyFetch && left > 0) fetch(next, left > 1 || p_.tail_halves == 2);
        __syncwarp();
        if (lane_.thread % 32 == 0) barrier_arrive(lane_.empty + stage * kStageBarrierBytes);
      }
    }
  }

  static __device__ __forceinline__ void promote(const float (&acc)[kTokens / 2],
                                                 const float4 (&scale)[kTokens / 16],
                                                 float weight_scale, float (&sum)[kTokens / 2]) {
#pragma unroll
    for (int j = 0; j < kTokens / 16; ++j) {
      const float scales[4] = {weight_scale * scale[j].x, weight_scale * scale[j].y,
                               weight_scale * scale[j].z, weight_scale * scale[j].w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int at = 8 * j + i;
        sum[at] = fmaf(acc[at], scales[i / 4 * 2 + i % 2], sum[at]);
      }
    }
  }

  // FP8 fragments need no expansion, and two sets of them more registers than there are.
  static constexpr bool kEarlyFetch = kStorage == Storage::kMxfp4;
  static constexpr bool kOrdered = GPTOSS_PREFILL_ORDERED && kTokens >= 96;

  const Params& p_;
  const PrefillMemory& memory_;
  PrefillLane& lane_;
  WeightReader<kStorage> reader_;
  uint32_t record_;
  float weight_scale_ = 0.0f;
};

// ---- the end of a strip -----------------------------------------------------------------------

// bf16 bits of the bias of this thread's two rows, or zeros.
__device__ __forceinline__ uint32_t load_bias(const Params& p, int expert, int row) {
  if (p.bias == nullptr || row >= p.n) return 0;  // n is even
  return __ldg(
      reinterpret_cast<const uint32_t*>(p.bias + static_cast<int64_t>(expert) * p.n + row));
}

// Row of the product that is this thread's low one, in a strip.
__device__ __forceinline__ int low_row(int strip, int thread) {
  return strip * kStripRows + thread / 32 * 16 + thread % 32 / 4 * 2;
}

template <int kTokens>
__device__ __forceinline__ void keep_values(const Params& p, float* values, int strip_of_group,
                                            int thread, uint32_t bias,
                                            const float (&sum)[kTokens / 2]) {
  const float gate_bias = __uint_as_float(bias << 16);
  const float up_bias = __uint_as_float(bias & 0xFFFF0000u);
  float* target =
      values + thread % 4 * 2 * kPrefillValuePitch + low_row(strip_of_group, thread) / 2;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      target[(8 * j + c) * kPrefillValuePitch] =
          swiglu(sum[4 * j + c] + gate_bias, sum[4 * j + 2 + c] + up_bias, p.limit, p.alpha);
    }
  }
}

// a / b rounded to nearest, for normal numbers, given 1 / b to an ulp or two: no call, which would
// cost the kernel its uniform registers.
__device__ __forceinline__ float divide(float a, float b, float reciprocal) {
  const float quotient = a * reciprocal;
  return fmaf(fmaf(-b, quotient, a), reciprocal, quotient);
}

// Below it 1 / scale is not normal; h is then as good as zero.
constexpr float kLeastScale = 0x1p-120f;

// A warp a token: scale of its channels and their codes.
__device__ __forceinline__ void quantise_values(const Params& p, const float* values,
                                                const PrefillItem& item, int thread) {
  const int lane = thread % 32;
  const int channels = p.n / 2;
  const int channel = item.group * kPrefillChannels + lane * 4;
  const bool present = channel < channels;
#pragma unroll 2
  for (int token = thread / 32; token < item.rows; token += kPrefillConsumerThreads / 32) {
    float4 h = *reinterpret_cast<const float4*>(values + token * kPrefillValuePitch + lane * 4);
    if (!present) h = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const int64_t row = item.first_row + token;
    float scale = kStaticScale;
    if (p.scale_group != 0) {
      float amax = fmaxf(fmaxf(fabsf(h.x), fabsf(h.y)), fmaxf(fabsf(h.z), fabsf(h.w)));
#pragma unroll
      for (int step = 1; step < 16; step *= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
      }
      const float other = __shfl_xor_sync(0xFFFFFFFFu, amax, 16);
      if (p.scale_group == kPrefillChannels) amax = fmaxf(amax, other);
      scale = divide(amax, kE4m3Max, 1.0f / kE4m3Max);
      if (scale < kLeastScale) scale = 1.0f;
      if (present && lane * 4 % p.scale_group == 0) {
        p.out_scale[static_cast<int64_t>(channel / p.scale_group) * p.rows + row] = scale;
      }
    }
    const float reciprocal = approximate_reciprocal(scale);
    const uint32_t codes = to_e4m3(divide(h.x, scale, reciprocal)) |
                           to_e4m3(divide(h.y, scale, reciprocal)) << 8 |
                           to_e4m3(divide(h.z, scale, reciprocal)) << 16 |
                           to_e4m3(divide(h.w, scale, reciprocal)) << 24;
    if (present) {
      *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.out) + row * channels + channel) = codes;
    }
  }
}

template <int kTokens>
__device__ __forceinline__ void store_rows(const Params& p, const PrefillMemory& memory,
                                           const PrefillItem& item, int warpgroup, int thread,
                                           int channel, uint32_t bias,
                                           const float (&sum)[kTokens / 2]) {
  if (channel >= p.n) return;
  const int32_t* slots = memory.slots(warpgroup);
  const float* weights = memory.weights(warpgroup);
  const float low_bias = __uint_as_float(bias << 16);
  const float high_bias = __uint_as_float(bias & 0xFFFF0000u);
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int token = 8 * j + thread % 4 * 2 + c;
      if (token >= item.rows) continue;
      store_pair(p, slots[token], channel, weights[token], sum[4 * j + c] + low_bias,
                 sum[4 * j + 2 + c] + high_bias);
    }
  }
}

template <Storage kStorage, Kind kKind, int kTokens>
__device__ __forceinline__ void consume_item(const Params& p, const PrefillMemory& memory,
                                             const PrefillItem& item, PrefillLane& lane) {
  using Group = StripGroup<is_gate_up(kKind)>;
  const int warpgroup = lane.warpgroup, thread = lane.thread;
  PrefillMultiplier<kStorage, kKind == Kind::kDownPer64, kTokens> multiplier(p, memory, lane);
  if constexpr (!is_gate_up(kKind)) {
    // Read by this warpgroup alone, behind the barrier at the end of the products.
    named_barrier_sync(kWarpgroupTurn + warpgroup, 128);
    const int slot = thread < item.rows ? __ldg(p.row_slots + item.first_row + thread) : 0;
    memory.slots(warpgroup)[thread] = slot;
    memory.weights(warpgroup)[thread] = __ldg(p.expert_weights + slot);
  }
  const int passes = Group::passes(p, item.group);
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    const int strip_of_group = pass * kPrefillConsumers + warpgroup;
    const int row = low_row(item.group * Group::kStrips + strip_of_group, thread);
    const uint32_t bias = load_bias(p, item.expert, row);
    float sum[kTokens / 2];
    multiplier.run(sum);
    if constexpr (is_gate_up(kKind)) {
      // The last item's values have been read.
      if (pass == 0) named_barrier_sync(kItemBarrier, kPrefillConsumerThreads);
      keep_values<kTokens>(p, memory.values(), strip_of_group, thread, bias, sum);
    } else {
      named_barrier_sync(kWarpgroupTurn + warpgroup, 128);
      store_rows<kTokens>(p, memory, item, warpgroup, thread, row, bias, sum);
    }
  }
  if constexpr (is_gate_up(kKind)) {
    named_barrier_sync(kItemBarrier, kPrefillConsumerThreads);
    quantise_values(p, memory.values(), item, threadIdx.x);
  }
}

// ---- roles ----------------------------------------------------------------------------------

template <Storage kStorage, bool kGateUp>
__device__ __forceinline__ void produce_items(const Params& p, const PrefillMemory& memory) {
  using Group = StripGroup<kGateUp>;
  const ExpertTables tables(memory.tables(), p.experts);
  const int groups = Group::count(p);
  const int total = tables.blocks_before[p.experts] * groups;
  const uint32_t full = memory.full(), empty = memory.empty(), ring = memory.ring();
  RingPosition position;
  int expert = 0;
  int next = 0;
  for (int index = blockIdx.x; index < total; index = next) {
    next = gridDim.x + atomicAdd(p.items_taken, 1);
    while (tables.blocks_before[expert + 1] * groups <= index) ++expert;
    const int blocks = tables.blocks_before[expert + 1] - tables.blocks_before[expert];
    const int inside = index - tables.blocks_before[expert] * groups;
    const int block = inside % blocks;
    PrefillItem item;
    item.expert = expert;
    item.group = inside / blocks;
    item.first_row = tables.rows_before[expert] + block * kPrefillBlock;
    item.rows = min(tables.rows_before[expert + 1] - item.first_row, kPrefillBlock);
    const uint32_t tile_bytes = block_columns(item.rows) * p.tile_row_bytes;
    const int64_t columns_before = tables.columns_before[expert] + block * kPrefillBlock;
    const uint8_t* tiles = p.gathered + columns_before * p.records * p.tile_row_bytes;
    const int first_strip = item.group * Group::kStrips;
    const int last_strip = min(p.strips, first_strip + Group::kStrips);
    const uint8_t* weights = p.weights + expert * p.expert_bytes + first_strip * p.strip_bytes;
#pragma unroll 1
    for (int strip = first_strip; strip < last_strip; strip += kPrefillConsumers) {
      const uint8_t* tile = tiles;
      const uint8_t* mine = weights;
      const uint8_t* other = strip + 1 < last_strip ? weights + p.strip_bytes : nullptr;
      weights += kPrefillConsumers * p.strip_bytes;
#pragma unroll 1
      for (int left = p.records; left > 0; --left) {
        const uint32_t bytes =
            left > 1 || p.tail_halves == 2 ? record_bytes(kStorage, 2) : record_bytes(kStorage, 1);
        const uint32_t filled = full + position.stage * kStageBarrierBytes;
        const uint32_t stage = ring + position.stage * memory.at.stage_bytes;
        const uint32_t target = stage + memory.at.record_offset;
        barrier_wait(empty + position.stage * kStageBarrierBytes, position.parity ^ 1);
        if (tile == tiles && strip == first_strip) memory.items()[position.stage] = item;
        barrier_expect_bytes(filled, tile_bytes + (other != nullptr ? 2 * bytes : bytes));
        bulk_copy(stage, tile, tile_bytes, filled);
        bulk_copy(target, mine, bytes, filled);
        tile += tile_bytes;
        mine += record_bytes(kStorage, 2);
        if (other != nullptr) {
          bulk_copy(target + memory.at.record_pitch, other, bytes, filled);
          other += record_bytes(kStorage, 2);
        }
        position.step(memory.at.stages);
      }
    }
  }
  barrier_wait(empty + position.stage * kStageBarrierBytes, position.parity ^ 1);
  memory.items()[position.stage].expert = -1;
  barrier_arrive(full + position.stage * kStageBarrierBytes);
}

template <Storage kStorage, Kind kKind>
__device__ __forceinline__ void consume_items(const Params& p, const PrefillMemory& memory) {
  PrefillLane lane;
  lane.warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  lane.thread = threadIdx.x % 128;
  lane.full = keep_in_register(memory.full());
  lane.empty = keep_in_register(memory.empty());
  lane.ring = keep_in_register(memory.ring());
  // Warpgroup 0 has the first turn.
  if (lane.warpgroup == 1) named_barrier_arrive(kOrderBarrier, kPrefillConsumerThreads);
  for (;;) {
    barrier_wait(lane.full + lane.position.stage * kStageBarrierBytes, lane.position.parity);
    const PrefillItem item = memory.items()[lane.position.stage];
    if (item.expert < 0) break;
    switch (block_columns(item.rows)) {
      case 16:
        consume_item<kStorage, kKind, 16>(p, memory, item, lane);
        break;
      case 32:
        consume_item<kStorage, kKind, 32>(p, memory, item, lane);
        break;
      case 64:
        consume_item<kStorage, kKind, 64>(p, memory, item, lane);
        break;
      case 96:
        consume_item<kStorage, kKind, 96>(p, memory, item, lane);
        break;
      default:
        consume_item<kStorage, kKind, kPrefillBlock>(p, memory, item, lane);
    }
  }
  if (lane.warpgroup == 0) named_barrier_sync(kOrderBarrier, kPrefillConsumerThreads);
}

template <Storage kStorage, Kind kKind>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    moe_gemm_prefill_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t prefill_shared[];
  __shared__ __align__(128) ReaderTable table;
  const PrefillMemory memory{prefill_shared, p.prefill, table};
  if (threadIdx.x < kPrefillMaxStages) {
    barrier_init(memory.full() + threadIdx.x * kStageBarrierBytes, 1);
    barrier_init(memory.empty() + threadIdx.x * kStageBarrierBytes, kPrefillConsumerThreads / 32);
  } else if (threadIdx.x >= 64 && threadIdx.x < 64 + kTableRows) {
    const int row = threadIdx.x - 64;
    table.rows[row].codes = make_uint2(kPrefillCodes.words[row][0], kPrefillCodes.words[row][1]);
    if (row == 0) table.zeros = make_uint4(0, 0, 0, 0);
  }
  barrier_init_fence();
  dependency_wait();
  dependents_launch();
  ExpertTables(memory.tables(), p.experts).fill(p);
  if (threadIdx.x >= kPrefillConsumerThreads) {
    registers_release<kPrefillProducerRegisters>();
    if (threadIdx.x == kPrefillConsumerThreads) {
      produce_items<kStorage, is_gate_up(kKind)>(p, memory);
    }
  } else {
    registers_claim<kPrefillConsumerRegisters>();
    consume_items<kStorage, kKind>(p, memory);
  }
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_PREFILL_KERNEL_CUH_
