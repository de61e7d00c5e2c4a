// Which work a block does, from counts that only the device knows. A work item is one strip of one
// expert for one block of its tokens and one part of K; items are ordered by (expert, token block,
// strip, part) and cut into equal contiguous ranges, so a block reads a token block once and then
// streams strips. What an item computes never depends on the cut.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_SCHEDULE_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_SCHEDULE_CUH_

#include <cstdint>

#include "moe_gemm_fp8/params.h"

namespace gptoss::moe {

// Reads the offsets into shared memory and counts token blocks: `rows_before[e]`,
// `blocks_before[e]` for e <= E. Called by warp 0; the caller synchronises.
__device__ inline void count_token_blocks(const Params& p, int32_t* rows_before,
                                          int32_t* blocks_before) {
  const int lane = threadIdx.x % 32;
  int32_t base = 0;
  for (int first = 0; first < p.experts; first += 32) {
    const int expert = first + lane;
    int32_t begin = 0, blocks = 0;
    if (expert < p.experts) {
      begin = __ldcg(p.expert_offsets + expert);
      blocks = ceil_div(__ldcg(p.expert_offsets + expert + 1) - begin, p.token_block);
    }
    int32_t sum = blocks;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (lane >= step) sum += other;
    }
    if (expert < p.experts) {
      rows_before[expert] = begin;
      blocks_before[expert] = base + sum - blocks;
    }
    base += __shfl_sync(0xFFFFFFFFu, sum, 31);
  }
  if (lane == 0) {
    rows_before[p.experts] = __ldcg(p.expert_offsets + p.experts);
    blocks_before[p.experts] = base;
  }
}

struct Item {
  int expert;
  int block;      // token block over all experts
  int first_row;  // sorted row of its first token
  int rows;       // tokens in it, 1 to token_block
  int strip;
  int part;
  int record_begin;
  int record_end;
};

// Walks a block's range of items in order.
class Cursor {
 public:
  __device__ Cursor(const Params& p, const int32_t* rows_before, const int32_t* blocks_before)
      : p_(p), rows_before_(rows_before), blocks_before_(blocks_before) {
    const int per_block = p.strips * p.k_split;
    const int64_t items = static_cast<int64_t>(blocks_before[p.experts]) * per_block;
    const int64_t begin = items * blockIdx.x / gridDim.x;
    left_ = static_cast<int>(items * (blockIdx.x + 1) / gridDim.x - begin);
    block_ = static_cast<int>(begin / per_block);
    const int inside = static_cast<int>(begin % per_block);
    strip_ = inside / p.k_split;
    part_ = inside % p.k_split;
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

  __device__ Item item() const {
    Item item;
    item.expert = expert_;
    item.block = block_;
    item.first_row = rows_before_[expert_] + (block_ - blocks_before_[expert_]) * p_.token_block;
    item.rows = min(rows_before_[expert_ + 1] - item.first_row, p_.token_block);
    item.strip = strip_;
    item.part = part_;
    item.record_begin = p_.records * part_ / p_.k_split;
    item.record_end = p_.records * (part_ + 1) / p_.k_split;
    return item;
  }

  __device__ void advance() {
    --left_;
    if (++part_ < p_.k_split) return;
    part_ = 0;
    if (++strip_ < p_.strips) return;
    strip_ = 0;
    ++block_;
    while (left_ > 0 && blocks_before_[expert_ + 1] <= block_) ++expert_;
  }

 private:
  const Params& p_;
  const int32_t* rows_before_;
  const int32_t* blocks_before_;
  int left_;
  int expert_;
  int block_;
  int strip_;
  int part_;
};

// Stage and phase parity of a ring position.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  // At most `stages` further.
  __device__ __forceinline__ void step(int records, int stages) {
    stage += records;
    const bool wraps = stage >= stages;
    stage -= wraps ? stages : 0;
    parity ^= wraps ? 1 : 0;
  }

  __device__ void advance(int records, int stages) {
    for (; records > stages; records -= stages) step(stages, stages);
    step(records, stages);
  }
};

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_SCHEDULE_CUH_
