#include "core/status.h"

#include <cstdarg>
#include <cstdio>

namespace gptoss {
namespace {

constexpr int kErrorBytes = 512;
thread_local char last_error[kErrorBytes] = "";

}  // namespace

gptoss_trt_status fail(gptoss_trt_status status, const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(last_error, kErrorBytes, format, values);
  va_end(values);
  return status;
}

}  // namespace gptoss

extern "C" int32_t gptoss_trt_abi_version(void) { return GPTOSS_TRT_ABI_VERSION; }

extern "C" const char* gptoss_trt_last_error(void) { return gptoss::last_error; }
