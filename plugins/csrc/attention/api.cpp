// Is the call legal? The C functions of attention: checks with the values in their texts, then
// plan, then launch.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cinttypes>
#include <cstdint>

#include "attention/launch.h"
#include "attention/plan.h"
#include "core/checks.h"
#include "core/numbers.h"
#include "core/status.h"
#include "gptoss_trt.h"

namespace gptoss::attention {
namespace {

using Args = gptoss_trt_attention_args;

constexpr const char* kCall = "attention";
constexpr int kMaxGrid = 65535;  // CUDA's limit in y and z
constexpr int kMaxQueries = 8;   // tokens of a sequence in a decode call
constexpr int kLeastBlockTokens = 16;
constexpr int kMostBlockTokens = 64;
constexpr int kDecodePlans = kFixedPlan;
constexpr int kPrefillPlans = 4;

gptoss_trt_status check_sizes(const Args* args, int plans) {
  gptoss_trt_status status = check_struct(kCall, args);
  if (status != GPTOSS_TRT_OK) return status;
  const Range ranges[] = {
      {"plan", args->plan, 0, plans},
      {"parts", args->parts, 0, kMaxParts},
      {"tokens", args->tokens, 0, INT32_MAX / 2},
      {"sequences", args->sequences, 0, kMaxGrid},
      {"kv_heads", args->kv_heads, 1, kMaxGrid},
      {"heads", args->heads, args->kv_heads * int64_t{kGroup}, args->kv_heads * int64_t{kGroup}},
      {"head_dim", args->head_dim, kHeadDim, kHeadDim},
      {"block_tokens", args->block_tokens, kLeastBlockTokens, kMostBlockTokens},
      {"blocks", args->blocks, 0,
       INT32_MAX / (int64_t{kMostBlockTokens} * std::max(args->kv_heads, 1))},
      {"table_width", args->table_width, 0, INT32_MAX / kMostBlockTokens},
      {"window", args->window, 0, INT32_MAX / 2},
      {"flags", args->flags, 0, GPTOSS_TRT_ATTENTION_DEPENDENT_LAUNCH},
  };
  status = check_ranges(kCall, ranges);
  if (status != GPTOSS_TRT_OK) return status;
  if ((args->block_tokens & (args->block_tokens - 1)) != 0) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT,
                "attention: block_tokens is %" PRId32 ", not 16, 32 or 64", args->block_tokens);
  }
  if (!(args->scale > 0.f)) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT, "attention: scale is %g, not positive",
                static_cast<double>(args->scale));
  }
  return GPTOSS_TRT_OK;
}

gptoss_trt_status check_pointers(const Args& args, bool prefill, bool split) {
  const Need needs[] = {
      {"q", args.q, 16, true},
      {"k_cache", args.k_cache, 16, true},
      {"v_cache", args.v_cache, 16, true},
      {"block_table", args.block_table, 4, true},
      {"query_start", args.query_start, 4, prefill},
      {"context_lens", args.context_lens, 4, true},
      {"sinks", args.sinks, 2, true},
      {"out", args.out, 16, true},
      {"out_scale", args.out_scale, 4, args.out_scale != nullptr},
      {"tickets", args.tickets, 4, split},
      {"workspace", args.workspace, 256, split},
  };
  return check_needs(kCall, needs);
}

LaunchOptions options_of(const Args& args, gptoss_trt_stream stream) {
  return {(args.flags & GPTOSS_TRT_ATTENTION_DEPENDENT_LAUNCH) != 0,
          static_cast<cudaStream_t>(stream)};
}

gptoss_trt_status decode(const Args& args, gptoss_trt_stream stream) {
  const DecodePlan plan = decode_plan(args);
  if (args.plan == kFixedPlan && (args.parts != 0 || plan.parts > kMaxParts)) {
    return fail(GPTOSS_TRT_UNSUPPORTED,
                "attention_decode: plan %d cuts %" PRId32
                " blocks into %d parts, at most %d, and "
                "takes no other cut (parts is %" PRId32 ")",
                kFixedPlan, args.table_width, plan.parts, kMaxParts, args.parts);
  }
  const DecodeWorkspace layout = decode_workspace(args);
  gptoss_trt_status status = check_pointers(args, false, plan.parts > 1);
  if (status != GPTOSS_TRT_OK) return status;
  if (args.workspace_bytes < static_cast<uint64_t>(layout.total_bytes)) {
    return fail(GPTOSS_TRT_WORKSPACE_TOO_SMALL,
                "attention: workspace has %" PRIu64 " bytes, %" PRId64 " are needed for %d parts",
                args.workspace_bytes, layout.total_bytes, plan.parts);
  }
  int multiprocessors = 0;
  status = check_card(kCall, &multiprocessors);
  if (status != GPTOSS_TRT_OK) return status;
  auto* workspace = static_cast<uint8_t*>(args.workspace);
  DecodeParams p{};
  p.q = static_cast<const uint16_t*>(args.q);
  p.k = static_cast<const uint16_t*>(args.k_cache);
  p.v = static_cast<const uint16_t*>(args.v_cache);
  p.block_table = args.block_table;
  p.first_block = args.first_block;
  p.context_lens = args.context_lens;
  p.query_start = args.query_start;
  p.sinks = static_cast<const uint16_t*>(args.sinks);
  p.out = args.out;
  p.out_scale = args.out_scale;
  p.sequences = args.sequences;
  p.queries = args.tokens / args.sequences;
  if (plan.parts > 1) {
    p.partial_out = reinterpret_cast<float*>(workspace);
    p.partial_stats = reinterpret_cast<float2*>(workspace + layout.stats);
    p.tickets = args.tickets;
  }
  p.scale_log2 = args.scale * kLog2E;
  p.kv_heads = args.kv_heads;
  p.table_width = args.table_width;
  while (1 << p.block_shift < args.block_tokens) ++p.block_shift;
  p.window = args.window;
  p.parts = plan.parts;
  p.part_keys = plan.part_keys;
  const cudaError_t error = launch_decode(p, plan, args.tokens, options_of(args, stream));
  return error == cudaSuccess ? GPTOSS_TRT_OK : cuda_failure(kCall, "launch", error);
}

