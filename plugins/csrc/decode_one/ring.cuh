// The stream of weights of one block of threads: a ring in shared memory that one warp fills, phase
// after phase and layer after layer, as far ahead as there is room, and that the others empty in
// the same order. Weights do not depend on activations, so it runs on while blocks wait for each
// other; only experts have to be chosen first.
//
// Weights are the first to leave the second-level cache again: mailboxes and what all blocks read
// stay.
//
// Invariant: every warp waits for every stage, in order, and releases it, whoever computes with it:
// a parity tells apart no more than two laps.
#ifndef GPTOSS_TRT_DECODE_ONE_RING_CUH_
#define GPTOSS_TRT_DECODE_ONE_RING_CUH_

#include <cstdint>

#include "core/ptx.cuh"
#include "decode_one/params.h"
#include "dense_fp8/instructions.cuh"
#include "moe_gemm_fp8/layout.h"

namespace gptoss::one {

constexpr int kWarpgroups = 4;
constexpr int kWarps = 4 * kWarpgroups;  // that compute; one more brings weights
constexpr int kComputeThreads = 32 * kWarps;
// Registers are dealt to warpgroups: the one that brings weights, with three idle warps, leaves
// those that it does not need to the others. A launch of kThreads gets kLaunchRegisters a thread.
constexpr int kThreads = kComputeThreads + 128;
constexpr int kLaunchRegisters = 96;
constexpr int kComputeRegisters = 112;
constexpr int kBringRegisters = 32;
static_assert(kComputeThreads * (kComputeRegisters - kLaunchRegisters) <=
              128 * (kLaunchRegisters - kBringRegisters));

constexpr int kStages = 11;
constexpr int kStageRecords = 4;  // of an expert's strip
constexpr int kRecordBytes = moe::record_bytes(moe::Storage::kMxfp4, 2);
// Swizzled memory begins at a multiple of a kilobyte.
constexpr int kStageBytes = moe::ceil_div(kStageRecords * kRecordBytes, 1024) * 1024;

// The thread's place in its block, found anew at every use (see mailbox_of).
__device__ __forceinline__ int thread_index() {
  return static_cast<int>(keep_in_register(threadIdx.x));
}

// Barrier of the threads that compute.
__device__ __forceinline__ void compute_sync() { named_barrier_sync(1, kComputeThreads); }

struct Ring {
  uint32_t stages;
  uint32_t full;
  uint32_t empty;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint32_t address() const { return stages + stage * kStageBytes; }
  __device__ __forceinline__ uint32_t filled() const { return full + stage * 8; }
  __device__ __forceinline__ void step() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // For the warps that compute.
  __device__ __forceinline__ void wait() const { barrier_wait(filled(), parity); }
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage * 8);
    step();
  }

  // For the warp that fills: waits for room, then `bytes` are on their way.
  __device__ __forceinline__ void claim(uint32_t bytes) const {
    barrier_wait(empty + stage * 8, parity ^ 1);
    if (threadIdx.x % 32 == 0) barrier_expect_bytes(filled(), bytes);
    __syncwarp();
  }
};

// ---- dense weights: strips of rows, cut along K into tiles of 128 bytes a row
// ---------------------

constexpr int kTileRowBytes = 128;

GPTOSS_HOST_DEVICE constexpr int element_bytes(Format format) {
  return format == Format::kBf16 ? 2 : 1;
}

// `kColumns` of K of a strip of `kRows` rows.
template <Format kFormat, int kColumns, int kStripRows>
struct DenseShape {
  static constexpr int kRows = kStripRows;
  static constexpr int kTileColumns = kTileRowBytes / element_bytes(kFormat);
  static constexpr int kTiles = moe::ceil_div(kColumns, kTileColumns);
  static constexpr int kTileBytes = kRows * kTileRowBytes;
  static constexpr int kTogether = kStageBytes / kTileBytes;  // tiles of a stage
  static_assert(kTogether > 0 && kTogether <= kWarpgroups);
  static_assert(kRows % 8 == 0 && kRows <= 64, "eight rows make a kilobyte of swizzled memory");
};

