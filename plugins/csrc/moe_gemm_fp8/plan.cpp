#include "moe_gemm_fp8/plan.h"

#include <algorithm>

namespace gptoss::moe {
namespace {

constexpr int kBarrierBytes = 8;
constexpr int kSharedAlignment = 128;
constexpr uint64_t kWorkspaceAlignment = 256;

int align_shared(int bytes) { return ceil_div(bytes, kSharedAlignment) * kSharedAlignment; }

uint64_t align_workspace(uint64_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

// An expert never has more rows than there are tokens.
int token_block_for(int tokens) { return tokens <= 8 ? 8 : tokens <= 16 ? 16 : kMaxTokenBlock; }

int split_for(const gptoss_trt_moe_gemm_args& args, int tokens) {
  if (args.k_split > 0) return args.k_split;
  return tokens > kSplitTokens ? 1 : std::min(kFewTokensSplit, records(args.k));
}

uint64_t rows(const gptoss_trt_moe_gemm_args& args, int tokens) {
  return static_cast<uint64_t>(tokens) * args.top_k;
}

uint64_t most_token_blocks(const gptoss_trt_moe_gemm_args& args, int tokens) {
  const uint64_t count = rows(args, tokens);
  return std::min<uint64_t>(args.experts, count) + count / kMaxTokenBlock;
}

uint64_t partial_bytes(const gptoss_trt_moe_gemm_args& args, int tokens) {
  const int split = split_for(args, tokens);
  if (split == 1 || args.plan == GPTOSS_TRT_MOE_PLAN_SIMT) return 0;
  return most_token_blocks(args, tokens) * strips(args.n) * split * kStripRows *
         token_block_for(tokens) * sizeof(float);
}

// Scales of an activation row in one record.
int scales_per_record(const gptoss_trt_moe_gemm_args& args) {
  return args.product == GPTOSS_TRT_MOE_DOWN && args.scale_mode == GPTOSS_TRT_SCALE_BLOCK64 ? 2 : 1;
}

SharedLayout make_shared(const gptoss_trt_moe_gemm_args& args, int token_block) {
  const auto storage = static_cast<Storage>(args.storage);
  const int scale_rows = scales_per_record(args) * records(args.k);
  SharedLayout shared{};
  int end = 0;
  const auto take = [&end](int bytes) {
    const int at = end;
    end += align_shared(bytes);
    return at;
  };
  shared.barriers = take((2 * kConsumers * kMaxStages + 2) * kBarrierBytes);
  shared.offsets = take((3 * (args.experts + 1) + kShareWords) * static_cast<int>(sizeof(int32_t)));
  shared.row_info = take(2 * kMaxTokenBlock * static_cast<int>(sizeof(int32_t)));
  shared.bias = take(args.n * static_cast<int>(sizeof(uint16_t)));
  shared.tokens = take(records(args.k) * kRecordColumns * token_block);
  shared.scales = take(scale_rows * token_block * static_cast<int>(sizeof(float)));
  shared.partials =
      take((kConsumers - 1) * kStripRows * token_block * static_cast<int>(sizeof(float)));
  shared.stage_bytes = align_shared(record_bytes(storage, 2));
  shared.rings = end;
  shared.stages =
      std::min(kMaxStages, (kSharedBytesLimit - end) / (kConsumers * shared.stage_bytes));
  shared.total_bytes = end + kConsumers * std::max(shared.stages, kMinStages) * shared.stage_bytes;
  return shared;
}

PrefillShared make_prefill_shared(const gptoss_trt_moe_gemm_args& args) {
  const auto storage = static_cast<Storage>(args.storage);
  const bool gate_up = args.product == GPTOSS_TRT_MOE_GATE_UP;
  constexpr int kWord = sizeof(int32_t);
  PrefillShared shared{};
  int end = 0;
  const auto take = [&end](int bytes) {
    const int at = end;
    end += align_shared(bytes);
    return at;
  };
  shared.barriers = take(2 * kPrefillMaxStages * kBarrierBytes);
  shared.items = take((kPrefillMaxStages + 1) * 4 * kWord);
  shared.tables = take(3 * (args.experts + 1) * kWord);
  shared.row_info = take(gate_up ? 0 : kPrefillConsumers * 2 * kPrefillBlock * kWord);
  shared.values = take(gate_up ? kPrefillBlock * kPrefillValuePitch * kWord : 0);
  shared.ring = end;
  shared.record_offset = align_shared(kPrefillBlock * tile_row_bytes(args));
  shared.record_pitch = align_shared(record_bytes(storage, 2));
  shared.stage_bytes = shared.record_offset + kPrefillConsumers * shared.record_pitch;
  shared.stages = std::min(kPrefillMaxStages, (kSharedBytesLimit - end) / shared.stage_bytes);
  shared.total_bytes = end + std::max(shared.stages, kMinStages) * shared.stage_bytes;
  return shared;
}

// Rows of h are stored by fours.
bool can_prefill(const gptoss_trt_moe_gemm_args& args) {
  return args.k_split <= 1 && (args.product == GPTOSS_TRT_MOE_DOWN || args.n % 8 == 0) &&
         make_prefill_shared(args).total_bytes <= kSharedBytesLimit;
}

// Into FP8 tiles.
bool can_expand(const gptoss_trt_moe_gemm_args& args) {
  const int step = args.product == GPTOSS_TRT_MOE_GATE_UP ? 32 : 8;  // rows are stored by 16 bytes
  return args.storage == GPTOSS_TRT_MOE_MXFP4 && args.scale_mode == GPTOSS_TRT_SCALE_STATIC &&
         args.n % step == 0 && args.k_split <= 1 && args.experts <= kMostExpandedExperts;
}

bool is_prefill(const gptoss_trt_moe_gemm_args& args, int tokens) {
  if (args.plan != GPTOSS_TRT_MOE_PLAN_AUTO) return args.plan == GPTOSS_TRT_MOE_PLAN_PREFILL;
  return tokens > kMostDecodeTokens &&
         rows(args, tokens) >= static_cast<uint64_t>(kPrefillRows) * args.experts &&
         can_prefill(args);
}

bool expands(const gptoss_trt_moe_gemm_args& args, int tokens) {
  const int least =
      args.product == GPTOSS_TRT_MOE_GATE_UP ? kExpandedGateUpRows : kExpandedDownRows;
  return is_prefill(args, tokens) && can_expand(args) &&
         rows(args, tokens) >= static_cast<uint64_t>(least) * args.experts;
}

// The most tokens up to `most` that another plan than prefill serves.
int most_tokens_elsewhere(const gptoss_trt_moe_gemm_args& args, int most) {
  if (!is_prefill(args, most)) return most;
  if (args.plan != GPTOSS_TRT_MOE_PLAN_AUTO) return 0;
  return std::max(kMostDecodeTokens, (kPrefillRows * args.experts - 1) / args.top_k);
}

}  // namespace

int tile_row_bytes(const gptoss_trt_moe_gemm_args& args) {
  return kRecordColumns + scales_per_record(args) * static_cast<int>(sizeof(float));
}

int scale_group(int scale_mode) {
  return scale_mode == GPTOSS_TRT_SCALE_BLOCK128  ? 128
         : scale_mode == GPTOSS_TRT_SCALE_BLOCK64 ? 64
                                                  : 0;
}

Plan make_plan(const gptoss_trt_moe_gemm_args& args) {
  Plan plan{};
  if (args.storage == GPTOSS_TRT_MOE_FP8_TILES || expands(args, args.tokens)) {
    plan.tiles = true;
    plan.kind = GPTOSS_TRT_MOE_PLAN_PREFILL;
    plan.token_block = kBlockRows;
    plan.k_split = 1;
    const auto rows_reach = [&](int rows_each) {
      return rows(args, args.tokens) >= static_cast<uint64_t>(rows_each) * args.experts;
    };
    plan.share = rows_reach(kSharedRows) ? 2 : 1;
    plan.pairs = args.storage == GPTOSS_TRT_MOE_FP8_TILES &&
                 (args.product == GPTOSS_TRT_MOE_GATE_UP || !rows_reach(kPairedDownRows));
    return plan;
  }
  if (is_prefill(args, args.tokens)) {
    plan.kind = GPTOSS_TRT_MOE_PLAN_PREFILL;
    plan.token_block = kPrefillBlock;
    plan.k_split = 1;
    plan.prefill = make_prefill_shared(args);
    return plan;
  }
  plan.kind =
      args.plan == GPTOSS_TRT_MOE_PLAN_SIMT ? GPTOSS_TRT_MOE_PLAN_SIMT : GPTOSS_TRT_MOE_PLAN_WGMMA;
  plan.token_block = token_block_for(args.tokens);
  plan.k_split = plan.kind == GPTOSS_TRT_MOE_PLAN_SIMT ? 1 : split_for(args, args.tokens);
  plan.shared = make_shared(args, plan.token_block);
  return plan;
}

namespace {

// GATE_UP on FP8 tiles: scales of x by token block.
uint64_t sorted_scale_bytes(const gptoss_trt_moe_gemm_args& args) {
  const uint64_t count = rows(args, args.max_tokens);
  const uint64_t blocks = count / kBlockRows + std::min<uint64_t>(args.experts, count);
  return blocks * records(args.k) * kBlockRows * sizeof(float);
}

// The counter of items; GATE_UP: the rows of x by expert, and their scales.
WorkspaceLayout make_tiles_workspace(const gptoss_trt_moe_gemm_args& args) {
  WorkspaceLayout layout{};
  layout.counter_bytes = layout.total_bytes = align_workspace(sizeof(int32_t));
  if (args.product != GPTOSS_TRT_MOE_GATE_UP) return layout;
  const uint64_t count = rows(args, args.max_tokens);
  layout.gathered = layout.counter_bytes;
  layout.sorted_scales = layout.gathered + align_workspace(count * args.k);
  layout.total_bytes = layout.sorted_scales + align_workspace(sorted_scale_bytes(args));
  return layout;
}

}  // namespace

WorkspaceLayout make_workspace(const gptoss_trt_moe_gemm_args& args) {
  if (args.storage == GPTOSS_TRT_MOE_FP8_TILES) return make_tiles_workspace(args);
  WorkspaceLayout layout{};
  const int most = most_tokens_elsewhere(args, args.max_tokens);
  const uint64_t blocks = most_token_blocks(args, most);
  const bool quantises = args.product == GPTOSS_TRT_MOE_GATE_UP;
  const bool through_values =
      quantises && (scale_group(args.scale_mode) > 0 || args.plan == GPTOSS_TRT_MOE_PLAN_SIMT);
  uint64_t partials = args.k_split > 1 ? partial_bytes(args, most) : 0;
  if (args.k_split == 0) {
    for (int tokens = 1; tokens <= std::min(most, kSplitTokens); ++tokens) {
      partials = std::max(partials, partial_bytes(args, tokens));
    }
  }
  const uint64_t gathered_rows = rows(args, args.max_tokens) +
                                 static_cast<uint64_t>(kMostPadding) *
                                     std::min<uint64_t>(args.experts, rows(args, args.max_tokens));
  const bool prefills = is_prefill(args, args.max_tokens);
  uint64_t end = 0;
  const auto take = [&end](uint64_t bytes) {
    const uint64_t at = end;
    end += align_workspace(bytes);
    return at;
  };
  layout.split_tickets = take(partials > 0 ? blocks * strips(args.n) * sizeof(int32_t) : 0);
  layout.tile_items = take(prefills && can_expand(args) ? sizeof(int32_t) : 0);
  layout.counter_bytes = end;
  layout.h_values = take(through_values ? rows(args, most) * (args.n / 2) * sizeof(float) : 0);
  layout.partials = take(partials);
  layout.items_taken = take(prefills ? sizeof(int32_t) : 0);
  layout.row_info = take(prefills && !quantises ? gathered_rows * 2 * sizeof(int32_t) : 0);
  layout.gathered = take(prefills ? gathered_rows * records(args.k) * tile_row_bytes(args) : 0);
  layout.sorted_scales =
      take(prefills && quantises && can_expand(args) ? sorted_scale_bytes(args) : 0);
  layout.total_bytes = end;
  return layout;
}

}  // namespace gptoss::moe
