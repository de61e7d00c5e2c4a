// The stream of weights of one block of threads: a ring in shared memory that one warp fills, phase
// after phase and layer after layer, as far ahead as there is room, and that the others empty in
// the same order. Weights do not depend on activations, so it runs on while blocks wait for each
// other; only experts have to be chosen first.
//
// Invariant: every warp waits for every stage, in order, and releases it, whoever computes with it:
// a parity tells apart no more than two laps.
#ifndef GPTOSS_TRT_DECODE_ONE_RING_CUH_
#define GPTOSS_TRT_DECODE_ONE_RING_CUH_

#include <cstdint>

#include "core/ptx.cuh"
#include "decode_one/params.h"
#include "moe_gemm_fp8/layout.h"

namespace gptoss::one {

constexpr int kWarpgroups = 2;
constexpr int kWarps = 4 * kWarpgroups;  // that compute; one more brings weights
constexpr int kComputeThreads = 32 * kWarps;
// Registers are dealt to warpgroups: the one that brings weights, with three idle warps, leaves
// those that it does not need to the others. A launch of kThreads gets kLaunchRegisters a thread.
constexpr int kThreads = kComputeThreads + 128;
constexpr int kLaunchRegisters = 168;
constexpr int kComputeRegisters = 232;
constexpr int kBringRegisters = 40;
static_assert(kComputeThreads * (kComputeRegisters - kLaunchRegisters) <=
              128 * (kLaunchRegisters - kBringRegisters));

constexpr int kStages = 11;
constexpr int kStageRecords = 4;  // of an expert's strip
constexpr int kRecordBytes = moe::record_bytes(moe::Storage::kMxfp4, 2);
constexpr int kStageBytes = moe::ceil_div(kStageRecords * kRecordBytes, 128) * 128;

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

// ---- dense weights: tiles of 8 rows, cut along K so that they fit a stage
// -------------------------

constexpr int kTileRows = 8;
constexpr int kUnitBytes = 64;  // of a row: what one step of a warp multiplies

template <Format kFormat, int kColumns>
struct DenseShape {
  static constexpr int kElement = kFormat == Format::kBf16 ? 2 : 1;
  static constexpr int kRowBytes = kColumns * kElement;
  static constexpr int kChunks = kRowBytes > 4096 ? moe::ceil_div(kRowBytes, 2048) : 2;
  // Units of a chunk in eights: half of the warps have one more in the first chunk, others in the
  // second.
  static constexpr int kChunkBytes =
      kFormat == Format::kFp8
          ? moe::ceil_div(moe::ceil_div(kRowBytes, kChunks), 8 * kUnitBytes) * 8 * kUnitBytes
          : moe::ceil_div(moe::ceil_div(kRowBytes, kChunks), kUnitBytes) * kUnitBytes;
  // An odd multiple of 64: rows g and g + 1 of a quarter of a warp's loads lie in other banks.
  static constexpr int kPitch = kChunkBytes % 128 == 0 ? kChunkBytes + 64 : kChunkBytes;
  static constexpr int kUnitColumns = kUnitBytes / kElement;
  static constexpr int kSlots = moe::ceil_div(kChunkBytes / kUnitBytes, kWarps);  // of a warp
  static_assert(kTileRows * kPitch <= kStageBytes);
  static_assert(kRowBytes % kUnitBytes == 0 && kChunkBytes % 16 == 0);

  static __device__ __forceinline__ constexpr int chunk_bytes(int chunk) {
    return chunk + 1 < kChunks ? kChunkBytes : kRowBytes - (kChunks - 1) * kChunkBytes;
  }
};

// Tiles of a weight that block `blockIdx.x` computes.
struct TileRange {
  int first;
  int end;

