// Norm, router product and choice of many tokens in one kernel: blocks stay, with the router in
// their shared memory, and each of a block's two teams of warps takes tile after tile of 8 tokens.
// While one team waits for its tokens the other computes. A kernel of one cluster sorts the rows
// behind it (sort.cuh).
//
// A warp has 256 columns of the tile's tokens, in registers from the load to the product: lane
// 4g + t has columns 32u + 8t to 32u + 8t + 7 of token g, of both groups of 128.
//
// Invariant: sums of squares are added in the order of rmsnorm_quant, so the norm has its bits; all
// sums are added in an order that the hidden size alone decides.
#ifndef GPTOSS_TRT_RMSNORM_ROUTE_RESIDENT_CUH_
#define GPTOSS_TRT_RMSNORM_ROUTE_RESIDENT_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "core/bf16.cuh"
#include "core/ptx.cuh"
#include "rmsnorm_route/choose.cuh"
#include "rmsnorm_route/params.h"

namespace gptoss::rmsnorm_route {

static_assert(kMostTokens <= INT32_MAX / kResidentHidden, "places in a tensor are 32-bit numbers");
constexpr int kTeamThreads = 32 * kTeamWarps;
constexpr int kResidentThreads = kTeams * kTeamThreads;
constexpr int kResidentTiles = kResidentExperts / 16;  // of 16 experts
constexpr int kWarpGroups = kWarpColumns / kGroup;     // of 128 columns, of a warp
constexpr int kGroupLoads = kGroup / 32;               // of a lane, in a group
constexpr int kResidentGroups = kTeamWarps * kWarpGroups;
static_assert(kResidentThreads >= kResidentHidden / 8, "a thread has eight of the gain");
constexpr int kResidentPitch = kResidentExperts + 4;  // floats of a token's logits

struct Resident {
  uint4 router[kResidentGroups][kResidentTiles][kGroupLoads][2][32];  // experts g, g + 8 in turn
  uint4 gain[kResidentGroups][kGroupLoads][4];
  float parts[kTeams][kTeamWarps][kTokens][kResidentPitch];  // logits of a warp's columns
  float squares[kTeams][kTeamWarps][kTokens];
  float bias[kResidentExperts];
  int real;  // tokens that are routed
};
static_assert(sizeof(Resident) <= 227 * 1024, "shared memory of a block");

__device__ __forceinline__ uint4 router_words(const Params& p, int row, int column) {
  if (row >= p.experts || column >= p.hidden) return make_uint4(0, 0, 0, 0);
  return __ldg(reinterpret_cast<const uint4*>(p.router + row * p.hidden + column));
}

// Router, gain and bias into shared memory: of the router what one instruction takes lies together.
__device__ __forceinline__ void keep_router(const Params& p, Resident& memory) {
  constexpr int kEach = kResidentTiles * kGroupLoads * 32;  // of a group
  const int all = (p.hidden + kGroup - 1) / kGroup * kEach;
#pragma unroll 4
  for (int i = threadIdx.x; i < all; i += kResidentThreads) {
    const int lane = i % 32, load = i / 32 % kGroupLoads;
    const int tile = i / (32 * kGroupLoads) % kResidentTiles, group = i / kEach;
    const int row = tile * 16 + lane / 4, column = group * kGroup + load * 32 + lane % 4 * 8;
    const uint4 low = router_words(p, row, column), high = router_words(p, row + 8, column);
    memory.router[group][tile][load][0][lane] = make_uint4(low.x, high.x, low.y, high.y);
    memory.router[group][tile][load][1][lane] = make_uint4(low.z, high.z, low.w, high.w);
  }
  if (threadIdx.x < kResidentHidden / 8) {
    const int column = threadIdx.x * 8;
    reinterpret_cast<uint4*>(memory.gain)[threadIdx.x] =
        column < p.hidden ? __ldg(reinterpret_cast<const uint4*>(p.gain + column))
                          : make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x < kResidentExperts) {
    memory.bias[threadIdx.x] = threadIdx.x < p.experts ? bf16_value(p.bias[threadIdx.x]) : 0.0f;
  }
}

// Magnitudes of a pair, the larger of those and of eight numbers.
__device__ __forceinline__ __nv_bfloat162 largest_of(__nv_bfloat162 largest, uint4 words) {
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    largest = __hmax2(largest, __habs2(*reinterpret_cast<const __nv_bfloat162*>(pairs + i)));
  }
  return largest;
}