gptoss_trt_status prefill(const Args& args, gptoss_trt_stream stream) {
  gptoss_trt_status status = check_pointers(args, true, false);
  if (status == GPTOSS_TRT_OK && args.block_tokens != kMostBlockTokens) {
    status = fail(GPTOSS_TRT_UNSUPPORTED, "attention_prefill: block_tokens is %" PRId32 ", not 64",
                  args.block_tokens);
  }
  const PrefillPlan plan = prefill_plan(args);
  const bool strips =
      plan.kind == PrefillKind::kLongStrips || plan.kind == PrefillKind::kShortStrips;
  const int window = strips ? kWindowKeys : plan.kind == PrefillKind::kFull ? 0 : args.window;
  if (status == GPTOSS_TRT_OK && args.window != window) {
    status = fail(GPTOSS_TRT_UNSUPPORTED,
                  "attention_prefill: plan %" PRId32 " takes a window of %d, not %" PRId32,
                  args.plan, window, args.window);
  }
  int multiprocessors = 0;
  if (status == GPTOSS_TRT_OK) status = check_card(kCall, &multiprocessors);
  if (status != GPTOSS_TRT_OK) return status;
  PrefillParams p{};
  p.block_table = args.block_table;
  p.first_block = args.first_block;
  p.query_start = args.query_start;
  p.context_lens = args.context_lens;
  p.sinks = static_cast<const uint16_t*>(args.sinks);
  p.out = args.out;
  p.out_scale = args.out_scale;
  p.scale_log2 = args.scale * kLog2E;
  p.tokens = args.tokens;
  p.sequences = args.sequences;
  p.kv_heads = args.kv_heads;
  p.table_width = args.table_width;
  p.blocks = args.blocks;
  p.window = args.window;
  p.strip = plan.strip;
  const PrefillTensors tensors{args.q, args.k_cache, args.v_cache};
  const cudaError_t error = launch_prefill(p, tensors, plan, options_of(args, stream));
  return error == cudaSuccess ? GPTOSS_TRT_OK : cuda_failure(kCall, "launch", error);
}

}  // namespace
}  // namespace gptoss::attention

extern "C" gptoss_trt_status gptoss_trt_attention_decode_workspace(
    const gptoss_trt_attention_args* args, uint64_t* bytes) {
  using namespace gptoss::attention;
  const gptoss_trt_status status = check_sizes(args, kDecodePlans);
  if (status != GPTOSS_TRT_OK) return status;
  if (bytes == nullptr) {
    return gptoss::fail(GPTOSS_TRT_INVALID_ARGUMENT, "attention_decode_workspace: bytes is null");
  }
  *bytes = static_cast<uint64_t>(decode_workspace(*args).total_bytes);
  return GPTOSS_TRT_OK;
}

extern "C" gptoss_trt_status gptoss_trt_attention_decode(const gptoss_trt_attention_args* args,
                                                         gptoss_trt_stream stream) {
  using namespace gptoss::attention;
  const gptoss_trt_status status = check_sizes(args, kDecodePlans);
  if (status != GPTOSS_TRT_OK) return status;
  const bool even = args->sequences > 0 && args->tokens % args->sequences == 0;
  const bool many = args->tokens > kMaxQueries * static_cast<int64_t>(args->sequences) &&
                    args->plan != kFixedPlan;
  if (args->tokens > kMaxGrid || many ||
      (args->query_start == nullptr && args->tokens > 0 && !even)) {
    return gptoss::fail(GPTOSS_TRT_UNSUPPORTED,
                        "attention_decode: %" PRId32 " tokens of %" PRId32
                        " sequences; this kernel takes %d tokens in all, %d a sequence, as many of "
                        "each without query_start",
                        args->tokens, args->sequences, kMaxGrid, kMaxQueries);
  }
  return args->tokens == 0 ? GPTOSS_TRT_OK : decode(*args, stream);
}

extern "C" gptoss_trt_status gptoss_trt_attention_prefill(const gptoss_trt_attention_args* args,
                                                          gptoss_trt_stream stream) {
  using namespace gptoss::attention;
  const gptoss_trt_status status = check_sizes(args, kPrefillPlans);
  if (status != GPTOSS_TRT_OK) return status;
  return args->tokens == 0 ? GPTOSS_TRT_OK : prefill(*args, stream);
}
