// The prefill plan of moe_gemm_fp8. Two warpgroups take a strip of weights each and share a block
// of up to 128 tokens: a strip's record is expanded in registers (M operand) once for all of them.
// One thread brings token tiles (gather_kernel.cuh) and records through a ring in shared memory;
// the other three warps of its warpgroup quantise h while the next item is multiplied.
// While the instructions of a record run, a warpgroup expands the next one; while the second half
// of the tokens is multiplied, the first is added to its sums.
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

// Named barriers.
constexpr int kValuesFree = 1;   // quantisers have read the values in shared memory
constexpr int kValuesFull = 2;   // consumers have written them
constexpr int kRowsBarrier = 3;  // of warpgroup w alone: kRowsBarrier + w
constexpr int kStageBarrierBytes = 8;

constexpr int kQuantisers = 3;  // warps
constexpr int kValuesThreads = kPrefillConsumerThreads + kQuantisers * 32;

// A launch of kPrefillThreads gets 168 registers a thread: 256 x 224 + 128 x 56 are as many.
constexpr int kPrefillConsumerRegisters = 224;
constexpr int kPrefillProducerRegisters = 56;

// Views of the block's shared memory.
struct PrefillMemory {
  uint8_t* base;
  const PrefillShared& at;
  const ReaderTable& table;

  __device__ uint32_t full() const { return shared_address(base + at.barriers); }
  __device__ uint32_t empty() const { return full() + kPrefillMaxStages * kStageBarrierBytes; }
  __device__ uint32_t ring() const { return shared_address(base + at.ring); }
  __device__ PrefillItem* items() const { return reinterpret_cast<PrefillItem*>(base + at.items); }
  // Whose values are in shared memory: behind the stages' items.
  __device__ PrefillItem* quantised_item() const { return items() + kPrefillMaxStages; }
  __device__ int32_t* tables() const { return reinterpret_cast<int32_t*>(base + at.tables); }
  __device__ uint2* row_info(int warpgroup) const {
    return reinterpret_cast<uint2*>(base + at.row_info) + warpgroup * kPrefillBlock;
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
        table_(memory.table),
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
  // Columns of one instruction: where a warpgroup has two halves of a block, one runs while the
  // other is added to its sums.
  static constexpr int kParts = kTokens == kPrefillBlock ? 2 : 1;
  static constexpr int kColumns = kTokens / kParts;
  static constexpr int kTurns = kScale64 ? 2 : 1;  // scales of a token in a record
  static constexpr int kTogether = kInstructionsPerRecord / kTurns;
  static constexpr int kChunkStride = kTokens / kCoreRows * kCoreBytes;
  static constexpr int kInstructionStep = 2 * kChunkStride / 16;  // in descriptor units
  // FP8 fragments need no expansion, and two sets of them more registers than there are.
  static constexpr bool kEarlyFetch = kStorage == Storage::kMxfp4;
  using Accumulators = float[kParts][kColumns / 2];

  // Of the record whose instructions run.
  struct Record {
    int stage;
    uint32_t tile;
    float weight_scale;
  };

  __device__ __forceinline__ uint32_t stage_address(int stage) const {
    return lane_.ring + stage * memory_.at.stage_bytes;
  }

  __device__ __forceinline__ Record next_record() {
    const Record record = {lane_.position.stage, stage_address(lane_.position.stage),
                           weight_scale_};
    lane_.position.step(memory_.at.stages);
    return record;
  }

  // Waits for the stage at lane_.position and expands this warpgroup's record.
  __device__ __forceinline__ void fetch(Fragments& a, bool second_half) {
    barrier_wait(lane_.full + lane_.position.stage * kStageBarrierBytes, lane_.position.parity);
    const uint32_t record = stage_address(lane_.position.stage) + record_;
    weight_scale_ = load_shared_f32(record);
    const auto raw = reader_.fetch(record, table_, second_half);
    WeightReader<kStorage>::expand(raw, table_, a);
  }

  // Starts the instructions of one part and turn.
  __device__ __forceinline__ void issue(Accumulators& acc, Fragments& a, uint32_t tile, int part,
                                        int turn) {
    const uint64_t tokens = wgmma_descriptor(tile + part * kColumns * 16, kChunkStride, kCoreBytes);
    wgmma_operands_ready(a);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int at = turn * kTogether + i;
      wgmma_e4m3<kColumns>(acc[part], a[at], tokens + at * kInstructionStep, i);
    }
    wgmma_commit();
  }

