// A dense product of one token: tiles of 8 rows from the ring. Each warp has columns of K of its
// own, whose part of the token stays in registers over all tiles; sums meet in shared memory.
//
// Weights are the N operand of mma.sync, straight from the row that they lie in: K is permuted
// alike on both sides. All eight token rows of the M operand's upper half hold the one token, so
// every lane ends with sums of two rows.
#ifndef GPTOSS_TRT_DECODE_ONE_DENSE_PHASE_CUH_
#define GPTOSS_TRT_DECODE_ONE_DENSE_PHASE_CUH_

#include <cstdint>

#include "decode_one/activation.cuh"
#include "decode_one/shared.cuh"

namespace gptoss::one {

// c += a b for 16 columns of K; a's rows 8 to 15 are zeros.
template <Format kFormat>
__device__ __forceinline__ void multiply_columns(float (&c)[4], uint32_t x0, uint32_t x1,
                                                 uint32_t w0, uint32_t w1) {
  const uint32_t zero = 0;
  if constexpr (kFormat == Format::kBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, "
        "{%7, %8}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(x0), "r"(zero), "r"(x1), "r"(w0), "r"(w1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, "
        "{%7, %8}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(x0), "r"(zero), "r"(x1), "r"(w0), "r"(w1));
  }
}

// A token's part of one unit, as the instructions want it.
template <Format kFormat>
struct TokenUnit {
  uint4 words[kFormat == Format::kBf16 ? 1 : 2];
};

// 64 bytes of eight rows, this lane's row and quarter, times the same columns of the token.
template <Format kFormat>
__device__ __forceinline__ float2 multiply_unit(uint4 w, const TokenUnit<kFormat>& x) {
  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const uint4 a = x.words[0];
  if constexpr (kFormat == Format::kBf16) {
    multiply_columns<kFormat>(c, a.x, a.y, w.x, w.y);
    multiply_columns<kFormat>(c, a.z, a.w, w.z, w.w);
    return make_float2(c[0], c[1]);
  } else {
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // two chains: an instruction's latency counts
    const uint4 b = x.words[1];
    multiply_columns<kFormat>(c, a.x, a.y, halves_of(w.x & 0xFFFF), halves_of(w.x >> 16));
    multiply_columns<kFormat>(d, b.x, b.y, halves_of(w.z & 0xFFFF), halves_of(w.z >> 16));
    multiply_columns<kFormat>(c, a.z, a.w, halves_of(w.y & 0xFFFF), halves_of(w.y >> 16));
    multiply_columns<kFormat>(d, b.z, b.w, halves_of(w.w & 0xFFFF), halves_of(w.w >> 16));
    return make_float2(c[0] + d[0], c[1] + d[1]);
  }
}

// The scales of the rows that this block computes, into shared memory; before the activation comes.
template <Format kFormat, int kColumns>
__device__ __forceinline__ void load_weight_scales(Shared& shared, const float* scale,
                                                   const TileRange& tiles) {
  if constexpr (kFormat == Format::kFp8) {
    constexpr int kBlocks = moe::ceil_div(kColumns, kScaleColumns);
    const int first = tiles.first * kTileRows / kScaleColumns;
    const int lines = (tiles.end * kTileRows - 1) / kScaleColumns - first + 1;
    for (int i = thread_index(); i < lines * kBlocks; i += kComputeThreads) {
      shared.weight_scale[i / kBlocks][i % kBlocks] = __ldg(scale + first * kBlocks + i);
    }
  }
}

// A warp's columns of K, the same in all tiles: units w, w + 16, .. of a chunk, counted from its
// end in every other chunk so that no warp has the odd one twice.
template <Format kFormat, int kColumns>
class DenseWarp {
 public:
  using Shape = DenseShape<kFormat, kColumns>;

  __device__ __forceinline__ explicit DenseWarp(const Shared& shared) {
    const int t = thread_index() % 4;
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
#pragma unroll
      for (int slot = 0; slot < Shape::kSlots; ++slot) {
        const int i = chunk * Shape::kSlots + slot;
        const int column = has(chunk, slot) ? first_column(chunk, slot) : 0;
        const auto* x = reinterpret_cast<const uint4*>(shared.activation.dense + column +
                                                       t * (Shape::kUnitColumns / 4));
        token_[i].words[0] = x[0];
        scale_[i] = has(chunk, slot) ? 1.0f : 0.0f;
        if constexpr (kFormat == Format::kFp8) {
          token_[i].words[1] = x[1];
          scale_[i] *= shared.x_scale[column / kScaleColumns];
        }
      }
    }
  }

