#include <algorithm>

#include "attention/launch.h"
#include "attention/prefill_full.cuh"
#include "attention/prefill_sums.cuh"
#include "attention/prefill_window.cuh"
#include "core/tensor_map.h"

namespace gptoss::attention {
namespace {

// bf16 [planes, rows, 64], contiguous, cut into boxes of [box_planes, box_rows, 64] whose rows are
// swizzled over 128 bytes; `rank` 2 has one plane.
cudaError_t encode_map(CUtensorMap* map, const void* base, int rank, int64_t rows, int64_t planes,
                       int box_rows, int box_planes) {
  static const EncodeTensorMap encode = find_tensor_map_encoder();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  const cuuint64_t sizes[3] = {kHeadDim, static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(planes)};
  const cuuint64_t strides[2] = {kRowBytes, static_cast<cuuint64_t>(rows) * kRowBytes};
  const cuuint32_t box[3] = {kHeadDim, static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(box_planes)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(base), sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// `queries`: tokens of a box of q.
template <class Shape, class Kernel>
cudaError_t launch(Kernel kernel, const PrefillParams& params, const PrefillTensors& tensors,
                   int queries, dim3 grid, const LaunchOptions& options) {
  const int64_t rows = static_cast<int64_t>(params.blocks) * params.kv_heads * kPageKeys;
  CUtensorMap q_map, k_map, v_map;
  cudaError_t error =
      encode_map(&q_map, tensors.q, 3, static_cast<int64_t>(params.kv_heads) * kGroup,
                 params.tokens, kGroup, queries);
  if (error == cudaSuccess) error = encode_map(&k_map, tensors.k, 2, rows, 1, kPageKeys, 1);
  if (error == cudaSuccess) error = encode_map(&v_map, tensors.v, 2, rows, 1, kPageKeys, 1);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 Shape::kSharedBytes);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = Shape::kSharedBytes;
  config.stream = options.stream;
  config.attrs = &attribute;
  config.numAttrs = options.dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params, q_map, k_map, v_map);
}

template <int kGroups, int kPages, int kBlocks>
cudaError_t launch_strips(const PrefillParams& params, const PrefillTensors& tensors,
                          const LaunchOptions& options) {
  using Shape = WindowShape<kGroups, kPages, kBlocks>;
  const int strips = params.tokens / params.strip + 2 * std::max(1, params.sequences);
  return launch<Shape>(attention_window_kernel<Shape>, params, tensors, kGroupQueries,
                       dim3(strips, params.kv_heads), options);
}

}  // namespace

cudaError_t launch_prefill(const PrefillParams& params, const PrefillTensors& tensors,
                           const PrefillPlan& plan, const LaunchOptions& options) {
  const int sequences = std::max(1, params.sequences);
  switch (plan.kind) {
    case PrefillKind::kFull: {
      const int tiles = params.tokens / FullShape::kQueries + sequences;
      return launch<FullShape>(attention_full_kernel, params, tensors, FullShape::kQueries,
                               dim3(std::min(tiles * params.kv_heads, plan.blocks)), options);
    }
    case PrefillKind::kSums: {
      const int tiles = params.tokens / SumsShape::kQueries + sequences;
      return launch<SumsShape>(attention_sums_kernel, params, tensors, SumsShape::kQueries,
                               dim3(tiles, params.kv_heads), options);
    }
    case PrefillKind::kLongStrips:
      return launch_strips<4, kLongStripPages, 1>(params, tensors, options);
    case PrefillKind::kShortStrips:
      return launch_strips<2, kShortStripPages, 2>(params, tensors, options);
  }
  return cudaErrorInvalidValue;
}

}  // namespace gptoss::attention
