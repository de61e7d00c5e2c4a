#include "core/checks.h"

namespace gptoss {

gptoss_trt_status check_range(const char* call, const Range& range) {
  if (range.value >= range.low && range.value <= range.high) return GPTOSS_TRT_OK;
  return fail(GPTOSS_TRT_INVALID_ARGUMENT, "%s: %s is %" PRId64 ", outside %" PRId64 " to %" PRId64,
              call, range.name, range.value, range.low, range.high);
}

gptoss_trt_status check_pointer(const char* call, const char* name, const void* pointer,
                                uint64_t alignment) {
  if (pointer == nullptr) return fail(GPTOSS_TRT_INVALID_ARGUMENT, "%s: %s is null", call, name);
  if (reinterpret_cast<uintptr_t>(pointer) % alignment == 0) return GPTOSS_TRT_OK;
  return fail(GPTOSS_TRT_INVALID_ARGUMENT, "%s: %s at %p is not aligned to %" PRIu64, call, name,
              pointer, alignment);
}

gptoss_trt_status cuda_failure(const char* call, const char* what, cudaError_t error) {
  return fail(GPTOSS_TRT_CUDA_ERROR, "%s: %s failed: %s", call, what, cudaGetErrorString(error));
}

gptoss_trt_status check_card(const char* call, int* multiprocessors) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return cuda_failure(call, "cudaGetDevice", error);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  error = cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return cuda_failure(call, "cudaDeviceGetAttribute", error);
  if (major == 9) return GPTOSS_TRT_OK;
  return fail(GPTOSS_TRT_UNSUPPORTED,
              "%s: compute capability %d.x, the library holds sm_90a code only", call, major);
}

}  // namespace gptoss
