// Of products of many tokens (wide.cuh): what lies in a block's shared memory, who copies into it,
// and who stores what leaves through it.
#ifndef GPTOSS_TRT_DENSE_FP8_WIDE_PRODUCERS_CUH_
#define GPTOSS_TRT_DENSE_FP8_WIDE_PRODUCERS_CUH_

#include <cuda.h>

#include <cstdint>

#include "core/cluster.cuh"
#include "core/ptx.cuh"
#include "dense_fp8/instructions.cuh"
#include "dense_fp8/kernel.cuh"
#include "dense_fp8/params.h"
#include "dense_fp8/store.cuh"
#include "dense_fp8/tile.cuh"
#include "dense_fp8/wide_schedule.h"

namespace gptoss::dense_fp8 {

constexpr int kStageBoxes = 2;  // that leave through a stage

template <End kEnd>
struct WideShape {
  static constexpr int kTokens = kWideTokens, kStages = 5, kGroups = kWideGroups;
  static constexpr bool kRotates = kEnd == End::kRotate, kAdds = kEnd == End::kAdd;
  static constexpr int kColumns = kGroups * kGroupRows;
  static constexpr int kHalfRows = kColumns / kWideBlocks;  // that a block copies
  static constexpr int kHalfBytes = kHalfRows * kBlock;
  static constexpr int kTokenBytes = kTokens * kBlock;
  static constexpr int kStageBytes = kTokenBytes + kWideBlocks * kHalfBytes;
  static constexpr int kWeightScaleAt = kTokens * 4;
  static constexpr int kBiasAt = kWeightScaleAt + 16;
  static constexpr int kPositionsAt = kBiasAt + kColumns * 2;
  static constexpr int kSlotsAt = kPositionsAt + kTokens * 4;
  static constexpr int kSideBytes = kRotates ? kSlotsAt + kTokens * 4 : kPositionsAt;
  static constexpr int kSideAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kSideAt + kStages * kSideBytes;
  static constexpr int kSharedBytes = kBarriersAt + 3 * 8 * kStages + kSwizzleAlignment;
  static_assert(kStageBoxes * kBoxBytes <= kStageBytes, "boxes of a stage");
};

// The items of this block's cluster.
__device__ __forceinline__ WideSchedule own_schedule(const Params& p) {
  return WideSchedule(p.cut, blockIdx.x / kWideBlocks);
}

// The first token of an item in this block.
__device__ __forceinline__ int first_token(const WideItem& item) {
  return (item.tokens * kWideBlocks + static_cast<int>(cluster_rank())) * kWideTokens;
}

// Stages of an item behind those of its products, through which its results leave.
__device__ __forceinline__ int end_stages(const WideItem& item) {
  return (item.groups + kStageBoxes - 1) / kStageBoxes;
}

// Of the weight's scales, which a row shares with 127 others of its segment.
__device__ __forceinline__ int scale_block(const Params& p, int row) {
  int before = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row < p.segments[i]) return before + row / kBlock;
    row -= p.segments[i];
    before += (p.segments[i] + kBlock - 1) / kBlock;
  }
  return before + row / kBlock;
}

// One warp, by a lane that it elects: tokens and weights, and behind an item's last stage the
// stages of its end, with what results are added to.
template <typename S>
__device__ inline void produce_wide(const Params& p, const Memory<S>& memory,
                                    const CUtensorMap& x_map, const CUtensorMap& weight_map,
                                    const CUtensorMap& out_map) {
  constexpr uint16_t kAll = (1 << kWideBlocks) - 1;
  WideSchedule schedule = own_schedule(p);
  const int rank = static_cast<int>(cluster_rank());
  const auto request_weights = [&](int stage, int block, const WideItem& item) {
    const uint32_t full = memory.full(stage);
    const int halves = item.groups * kGroupRows > S::kHalfRows ? 2 : 1;
    barrier_expect_bytes(full, S::kTokenBytes + halves * S::kHalfBytes);
    if (rank < halves) {
      copy_box_to_all(memory.weights(stage) + rank * S::kHalfBytes, weight_map, block * kBlock,
                      item.row + rank * S::kHalfRows, full, kAll);
    }
  };
  int ahead = 0;  // stages whose weights are under way
  if (!schedule.done()) {
    const WideItem item = schedule.item();
    ahead = min(S::kStages, p.k_blocks);
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
      if (elect_lane()) request_weights(i, i, item);
      __syncwarp();
    }
  }
  dependency_wait();
  Position<S> position;
  for (; !schedule.done(); schedule.advance()) {
    const WideItem item = schedule.item();
    const int token = first_token(item);
#pragma unroll 1
    for (int block = 0; block < p.k_blocks; ++block, position.step(), --ahead) {
      const int stage = position.stage;
      barrier_wait(memory.empty(stage), position.parity ^ 1);
      if (elect_lane()) {
        if (ahead <= 0) request_weights(stage, block, item);
        copy_box(memory.tokens(stage), x_map, block * kBlock, token, memory.full(stage));
      }
      __syncwarp();
    }
#pragma unroll 1
    for (int i = 0; i < end_stages(item); ++i, position.step()) {
      const uint32_t full = memory.full(position.stage), to = memory.tokens(position.stage);
      barrier_wait(memory.empty(position.stage), position.parity ^ 1);
      if (elect_lane()) {
        if constexpr (S::kAdds) {
          const int first = i * kStageBoxes, boxes = min(item.groups - first, kStageBoxes);
          barrier_expect_bytes(full, boxes * kBoxBytes);
          for (int box = 0; box < boxes; ++box) {
            copy_box(to + box * kBoxBytes, out_map, 2 * (item.row + (first + box) * kGroupRows),
                     token, full);
          }
        } else {
          barrier_arrive(full);
        }
      }
      __syncwarp();
    }
  }
}

