// Four words of four neighbouring lanes, turned: what makes runs of the values that a fragment of
// the tensor cores holds in pairs.
#ifndef GPTOSS_TRT_CORE_TURN_QUAD_CUH_
#define GPTOSS_TRT_CORE_TURN_QUAD_CUH_

#include <cstdint>

namespace gptoss {

// a of the upper lane of a pair and b of the lower one change places.
__device__ __forceinline__ void swap_across(uint32_t& a, uint32_t& b, int distance, bool upper) {
  const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, upper ? a : b, distance);
  a = upper ? other : a;
  b = upper ? b : other;
}

// words[s] of lane t of four becomes words[t] of lane s: each has a run of the four's values.
__device__ __forceinline__ void turn_quad(uint32_t (&words)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  swap_across(words[0], words[1], 1, odd);
  swap_across(words[2], words[3], 1, odd);
  swap_across(words[0], words[2], 2, upper);
  swap_across(words[1], words[3], 2, upper);
}

}  // namespace gptoss

#endif  // GPTOSS_TRT_CORE_TURN_QUAD_CUH_
