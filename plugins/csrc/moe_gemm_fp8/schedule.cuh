// Which work a block does, from counts that only the device knows. A work item is one strip of one
// expert for one block of its tokens and one part of K; items are ordered by (expert, token block,
// strip, part) and cut into contiguous ranges of equal cost, so a block reads a token block once
// and then streams strips. What an item computes never depends on the cut.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_SCHEDULE_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_SCHEDULE_CUH_

#include <cstdint>

#include "moe_gemm_fp8/params.h"

namespace gptoss::moe {

// What an item takes by the columns of its instruction, 8 to 32, in units of its own (measured).
__constant__ constexpr int kItemCosts[kWidths] = {16, 19, 23, 27};

// Columns of the instruction that serves `rows` tokens.
__device__ __forceinline__ int instruction_tokens(int rows) {
  return (rows + kColumnStep - 1) / kColumnStep * kColumnStep;
}

// And what a block of threads takes to begin with a token block: to end the one before, and to load
// tokens.
constexpr int kStartCost = 12;

// Of one item of a token block of `rows`, at least 1.
__device__ __forceinline__ int item_cost(int rows) { return kItemCosts[(rows - 1) / kColumnStep]; }

// Of all `items` of it.
__device__ __forceinline__ int block_cost(int rows, int items) {
  return rows == 0 ? 0 : item_cost(rows) * items + kStartCost;
}

// Tables of all experts in shared memory, for e <= E: what lies before expert e.
struct Tables {
  int32_t* memory;
  int stride;

  __device__ Tables(int32_t* memory, int experts) : memory(memory), stride(experts + 1) {}

  __device__ int32_t& rows(int e) const { return memory[e]; }
  // Of token_block tokens, the last one of an expert with the rest.
  __device__ int32_t& blocks(int e) const { return memory[stride + e]; }
  __device__ int32_t& costs(int e) const { return memory[2 * stride + e]; }  // of those blocks
  // [kShareWords] of this block of threads.
  __device__ int32_t* share() const { return memory + 3 * stride; }
};

// Which items a block of threads takes: `left` from item `inside` of token block `block` on, which
// is one of `expert`'s.
struct Share {
  int expert;
  int block;
  int inside;
  int left;
};
static_assert(sizeof(Share) == kShareWords * sizeof(int32_t));

// The first item at or behind `cost` in the order of items, as if each took its cost.
struct Place {
  int expert;
  int block;
  int inside;
};

__device__ inline Place find_place(const Params& p, const Tables& tables, int cost) {
  const int per_block = p.strips * p.k_split;
  int low = 0, high = p.experts;  // the last expert that begins at or before `cost`
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (tables.costs(middle) <= cost) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int rows = tables.rows(low + 1) - tables.rows(low);
  const int whole = rows / p.token_block;  // token blocks
  const int whole_cost = block_cost(p.token_block, per_block);
  const int beyond = cost - tables.costs(low);
  const int block = min(beyond / whole_cost, whole);
  const int each = item_cost(max(min(rows - block * p.token_block, p.token_block), 1));
  const int behind_start = max(beyond - block * whole_cost - kStartCost, 0);
  return {low, tables.blocks(low) + block, (behind_start + each - 1) / each};
}

// Reads the offsets into shared memory (all threads of the block, so that the loads overlap), adds
// up token blocks and costs, and finds the share of this block of threads: cuts of equal cost,
// rounded up to items. Synchronises at its end.
__device__ inline void make_tables(const Params& p, const Tables& tables) {
  for (int i = threadIdx.x; i <= p.experts; i += blockDim.x) {
    tables.rows(i) = __ldcg(p.expert_offsets + i);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    const int per_block = p.strips * p.k_split;
    int32_t blocks_base = 0, costs_base = 0;
    for (int first = 0; first < p.experts; first += 32) {
      const int expert = first + lane;
      const int32_t rows = expert < p.experts ? tables.rows(expert + 1) - tables.rows(expert) : 0;
      const int32_t blocks = ceil_div(rows, p.token_block);
      const int32_t costs = rows / p.token_block * block_cost(p.token_block, per_block) +
                            block_cost(rows % p.token_block, per_block);
      int32_t block_sum = blocks, cost_sum = costs;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int32_t other_blocks = __shfl_up_sync(0xFFFFFFFFu, block_sum, step);
        const int32_t other_costs = __shfl_up_sync(0xFFFFFFFFu, cost_sum, step);
        if (lane >= step) {
          block_sum += other_blocks;
          cost_sum += other_costs;
        }
      }
      if (expert < p.experts) {
        tables.blocks(expert) = blocks_base + block_sum - blocks;
        tables.costs(expert) = costs_base + cost_sum - costs;
      }
      blocks_base += __shfl_sync(0xFFFFFFFFu, block_sum, 31);
      costs_base += __shfl_sync(0xFFFFFFFFu, cost_sum, 31);
    }
    if (lane == 0) {
      tables.blocks(p.experts) = blocks_base;
      tables.costs(p.experts) = costs_base;
    }
    __syncwarp();
    // Lane 0 finds the beginning, lane 1 the end.
    const int64_t cut = static_cast<int64_t>(costs_base) * (blockIdx.x + min(lane, 1)) / gridDim.x;
    const Place place = find_place(p, tables, static_cast<int>(cut));
    const int32_t item = place.block * per_block + place.inside;
    const int32_t end = __shfl_sync(0xFFFFFFFFu, item, 1);
    if (lane == 0) {
      Share share;
      const bool over = place.inside == per_block;  // the next block's first
      share.block = place.block + (over ? 1 : 0);
      share.inside = over ? 0 : place.inside;
      share.expert = place.expert;
      share.left = end - item;
      while (share.left > 0 && tables.blocks(share.expert + 1) <= share.block) ++share.expert;
      *reinterpret_cast<Share*>(tables.share()) = share;
    }
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

// Walks a block's share of all items, segment by segment.
class Cursor {
 public:
  __device__ Cursor(const Params& p, const Tables& tables)
      : p_(p), tables_(tables), per_block_(p.strips * p.k_split) {
    const Share share = *reinterpret_cast<const Share*>(tables.share());
    left_ = share.left;
    expert_ = share.expert;
    block_ = share.block;
    inside_ = share.inside;
  }

  __device__ bool done() const { return left_ == 0; }

  __device__ Segment segment() const {
    Segment segment;
    segment.expert = expert_;
    segment.block = block_;
    segment.first_row = tables_.rows(expert_) + (block_ - tables_.blocks(expert_)) * p_.token_block;
    segment.rows = min(tables_.rows(expert_ + 1) - segment.first_row, p_.token_block);
    segment.begin = inside_;
    segment.end = min(per_block_, inside_ + left_);
    return segment;
  }

  __device__ void advance() {
    left_ -= min(per_block_, inside_ + left_) - inside_;
    inside_ = 0;
    ++block_;
    while (left_ > 0 && tables_.blocks(expert_ + 1) <= block_) ++expert_;
  }

 private:
  const Params& p_;
  const Tables tables_;
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
