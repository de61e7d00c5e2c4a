// Owns the error text of the calling thread. Every failing path of the library goes through `fail`.
#ifndef GPTOSS_TRT_CORE_STATUS_H_
#define GPTOSS_TRT_CORE_STATUS_H_

#include "gptoss_trt.h"

namespace gptoss {

// Formats the text that gptoss_trt_last_error returns and hands `status` back.
gptoss_trt_status fail(gptoss_trt_status status, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

}  // namespace gptoss

#endif  // GPTOSS_TRT_CORE_STATUS_H_