template <Format kFormat>
using QkvShape = DenseShape<kFormat, kHidden, kQkvStripRows>;
template <Format kFormat>
using OutShape = DenseShape<kFormat, kAttended / kOutParts, kOutStripRows>;
template <Format kFormat>
using LmHeadShape = DenseShape<kFormat, kHidden, kLmHeadStripRows>;

constexpr int kQkvStrips = kQkvRows / kQkvStripRows;
constexpr int kOutStrips = kHidden / kOutStripRows;
static_assert(kQkvRows % kQkvStripRows == 0 && kQkvStrips <= kLeastBlocks);
static_assert(kHidden % kOutStripRows == 0 && kOutStrips * kOutParts <= kLeastBlocks);

__device__ __forceinline__ bool has_qkv() { return blockIdx.x < kQkvStrips; }
__device__ __forceinline__ bool has_out() { return blockIdx.x < kOutStrips * kOutParts; }
__device__ __forceinline__ int out_strip() { return static_cast<int>(blockIdx.x) % kOutStrips; }
__device__ __forceinline__ int out_part() { return static_cast<int>(blockIdx.x) / kOutStrips; }

// Strips of the lm head that block `blockIdx.x` computes.
struct StripRange {
  int first;
  int end;

  __device__ __forceinline__ explicit StripRange(int vocabulary) {
    const uint32_t strips =
        moe::ceil_div(vocabulary, kLmHeadStripRows);  // times blocks: below 2^32
    first = static_cast<int>(strips * blockIdx.x / gridDim.x);
    end = static_cast<int>(strips * (blockIdx.x + 1) / gridDim.x);
  }
};

// The tiles of one strip, from `column` (bytes) on.
template <class Shape>
__device__ __forceinline__ void bring_dense(Ring& ring, const CUtensorMap& map, int row,
                                            int column) {
#pragma unroll 1
  for (int tile = 0; tile < Shape::kTiles; tile += Shape::kTogether) {
    const int count = min(Shape::kTogether, Shape::kTiles - tile);
    ring.claim(count * Shape::kTileBytes);
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < count; ++i) {
        dense_fp8::copy_box_once(ring.address() + i * Shape::kTileBytes, map,
                                 column + (tile + i) * kTileRowBytes, row, ring.filled());
      }
    }
    ring.step();
  }
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---- experts: strips of 64 rows in layout sm90_v1, four records a stage -----------

constexpr int kRecords = moe::records(kHidden);
constexpr int kStripStages = moe::ceil_div(kRecords, kStageRecords);
constexpr int64_t kStripBytes = moe::strip_bytes(moe::Storage::kMxfp4, kHidden);
constexpr int kGateUpStrips = moe::strips(2 * kChannels);
constexpr int kDownStrips = moe::strips(kHidden);
constexpr int kTailBytes = moe::record_bytes(moe::Storage::kMxfp4, moe::tail_halves(kHidden));
static_assert(kChannels == kHidden, "both products have the same K");

// Strips of gate_up, [slot][strip] in one row, dealt to blocks in turn.
struct GateUpRange {
  static constexpr int kMost = moe::ceil_div(kTopK * kGateUpStrips, kLeastBlocks);  // of a block
  static_assert(kMost == moe::ceil_div(kTopK * kGateUpStrips, kMostBlocks) && kMost <= kMostStrips);
  static __device__ __forceinline__ int count() {
    return (kTopK * kGateUpStrips - place(0) + static_cast<int>(gridDim.x) - 1) /
           static_cast<int>(gridDim.x);
  }
  static __device__ __forceinline__ int slot(int i) { return place(i) / kGateUpStrips; }
  static __device__ __forceinline__ int strip(int i) { return place(i) % kGateUpStrips; }

