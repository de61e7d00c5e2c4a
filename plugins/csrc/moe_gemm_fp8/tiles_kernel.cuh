// moe_gemm_fp8 on FP8 tiles, many rows an expert. Tokens are the M operand, up to 256 of one
// expert, and a tile of 128 rows of the weights the N operand, both in shared memory with 128-byte
// swizzle: tokens by tensor copies of their sorted rows, weights by bulk copies of tiles that lie
// in memory as they shall lie here. The tensor cores sum 128 columns of K; their sums times the
// scales of token and tile go to fp32 sums in registers while the other warpgroup's instructions
// run.
//
// A cluster of two blocks (kShare) multiplies the same tokens with two tiles and copies the tokens
// once. Items are taken from a counter, because they cost as much as their rows: one warp takes
// them and finds what their ends need, others copy (tiles_producer.cuh). Weights
// that lie as MXFP4 are expanded into such tiles by warps ahead of the products (tiles_expand.cuh).
//
// Invariant: a result depends on its own row of x and its expert's weights only: records are added
// in their order, whatever the token block.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_TILES_KERNEL_CUH_
#define GPTOSS_TRT_MOE_GEMM_FP8_TILES_KERNEL_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "core/cluster.cuh"
#include "core/ptx.cuh"
#include "core/turn_quad.cuh"
#include "dense_fp8/instructions.cuh"
#include "moe_gemm_fp8/epilogue.cuh"
#include "moe_gemm_fp8/tiles_expand.cuh"
#include "moe_gemm_fp8/tiles_producer.cuh"
#include "moe_gemm_fp8/tiles_schedule.cuh"

namespace gptoss::moe {

using dense_fp8::multiply;
using dense_fp8::swizzled_rows;

// ---- consumers ------------------------------------------------------------------------------

using TileSums = float[kOwnChunks][kTileRows / 2];

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

  // The warpgroup's chunks of a token block.
  __device__ __forceinline__ int chunk(int own) const { return warpgroup + kTileConsumers * own; }
  __device__ __forceinline__ int token(int own) const { return chunk(own) * kChunkRows + row; }
};

template <typename S>
__device__ __forceinline__ void release_stage(const TileMemory<S>& memory, int stage,
                                              uint32_t leader) {
  __syncwarp();
  if (leader == 0) return;
  if constexpr (S::kShare == 1) {
    barrier_arrive(memory.empty(stage));
  } else {
#pragma unroll
    for (int rank = 0; rank < S::kShare; ++rank) {
      cluster_arrive(cluster_address(memory.empty(stage), rank));
    }
  }
}

// Of a thread's two rows of a chunk, times the tile's.
struct TileScales {
  float low, high;
};

template <typename S>
__device__ __forceinline__ TileScales load_scales(const TileMemory<S>& memory, const TileLane& lane,
                                                  int stage, int own, float tile_scale) {
  if constexpr (!S::kGate) return {tile_scale, tile_scale};
  const uint32_t scales = memory.scales(stage) + lane.token(own) * 4;
  return {tile_scale * load_shared_f32(scales), tile_scale * load_shared_f32(scales + 32)};
}

// sum = the products of an item with kOwn chunks, record by record. What the next instructions need
// is read while these run: a warpgroup that is done with its additions starts them at once.
template <typename S, int kOwn, int kColumns>
__device__ __forceinline__ void multiply_item(const Params& p, const TileMemory<S>& memory,
                                              const TileLane& lane, RingPlace<S::kStages>& place,
                                              TileSums& sum) {
  constexpr float kTokenScale = S::kGate ? 1.0f : kStaticScale;  // GATE_UP's tokens have their own
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sum[own][i] = 0.0f;
  }
  barrier_wait(memory.full(place.stage), place.parity);
  float tile_scale = kTokenScale * load_shared_f32(memory.weight_scale(place.stage));
  TileScales next = load_scales(memory, lane, place.stage, 0, tile_scale);