// A lane's part of a tile.
struct Held {
  uint4 words[kWarpGroups][kGroupLoads];

  __device__ __forceinline__ void load(const uint16_t* row, int first, bool present, int hidden) {
#pragma unroll
    for (int group = 0; group < kWarpGroups; ++group) {
#pragma unroll
      for (int i = 0; i < kGroupLoads; ++i) {
        const int column = first + kGroup * group + 32 * i;
        words[group][i] = present && column < hidden ? *reinterpret_cast<const uint4*>(row + column)
                                                     : make_uint4(0, 0, 0, 0);
      }
    }
  }

  // The residual has been loaded. A group at a time: registers are short.
  __device__ __forceinline__ void add(const uint16_t* row, int first, bool present, int hidden) {
#pragma unroll
    for (int group = 0; group < kWarpGroups; ++group) {
      uint4 delta[kGroupLoads];
#pragma unroll
      for (int i = 0; i < kGroupLoads; ++i) {
        const int column = first + kGroup * group + 32 * i;
        delta[i] = present && column < hidden ? *reinterpret_cast<const uint4*>(row + column)
                                              : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kGroupLoads; ++i) {
        float a[8], b[8];
        widen(words[group][i], a);
        widen(delta[i], b);
#pragma unroll
        for (int j = 0; j < 8; ++j) a[j] += b[j];
        words[group][i] = narrow(a);
      }
    }
  }

  __device__ __forceinline__ void store(uint16_t* row, int first, bool present, int hidden) const {
#pragma unroll
    for (int group = 0; group < kWarpGroups; ++group) {
#pragma unroll
      for (int i = 0; i < kGroupLoads; ++i) {
        const int column = first + kGroup * group + 32 * i;
        if (present && column < hidden) *reinterpret_cast<uint4*>(row + column) = words[group][i];
      }
    }
  }

  // The warp's sum of squares of token g, in lanes 4g: eight columns at a time, then as
  // rmsnorm_quant's lanes add up, of which one has eight neighbouring columns.
  __device__ __forceinline__ float squares() const {
    float sums[kGroupLoads];
#pragma unroll
    for (int i = 0; i < kGroupLoads; ++i) {
      float both[kWarpGroups];
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group) {
        float a[8];
        widen(words[group][i], a);
        both[group] = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) both[group] = fmaf(a[j], a[j], both[group]);
      }
      sums[i] = both[0] + both[1];
    }
    float sum = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    sum += __shfl_xor_sync(kAll, sum, 2);
    return sum + __shfl_xor_sync(kAll, sum, 1);
  }

  // words = the norm; its codes and scales into place.
  __device__ __forceinline__ void normalise(const Params& p, const uint4 (*gain)[kGroupLoads][4],
                                            float inverse, int token, int first, int group) {
    __nv_bfloat162 largest = __floats2bfloat162_rn(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kGroupLoads; ++i) {
      float a[8], b[8];
      widen(words[group][i], a);
      widen(gain[group][i][threadIdx.x % 4], b);
#pragma unroll
      for (int j = 0; j < 8; ++j) a[j] = a[j] * inverse * b[j];
      words[group][i] = narrow(a);
      largest = largest_of(largest, words[group][i]);
    }
    float most = fmaxf(__low2float(largest), __high2float(largest));
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 1));
    const float scale = group_scale(most);
    const bool present = token < p.rows.tokens;
    uint8_t* to = p.quantised + token * p.hidden + first + kGroup * group;
    const GroupDivision divide(scale);