  static __device__ __forceinline__ TileRange of(int rows) {
    const uint32_t tiles = static_cast<uint32_t>(rows) / kTileRows;  // times blocks: below 2^32
    return {static_cast<int>(tiles * blockIdx.x / gridDim.x),
            static_cast<int>(tiles * (blockIdx.x + 1) / gridDim.x)};
  }
};

template <Format kFormat, int kColumns>
__device__ __forceinline__ void bring_dense(Ring& ring, const void* weight,
                                            const TileRange& tiles) {
  using Shape = DenseShape<kFormat, kColumns>;
  const int lane = threadIdx.x % 32;
  for (int tile = tiles.first; tile < tiles.end; ++tile) {
    const uint8_t* row = static_cast<const uint8_t*>(weight) +
                         (static_cast<int64_t>(tile) * kTileRows + lane) * Shape::kRowBytes;
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
      const int bytes = Shape::chunk_bytes(chunk);
      ring.claim(kTileRows * bytes);
      if (lane < kTileRows) {
        bulk_copy(ring.address() + lane * Shape::kPitch, row + chunk * Shape::kChunkBytes, bytes,
                  ring.filled());
      }
      ring.step();
    }
  }
}

// ---- experts: strips of 64 rows in layout sm90_v1, four records a stage -----------

constexpr int kRecords = moe::records(kHidden);
constexpr int kStripStages = moe::ceil_div(kRecords, kStageRecords);
constexpr int64_t kStripBytes = moe::strip_bytes(moe::Storage::kMxfp4, kHidden);
constexpr int kGateUpStrips = moe::strips(2 * kChannels);
constexpr int kDownStrips = moe::strips(kHidden);
constexpr int kTailBytes = moe::record_bytes(moe::Storage::kMxfp4, moe::tail_halves(kHidden));
static_assert(kChannels == kHidden, "both products have the same K");

// Strips [slot][strip] in one row, dealt to blocks in turn: gate_up from the first block on, `down`
// from the last, which has fewer of gate_up.
template <bool kDown>
struct StripRange {
  static constexpr int kStrips = kDown ? kDownStrips : kGateUpStrips;
  int first;

  __device__ __forceinline__ StripRange()
      : first(kDown ? static_cast<int>(gridDim.x - 1 - blockIdx.x) : static_cast<int>(blockIdx.x)) {
  }
  __device__ __forceinline__ int count() const {
    return (kTopK * kStrips - first + static_cast<int>(gridDim.x) - 1) /
           static_cast<int>(gridDim.x);
  }
  __device__ __forceinline__ int slot(int i) const {
    return (first + i * static_cast<int>(gridDim.x)) / kStrips;
  }
  __device__ __forceinline__ int strip(int i) const {
    return (first + i * static_cast<int>(gridDim.x)) % kStrips;
  }
};

template <bool kDown>
__device__ __forceinline__ void bring_strips(Ring& ring, const void* weight, const int* experts) {
  const StripRange<kDown> range;
  constexpr int64_t kExpertBytes = StripRange<kDown>::kStrips * kStripBytes;
  for (int i = 0; i < range.count(); ++i) {
    const uint8_t* strip = static_cast<const uint8_t*>(weight) +
                           experts[range.slot(i)] * kExpertBytes + range.strip(i) * kStripBytes;
    for (int stage = 0; stage < kStripStages; ++stage) {
      const int records = min(kStageRecords, kRecords - stage * kStageRecords);
      const bool tail = stage + 1 == kStripStages;
      const int bytes = tail ? (records - 1) * kRecordBytes + kTailBytes : records * kRecordBytes;
      ring.claim(bytes);
      if (threadIdx.x % 32 == 0) {
        bulk_copy(ring.address(), strip + stage * kStageRecords * kRecordBytes, bytes,
                  ring.filled());
      }
      ring.step();
    }
  }
}

// One row of the router, bf16, for the blocks that have an expert.
__device__ __forceinline__ void bring_router(Ring& ring, const void* weight) {
  constexpr int kBytes = kHidden * 2;
  ring.claim(kBytes);
  if (threadIdx.x % 32 == 0) {
    bulk_copy(ring.address(), static_cast<const uint8_t*>(weight) + blockIdx.x * kBytes, kBytes,
              ring.filled());
  }
  ring.step();
}

}  // namespace gptoss::one

#endif  // GPTOSS_TRT_DECODE_ONE_RING_CUH_