// The bias of an item's rows, and positions and slots of its tokens.
template <typename S>
__device__ __forceinline__ void copy_ends(const Params& p, const WideItem& item, int first,
                                          uint32_t side, int lane) {
  if (p.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < S::kColumns / 64; ++i) {
      const int column = 2 * (lane + 32 * i);
      copy_word_async(side + S::kBiasAt + column * 2, p.bias + min(item.row + column, p.n - 2),
                      column < item.groups * kGroupRows);
    }
  }
  if constexpr (S::kRotates) {
#pragma unroll 2
    for (int i = 0; i < S::kTokens / 32; ++i) {
      const int at = lane + 32 * i, token = min(first + at, p.tokens - 1);
      copy_word_async(side + S::kPositionsAt + at * 4, p.positions + token, true);
      copy_word_async(side + S::kSlotsAt + at * 4, p.slots + token, true);
    }
  }
}

// One warp: scales, and with the last of them the bias and what rotation needs.
template <typename S>
__device__ inline void produce_wide_scales(const Params& p, const Memory<S>& memory) {
  const int lane = threadIdx.x % 32;
  dependency_wait();
  Position<S> position;
  for (WideSchedule schedule = own_schedule(p); !schedule.done(); schedule.advance()) {
    const WideItem item = schedule.item();
    const int group = min(lane, item.groups - 1), token = first_token(item);
    const float* unit =
        p.weight_scale +
        static_cast<int64_t>(scale_block(p, item.row + group * kGroupRows)) * p.k_blocks;
#pragma unroll 1
    for (int block = 0; block < p.k_blocks; ++block, position.step()) {
      const uint32_t side = memory.side(position.stage);
      const float* scales = p.x_scale + static_cast<int64_t>(block) * p.tokens;
      barrier_wait(memory.empty(position.stage), position.parity ^ 1);
      copy_token_scales<S>(p, side, scales, token, lane);
      if (lane < item.groups) {
        copy_word_async(side + S::kWeightScaleAt + lane * 4, unit + block, true);
      }
      if (block + 1 == p.k_blocks) copy_ends<S>(p, item, token, side, lane);
      copies_arrive(memory.full(position.stage));
    }
    for (int i = 0; i < end_stages(item); ++i, position.step()) {
      barrier_wait(memory.empty(position.stage), position.parity ^ 1);
      copies_arrive(memory.full(position.stage));
    }
  }
}

// One warp for each of a stage's boxes: what consumers have put there goes where it belongs, and
// the stages are given back for all consumers.
template <typename S>
__device__ inline void store_boxes(const Params& p, const Memory<S>& memory,
                                   const CUtensorMap& out_map, int box) {
  int stage = 0;
  uint32_t parities = 0;  // a bit a stage
  for (WideSchedule schedule = own_schedule(p); !schedule.done(); schedule.advance()) {
    const WideItem item = schedule.item();
    stage = (stage + p.k_blocks) % S::kStages;
#pragma unroll 1
    for (int group = box; group - box < item.groups; group += kStageBoxes) {
      const int token = first_token(item), row = item.row + group * kGroupRows;
      const uint32_t from = memory.tokens(stage) + box * kBoxBytes;
      const uint32_t boxed = memory.boxed(stage), parity = parities >> stage & 1;
      parities ^= 1u << stage;
      if (group >= item.groups) {
        barrier_wait(boxed, parity);
      } else if (S::kRotates && row >= p.segments[0]) {
        const KeptBox kept(p, token, row);
        barrier_wait(boxed, parity);
        kept.store(from);
      } else {
        barrier_wait(boxed, parity);
        if (elect_lane()) {
          store_box(out_map, 2 * row, token, from);
          bulk_stores_commit();
          bulk_stores_wait_read();
        }
      }
      // Behind the stores: an arrival in the cluster overtakes loads that are under way.
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int rank = 0; rank < kWideBlocks; ++rank) {
          cluster_arrive(cluster_address(memory.empty(stage), rank), kConsumerWarps / kStageBoxes);
        }
      }
      stage = (stage + 1) % S::kStages;
    }
  }
  if (elect_lane()) bulk_stores_wait();
}

// One warp: the angles of all tokens come into the second-level cache, some by each block.
__device__ inline void ask_for_angles(const Params& p) {
  const int step = gridDim.x * 32;
  for (int token = blockIdx.x * 32 + threadIdx.x % 32; token < p.tokens; token += step) {
    const float* row = p.cos_sin + static_cast<int64_t>(p.positions[token]) * kHeadDim;
    prefetch_line(row);
    prefetch_line(row + kHeadDim / 2);
  }
}

}  // namespace gptoss::dense_fp8

#endif  // GPTOSS_TRT_DENSE_FP8_WIDE_PRODUCERS_CUH_
