// Is the call legal? The C functions of moe_gemm_fp8: checks with the values in their texts, then
// plan, then launch.
#include <cuda_runtime_api.h>

#include <cinttypes>
#include <cstdint>

#include "core/checks.h"
#include "core/status.h"
#include "gptoss_trt.h"
#include "moe_gemm_fp8/launch.h"
#include "moe_gemm_fp8/plan.h"

namespace gptoss::moe {
namespace {

using Args = gptoss_trt_moe_gemm_args;

constexpr const char* kCall = "moe_gemm_fp8";
constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 32;
constexpr int kMaxGridY = 65535;  // CUDA's limit, met by the SIMT plan only
constexpr uint32_t kKnownFlags = GPTOSS_TRT_MOE_DEPENDENT_LAUNCH | GPTOSS_TRT_MOE_ROUTING_READY;

gptoss_trt_status check_columns(int n, int k) {
  if (n < 2 || n % 2 != 0) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT, "moe_gemm_fp8: n is %d, not a positive even number",
                n);
  }
  if (k < 32 || k % 32 != 0) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT, "moe_gemm_fp8: k is %d, not a multiple of 32", k);
  }
  return GPTOSS_TRT_OK;
}

gptoss_trt_status check_sizes(const Args* args) {
  gptoss_trt_status status = check_struct(kCall, args);
  if (status != GPTOSS_TRT_OK) return status;
  const Range ranges[] = {
      {"product", args->product, GPTOSS_TRT_MOE_GATE_UP, GPTOSS_TRT_MOE_DOWN},
      {"storage", args->storage, GPTOSS_TRT_MOE_MXFP4, GPTOSS_TRT_MOE_FP8_TILES},
      {"scale_mode", args->scale_mode, GPTOSS_TRT_SCALE_STATIC, GPTOSS_TRT_SCALE_BLOCK64},
      {"plan", args->plan, GPTOSS_TRT_MOE_PLAN_AUTO, GPTOSS_TRT_MOE_PLAN_PREFILL},
      {"k_split", args->k_split, 0, kMaxSplit},
      {"experts", args->experts, 1, kMaxExperts},
      {"top_k", args->top_k, 1, kMaxTopK},
      {"max_tokens", args->max_tokens, 0, INT32_MAX / kMaxTopK},
      {"tokens", args->tokens, 0, args->max_tokens},
  };
  status = check_ranges(kCall, ranges);
  if (status != GPTOSS_TRT_OK) return status;
  if (args->product == GPTOSS_TRT_MOE_DOWN) {
    status = check_range(kCall, {"out_dtype", args->out_dtype, GPTOSS_TRT_BF16, GPTOSS_TRT_FP32});
    if (status != GPTOSS_TRT_OK) return status;
  }
  if ((args->flags & ~kKnownFlags) != 0) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT, "moe_gemm_fp8: flags 0x%" PRIx32 " are unknown",
                args->flags & ~kKnownFlags);
  }
  return check_columns(args->n, args->k);
}

gptoss_trt_status check_pointers(const Args& args) {
  const bool gate_up = args.product == GPTOSS_TRT_MOE_GATE_UP;
  const bool is_static = args.scale_mode == GPTOSS_TRT_SCALE_STATIC;
  const Need needs[] = {
      {"weights", args.weights, 128, true},
      {"bias", args.bias, 4, args.bias != nullptr},
      {"x", args.x, 16, true},
      {"x_scale", args.x_scale, 4, gate_up || !is_static},
      {"expert_offsets", args.expert_offsets, 4, true},
      {"row_slots", args.row_slots, 4, true},
      {"expert_weights", args.expert_weights, 4, !gate_up},
      {"out", args.out, 8, true},
      {"out_scale", args.out_scale, 4, gate_up && !is_static},
  };
  return check_needs(kCall, needs);
}

gptoss_trt_status check_workspace(const Args& args, const WorkspaceLayout& layout) {
  if (layout.total_bytes == 0) return GPTOSS_TRT_OK;
  if (args.workspace_bytes < layout.total_bytes) {
    return fail(GPTOSS_TRT_WORKSPACE_TOO_SMALL,
                "moe_gemm_fp8: workspace has %" PRIu64 " bytes, %" PRIu64
                " are needed for max_tokens %" PRId32,
                args.workspace_bytes, layout.total_bytes, args.max_tokens);
  }
  return check_pointer(kCall, "workspace", args.workspace, 256);
}