  // This warp's weights of one tile, from the ring's next stages, which are given back.
  struct Held {
    uint4 words[Shape::kChunks * Shape::kSlots];
  };
  __device__ __forceinline__ void fetch(Ring& ring, Held& held) const {
    const int lane = thread_index() % 32;
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
      ring.wait();
      const uint32_t weights = ring.address() + lane / 4 * Shape::kPitch + lane % 4 * 16;
#pragma unroll
      for (int slot = 0; slot < Shape::kSlots; ++slot) {
        // A place behind the chunk's last unit takes the first: it counts as nothing.
        held.words[chunk * Shape::kSlots + slot] =
            load_shared_u128(weights + (has(chunk, slot) ? unit(chunk, slot) : 0) * kUnitBytes);
      }
      ring.release();
    }
  }

  // Sums of two rows of the tile over this warp's columns; `scales` are the tile's.
  __device__ __forceinline__ float2 multiply(const Held& held, const float* scales) const {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
#pragma unroll
      for (int slot = 0; slot < Shape::kSlots; ++slot) {
        const int i = chunk * Shape::kSlots + slot;
        const float2 part = multiply_unit<kFormat>(held.words[i], token_[i]);
        float scale = scale_[i];
        if constexpr (kFormat == Format::kFp8) scale *= scales[block_of(chunk, slot)];
        sum.x = fmaf(part.x, scale, sum.x);
        sum.y = fmaf(part.y, scale, sum.y);
      }
    }
    return sum;
  }

 private:
  static __device__ __forceinline__ int unit(int chunk, int slot) {
    const int warp = thread_index() / 32;
    return slot * kWarps + (chunk % 2 == 0 ? warp : kWarps - 1 - warp);
  }
  static __device__ __forceinline__ bool has(int chunk, int slot) {
    return unit(chunk, slot) < Shape::chunk_bytes(chunk) / kUnitBytes;
  }
  static __device__ __forceinline__ int block_of(int chunk, int slot) {
    return has(chunk, slot) ? first_column(chunk, slot) / kScaleColumns : 0;
  }
  static __device__ __forceinline__ int first_column(int chunk, int slot) {
    return chunk * (Shape::kChunkBytes / Shape::kElement) + unit(chunk, slot) * Shape::kUnitColumns;
  }

  TokenUnit<kFormat> token_[Shape::kChunks * Shape::kSlots];
  float scale_[Shape::kChunks * Shape::kSlots];
};

// Takes this block's tiles of a weight of kColumns columns from the ring; `finish` (row, sums of it
// and of the next row) is called by one thread for each pair of rows, batch after batch.
template <Format kFormat, int kColumns, class Finish>
__device__ __forceinline__ void dense_phase(Shared& shared, Ring& ring, const TileRange tiles,
                                            Finish finish) {
  const int lane = thread_index() % 32;
  const int first_scale = tiles.first * kTileRows / kScaleColumns;
  const DenseWarp<kFormat, kColumns> warp(shared);
  using Warp = DenseWarp<kFormat, kColumns>;
  typename Warp::Held held;
  int buffer = 0;
#pragma unroll 1
  for (int start = tiles.first; start < tiles.end; start += kBatchTiles, buffer ^= 1) {
    const int count = min(kBatchTiles, tiles.end - start);
    // Fetching a tile ahead takes more registers than it saves time (measured).
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      warp.fetch(ring, held);
      const int line = (start + i) * kTileRows / kScaleColumns - first_scale;
      const float2 sum = warp.multiply(held, shared.weight_scale[line]);
      if (lane < 4) {
        *reinterpret_cast<float2*>(shared.dense_partial[buffer][i][thread_index() / 32] +
                                   2 * lane) = sum;
      }
    }
    compute_sync();
    if (thread_index() < count * (kTileRows / 2)) {
      const int i = thread_index() / (kTileRows / 2), pair = thread_index() % (kTileRows / 2);
      float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float2 more =
            *reinterpret_cast<const float2*>(shared.dense_partial[buffer][i][w] + 2 * pair);
        total.x += more.x, total.y += more.y;
      }
      finish((start + i) * kTileRows + 2 * pair, total);
    }
  }
}

// The bias of the rows that this thread will finish, when there is one batch; before the wait.
__device__ __forceinline__ float2 load_bias(const void* bias, const TileRange& tiles) {
  const int pair = tiles.first * (kTileRows / 2) + thread_index();
  if (pair >= tiles.end * (kTileRows / 2)) return make_float2(0.0f, 0.0f);
  const uint32_t words = __ldg(static_cast<const uint32_t*>(bias) + pair);
  return make_float2(low_float(words), high_float(words));
}

}  // namespace gptoss::one

#endif  // GPTOSS_TRT_DECODE_ONE_DENSE_PHASE_CUH_
