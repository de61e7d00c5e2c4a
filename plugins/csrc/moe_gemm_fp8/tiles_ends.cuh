// Of the plan of FP8 tiles: what a warpgroup has of an item, and what becomes of its sums.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_TILES_ENDS_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_TILES_ENDS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "core/turn_quad.cuh"
#include "moe_gemm_fp8/epilogue.cuh"
#include "moe_gemm_fp8/tiles_producer.cuh"

namespace gptoss::moe {

// What a warpgroup has of an item: products of a chunk and a tile, kOwnBlocks at most. Where tiles
// go in pairs they are those of one chunk, otherwise those of every second chunk and the tile.
using TileSums = float[kOwnBlocks][kTileRows / 2];

template <typename S>
struct TileWork {
  int first_chunk, first_tile;  // within the item

  __device__ __forceinline__ int chunk(int block) const {
    return S::kPairs ? first_chunk : first_chunk + kTileConsumers * block;
  }
  __device__ __forceinline__ int tile(int block) const {
    return S::kPairs ? first_tile + block : 0;
  }
};

// A thread of a warpgroup has rows `row` and row + 8 of a chunk, columns `column` + 8j and the
// next.
struct TileLane {
  int warpgroup, row, column;
  uint32_t leader;  // of its warp

  __device__ __forceinline__ TileLane() {
    const int thread = threadIdx.x % 128;
    warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
    row = thread / 32 * 16 + thread % 32 / 4;
    column = thread % 4 * 2;
    leader = thread % 32 == 0;
  }
};

// Byte b of word w becomes byte w of word b.
__device__ __forceinline__ uint4 transpose_bytes(const uint32_t (&words)[4]) {
  const uint32_t low_01 = __byte_perm(words[0], words[1], 0x5140);
  const uint32_t low_23 = __byte_perm(words[2], words[3], 0x5140);
  const uint32_t high_01 = __byte_perm(words[0], words[1], 0x7362);
  const uint32_t high_23 = __byte_perm(words[2], words[3], 0x7362);
  return make_uint4(__byte_perm(low_01, low_23, 0x5410), __byte_perm(low_01, low_23, 0x7632),
                    __byte_perm(high_01, high_23, 0x5410), __byte_perm(high_01, high_23, 0x7632));
}

__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  constexpr float kInverse = 1.0f / kStaticScale;
  return __nv_cvt_float2_to_fp8x2(make_float2(low * kInverse, high * kInverse), __NV_SATFINITE,
                                  __NV_E4M3);
}

// Columns `column` + 8j of the item's bias, and the next, as bf16 bits.
template <int kColumns, bool kPermuted>
struct TileBias {
  uint32_t pairs[kColumns / 8];

  // Of a tile's bias.
  __device__ __forceinline__ TileBias(const uint16_t* tile, const TileLane& lane) {
    const uint16_t* bias = tile + lane.column * (kPermuted ? 4 : 1);
    if constexpr (kPermuted) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(bias + 8 * j);
        pairs[j] = four.x;
        pairs[j + 1] = four.y;
        pairs[j + 2] = four.z;
        pairs[j + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        pairs[j] = *reinterpret_cast<const uint32_t*>(bias + 8 * j);
      }
    }
  }
  __device__ __forceinline__ float even(int j) const { return __uint_as_float(pairs[j] << 16); }
  __device__ __forceinline__ float odd(int j) const {
    return __uint_as_float(pairs[j] & 0xFFFF0000u);
  }
};

// A thread has channels 4j + t of a row (permuted: 16 (j / 4) + 4t + j % 4), and stores the 16 from
// 16t on.
template <typename S, int kBlocks>
__device__ __forceinline__ void store_h(const Params& p, const typename S::Slot& slot,
                                        const TileLane& lane, const TileWork<S>& work,
                                        const TileSums& sum) {
  constexpr bool kPermuted = S::kExpand;
  const int channels = p.n / 2;
#pragma unroll
  for (int own = 0; own < kBlocks; ++own) {
    const TileBias<kTileRows, kPermuted> bias(slot.bias + work.tile(own) * kTileRows, lane);
    const int channel = (slot.item.tile + work.tile(own)) * (kTileRows / 2) + threadIdx.x % 4 * 16;
    uint32_t words[2][4];
#pragma unroll
    for (int j = 0; j < kTileRows / 8; j += 2) {
      float h[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const float* pair = sum[own] + 4 * (j + i) + 2 * row;
          h[row][i] =
              swiglu(pair[0] + bias.even(j + i), pair[1] + bias.odd(j + i), p.limit, p.alpha);
        }
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32_t codes = e4m3_pair(h[row][0], h[row][1]);
        words[row][j / 4] = j % 4 == 0 ? codes : words[row][j / 4] | codes << 16;
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      turn_quad(words[row]);
      const uint4 codes =
          kPermuted ? make_uint4(words[row][0], words[row][1], words[row][2], words[row][3])
                    : transpose_bytes(words[row]);
      const int token = work.chunk(own) * kChunkRows + lane.row + 8 * row;
      if (token < slot.item.rows && channel < channels) {
        *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out) +
                                  static_cast<int64_t>(slot.item.first + token) * channels +
                                  channel) = codes;
      }
    }
  }
}

template <typename S, int kBlocks, int kColumns>
__device__ __forceinline__ void store_out(const Params& p, const typename S::Slot& slot,
                                          const TileLane& lane, const TileWork<S>& work,
                                          const TileSums& sum) {
  constexpr bool kPermuted = S::kExpand;
  const auto token_of = [&](int own, int row) {
    return work.chunk(own) * kChunkRows + lane.row + 8 * row;
  };
  uint2 rows[kBlocks][2];
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) rows[i / 2][i % 2] = slot.rows[token_of(i / 2, i % 2)];
#pragma unroll
  for (int own = 0; own < kBlocks; ++own) {
    const int first = (slot.item.tile + work.tile(own)) * kTileRows;
    const TileBias<kColumns, kPermuted> bias(slot.bias + work.tile(own) * kTileRows, lane);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int token = token_of(own, row);
      const bool present = token < slot.item.rows;
      const uint2 info = rows[own][row];
      const float weight = __uint_as_float(info.y);
      const int64_t at = static_cast<int64_t>(info.x) * p.n + first;
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 4) {
        float2 values[4];
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = sum[own] + 4 * (j + i) + 2 * row;
          values[i] = make_float2(weight * (pair[0] + bias.even(j + i)),
                                  weight * (pair[1] + bias.odd(j + i)));
          const __nv_bfloat162 rounded = __floats2bfloat162_rn(values[i].x, values[i].y);
          words[i] = *reinterpret_cast<const uint32_t*>(&rounded);
        }
        if (p.out_fp32) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int column =
                kPermuted ? 8 * j + 4 * lane.column + 2 * i : lane.column + 8 * (j + i);
            if (present && first + column < p.n) {
              *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at + column) = values[i];
            }
          }
          continue;
        }
        if constexpr (!kPermuted) turn_quad(words);
        const int column = 8 * (j + threadIdx.x % 4);
        if (present && first + column < p.n) {
          *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.out) + at + column) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_TILES_ENDS_CUH_
