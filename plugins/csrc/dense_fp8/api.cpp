// Is the call legal? The C function of dense_fp8: checks with the values in their texts, then a
// plan, then launch.
#include <algorithm>
#include <cinttypes>
#include <cstdint>

#include "core/checks.h"
#include "core/status.h"
#include "dense_fp8/launch.h"
#include "gptoss_trt.h"

namespace gptoss::dense_fp8 {
namespace {

using Args = gptoss_trt_dense_fp8_args;

constexpr const char* kCall = "dense_fp8";
constexpr int kLeastTile = 64, kMostTile = 256;
constexpr int kMostBlockTokens = 64;

constexpr int blocks_of(int rows) { return (rows + kBlock - 1) / kBlock; }

bool is_adding(const Args& args) { return (args.flags & GPTOSS_TRT_DENSE_ADDS) != 0; }

// To a residual in bf16, by tiles that keep K whole.
gptoss_trt_status check_addition(const Args& args) {
  if (args.k_cache != nullptr) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT, "dense_fp8: results are added and rotated");
  }
  const Range ranges[] = {
      {"out_dtype", args.out_dtype, GPTOSS_TRT_BF16, GPTOSS_TRT_BF16},
      {"parts", args.parts, 0, 1},
      {"tile_tokens", args.tile_tokens == 0 ? kMostTile : args.tile_tokens, 2 * kLeastTile,
       kMostTile},
  };
  return check_ranges(kCall, ranges);
}

// q, k and v in whole heads; q may have none.
gptoss_trt_status check_rotation(const Args& args) {
  const int64_t kv_rows = int64_t{args.kv_heads} * kHeadDim;
  const Range ranges[] = {
      {"kv_heads", args.kv_heads, 1, INT32_MAX / kHeadDim},
      {"block_tokens", args.block_tokens, 1, kMostBlockTokens},
      {"second_segment", args.second_segment, kv_rows, kv_rows},
      {"n", args.n, args.first_segment + 2 * kv_rows, args.first_segment + 2 * kv_rows},
      {"out_dtype", args.out_dtype, GPTOSS_TRT_BF16, GPTOSS_TRT_BF16},
  };
  const auto status = check_ranges(kCall, ranges);
  if (status != GPTOSS_TRT_OK) return status;
  if (args.first_segment % kHeadDim != 0 || (args.block_tokens & (args.block_tokens - 1)) != 0) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT,
                "dense_fp8: first_segment is %" PRId32 ", block_tokens %" PRId32
                "; q has heads of %d rows, a block of keys a power of two",
                args.first_segment, args.block_tokens, kHeadDim);
  }
  return GPTOSS_TRT_OK;
}

gptoss_trt_status check_sizes(const Args* args) {
  gptoss_trt_status status = check_struct(kCall, args);
  if (status != GPTOSS_TRT_OK) return status;
  struct Stepped {
    Range range;
    int64_t step;
  };
  const Stepped sizes[] = {
      {{"out_dtype", args->out_dtype, GPTOSS_TRT_BF16, GPTOSS_TRT_FP32}, 1},
      {{"flags", args->flags, 0, GPTOSS_TRT_DENSE_DEPENDENT_LAUNCH | GPTOSS_TRT_DENSE_ADDS}, 1},
      {{"tokens", args->tokens, 0, INT32_MAX / 2}, 1},
      {{"n", args->n, kSegmentStep, INT32_MAX / 2}, kSegmentStep},
      {{"k", args->k, 16, INT32_MAX / 2}, 16},  // what a tensor map's rows may be apart
      {{"first_segment", args->first_segment, 0, args->n}, kSegmentStep},
      {{"second_segment", args->second_segment, 0, args->n - args->first_segment}, kSegmentStep},
      {{"tile_tokens", args->tile_tokens, 0, kMostTile}, kLeastTile},
      {{"parts", args->parts, 0, std::min(kMostParts, blocks_of(args->k))}, 1},
  };
  for (const auto& [range, step] : sizes) {
    status = check_range(kCall, range);
    if (status != GPTOSS_TRT_OK) return status;
    if (range.value % step != 0) {
      return fail(GPTOSS_TRT_INVALID_ARGUMENT,
                  "dense_fp8: %s is %" PRId64 ", no multiple of %" PRId64, range.name, range.value,
                  step);
    }
  }
  if (args->tile_tokens == 3 * kLeastTile) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT, "dense_fp8: tile_tokens is 192, not 64, 128 or 256");
  }
  if (is_adding(*args)) {
    const auto status = check_addition(*args);
    if (status != GPTOSS_TRT_OK) return status;
  }
  if (args->k_cache != nullptr) {
    const auto status = check_rotation(*args);
    if (status != GPTOSS_TRT_OK) return status;
  }
  if (args->parts > 1 && args->tile_tokens == kMostTile) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT,
                "dense_fp8: parts is %d with tile_tokens %d, which keep K whole", args->parts,
                args->tile_tokens);
  }
  return GPTOSS_TRT_OK;
}

