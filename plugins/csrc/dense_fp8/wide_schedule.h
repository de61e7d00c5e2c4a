// Which cluster multiplies what of a product of many tokens (wide.cuh). An item has 256 tokens and
// three groups of 64 rows of the weight; what rows are left behind whole items is a tail of one or
// two groups. Whole items come first, in rounds of all clusters, then whole tails; the last of both
// are cut into single groups where that makes the last round shorter. Runs on the host too: tests
// count that all is multiplied once.
#ifndef GPTOSS_TRT_DENSE_FP8_WIDE_SCHEDULE_H_
#define GPTOSS_TRT_DENSE_FP8_WIDE_SCHEDULE_H_

#include <cuda_runtime_api.h>

#include "dense_fp8/params.h"

namespace gptoss::dense_fp8 {

struct WideItem {
  int tokens;  // number of its tokens' tile
  int row;     // of the weight, the first of `groups` of kGroupRows
  int groups;
};

// The items of a cluster.
class WideSchedule {
 public:
  __host__ __device__ WideSchedule(const WideCut& cut, int cluster)
      : cut_(cut),
        cluster_(cluster),
        per_(cut.groups / kWideGroups),
        tail_(cut.groups % kWideGroups),
        singles_from_(cut.whole_items + cut.whole_tails),
        tails_from_(singles_from_ + kWideGroups * (cut.token_tiles * per_ - cut.whole_items)),
        end_(tails_from_ + tail_ * (cut.token_tiles - cut.whole_tails)) {}

  __host__ __device__ bool done() const { return at() >= end_; }
  __host__ __device__ void advance() { ++round_; }

  __host__ __device__ WideItem item() const {
    const int number = at();
    if (number < cut_.whole_items) return place(number, 0, kWideGroups);
    if (number < singles_from_) return tail(number - cut_.whole_items, 0, tail_);
    if (number < tails_from_) {
      const int single = number - singles_from_;
      return place(cut_.whole_items + single / kWideGroups, single % kWideGroups, 1);
    }
    const int single = number - tails_from_;
    return tail(cut_.whole_tails + single / tail_, single % tail_, 1);
  }

 private:
  // Rounds go there and back: of two that are not full the same clusters have an item less.
  __host__ __device__ int at() const {
    return round_ * cut_.clusters + (round_ % 2 == 0 ? cluster_ : cut_.clusters - 1 - cluster_);
  }

  __host__ __device__ WideItem place(int item, int group, int groups) const {
    const int fast = cut_.tokens_first ? cut_.token_tiles : per_;
    const int slow = item / fast;
    const int inner = item - slow * fast;
    const int first = kWideGroups * (cut_.tokens_first ? slow : inner) + group;
    return {cut_.tokens_first ? inner : slow, first * kGroupRows, groups};
  }

  __host__ __device__ WideItem tail(int tile, int group, int groups) const {
    return {tile, (kWideGroups * per_ + group) * kGroupRows, groups};
  }

  const WideCut& cut_;
  const int cluster_, per_, tail_, singles_from_, tails_from_, end_;
  int round_ = 0;
};

}  // namespace gptoss::dense_fp8

#endif  // GPTOSS_TRT_DENSE_FP8_WIDE_SCHEDULE_H_
