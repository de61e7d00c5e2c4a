// Which work a block does, from counts that only the device knows. A work item is one strip of one
// expert for one block of its tokens and one part of K; items are ordered by (expert, token block,
// strip, part) and cut into equal contiguous ranges, so a block reads a token block once and then
// streams strips. What an item computes never depends on the cut.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_SCHEDULE_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_SCHEDULE_CUH_

#include <cstdint>

#include "moe_gemm_fp8/params.h"

namespace gptoss::moe {

// Reads the offsets into shared memory (all threads of the block, so that the loads overlap) and
// counts token blocks: `rows_before[e]`, `blocks_before[e]` for e <= E. Synchronises at its end.
__device__ inline void count_token_blocks(const Params& p, int32_t* rows_before,
                                          int32_t* blocks_before) {
  for (int i = threadIdx.x; i <= p.experts; i += blockDim.x) {
    rows_before[i] = __ldcg(p.expert_offsets + i);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int32_t base = 0;
    for (int first = 0; first < p.experts; first += 32) {
      const int expert = first + lane;
      const int32_t blocks =
          expert < p.experts
              ? ceil_div(rows_before[expert + 1] - rows_before[expert], p.token_block)
              : 0;
      int32_t sum = blocks;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane >= step) sum += other;
      }
      if (expert < p.experts) blocks_before[expert] = base + sum - blocks;
      base += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
    if (lane == 0) blocks_before[p.experts] = base;
  }
  __syncthreads();
}

// Items of one token block that a block of threads takes: [begin, end) of strip x k_split + part.
struct Segment {
  int expert;
  int block;      // token block over all experts
  int first_row;  // sorted row of its first token
  int rows;       // tokens in it, 1 to token_block
  int begin;
  int end;
};

// Walks a block's equal share of all items, segment by segment.
class Cursor {
 public:
  __device__ Cursor(const Params& p, const int32_t* rows_before, const int32_t* blocks_before)
      : p_(p), rows_before_(rows_before), blocks_before_(blocks_before) {
    per_block_ = p.strips * p.k_split;
    const uint32_t items = static_cast<uint32_t>(blocks_before[p.experts]) * per_block_;
    const uint32_t share = items / gridDim.x, rest = items % gridDim.x;
    const uint32_t begin = share * blockIdx.x + min(blockIdx.x, rest);
    left_ = share + (blockIdx.x < rest ? 1 : 0);
    block_ = begin / per_block_;
    inside_ = begin % per_block_;
    int low = 0, high = p.experts;  // the expert with blocks_before[e] <= block < [e + 1]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (blocks_before[middle] <= block_) {
        low = middle;
      } else {
        high = middle;
      }
    }
    expert_ = low;
  }

  __device__ bool done() const { return left_ == 0; }

  __device__ Segment segment() const {
    Segment segment;
    segment.expert = expert_;
    segment.block = block_;
    segment.first_row = rows_before_[expert_] + (block_ - blocks_before_[expert_]) * p_.token_block;
    segment.rows = min(rows_before_[expert_ + 1] - segment.first_row, p_.token_block);
    segment.begin = inside_;
    segment.end = min(per_block_, inside_ + left_);
    return segment;
  }

  __device__ void advance() {
    left_ -= min(per_block_, inside_ + left_) - inside_;
    inside_ = 0;
    ++block_;
    while (left_ > 0 && blocks_before_[expert_ + 1] <= block_) ++expert_;
  }

 private:
  const Params& p_;
  const int32_t* rows_before_;
  const int32_t* blocks_before_;
  int per_block_;
  int left_;
  int expert_;
  int block_;
  int inside_;
};

// One strip, or one part of its K.
struct Item {
  int strip;
  int part;
  int record_begin;
  int record_end;
};

__device__ __forceinline__ Item make_item(const Params& p, int index) {
  if (p.k_split == 1) return {index, 0, 0, p.records};
  const int strip = index / p.k_split, part = index % p.k_split;
  return {strip, part, p.records * part / p.k_split, p.records * (part + 1) / p.k_split};
}

// Stage and phase parity of a ring position.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void step(int stages) {
    ++stage;
    const bool wraps = stage == stages;
    stage = wraps ? 0 : stage;
    parity ^= wraps ? 1 : 0;
  }
};

// The first record of an item that a warpgroup takes.
__device__ __forceinline__ int first_record(const Item& item, int warpgroup) {
  return item.record_begin + ((warpgroup - item.record_begin) & (kConsumers - 1));
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_SCHEDULE_CUH_