gptoss_trt_status check_pointers(const Args& args) {
  const bool rotates = args.k_cache != nullptr;
  const Need needs[] = {
      {"x", args.x, 16, true},
      {"x_scale", args.x_scale, 4, true},
      {"weight", args.weight, 16, true},
      {"weight_scale", args.weight_scale, 4, true},
      {"bias", args.bias, 8, args.bias != nullptr},
      {"out", args.out, 16, !rotates || args.first_segment > 0},
      {"k_cache", args.k_cache, 16, rotates},
      {"v_cache", args.v_cache, 16, rotates},
      {"cos_sin", args.cos_sin, 16, rotates},
      {"positions", args.positions, 4, rotates},
      {"slots", args.slots, 4, rotates},
  };
  return check_needs(kCall, needs);
}

// What the caller left open is chosen; a tile that was named is not divided unless asked.
Plan plan_of(const Args& args, const Params& p, int multiprocessors) {
  Plan plan = choose_plan(p.tokens, p.tiles, p.k_blocks, multiprocessors);
  if (args.tile_tokens != 0) plan = {args.tile_tokens, 1};
  if (args.parts != 0 && plan.tile_tokens != kMostTile) plan.parts = args.parts;
  if (is_adding(args)) plan = {std::max(plan.tile_tokens, 2 * kLeastTile), 1};
  return plan;
}

gptoss_trt_status launch(const Args& args, gptoss_trt_stream stream) {
  int multiprocessors = 0;
  const gptoss_trt_status status = check_card(kCall, &multiprocessors);
  if (status != GPTOSS_TRT_OK) return status;
  Params p{};
  p.x_scale = args.x_scale;
  p.weight_scale = args.weight_scale;
  p.bias = static_cast<const uint16_t*>(args.bias);
  p.out = args.out;
  p.tokens = args.tokens;
  p.n = args.n;
  p.k_blocks = blocks_of(args.k);
  p.segments[0] = args.first_segment;
  p.segments[1] = args.second_segment;
  p.tiles = blocks_of(args.first_segment) + blocks_of(args.second_segment) +
            blocks_of(args.n - args.first_segment - args.second_segment);
  p.out_fp32 = args.out_dtype == GPTOSS_TRT_FP32;
  p.k_cache = static_cast<uint16_t*>(args.k_cache);
  p.v_cache = static_cast<uint16_t*>(args.v_cache);
  p.positions = args.positions;
  p.slots = args.slots;
  p.cos_sin = args.cos_sin;
  p.kv_heads = args.kv_heads;
  while (1 << p.block_shift < args.block_tokens) ++p.block_shift;
  const Plan plan = plan_of(args, p, multiprocessors);
  const LaunchOptions options{(args.flags & GPTOSS_TRT_DENSE_DEPENDENT_LAUNCH) != 0,
                              is_adding(args), multiprocessors, static_cast<cudaStream_t>(stream)};
  const cudaError_t error = launch_dense_fp8(plan, p, {args.x, args.weight, args.k}, options);
  return error == cudaSuccess ? GPTOSS_TRT_OK : cuda_failure(kCall, "launch", error);
}

}  // namespace
}  // namespace gptoss::dense_fp8

extern "C" gptoss_trt_status gptoss_trt_dense_fp8(const gptoss_trt_dense_fp8_args* args,
                                                  gptoss_trt_stream stream) {
  using namespace gptoss::dense_fp8;
  gptoss_trt_status status = check_sizes(args);
  if (status != GPTOSS_TRT_OK || args->tokens == 0) return status;
  status = check_pointers(*args);
  return status == GPTOSS_TRT_OK ? launch(*args, stream) : status;
}