  // Waits for the oldest part (of `kRunning` that were started) and adds it to its sums.
  template <int kRunning>
  __device__ __forceinline__ void add(Accumulators& acc, const Record& record, int part, int turn,
                                      float (&sum)[kTokens / 2]) {
    float4 scale[kColumns / 16];
    const uint32_t row = record.tile + kTokens * kRecordColumns + turn * kTokens * 4 +
                         part * kColumns * 4 + lane_.thread % 4 * 16;
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) scale[j] = load_shared_f128(row + j * 64);
    wgmma_wait<kRunning - 1>();
    wgmma_settle(acc[part]);
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
      const float scales[4] = {record.weight_scale * scale[j].x, record.weight_scale * scale[j].y,
                               record.weight_scale * scale[j].z, record.weight_scale * scale[j].w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int at = part * kColumns / 2 + 8 * j + i;
        sum[at] = fmaf(acc[part][8 * j + i], scales[i / 4 * 2 + i % 2], sum[at]);
      }
    }
    // Added here, while the next part runs, and not behind its wait.
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      asm volatile("" : "+f"(sum[part * kColumns / 2 + i])::"memory");
    }
  }

  __device__ __forceinline__ void release(int stage) {
    __syncwarp();
    if (lane_.thread % 32 == 0) barrier_arrive(lane_.empty + stage * kStageBarrierBytes);
  }

  // The record in `a`, of the stage at lane_.position, `left` before the strip's last; expands the
  // next one into `next`.
  __device__ __forceinline__ void multiply(Fragments& a, Fragments& next, int left,
                                           float (&sum)[kTokens / 2]) {
    const Record record = next_record();
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      Accumulators acc;
#pragma unroll
      for (int part = 0; part < kParts; ++part) issue(acc, a, record.tile, part, turn);
      if (kEarlyFetch && turn == 0 && left > 0) fetch(next, left > 1 || p_.tail_halves == 2);
      add<kParts>(acc, record, 0, turn, sum);
      if constexpr (kParts == 2) add<1>(acc, record, 1, turn, sum);
    }
    wgmma_operands_ready(a);  // read until the wait: nothing may take these registers
    release(record.stage);
    if (!kEarlyFetch && left > 0) fetch(next, left > 1 || p_.tail_halves == 2);
  }

  const Params& p_;
  const PrefillMemory& memory_;
  PrefillLane& lane_;
  WeightReader<kStorage> reader_;
  KeptTable table_;
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

// Eight lanes a token: scales of its channels and their codes. A lane has four channels of every
// 32, so that a group of 64 is two of its quads in all eight lanes.
__device__ __forceinline__ void quantise_values(const Params& p, const float* values,
                                                const PrefillItem& item, int warp) {
  constexpr int kQuads = kPrefillChannels / 32;
  const int lane = threadIdx.x % 32, inside = lane % 8;
  const int channels = p.n / 2;
  const int channel = item.group * kPrefillChannels + inside * 4;
  for (int token = warp * 4 + lane / 8; token - lane / 8 < item.rows; token += kQuantisers * 4) {
    const float* source = values + token * kPrefillValuePitch + inside * 4;
    float4 h[kQuads];
    float amax[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      h[i] = *reinterpret_cast<const float4*>(source + 32 * i);
      if (channel + 32 * i >= channels) h[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      amax[i / 2] = fmaxf(amax[i / 2], fmaxf(fmaxf(fabsf(h[i].x), fabsf(h[i].y)),
                                             fmaxf(fabsf(h[i].z), fabsf(h[i].w))));
    }
    const bool present = token < item.rows;
    const int64_t row = item.first + token;
    float scale[2] = {kStaticScale, kStaticScale};
    if (p.scale_group != 0) {
#pragma unroll
      for (int step = 1; step < 8; step *= 2) {
        amax[0] = fmaxf(amax[0], __shfl_xor_sync(0xFFFFFFFFu, amax[0], step));
        amax[1] = fmaxf(amax[1], __shfl_xor_sync(0xFFFFFFFFu, amax[1], step));
      }
      if (p.scale_group == kPrefillChannels) amax[0] = amax[1] = fmaxf(amax[0], amax[1]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale[half] = divide(amax[half], kE4m3Max, 1.0f / kE4m3Max);
        if (scale[half] < kLeastScale) scale[half] = 1.0f;
      }
      const int group = item.group * (kPrefillChannels / p.scale_group) + inside;
      if (present && inside < kPrefillChannels / p.scale_group &&
          group * p.scale_group < channels) {
        p.out_scale[static_cast<int64_t>(group) * p.rows + row] = inside == 0 ? scale[0] : scale[1];
      }
    }
    const float reciprocal[2] = {approximate_reciprocal(scale[0]),
                                 approximate_reciprocal(scale[1])};
    uint8_t* out = static_cast<uint8_t*>(p.out) + row * channels + channel;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float by = scale[i / 2], inverse = reciprocal[i / 2];
      const uint32_t codes =
          to_e4m3(divide(h[i].x, by, inverse)) | to_e4m3(divide(h[i].y, by, inverse)) << 8 |
          to_e4m3(divide(h[i].z, by, inverse)) << 16 | to_e4m3(divide(h[i].w, by, inverse)) << 24;
      if (present && channel + 32 * i < channels) {
        *reinterpret_cast<uint32_t*>(out + 32 * i) = codes;
      }
    }
  }
}

