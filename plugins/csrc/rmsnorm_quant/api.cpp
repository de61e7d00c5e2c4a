// Is the call legal? The C function of rmsnorm_quant: checks with the values in their texts, then
// launch.
#include <cinttypes>
#include <cstdint>

#include "core/checks.h"
#include "core/status.h"
#include "gptoss_trt.h"
#include "rmsnorm_quant/params.h"

namespace gptoss::rmsnorm_quant {
namespace {

using Args = gptoss_trt_rmsnorm_quant_args;

constexpr const char* kCall = "rmsnorm_quant";

gptoss_trt_status check_sizes(const Args* args) {
  gptoss_trt_status status = check_struct(kCall, args);
  if (status != GPTOSS_TRT_OK) return status;
  const Range ranges[] = {
      {"flags", args->flags, 0, GPTOSS_TRT_NORM_DEPENDENT_LAUNCH},
      {"tokens", args->tokens, 0, INT32_MAX / 2},
      {"hidden", args->hidden, kLane, kMostHidden},
  };
  status = check_ranges(kCall, ranges);
  if (status != GPTOSS_TRT_OK) return status;
  if (args->hidden % kLane != 0) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT,
                "rmsnorm_quant: hidden is %" PRId32 ", no multiple of %d", args->hidden, kLane);
  }
  return GPTOSS_TRT_OK;
}

gptoss_trt_status check_pointers(const Args& args) {
  if (args.delta != nullptr && args.rows != nullptr) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT, "rmsnorm_quant: delta and rows are both given");
  }
  if (args.normed == nullptr && args.quantised == nullptr) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT, "rmsnorm_quant: normed and quantised are both null");
  }
  const Need needs[] = {
      {"residual", args.residual, 16, true},
      {"updated", args.updated, 16, true},
      {"delta", args.delta, 16, args.delta != nullptr},
      {"rows", args.rows, 16, args.rows != nullptr},
      {"expert_ids", args.expert_ids, 16, args.rows != nullptr},
      {"gain", args.gain, 16, true},
      {"normed", args.normed, 16, args.normed != nullptr},
      {"quantised", args.quantised, 8, args.quantised != nullptr},
      {"scales", args.scales, 4, args.quantised != nullptr},
  };
  return check_needs(kCall, needs);
}

gptoss_trt_status launch(const Args& args, gptoss_trt_stream stream) {
  int multiprocessors = 0;
  const gptoss_trt_status status = check_card(kCall, &multiprocessors);
  if (status != GPTOSS_TRT_OK) return status;
  Params p{};
  p.residual = static_cast<const uint16_t*>(args.residual);
  p.updated = static_cast<uint16_t*>(args.updated);
  p.delta = static_cast<const uint16_t*>(args.delta);
  p.rows = static_cast<const uint16_t*>(args.rows);
  p.expert_ids = args.expert_ids;
  p.gain = static_cast<const uint16_t*>(args.gain);
  p.normed = static_cast<uint16_t*>(args.normed);
  p.quantised = static_cast<uint8_t*>(args.quantised);
  p.scales = args.scales;
  p.eps = args.eps;
  p.tokens = args.tokens;
  p.hidden = args.hidden;
  p.first_expert = args.first_expert;
  p.local_experts = args.local_experts;
  const LaunchOptions options{(args.flags & GPTOSS_TRT_NORM_DEPENDENT_LAUNCH) != 0,
                              static_cast<cudaStream_t>(stream)};
  const cudaError_t error = launch_rmsnorm_quant(p, options);
  return error == cudaSuccess ? GPTOSS_TRT_OK : cuda_failure(kCall, "launch", error);
}

}  // namespace
}  // namespace gptoss::rmsnorm_quant

extern "C" gptoss_trt_status gptoss_trt_rmsnorm_quant(const gptoss_trt_rmsnorm_quant_args* args,
                                                      gptoss_trt_stream stream) {
  using namespace gptoss::rmsnorm_quant;
  gptoss_trt_status status = check_sizes(args);
  if (status != GPTOSS_TRT_OK || args->tokens == 0) return status;
  status = check_pointers(*args);
  return status == GPTOSS_TRT_OK ? launch(*args, stream) : status;
}
