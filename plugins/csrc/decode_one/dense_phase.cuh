// A dense product of one token: strips of rows from the ring, as tensor copies leave them, and the
// token by WGMMA, both from shared memory. A warpgroup takes every fourth tile of K; their sums
// meet in shared memory.
//
// Strips are shorter than the 64 rows of an instruction: the others are what lies behind, and mean
// nothing. The token is the plain vector, as in expert_phase.cuh.
#ifndef GPTOSS_TRT_DECODE_ONE_DENSE_PHASE_CUH_
#define GPTOSS_TRT_DECODE_ONE_DENSE_PHASE_CUH_

#include <cstdint>

#include "decode_one/activation.cuh"
#include "decode_one/shared.cuh"

namespace gptoss::one {

// d[64, 8] = a[64, 32 bytes] b[8, 32 bytes]^T (+ d when `accumulate` is not 0), by descriptors.
template <Format kFormat>
__device__ __forceinline__ void multiply_shared(float (&d)[4], uint64_t a, uint64_t b,
                                                int accumulate) {
  if constexpr (kFormat == Format::kFp8) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, "
        "accumulate, 1, 1;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a), "l"(b), "r"(accumulate));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, "
        "accumulate, 1, 1, 0, 0;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a), "l"(b), "r"(accumulate));
  }
}

// The scales of rows [row, row + rows) and kTiles tiles of K from `first_tile` on, into shared
// memory; before the activation comes. `columns` is how many a line of the scales has.
template <Format kFormat, int kTiles>
__device__ __forceinline__ void load_weight_scales(Shared& shared, const float* scale, int row,
                                                   int rows, int columns, int first_tile) {
  if constexpr (kFormat == Format::kFp8) {
    const int first = row / kScaleColumns;
    const int lines = (row + rows - 1) / kScaleColumns - first + 1;
    for (int i = thread_index(); i < lines * kTiles; i += kComputeThreads) {
      shared.weight_scale[i / kTiles][i % kTiles] =
          __ldg(scale + (first + i / kTiles) * columns + first_tile + i % kTiles);
    }
  }
}

// Takes one strip of rows from the ring; `finish` (row, sums of it and of the next row) is called
// by the first threads, one for each pair of rows. `scale_row` is the first row of those whose
// scales are loaded.
template <Format kFormat, class Shape, class Finish>
__device__ __forceinline__ void dense_phase(Shared& shared, Ring& ring, int row, int scale_row,
                                            int buffer, Finish finish) {
  constexpr int kSteps = kTileRowBytes / 32;  // instructions of a tile
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  const int lane = thread_index() % 32;
  const int low_row = thread_index() % 128 / 32 * 16 + lane / 4;  // of this thread; and + 8
  const uint64_t x = wgmma_descriptor(shared_address(shared.activation.dense), 16, 128);
  const float *low_scale = nullptr, *high_scale = nullptr;
  if constexpr (kFormat == Format::kFp8) {
    const int first = scale_row / kScaleColumns;
    // Rows behind the strip have the last line's.
    low_scale = shared.weight_scale[(row + min(low_row, Shape::kRows - 1)) / kScaleColumns - first];
    high_scale =
        shared.weight_scale[(row + min(low_row + 8, Shape::kRows - 1)) / kScaleColumns - first];
  }
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll 1
  for (int first = 0; first < Shape::kTiles; first += Shape::kTogether) {
    ring.wait();
    const int i = (warpgroup - first) & (kWarpgroups - 1), tile = first + i;
    if (i < Shape::kTogether && tile < Shape::kTiles) {
      const uint64_t weights = dense_fp8::swizzled_rows(ring.address() + i * Shape::kTileBytes);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        multiply_shared<kFormat>(acc, weights + j * 2, x + tile * (kSteps * 2) + j * 2,
                                 kFormat == Format::kBf16 || j > 0);
      }
      wgmma_commit();
      if constexpr (kFormat == Format::kFp8) {
        const float token = shared.x_scale[tile];
        const float low = low_scale[tile] * token, high = high_scale[tile] * token;
        wgmma_wait_all();
        wgmma_settle(acc);
        sums.x = fmaf(acc[0], low, sums.x);
        sums.y = fmaf(acc[2], high, sums.y);
      } else {
        wgmma_wait_all();
        wgmma_settle(acc);
      }
    }
    ring.release();
  }
  if constexpr (kFormat == Format::kBf16) sums = make_float2(acc[0], acc[2]);
  if (lane % 4 == 0) {
    shared.dense_partial[buffer][warpgroup][low_row] = sums.x;
    shared.dense_partial[buffer][warpgroup][low_row + 8] = sums.y;
  }
  compute_sync();
  if (thread_index() < Shape::kRows / 2) {
    float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarpgroups; ++w) {
      const float2 more =
          *reinterpret_cast<const float2*>(shared.dense_partial[buffer][w] + 2 * thread_index());
      total.x += more.x, total.y += more.y;
    }
    finish(row + 2 * thread_index(), total);
  }
}

// The bias of the two rows that this thread will finish; before the wait.
template <int kRows>
__device__ __forceinline__ float2 load_bias(const void* bias, int row) {
  if (thread_index() >= kRows / 2) return make_float2(0.0f, 0.0f);
  const uint32_t words = __ldg(static_cast<const uint32_t*>(bias) + row / 2 + thread_index());
  return make_float2(low_float(words), high_float(words));
}

}  // namespace gptoss::one

#endif  // GPTOSS_TRT_DECODE_ONE_DENSE_PHASE_CUH_
