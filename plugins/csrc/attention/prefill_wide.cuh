// Prefill's inner loop with two sets of scores: while a block's scores become weights, the tensor
// cores add the block before and make the scores of the next.
//
// A multiprocessor's quarter queues some seven WGMMA of all its warps; a warp that issues more
// waits where it stands. So the next scores are asked for in the middle of the exponentials, not
// with the output. Weights stay relative to a base of each row that is raised only when a score
// exceeds it by far: floats do not mind, and a block without such a score needs no shuffle and no
// rescaling. A base is a whole number (log2), so raising it multiplies by powers of two, exactly.
// Whether it is raised depends on the row's own scores alone.
#ifndef GPTOSS_TRT_ATTENTION_PREFILL_WIDE_CUH_
#define GPTOSS_TRT_ATTENTION_PREFILL_WIDE_CUH_

#include <climits>
#include <cstdint>

#include "attention/prefill_products.cuh"
#include "attention/warp_mma.cuh"
#include "attention/wgmma_bf16.cuh"
#include "core/ptx.cuh"

namespace gptoss::attention {

constexpr float kSlack = 16.f;       // log2 of the largest weight that raises no base
constexpr float kLeastBase = -60.f;  // below, every block is looked at as a float
constexpr int kAlways = INT_MIN;     // as a limit

// Two rows of a thread, of two neighbouring queries.
struct WideRows {
  float base[2] = {-INFINITY, -INFINITY};  // log2, a whole number; -inf: no key so far
  float minus[2] = {0.f, 0.f};             // -base, or 0 without a key
  int limit[2] = {kAlways, kAlways};       // score as bits that raises the base; not negative
  float total[2] = {0.f, 0.f};             // of this lane's weights
};

// What a step needs of the block and of its warp.
struct WidePlace {
  uint64_t query;  // descriptor
  float scale;     // log2
  int position;    // of the first row's query
  int last;        // key block, and steps of earlier walks
  bool leads;      // one lane of a warp
};

// exp2_fast where it stands: between the products that surround it.
__device__ __forceinline__ float exp2_here(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Without a branch: registers that WGMMA writes must not differ by the way taken.
template <int kKeys>
__device__ __forceinline__ void hide_keys(float (&scores)[kKeys / 2], const WidePlace& place,
                                          int first_key) {
  const int last = place.position - first_key - 2 * (threadIdx.x & 3);  // that the first row sees
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    const int key = 8 * (i >> 2) + (i & 1) - ((i & 2) >> 1);
    scores[i] = key <= last ? scores[i] : -INFINITY;
  }
}

// Whether a score of the warp exceeds its row's limit. Then the bases of such rows are raised, and
// shrink is what the output so far is multiplied by (1 where nothing changes).
template <int kKeys>
__device__ __forceinline__ bool raise_bases(const float (&scores)[kKeys / 2], WideRows& rows,
                                            float (&shrink)[2], float scale) {
  int most[2] = {INT_MIN, INT_MIN};
#pragma unroll
  for (int i = 0; i < kKeys / 2; i += 2) {
    int& row = most[(i & 2) >> 1];
    row = most_bits(row, scores[i], scores[i + 1]);
  }
  if (!__any_sync(0xffffffffu, most[0] >= rows.limit[0] || most[1] >= rows.limit[1])) return false;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float higher = scores[2 * row];
#pragma unroll
    for (int i = 2 * row; i < kKeys / 2; i += 4) {
      higher = fmaxf(higher, fmaxf(scores[i], scores[i + 1]));
    }
    higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 1));
    higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 2));
    const int limit = rows.limit[row];
    const bool exceeds = limit == kAlways || higher >= __int_as_float(limit);
    const float base = exceeds ? fmaxf(rows.base[row], ceilf(higher * scale)) : rows.base[row];
    rows.minus[row] = base == -INFINITY ? 0.f : -base;
    shrink[row] = exp2_fast(rows.base[row] + rows.minus[row]);
    rows.total[row] *= shrink[row];
    rows.base[row] = base;
    const float next_limit = fmaxf(__fdividef(base + kSlack, scale), 0.f);
    rows.limit[row] = base > kLeastBase ? __float_as_int(next_limit) : kAlways;
  }
  return true;
}

// The 16 scores of each row from key 16 * `part` of the block on become weights.
template <int kKeys>
__device__ __forceinline__ void make_weights(float (&scores)[kKeys / 2], int part,
                                             const WideRows& rows, float (&sum)[2], float scale) {
#pragma unroll
  for (int i = 8 * part; i < 8 * part + 8; i += 2) {
    const int row = (i & 2) >> 1;
    scores[i] = exp2_here(__fmaf_rn(scores[i], scale, rows.minus[row]));
    scores[i + 1] = exp2_here(__fmaf_rn(scores[i + 1], scale, rows.minus[row]));
    sum[row] += scores[i] + scores[i + 1];
  }
}

template <bool kIsEdge>
struct WideEdges {
  static constexpr bool kEdge = kIsEdge;
};

