// Is the call legal? The C functions of rmsnorm_route and route_rows: checks with the values in
// their texts, then launch.
#include <cinttypes>
#include <cstdint>

#include "core/checks.h"
#include "core/status.h"
#include "gptoss_trt.h"
#include "rmsnorm_route/params.h"

namespace gptoss::rmsnorm_route {
namespace {

using Args = gptoss_trt_rmsnorm_route_args;

constexpr const char* kCall = "rmsnorm_route";
constexpr int kHiddenStep = 8;  // a lane has eight columns

// The router of a call of more than kFewTokens stays in shared memory.
bool is_resident(const Args& args) {
  return args.experts <= kResidentExperts && args.hidden <= kResidentHidden;
}

gptoss_trt_status check_sizes(const Args* args) {
  gptoss_trt_status status = check_struct(kCall, args);
  if (status != GPTOSS_TRT_OK) return status;
  const Range ranges[] = {
      {"flags", args->flags, 0, GPTOSS_TRT_ROUTE_DEPENDENT_LAUNCH},
      {"tokens", args->tokens, 1, is_resident(*args) ? kMostTokens : kFewTokens},
      {"hidden", args->hidden, kHiddenStep, kMostBlocks * kColumns},
      {"experts", args->experts, kTopK, kMostExperts},
      {"first_expert", args->first_expert, 0, args->experts - 1},
      {"local_experts", args->local_experts, 1, args->experts - args->first_expert},
  };
  status = check_ranges(kCall, ranges);
  if (status != GPTOSS_TRT_OK) return status;
  if (args->hidden % kHiddenStep != 0) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT,
                "rmsnorm_route: hidden is %" PRId32 ", no multiple of %d", args->hidden,
                kHiddenStep);
  }
  return GPTOSS_TRT_OK;
}

gptoss_trt_status check_pointers(const Args& args) {
  const Need needs[] = {
      {"residual", args.residual, 16, true},
      {"delta", args.delta, 16, args.delta != nullptr},
      {"gain", args.gain, 16, true},
      {"router", args.router, 16, true},
      {"bias", args.bias, 2, true},
      {"token_count", args.token_count, 4, args.token_count != nullptr},
      {"updated", args.updated, 16, true},
      {"quantised", args.quantised, 8, true},
      {"scales", args.scales, 4, true},
      {"expert_ids", args.expert_ids, 16, true},
      {"expert_weights", args.expert_weights, 16, true},
      {"expert_offsets", args.expert_offsets, 4, true},
      {"active_experts", args.active_experts, 4, true},
      {"row_slots", args.row_slots, 4, true},
      {"ticket", args.ticket, 4, true},
  };
  return check_needs(kCall, needs);
}

gptoss_trt_status launch(const Args& args, gptoss_trt_stream stream) {
  int multiprocessors = 0;
  const gptoss_trt_status status = check_card(kCall, &multiprocessors);
  if (status != GPTOSS_TRT_OK) return status;
  Params p{};
  p.residual = static_cast<const uint16_t*>(args.residual);
  p.delta = static_cast<const uint16_t*>(args.delta);
  p.gain = static_cast<const uint16_t*>(args.gain);
  p.router = static_cast<const uint16_t*>(args.router);
  p.bias = static_cast<const uint16_t*>(args.bias);
  p.token_count = args.token_count;
  p.updated = static_cast<uint16_t*>(args.updated);
  p.quantised = static_cast<uint8_t*>(args.quantised);
  p.scales = args.scales;
  p.expert_ids_out = args.expert_ids;
  p.expert_weights = args.expert_weights;
  p.ticket = args.ticket;
  p.eps = args.eps;
  p.hidden = args.hidden;
  p.experts = args.experts;
  p.rows = {args.expert_ids, args.expert_offsets, args.active_experts, args.row_slots,
            args.tokens,     args.first_expert,   args.local_experts};
  const LaunchOptions options{(args.flags & GPTOSS_TRT_ROUTE_DEPENDENT_LAUNCH) != 0,
                              multiprocessors, static_cast<cudaStream_t>(stream)};
  const cudaError_t error =
      args.tokens > kFewTokens ? launch_resident(p, options) : launch_rmsnorm_route(p, options);
  return error == cudaSuccess ? GPTOSS_TRT_OK : cuda_failure(kCall, "launch", error);
}

using RowsArgs = gptoss_trt_route_rows_args;

constexpr const char* kRowsCall = "route_rows";

gptoss_trt_status check_rows(const RowsArgs* args) {
  gptoss_trt_status status = check_struct(kRowsCall, args);
  if (status != GPTOSS_TRT_OK) return status;
  const Range ranges[] = {
      {"flags", args->flags, 0, GPTOSS_TRT_ROUTE_DEPENDENT_LAUNCH},
      {"tokens", args->tokens, 1, kMostTokens},
      {"first_expert", args->first_expert, 0, INT32_MAX / 2},
      {"local_experts", args->local_experts, 1, kMostExperts},
  };
  status = check_ranges(kRowsCall, ranges);
  if (status != GPTOSS_TRT_OK) return status;
  const Need needs[] = {
      {"expert_ids", args->expert_ids, 4, true},
      {"expert_offsets", args->expert_offsets, 4, true},
      {"active_experts", args->active_experts, 4, true},
      {"row_slots", args->row_slots, 4, true},
  };
  return check_needs(kRowsCall, needs);
}

gptoss_trt_status launch_rows(const RowsArgs& args, gptoss_trt_stream stream) {
  int multiprocessors = 0;
  const gptoss_trt_status status = check_card(kRowsCall, &multiprocessors);
  if (status != GPTOSS_TRT_OK) return status;
  const RowsParams p{args.expert_ids, args.expert_offsets, args.active_experts, args.row_slots,
                     args.tokens,     args.first_expert,   args.local_experts};
  const LaunchOptions options{(args.flags & GPTOSS_TRT_ROUTE_DEPENDENT_LAUNCH) != 0,
                              multiprocessors, static_cast<cudaStream_t>(stream)};
  const cudaError_t error = launch_route_rows(p, options);
  return error == cudaSuccess ? GPTOSS_TRT_OK : cuda_failure(kRowsCall, "launch", error);
}

}  // namespace
}  // namespace gptoss::rmsnorm_route

extern "C" gptoss_trt_status gptoss_trt_rmsnorm_route(const gptoss_trt_rmsnorm_route_args* args,
                                                      gptoss_trt_stream stream) {
  using namespace gptoss::rmsnorm_route;
  gptoss_trt_status status = check_sizes(args);
  if (status == GPTOSS_TRT_OK) status = check_pointers(*args);
  return status != GPTOSS_TRT_OK ? status : launch(*args, stream);
}

extern "C" gptoss_trt_status gptoss_trt_route_rows(const gptoss_trt_route_rows_args* args,
                                                   gptoss_trt_stream stream) {
  using namespace gptoss::rmsnorm_route;
  const gptoss_trt_status status = check_rows(args);
  return status != GPTOSS_TRT_OK ? status : launch_rows(*args, stream);
}