#pragma unroll 1
  for (int left = p.records - 1; left >= 0; --left) {
    const int stage = place.stage;
    const uint64_t weights = swizzled_rows(memory.weights(stage));
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const uint64_t tokens = swizzled_rows(memory.tokens(stage) + lane.chunk(own) * kChunkBytes);
      float part[kColumns / 2];
      wgmma_fence();
      if (left > 0 || p.tail_halves == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) multiply<kColumns>(part, tokens + 2 * i, weights + 2 * i, i);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply<kColumns>(part, tokens + 2 * i, weights + 2 * i, i);
      }
      wgmma_commit();
      const TileScales now = next;
      if (own + 1 < kOwn) {
        next = load_scales(memory, lane, stage, own + 1, tile_scale);
      } else {
        place.step();
        if (left > 0) {
          barrier_wait(memory.full(place.stage), place.parity);
          tile_scale = kTokenScale * load_shared_f32(memory.weight_scale(place.stage));
          next = load_scales(memory, lane, place.stage, 0, tile_scale);
        }
      }
      wgmma_wait_all();
      wgmma_settle(part);
      if (own + 1 == kOwn) release_stage(memory, stage, lane.leader);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        sum[own][i] = fmaf(part[i], i % 4 < 2 ? now.low : now.high, sum[own][i]);
      }
    }
  }
}

// An item of whose chunks the warpgroup has none.
template <typename S>
__device__ __forceinline__ void pass_item(const Params& p, const TileMemory<S>& memory,
                                          const TileLane& lane, RingPlace<S::kStages>& place) {
#pragma unroll 1
  for (int left = p.records; left > 0; --left, place.step()) {
    barrier_wait(memory.full(place.stage), place.parity);
    release_stage(memory, place.stage, lane.leader);
  }
}

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

  __device__ __forceinline__ TileBias(const TileSlot& slot, const TileLane& lane) {
    if constexpr (kPermuted) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(slot.bias + lane.column * 4 + 8 * j);
        pairs[j] = four.x;
        pairs[j + 1] = four.y;
        pairs[j + 2] = four.z;
        pairs[j + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        pairs[j] = *reinterpret_cast<const uint32_t*>(slot.bias + lane.column + 8 * j);
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
template <int kOwn, bool kPermuted>
__device__ __forceinline__ void store_h(const Params& p, const TileSlot& slot, const TileLane& lane,
                                        const TileSums& sum) {
  const int channels = p.n / 2;
  const int channel = slot.item.tile * (kTileRows / 2) + threadIdx.x % 4 * 16;
  const TileBias<kTileRows, kPermuted> bias(slot, lane);
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
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
      const int token = lane.token(own) + 8 * row;
      if (token < slot.item.rows && channel < channels) {
        *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out) +
                                  static_cast<int64_t>(slot.item.first + token) * channels +
                                  channel) = codes;
      }
    }
  }
}

