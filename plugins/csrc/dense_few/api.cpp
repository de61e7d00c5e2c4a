// Is the call legal? The C function of dense_few: checks with the values in their texts, then
// launch.
#include <cinttypes>
#include <cstdint>

#include "core/checks.h"
#include "core/status.h"
#include "dense_few/params.h"
#include "gptoss_trt.h"

namespace gptoss::dense {
namespace {

using Args = gptoss_trt_dense_few_args;

constexpr const char* kCall = "dense_few";

gptoss_trt_status check_sizes(const Args* args) {
  gptoss_trt_status status = check_struct(kCall, args);
  if (status != GPTOSS_TRT_OK) return status;
  const bool fp8 = args->format == GPTOSS_TRT_DENSE_FP8;
  struct Stepped {
    Range range;
    int64_t step;
  };
  const Stepped sizes[] = {
      {{"format", args->format, GPTOSS_TRT_DENSE_BF16, GPTOSS_TRT_DENSE_FP8}, 1},
      {{"out_dtype", args->out_dtype, GPTOSS_TRT_BF16, GPTOSS_TRT_FP32}, 1},
      {{"flags", args->flags, 0, GPTOSS_TRT_DENSE_DEPENDENT_LAUNCH}, 1},
      {{"tokens", args->tokens, 0, kMostTokens}, 1},
      {{"n", args->n, 1, INT32_MAX / 2}, 1},
      {{"k", args->k, fp8 ? 64 : 32, kMostColumns}, fp8 ? 64 : 32},
      {{"first_segment", args->first_segment, 0, args->n}, fp8 ? kTileRows : 1},
      {{"second_segment", args->second_segment, 0, args->n}, fp8 ? kTileRows : 1},
  };
  for (const auto& [range, step] : sizes) {
    status = check_range(kCall, range);
    if (status != GPTOSS_TRT_OK) return status;
    // The last segment may end anywhere.
    if (range.value % step != 0 && range.value != args->n) {
      return fail(GPTOSS_TRT_INVALID_ARGUMENT,
                  "dense_few: %s is %" PRId64 ", no multiple of %" PRId64, range.name, range.value,
                  step);
    }
  }
  return GPTOSS_TRT_OK;
}

gptoss_trt_status check_pointers(const Args& args) {
  const bool fp8 = args.format == GPTOSS_TRT_DENSE_FP8;
  const Need needs[] = {
      {"x", args.x, 16, true},
      {"x_scale", args.x_scale, 4, fp8},
      {"weight", args.weight, 16, true},
      {"weight_scale", args.weight_scale, 4, fp8},
      {"bias", args.bias, 2, args.bias != nullptr},
      {"out", args.out, 4, true},
  };
  return check_needs(kCall, needs);
}

gptoss_trt_status launch(const Args& args, gptoss_trt_stream stream) {
  int multiprocessors = 0;
  const gptoss_trt_status status = check_card(kCall, &multiprocessors);
  if (status != GPTOSS_TRT_OK) return status;
  Params p{};
  p.x = static_cast<const uint8_t*>(args.x);
  p.x_scale = args.x_scale;
  p.weight = static_cast<const uint8_t*>(args.weight);
  p.weight_scale = args.weight_scale;
  p.bias = static_cast<const uint16_t*>(args.bias);
  p.out = args.out;
  p.tokens = args.tokens;
  p.n = args.n;
  p.k = args.k;
  p.segments[0] = args.first_segment;
  p.segments[1] = args.second_segment;
  p.out_fp32 = args.out_dtype == GPTOSS_TRT_FP32;
  const LaunchOptions options{(args.flags & GPTOSS_TRT_DENSE_DEPENDENT_LAUNCH) != 0,
                              multiprocessors, static_cast<cudaStream_t>(stream)};
  const cudaError_t error = launch_dense_few(static_cast<Format>(args.format), p, options);
  return error == cudaSuccess ? GPTOSS_TRT_OK : cuda_failure(kCall, "launch", error);
}

}  // namespace
}  // namespace gptoss::dense

extern "C" gptoss_trt_status gptoss_trt_dense_few(const gptoss_trt_dense_few_args* args,
                                                  gptoss_trt_stream stream) {
  using namespace gptoss::dense;
  gptoss_trt_status status = check_sizes(args);
  if (status != GPTOSS_TRT_OK || args->tokens == 0) return status;
  status = check_pointers(*args);
  return status == GPTOSS_TRT_OK ? launch(*args, stream) : status;
}