template <int kTokens, bool kFp32>
__device__ __forceinline__ void store_rows(const Params& p, const uint2* rows, int count,
                                           int thread, int channel, uint32_t bias,
                                           const float (&sum)[kTokens / 2]) {
  const float low_bias = __uint_as_float(bias << 16);
  const float high_bias = __uint_as_float(bias & 0xFFFF0000u);
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    const int token = 8 * j + thread % 4 * 2;
    const uint4 pair = *reinterpret_cast<const uint4*>(rows + token);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int64_t at = static_cast<int64_t>(c == 0 ? pair.x : pair.z) * p.n + channel;
      const float weight = __uint_as_float(c == 0 ? pair.y : pair.w);
      const float low = weight * (sum[4 * j + c] + low_bias);
      const float high = weight * (sum[4 * j + 2 + c] + high_bias);
      if (token + c >= count) continue;
      if constexpr (kFp32) {
        *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = make_float2(low, high);
      } else {
        *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.out) + at) =
            __floats2bfloat162_rn(low, high);
      }
    }
  }
}

template <Storage kStorage, Kind kKind, int kTokens>
__device__ __forceinline__ void consume_item(const Params& p, const PrefillMemory& memory,
                                             const PrefillItem& item, PrefillLane& lane) {
  using Group = StripGroup<is_gate_up(kKind)>;
  const int warpgroup = lane.warpgroup, thread = lane.thread;
  PrefillMultiplier<kStorage, kKind == Kind::kDownPer64, kTokens> multiplier(p, memory, lane);
  uint2 row_info{};  // output slot and routing weight; asked for now, needed behind the products
  if constexpr (!is_gate_up(kKind)) row_info = __ldg(p.row_info + item.first + thread);
  const int passes = Group::passes(p, item.group);
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    const int strip_of_group = pass * kPrefillConsumers + warpgroup;
    const int row = low_row(item.group * Group::kStrips + strip_of_group, thread);
    const uint32_t bias = load_bias(p, item.expert, row);
    float sum[kTokens / 2];
    multiplier.run(sum);
    if constexpr (is_gate_up(kKind)) {
      if (pass == 0) named_barrier_sync(kValuesFree, kValuesThreads);
      keep_values<kTokens>(p, memory.values(), strip_of_group, thread, bias, sum);
    } else {
      uint2* rows = memory.row_info(warpgroup);
      named_barrier_sync(kRowsBarrier + warpgroup, 128);  // the last item's have been read
      rows[thread] = row_info;
      named_barrier_sync(kRowsBarrier + warpgroup, 128);
      if (row < p.n && p.out_fp32) {
        store_rows<kTokens, true>(p, rows, item.rows, thread, row, bias, sum);
      } else if (row < p.n) {
        store_rows<kTokens, false>(p, rows, item.rows, thread, row, bias, sum);
      }
    }
  }
  if constexpr (is_gate_up(kKind)) {
    if (threadIdx.x == 0) *memory.quantised_item() = item;
    named_barrier_arrive(kValuesFull, kValuesThreads);
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
    const int first_row = tables.rows_before[expert] + block * kPrefillBlock;
    const int first_column = tables.columns_before[expert] + block * kPrefillBlock;
    item.first = kGateUp ? first_row : first_column;
    item.rows = min(tables.rows_before[expert + 1] - first_row, kPrefillBlock);
    const uint32_t tile_bytes = block_columns(item.rows) * p.tile_row_bytes;
    const int64_t columns_before = first_column;
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
  lane.full = memory.full();
  lane.empty = memory.empty();
  lane.ring = memory.ring();
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
  if constexpr (is_gate_up(kKind)) {
    named_barrier_sync(kValuesFree, kValuesThreads);
    if (threadIdx.x == 0) memory.quantised_item()->expert = -1;
    named_barrier_arrive(kValuesFull, kValuesThreads);
  }
}

__device__ __forceinline__ void quantise_items(const Params& p, const PrefillMemory& memory,
                                               int warp) {
  for (;;) {
    named_barrier_arrive(kValuesFree, kValuesThreads);
    named_barrier_sync(kValuesFull, kValuesThreads);
    const PrefillItem item = *memory.quantised_item();
    if (item.expert < 0) return;
    quantise_values(p, memory.values(), item, warp);
  }
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
    const int warp = threadIdx.x / 32 - kPrefillConsumerThreads / 32;
    if (threadIdx.x == kPrefillConsumerThreads) {
      produce_items<kStorage, is_gate_up(kKind)>(p, memory);
    } else if (is_gate_up(kKind) && warp > 0) {
      quantise_items(p, memory, warp - 1);
    }
  } else {
    registers_claim<kPrefillConsumerRegisters>();
    consume_items<kStorage, kKind>(p, memory);
  }
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_PREFILL_KERNEL_CUH_
