// What every C function of the library checks before it launches, with one wording. Knows no
// product.
#ifndef GPTOSS_TRT_CORE_CHECKS_H_
#define GPTOSS_TRT_CORE_CHECKS_H_

#include <cuda_runtime_api.h>

#include <cinttypes>
#include <cstddef>
#include <cstdint>

#include "core/status.h"
#include "gptoss_trt.h"

namespace gptoss {

// A number of a call's arguments and the values that it may have.
struct Range {
  const char* name;
  int64_t value, low, high;
};

// A pointer of a call's arguments; one that is not needed may be anything.
struct Need {
  const char* name;
  const void* pointer;
  uint64_t alignment;
  bool needed;
};

// `call` is the name that an error's text begins with.
gptoss_trt_status check_range(const char* call, const Range& range);
gptoss_trt_status check_pointer(const char* call, const char* name, const void* pointer,
                                uint64_t alignment);
gptoss_trt_status cuda_failure(const char* call, const char* what, cudaError_t error);

// That the current device is one that the library has code for, and its multiprocessors.
gptoss_trt_status check_card(const char* call, int* multiprocessors);

template <typename Args>
gptoss_trt_status check_struct(const char* call, const Args* args) {
  if (args == nullptr) return fail(GPTOSS_TRT_INVALID_ARGUMENT, "%s: args is null", call);
  if (args->size == sizeof(Args)) return GPTOSS_TRT_OK;
  return fail(GPTOSS_TRT_INVALID_ARGUMENT,
              "%s: args->size is %" PRIu32 ", this library's struct has %zu bytes", call,
              args->size, sizeof(Args));
}

template <size_t kCount>
gptoss_trt_status check_ranges(const char* call, const Range (&ranges)[kCount]) {
  for (const Range& range : ranges) {
    const auto status = check_range(call, range);
    if (status != GPTOSS_TRT_OK) return status;
  }
  return GPTOSS_TRT_OK;
}

template <size_t kCount>
gptoss_trt_status check_needs(const char* call, const Need (&needs)[kCount]) {
  for (const Need& need : needs) {
    if (!need.needed) continue;
    const auto status = check_pointer(call, need.name, need.pointer, need.alignment);
    if (status != GPTOSS_TRT_OK) return status;
  }
  return GPTOSS_TRT_OK;
}

}  // namespace gptoss

#endif  // GPTOSS_TRT_CORE_CHECKS_H_