 private:
  static __device__ __forceinline__ int place(int i) {
    return static_cast<int>(keep_in_register(blockIdx.x) + i * gridDim.x);
  }
};

__device__ __forceinline__ void bring_stage(Ring& ring, const uint8_t* strip, int stage) {
  const int records = min(kStageRecords, kRecords - stage * kStageRecords);
  const bool tail = stage + 1 == kStripStages;
  const int bytes = tail ? (records - 1) * kRecordBytes + kTailBytes : records * kRecordBytes;
  ring.claim(bytes);
  if (threadIdx.x % 32 == 0) {
    bulk_copy_once(ring.address(), strip + stage * kStageRecords * kRecordBytes, bytes,
                   ring.filled());
  }
  ring.step();
}

__device__ __forceinline__ void bring_gate_up(Ring& ring, const void* weight, const int* experts) {
  const int count = GateUpRange::count();
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const uint8_t* strip =
        static_cast<const uint8_t*>(weight) +
        (experts[GateUpRange::slot(i)] * kGateUpStrips + GateUpRange::strip(i)) * kStripBytes;
#pragma unroll 1
    for (int stage = 0; stage < kStripStages; ++stage) bring_stage(ring, strip, stage);
  }
}

// Stages of `down`, [strip][slot][stage of the strip] in one row, cut into as many equal runs as
// there are blocks: a run has parts of one strip of rows, or of two.
struct DownRange {
  static constexpr int kOfStrip = kTopK * kStripStages;  // stages that make a strip of the sum
  static constexpr int kAll = kDownStrips * kOfStrip;
  static_assert(kAll / kMostBlocks * (kDownParts - 1) >= kOfStrip, "more parts of a strip");
  int first;
  int end;

  __device__ __forceinline__ DownRange() : first(begin(blockIdx.x)), end(begin(blockIdx.x + 1)) {}

  static __device__ __forceinline__ int strip(int stage) { return stage / kOfStrip; }
  static __device__ __forceinline__ int slot(int stage) { return stage % kOfStrip / kStripStages; }
  // Which part of its strip's sum this block has.
  static __device__ __forceinline__ int part(int strip) {
    const int first_block = ((strip * kOfStrip + 1) * static_cast<int>(gridDim.x) - 1) / kAll;
    return static_cast<int>(blockIdx.x) - first_block;
  }
  __device__ __forceinline__ int strips() const { return strip(end - 1) - strip(first) + 1; }

 private:
  static __device__ __forceinline__ int begin(uint32_t block) {
    return static_cast<int>(kAll * block / gridDim.x);
  }
};

// Waits until there is room in the stage `ahead` places behind the ring's next one.
__device__ __forceinline__ void await_room(Ring ring, int ahead) {
  for (int i = 0; i < ahead; ++i) ring.step();
  barrier_wait(ring.empty + ring.stage * 8, ring.parity ^ 1);
}

__device__ __forceinline__ void bring_down(Ring& ring, const void* weight, const int* experts) {
  const DownRange range;
#pragma unroll 1
  for (int at = static_cast<int>(keep_in_register(range.first)); at < range.end; ++at) {
    const uint8_t* strip =
        static_cast<const uint8_t*>(weight) +
        (experts[DownRange::slot(at)] * kDownStrips + DownRange::strip(at)) * kStripBytes;
    bring_stage(ring, strip, at % kStripStages);
  }
}

// One row of the router, bf16, for the blocks that have an expert.
__device__ __forceinline__ void bring_router(Ring& ring, const void* weight) {
  constexpr int kBytes = kHidden * 2;
  ring.claim(kBytes);
  if (threadIdx.x % 32 == 0) {
    bulk_copy(ring.address(),
              static_cast<const uint8_t*>(weight) + keep_in_register(blockIdx.x) * kBytes, kBytes,
              ring.filled());
  }
  ring.step();
}

}  // namespace gptoss::one

#endif  // GPTOSS_TRT_DECODE_ONE_RING_CUH_
