// e4m3 codes as fp16, exactly: what mma.sync multiplies where the weights' format has no
// instruction.
#ifndef GPTOSS_TRT_CORE_E4M3_CUH_
#define GPTOSS_TRT_CORE_E4M3_CUH_

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace gptoss {

// The two codes in the low half of `codes`.
__device__ __forceinline__ uint32_t halves_of(uint32_t codes) {
  const __half2_raw pair =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  return static_cast<uint32_t>(pair.y) << 16 | pair.x;
}

__device__ __forceinline__ uint2 halves_of_word(uint32_t codes) {
  return make_uint2(halves_of(codes), halves_of(codes >> 16));
}

}  // namespace gptoss

#endif  // GPTOSS_TRT_CORE_E4M3_CUH_