Params make_params(const Args& args, const Plan& plan, const WorkspaceLayout& layout) {
  const bool gate_up = args.product == GPTOSS_TRT_MOE_GATE_UP;
  const bool is_static = args.scale_mode == GPTOSS_TRT_SCALE_STATIC;
  const auto storage = static_cast<Storage>(args.storage);
  auto* workspace = static_cast<uint8_t*>(args.workspace);
  Params p{};
  p.weights = static_cast<const uint8_t*>(args.weights);
  p.bias = static_cast<const uint16_t*>(args.bias);
  p.x = static_cast<const uint8_t*>(args.x);
  p.x_scale = gate_up || !is_static ? args.x_scale : nullptr;
  p.expert_offsets = args.expert_offsets;
  p.row_slots = args.row_slots;
  p.expert_weights = args.expert_weights;
  p.out = args.out;
  p.out_scale = args.out_scale;
  if (workspace != nullptr) {
    p.split_tickets = reinterpret_cast<int32_t*>(workspace + layout.split_tickets);
    p.h_values = reinterpret_cast<float*>(workspace + layout.h_values);
    p.partials = reinterpret_cast<float*>(workspace + layout.partials);
    p.items_taken = reinterpret_cast<int32_t*>(
        workspace + (plan.tiles ? layout.tile_items : layout.items_taken));
    p.row_info = reinterpret_cast<uint2*>(workspace + layout.row_info);
    p.gathered = workspace + layout.gathered;
    p.sorted_scales = reinterpret_cast<float*>(workspace + layout.sorted_scales);
  }
  p.expert_bytes = expert_bytes(storage, args.n, args.k);
  p.strip_bytes = storage == Storage::kFp8Tiles ? 0 : strip_bytes(storage, args.k);
  p.limit = args.limit;
  p.alpha = args.alpha;
  p.experts = args.experts;
  p.top_k = args.top_k;
  p.n = args.n;
  p.k = args.k;
  p.strips = strips(args.n);
  p.weight_tiles = weight_tiles(args.n);
  p.records = records(args.k);
  p.tail_halves = tail_halves(args.k);
  p.rows = args.tokens * args.top_k;
  p.x_rows = gate_up ? args.tokens : p.rows;
  p.scale_group = gate_up ? scale_group(args.scale_mode) : 0;
  p.out_fp32 = args.out_dtype == GPTOSS_TRT_FP32;
  p.token_block = plan.token_block;
  p.k_split = plan.k_split;
  p.routing_ready = (args.flags & GPTOSS_TRT_MOE_ROUTING_READY) != 0;
  p.shared = plan.shared;
  p.tile_row_bytes = tile_row_bytes(args);
  p.prefill = plan.prefill;
  return p;
}

gptoss_trt_status check_tiles(const Args& args) {
  if (args.plan != GPTOSS_TRT_MOE_PLAN_AUTO && args.plan != GPTOSS_TRT_MOE_PLAN_PREFILL) {
    return fail(GPTOSS_TRT_UNSUPPORTED, "moe_gemm_fp8: FP8 tiles have a prefill plan only, not %d",
                args.plan);
  }
  if (args.scale_mode != GPTOSS_TRT_SCALE_STATIC) {
    return fail(GPTOSS_TRT_UNSUPPORTED, "moe_gemm_fp8: FP8 tiles take static scales of h, not %d",
                args.scale_mode);
  }
  const int step = args.product == GPTOSS_TRT_MOE_GATE_UP ? 32 : 8;  // rows are stored by 16 bytes
  if (args.n % step == 0 && args.k_split <= 1) return GPTOSS_TRT_OK;
  return fail(GPTOSS_TRT_UNSUPPORTED,
              "moe_gemm_fp8: FP8 tiles with n %d, no multiple of %d, or k_split %d", args.n, step,
              args.k_split);
}

gptoss_trt_status check_plan(const Args& args, const Plan& plan) {
  if (args.storage == GPTOSS_TRT_MOE_FP8_TILES) return check_tiles(args);
  if (plan.kind == GPTOSS_TRT_MOE_PLAN_SIMT) {
    if (args.tokens * args.top_k <= kMaxGridY) return GPTOSS_TRT_OK;
    return fail(GPTOSS_TRT_UNSUPPORTED, "moe_gemm_fp8: the SIMT plan takes %d rows at most, not %d",
                kMaxGridY, args.tokens * args.top_k);
  }
  const bool prefill = plan.kind == GPTOSS_TRT_MOE_PLAN_PREFILL;
  if (prefill && args.k_split > 1) {
    return fail(GPTOSS_TRT_UNSUPPORTED,
                "moe_gemm_fp8: the prefill plan keeps K whole, k_split is %d", args.k_split);
  }
  if (prefill && args.product == GPTOSS_TRT_MOE_GATE_UP && args.n % 8 != 0) {
    return fail(GPTOSS_TRT_UNSUPPORTED,
                "moe_gemm_fp8: the prefill plan stores h by fours, n is %d, no multiple of 8",
                args.n);
  }
  if (plan.tiles) return GPTOSS_TRT_OK;
  const int bytes = prefill ? plan.prefill.total_bytes : plan.shared.total_bytes;
  if (bytes <= kSharedBytesLimit) return GPTOSS_TRT_OK;
  return fail(
      GPTOSS_TRT_UNSUPPORTED,
      "moe_gemm_fp8: k %d with %d tokens a block needs %d bytes of shared memory, more than "
      "%d",
      args.k, plan.token_block, bytes, kSharedBytesLimit);
}