template <int kOwn, int kColumns, bool kPermuted>
__device__ __forceinline__ void store_out(const Params& p, const TileSlot& slot,
                                          const TileLane& lane, const TileSums& sum) {
  const int first = slot.item.tile * kTileRows;
  const TileBias<kColumns, kPermuted> bias(slot, lane);
  uint2 rows[kOwn][2];
#pragma unroll
  for (int i = 0; i < 2 * kOwn; ++i) rows[i / 2][i % 2] = slot.rows[lane.token(i / 2) + i % 2 * 8];
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int token = lane.token(own) + 8 * row;
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

template <typename S, int kOwn, int kColumns = kTileRows>
__device__ __forceinline__ void consume_item(const Params& p, const TileMemory<S>& memory,
                                             const TileSlot& slot, const TileLane& lane,
                                             RingPlace<S::kStages>& place) {
  TileSums sum;
  multiply_item<S, kOwn, kColumns>(p, memory, lane, place, sum);
  if constexpr (S::kGate) {
    store_h<kOwn, S::kExpand>(p, slot, lane, sum);
  } else {
    store_out<kOwn, kColumns, S::kExpand>(p, slot, lane, sum);
  }
}

// DOWN has tiles whose second half lies behind n: the first is multiplied alone.
template <typename S, int kOwn>
__device__ __forceinline__ void consume_chunks(const Params& p, const TileMemory<S>& memory,
                                               const TileSlot& slot, const TileLane& lane,
                                               RingPlace<S::kStages>& place) {
  if constexpr (!S::kGate) {
    if ((slot.item.tile + 1) * kTileRows - p.n >= kTileRows / 2) {
      consume_item<S, kOwn, kTileRows / 2>(p, memory, slot, lane, place);
      return;
    }
  }
  consume_item<S, kOwn>(p, memory, slot, lane, place);
}

template <typename S>
__device__ __forceinline__ void consume_items(const Params& p, const TileMemory<S>& memory) {
  const TileLane lane;
  RingPlace<S::kStages> place;
  RingPlace<kItemSlots> slots;
  for (;; slots.step()) {
    barrier_wait(memory.item_full(slots.stage), slots.parity);
    const TileSlot& slot = memory.slot(slots.stage);
    if (slot.item.expert < 0) return;
    const int own = ceil_div(slot.item.chunks - lane.warpgroup, kTileConsumers);
    if (own == kOwnChunks) {
      consume_chunks<S, kOwnChunks>(p, memory, slot, lane, place);
    } else if (own == 1) {
      consume_chunks<S, 1>(p, memory, slot, lane, place);
    } else {
      pass_item(p, memory, lane, place);
    }
    __syncwarp();
    if (lane.leader != 0) barrier_arrive(memory.item_empty(slots.stage));
  }
}

__constant__ constexpr CodeTable kTileCodes = make_code_table();

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    moe_gemm_tiles_kernel(const __grid_constant__ Params p,
                          const __grid_constant__ CUtensorMap map) {
  extern __shared__ uint8_t tiles_shared[];
  __shared__ __align__(128) ReaderTable table;
  const uint32_t start = shared_address(tiles_shared);
  const uint32_t skipped = (kTileSwizzle - start % kTileSwizzle) % kTileSwizzle;
  const TileMemory<S> memory{tiles_shared + skipped, start + skipped};
  if (threadIdx.x < S::kStages) {
    barrier_init(memory.full(threadIdx.x), S::kExpandingWarps + 1);
    barrier_init(memory.empty(threadIdx.x), kTileConsumerWarps * S::kShare);
  } else if (threadIdx.x >= 32 && threadIdx.x < 32 + kItemSlots) {
    barrier_init(memory.item_full(threadIdx.x - 32), 1);
    barrier_init(memory.item_empty(threadIdx.x - 32),
                 kTileConsumerWarps + S::kExpandingWarps + S::kCopyingThreads);
    barrier_init(memory.index_full(threadIdx.x - 32), 1);
    barrier_init(memory.index_read(threadIdx.x - 32), S::kShare > 1 ? S::kShare - 1 : 1);
  } else if (threadIdx.x == 64) {
    barrier_init(memory.wanted(), 1);
    if constexpr (S::kExpand) {
      for (int i = 0; i < kRawStages; ++i) {
        barrier_init(memory.raw_full(i), 1);
        barrier_init(memory.raw_empty(i), S::kExpandingWarps);
      }
    }
  } else if (S::kExpand && threadIdx.x >= 96 && threadIdx.x < 96 + kTableRows) {
    const int row = threadIdx.x - 96;
    table.rows[row].codes = make_uint2(kTileCodes.words[row][0], kTileCodes.words[row][1]);
  }
  barrier_init_fence();
  dependency_wait();
  dependents_launch();
  TileTables(memory.tables(), p.experts).fill(p);
  if constexpr (S::kShare > 1) cluster_sync();
  const int warp_of_all = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  const int warpgroup = warp_of_all / 4, warp = warp_of_all % 4;
  if (S::kExpand && warpgroup == kTileConsumers) {
    if constexpr (S::kExpand) {
      registers_release<S::kExpanderRegisters>();
      expand_stages<S>(p, memory, table);
    }
  } else if (warpgroup >= kTileConsumers) {
    registers_release<S::kProducerRegisters>();
    if (warp == 0) {
      produce_stages<S>(p, memory, map);
    } else if (warp == 1) {
      produce_slots<S>(p, memory);
    } else if (S::kExpand && warp == 2) {
      produce_records<S>(p, memory);
    }
  } else {
    registers_claim<S::kConsumerRegisters>();
    consume_items<S>(p, memory);
  }
  if constexpr (S::kShare > 1) {
    __syncwarp();
    cluster_sync();  // copies into the others and their arrivals here have ended
  }
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_TILES_KERNEL_CUH_
