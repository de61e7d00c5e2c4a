#include <algorithm>

#include "attention/launch.h"
#include "attention/prefill_kernel.cuh"
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

template <int kConsumers, int kKeys, int kStages, PrefillStyle kStyle>
cudaError_t launch(const PrefillParams& params, const PrefillTensors& tensors,
                   const LaunchOptions& options) {
  using Shape = PrefillShape<kConsumers, kKeys, kStages, kStyle>;
  const auto kernel = attention_prefill_kernel<Shape>;
  const int64_t rows = static_cast<int64_t>(params.blocks) * params.kv_heads * kPageKeys;
  CUtensorMap q_map, k_map, v_map;
  cudaError_t error =
      encode_map(&q_map, tensors.q, 3, static_cast<int64_t>(params.kv_heads) * kGroup,
                 params.tokens, kGroup, Shape::kQueries);
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
  config.gridDim =
      dim3(params.tokens / Shape::kQueries + std::max(1, params.sequences), params.kv_heads);
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = Shape::kSharedBytes;
  config.stream = options.stream;
  config.attrs = &attribute;
  config.numAttrs = options.dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params, q_map, k_map, v_map);
}

}  // namespace

cudaError_t launch_prefill(const PrefillParams& params, const PrefillTensors& tensors,
                           PrefillKind kind, const LaunchOptions& options) {
  switch (kind) {
    case PrefillKind::kWide:
      return launch<3, 64, 8, PrefillStyle::kWide>(params, tensors, options);
    case PrefillKind::kSums:
      return launch<2, 128, 3, PrefillStyle::kSums>(params, tensors, options);
    case PrefillKind::kWindow:
      return launch<2, 64, kWindowStages, PrefillStyle::kWindow>(params, tensors, options);
  }
  return cudaErrorInvalidValue;
}

}  // namespace gptoss::attention