#pragma unroll
    for (int i = 0; i < kGroupLoads; ++i) {
      float a[8];
      widen(words[group][i], a);
      const uint2 codes = codes_of(a, divide);
      if (present && first + kGroup * group + 32 * i < p.hidden) {
        *reinterpret_cast<uint2*>(to + 32 * i) = codes;
      }
    }
    if (present && threadIdx.x % 4 == 0) {
      p.scales[(first / kGroup + group) * p.rows.tokens + token] = scale;
    }
  }
};

// kDelta: something is added to the residual.
template <bool kDelta>
__global__ void __launch_bounds__(kResidentThreads, 1)
    rmsnorm_route_resident_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) uint8_t route_shared[];
  Resident& memory = *reinterpret_cast<Resident*>(route_shared);
  const int team = threadIdx.x / kTeamThreads, warp = threadIdx.x / 32 % kTeamWarps;
  const int lane = threadIdx.x % 32, begin = warp * kWarpColumns, first = begin + lane % 4 * 8;
  const auto team_sync = [&] { named_barrier_sync(1 + team, kTeamThreads); };
  dependents_launch();
  keep_router(p, memory);
  dependency_wait();
  int tile = blockIdx.x + team * gridDim.x;
  if (threadIdx.x == 0) {
    memory.real = p.token_count == nullptr ? p.rows.tokens : *p.token_count;
  }
  const int tiles = (p.rows.tokens + kTokens - 1) / kTokens;
  Held x;
  const auto load = [&] {
    const int token = tile * kTokens + lane / 4;
    x.load(p.residual + token * p.hidden, first, token < p.rows.tokens, p.hidden);
  };
  load();
  __syncthreads();  // the router is there
  while (tile < tiles) {
    const int token = tile * kTokens + lane / 4;
    const bool present = token < p.rows.tokens;
    if constexpr (kDelta) x.add(p.delta + token * p.hidden, first, present, p.hidden);
    if (kDelta || p.updated != p.residual) {
      x.store(p.updated + token * p.hidden, first, present, p.hidden);
    }
    const float squares = x.squares();
    if (lane % 4 == 0) memory.squares[team][warp][lane / 4] = squares;
    team_sync();
    float sum = 0.0f;
#pragma unroll
    for (int of = 0; of < kTeamWarps; ++of) sum += memory.squares[team][of][lane / 4];
    const float inverse = inverse_rms(sum, p.hidden, p.eps);
    float logits[kResidentTiles][4] = {};
#pragma unroll
    for (int group = 0; group < kWarpGroups; ++group) {
      if (begin + group * kGroup >= p.hidden) break;
      const int at = warp * kWarpGroups + group;
      x.normalise(p, memory.gain + warp * kWarpGroups, inverse, token, first, group);
#pragma unroll
      for (int of = 0; of < kResidentTiles; ++of) {
#pragma unroll
        for (int i = 0; i < kGroupLoads; ++i) {
          const uint4 even = memory.router[at][of][i][0][lane];
          const uint4 odd = memory.router[at][of][i][1][lane];
          const uint4 words = x.words[group][i];
          multiply(logits[of], even.x, even.y, even.z, even.w, words.x, words.y);
          multiply(logits[of], odd.x, odd.y, odd.z, odd.w, words.z, words.w);
        }
      }
    }
#pragma unroll
    for (int of = 0; of < kResidentTiles; ++of) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int expert = of * 16 + lane / 4 + c / 2 * 8;
        memory.parts[team][warp][lane % 4 * 2 + c % 2][expert] = logits[of][c];
      }
    }
    const int chosen = tile * kTokens + warp;  // by the team's first warps
    tile += kTeams * gridDim.x;
    if (tile < tiles) load();
    team_sync();
    if (warp < kTokens && chosen < p.rows.tokens) {
      choose<kResidentExperts>(p, chosen, chosen < memory.real, &memory.parts[team][0][warp],
                               memory.bias);
    }
  }
}

}  // namespace gptoss::rmsnorm_route

#endif  // GPTOSS_TRT_RMSNORM_ROUTE_RESIDENT_CUH_