// Block i of the walk: `scores` become `weights`, those of the block before are added to `out`
// (kBefore), `next` becomes the scores of the block behind (kNext). kEdge: some keys are not seen.
template <class Memory, bool kEdge, bool kBefore, bool kNext, int kKeys>
__device__ __forceinline__ void wide_step(float (&scores)[kKeys / 2], float (&next)[kKeys / 2],
                                          float (&out)[32], uint32_t (&weights)[kKeys / 16][4],
                                          WideRows& rows, const Memory& memory,
                                          const WidePlace& place, int i) {
  constexpr int kStages = Memory::kStages, kParts = kKeys / 16;
  const int before = (i + kStages - 1) % kStages, later = (i + 1) % kStages;
  if (kBefore) barrier_wait(memory.values_full(before), (i - 1) / kStages & 1);
  if (kNext) barrier_wait(memory.keys_full(later), (i + 1) / kStages & 1);
  wgmma_fence();
  if constexpr (kBefore) {
    start_output<kKeys>(out, weights, memory.values + before * kKeys * kRowBytes, 0);
  }
  float shrink[2], sum[2] = {0.f, 0.f};
  if (kEdge) hide_keys<kKeys>(scores, place, (place.last - i) * kKeys);
  const bool raised = raise_bases<kKeys>(scores, rows, shrink, place.scale);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (kNext && part == kParts / 2) {
      start_scores<kKeys>(next, place.query,
                          swizzled_rows(memory.keys + later * kKeys * kRowBytes));
    }
    make_weights<kKeys>(scores, part, rows, sum, place.scale);
  }
  rows.total[0] += sum[0];
  rows.total[1] += sum[1];
  finish_before_wait(rows.total[0] + rows.total[1]);
  if constexpr (kBefore) {
    wgmma_wait<kNext ? 1 : 0>();
    wgmma_settle(out);
    wgmma_release(weights);
    if (place.leads) barrier_arrive(memory.values_free(before));
    if (raised) rescale(out, shrink);
  }
  pack_weights<kKeys>(scores, weights);
  if constexpr (kNext) {
    wgmma_wait<0>();
    wgmma_settle(next);
    if (place.leads) barrier_arrive(memory.keys_free(later));
  }
}

// All `count` blocks, as steps from `first` on, from block place.last - first down: `out` is the
// sum of values by weights relative to rows.base. Edges are blocks whose keys do not all lie before
// `begin`, the position of the tile's first query. The steps that are left behind the pairs come in
// forms of their own: a block without keys to make their number even costs as much as one with.
template <class Memory, int kKeys>
__device__ __forceinline__ void wide_walk(float (&out)[32], WideRows& rows, const Memory& memory,
                                          const WidePlace& place, int first, int count, int begin,
                                          uint32_t query_free) {
  constexpr int kStages = Memory::kStages;
  float even[kKeys / 2], odd[kKeys / 2];
  uint32_t weights[kKeys / 16][4];
  const int end = first + count;
  int i = first;
  const auto edge = [&] { return (place.last - i + 1) * kKeys > begin; };
  const auto queries_read = [&] {
    if (place.leads) barrier_arrive(query_free);
  };
  barrier_wait(memory.keys_full(i % kStages), i / kStages & 1);
  wgmma_fence();
  start_scores<kKeys>(even, place.query,
                      swizzled_rows(memory.keys + i % kStages * kKeys * kRowBytes));
  wgmma_wait<0>();
  wgmma_settle(even);
  if (place.leads) barrier_arrive(memory.keys_free(i % kStages));
  if (count == 1) {
    queries_read();
    wide_step<Memory, true, false, false, kKeys>(even, odd, out, weights, rows, memory, place, i);
  } else {
    wide_step<Memory, true, false, true, kKeys>(even, odd, out, weights, rows, memory, place, i);
    ++i;
    for (; i + 2 < end && edge(); i += 2) {
      wide_step<Memory, true, true, true, kKeys>(odd, even, out, weights, rows, memory, place, i);
      wide_step<Memory, true, true, true, kKeys>(even, odd, out, weights, rows, memory, place,
                                                 i + 1);
    }
    for (; i + 2 < end; i += 2) {
      wide_step<Memory, false, true, true, kKeys>(odd, even, out, weights, rows, memory, place, i);
      wide_step<Memory, false, true, true, kKeys>(even, odd, out, weights, rows, memory, place,
                                                  i + 1);
    }
    // One or two are left.
    const auto last_steps = [&](auto edges) {
      constexpr bool kEdge = decltype(edges)::kEdge;
      if (i + 2 == end) {
        wide_step<Memory, kEdge, true, true, kKeys>(odd, even, out, weights, rows, memory, place,
                                                    i);
        queries_read();
        ++i;
        wide_step<Memory, kEdge, true, false, kKeys>(even, odd, out, weights, rows, memory, place,
                                                     i);
      } else {
        queries_read();
        wide_step<Memory, kEdge, true, false, kKeys>(odd, even, out, weights, rows, memory, place,
                                                     i);
      }
    };
    if (edge()) {
      last_steps(WideEdges<true>());
    } else {
      last_steps(WideEdges<false>());
    }
  }
  const int stage = i % kStages;
  barrier_wait(memory.values_full(stage), i / kStages & 1);
  wgmma_fence();
  start_output<kKeys>(out, weights, memory.values + stage * kKeys * kRowBytes, 0);
  wgmma_wait<0>();
  wgmma_settle(out);
  if (place.leads) barrier_arrive(memory.values_free(stage));
}

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_PREFILL_WIDE_CUH_
