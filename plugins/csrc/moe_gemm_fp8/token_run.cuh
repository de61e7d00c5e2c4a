// Activations in the order that the weights' fragments have, as WGMMA wants them in shared memory.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_TOKEN_RUN_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_TOKEN_RUN_CUH_

#include <cstdint>

#include "moe_gemm_fp8/params.h"

namespace gptoss::moe {

constexpr int kCoreRows = 8;  // tokens of one core matrix
constexpr int kCoreBytes = 128;

// Brings 64 columns of one token in the order that the weights have: word 4a + c of the run
// becomes word 4c + a.
__device__ __forceinline__ void copy_token_run(const Params& p, const uint8_t* source, int column,
                                               uint8_t* target, int chunk_stride) {
  uint4 in[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    in[i] = source != nullptr && column + 16 * i < p.k
                ? __ldg(reinterpret_cast<const uint4*>(source + column) + i)
                : make_uint4(0, 0, 0, 0);
  }
  *reinterpret_cast<uint4*>(target) = make_uint4(in[0].x, in[1].x, in[2].x, in[3].x);
  *reinterpret_cast<uint4*>(target + chunk_stride) = make_uint4(in[0].y, in[1].y, in[2].y, in[3].y);
  *reinterpret_cast<uint4*>(target + 2 * chunk_stride) =
      make_uint4(in[0].z, in[1].z, in[2].z, in[3].z);
  *reinterpret_cast<uint4*>(target + 3 * chunk_stride) =
      make_uint4(in[0].w, in[1].w, in[2].w, in[3].w);
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_TOKEN_RUN_CUH_
