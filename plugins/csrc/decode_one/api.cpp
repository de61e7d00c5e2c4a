// Is the call legal? The C functions of decode_one: checks with the values in their texts, then
// launch.
#include <algorithm>
#include <cinttypes>
#include <cstdint>

#include "core/checks.h"
#include "core/numbers.h"
#include "core/status.h"
#include "decode_one/params.h"
#include "gptoss_trt.h"

namespace gptoss::one {
namespace {

using Args = gptoss_trt_decode_one_args;

constexpr const char* kCall = "decode_one";

gptoss_trt_status check_sizes(const Args* args) {
  gptoss_trt_status status = check_struct(kCall, args);
  if (status != GPTOSS_TRT_OK) return status;
  const Range sizes[] = {
      {"format", args->format, GPTOSS_TRT_DENSE_BF16, GPTOSS_TRT_DENSE_FP8},
      {"num_layers", args->num_layers, 1, kMostLayers},
      {"experts", args->experts, kTopK, kMostExperts},
      {"vocabulary", args->vocabulary, 8, INT32_MAX / 2},
      {"block_tokens", args->block_tokens, 16, 64},
      {"full_width", args->full_width, 0, INT32_MAX / 2},
      {"window_width", args->window_width, 0, INT32_MAX / 2},
  };
  status = check_ranges(kCall, sizes);
  if (status != GPTOSS_TRT_OK) return status;
  if (args->vocabulary % 8 != 0 || (args->block_tokens & (args->block_tokens - 1)) != 0) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT,
                "decode_one: vocabulary %d is no multiple of 8, or block_tokens %d no power of two",
                args->vocabulary, args->block_tokens);
  }
  if (!(args->scale > 0.0f)) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT, "decode_one: scale is %g, not positive",
                static_cast<double>(args->scale));
  }
  return GPTOSS_TRT_OK;
}

gptoss_trt_status check_pointers(const Args& args) {
  const Need needs[] = {
      {"layers", args.layers, 8, true},
      {"embedding", args.embedding, 16, true},
      {"final_norm", args.final_norm, 16, true},
      {"lm_head", args.lm_head, 16, true},
      {"lm_head_scale", args.lm_head_scale, 4, args.format == GPTOSS_TRT_DENSE_FP8},
      {"cos_sin", args.cos_sin, 8, true},
      {"token_ids", args.token_ids, 4, true},
      {"positions", args.positions, 4, true},
      {"context_lens", args.context_lens, 4, true},
      {"full_blocks", args.full_blocks, 4, args.full_width > 0},
      {"window_blocks", args.window_blocks, 4, args.window_width > 0},
      {"window_first_block", args.window_first_block, 4, true},
      {"logits", args.logits, 8, true},
      {"workspace", args.workspace, 256, true},
  };
  const gptoss_trt_status status = check_needs(kCall, needs);
  if (status != GPTOSS_TRT_OK) return status;
  if (args.workspace_bytes < kWorkspaceBytes) {
    return fail(GPTOSS_TRT_WORKSPACE_TOO_SMALL,
                "decode_one: workspace has %" PRIu64 " bytes, needed are %" PRIu64,
                args.workspace_bytes, kWorkspaceBytes);
  }
  return GPTOSS_TRT_OK;
}

gptoss_trt_status check_fit(const Args& args, int multiprocessors) {
  if (multiprocessors < kLeastBlocks || multiprocessors > kMostBlocks ||
      args.experts > multiprocessors) {
    return fail(
        GPTOSS_TRT_UNSUPPORTED,
        "decode_one: the card has %d multiprocessors; needed are %d to %d, and one for each "
        "of %d experts",
        multiprocessors, kLeastBlocks, kMostBlocks, args.experts);
  }
  return GPTOSS_TRT_OK;
}

Params make_params(const Args& args) {
  Params p{};
  std::copy_n(args.layers, args.num_layers, p.layers);
  p.num_layers = args.num_layers;
  p.experts = args.experts;
  p.embedding = static_cast<const uint16_t*>(args.embedding);
  p.final_norm = static_cast<const uint16_t*>(args.final_norm);
  p.lm_head_scale = args.lm_head_scale;
  p.cos_sin = args.cos_sin;
  p.token_ids = args.token_ids;
  p.positions = args.positions;
  p.context_lens = args.context_lens;
  p.full_blocks = args.full_blocks;
  p.window_blocks = args.window_blocks;
  p.window_first_block = args.window_first_block;
  p.logits = args.logits;
  p.epoch = static_cast<uint32_t*>(args.workspace);
  p.mailbox = static_cast<uint64_t*>(args.workspace) + kEpochBytes / sizeof(uint64_t);
  p.full_width = args.full_width;
  p.window_width = args.window_width;
  p.block_shift = args.block_tokens == 16 ? 4 : args.block_tokens == 32 ? 5 : 6;
  p.vocabulary = args.vocabulary;
  p.eps = args.eps;
  p.limit = args.limit;
  p.alpha = args.alpha;
  p.scale_log2 = args.scale * kLog2E;
  return p;
}

}  // namespace
}  // namespace gptoss::one

extern "C" gptoss_trt_status gptoss_trt_decode_one_workspace(uint64_t* bytes) {
  using namespace gptoss;
  if (bytes == nullptr) {
    return fail(GPTOSS_TRT_INVALID_ARGUMENT, "decode_one_workspace: bytes is null");
  }
  *bytes = one::kWorkspaceBytes;
  return GPTOSS_TRT_OK;
}

extern "C" gptoss_trt_status gptoss_trt_decode_one(const gptoss_trt_decode_one_args* args,
                                                   gptoss_trt_stream stream) {
  using namespace gptoss::one;
  gptoss_trt_status status = check_sizes(args);
  if (status == GPTOSS_TRT_OK) status = check_pointers(*args);
  int multiprocessors = 0;
  if (status == GPTOSS_TRT_OK) status = gptoss::check_card(kCall, &multiprocessors);
  if (status == GPTOSS_TRT_OK) status = check_fit(*args, multiprocessors);
  if (status != GPTOSS_TRT_OK) return status;
  Params params = make_params(*args);
  const cudaError_t error =
      launch_decode_one(static_cast<Format>(args->format), params, args->lm_head, multiprocessors,
                        static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? GPTOSS_TRT_OK : gptoss::cuda_failure(kCall, "launch", error);
}