gptoss_trt_status launch(const Args& args, cudaStream_t stream) {
  const Plan plan = make_plan(args);
  const WorkspaceLayout layout = make_workspace(args);
  gptoss_trt_status status = check_plan(args, plan);
  if (status == GPTOSS_TRT_OK) status = check_workspace(args, layout);
  if (status != GPTOSS_TRT_OK || args.tokens == 0) return status;
  if (plan.tiles) status = check_pointer(kCall, "out", args.out, 16);
  if (status != GPTOSS_TRT_OK) return status;
  int multiprocessors = 0;
  status = check_card(kCall, &multiprocessors);
  if (status != GPTOSS_TRT_OK) return status;
  const LaunchOptions options{
      args.product == GPTOSS_TRT_MOE_GATE_UP,
      args.product == GPTOSS_TRT_MOE_DOWN && args.scale_mode == GPTOSS_TRT_SCALE_BLOCK64,
      (args.flags & GPTOSS_TRT_MOE_DEPENDENT_LAUNCH) != 0,
      multiprocessors,
      plan.share,
      plan.pairs,
      stream};
  const Params params = make_params(args, plan, layout);
  const auto storage = static_cast<Storage>(args.storage);
  cudaError_t error = cudaSuccess;
  switch (plan.kind) {
    case GPTOSS_TRT_MOE_PLAN_SIMT:
      error = launch_simt(storage, params, options);
      break;
    case GPTOSS_TRT_MOE_PLAN_PREFILL:
      error = plan.tiles ? launch_tiles(storage, params, options)
                         : launch_prefill(storage, params, options);
      break;
    default:
      error = launch_wgmma(storage, params, options);
  }
  return error == cudaSuccess ? GPTOSS_TRT_OK : cuda_failure(kCall, "launch", error);
}

}  // namespace
}  // namespace gptoss::moe

extern "C" gptoss_trt_status gptoss_trt_moe_weight_bytes(int32_t storage, int32_t n, int32_t k,
                                                         uint64_t* bytes) {
  using namespace gptoss::moe;
  if (bytes == nullptr) {
    return gptoss::fail(GPTOSS_TRT_INVALID_ARGUMENT, "moe_weight_bytes: bytes is null");
  }
  gptoss_trt_status status = gptoss::check_range(
      kCall, {"storage", storage, GPTOSS_TRT_MOE_MXFP4, GPTOSS_TRT_MOE_FP8_TILES});
  if (status == GPTOSS_TRT_OK) status = check_columns(n, k);
  if (status != GPTOSS_TRT_OK) return status;
  *bytes = static_cast<uint64_t>(expert_bytes(static_cast<Storage>(storage), n, k));
  return GPTOSS_TRT_OK;
}

extern "C" gptoss_trt_status gptoss_trt_moe_gemm_fp8_workspace(const gptoss_trt_moe_gemm_args* args,
                                                               uint64_t* bytes) {
  using namespace gptoss::moe;
  const gptoss_trt_status status = check_sizes(args);
  if (status != GPTOSS_TRT_OK) return status;
  if (bytes == nullptr) {
    return gptoss::fail(GPTOSS_TRT_INVALID_ARGUMENT, "moe_gemm_fp8_workspace: bytes is null");
  }
  *bytes = make_workspace(*args).total_bytes;
  return GPTOSS_TRT_OK;
}

extern "C" gptoss_trt_status gptoss_trt_moe_gemm_fp8_prepare(const gptoss_trt_moe_gemm_args* args,
                                                             gptoss_trt_stream stream) {
  using namespace gptoss::moe;
  gptoss_trt_status status = check_sizes(args);
  if (status != GPTOSS_TRT_OK) return status;
  const WorkspaceLayout layout = make_workspace(*args);
  status = check_workspace(*args, layout);
  if (status != GPTOSS_TRT_OK || layout.counter_bytes == 0) return status;
  const cudaError_t error =
      cudaMemsetAsync(args->workspace, 0, layout.counter_bytes, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? GPTOSS_TRT_OK
                              : gptoss::cuda_failure(kCall, "cudaMemsetAsync", error);
}

extern "C" gptoss_trt_status gptoss_trt_moe_gemm_fp8(const gptoss_trt_moe_gemm_args* args,
                                                     gptoss_trt_stream stream) {
  using namespace gptoss::moe;
  gptoss_trt_status status = check_sizes(args);
  if (status == GPTOSS_TRT_OK && args->tokens > 0) status = check_pointers(*args);
  if (status != GPTOSS_TRT_OK) return status;
  return launch(*args, static_cast<cudaStream_t>(stream));
}
