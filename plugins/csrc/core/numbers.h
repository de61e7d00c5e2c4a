// Numbers that host and device code share.
#ifndef GPTOSS_TRT_CORE_NUMBERS_H_
#define GPTOSS_TRT_CORE_NUMBERS_H_

namespace gptoss {

constexpr float kLog2E = 1.4426950408889634f;

}  // namespace gptoss

#endif  // GPTOSS_TRT_CORE_NUMBERS_H_
