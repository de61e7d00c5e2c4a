// Prefill's inner loop with two sets of scores: while a block's scores become weights, the tensor
// cores add the block before and make the scores of the next.
//
// Few instructions are what counts: with fewer of them the loop is faster by as much, and at the
// card's power limit too. So weights are relative to a base of each row that lies far above its
// first scores, and nobody looks for a maximum afterwards: whether a weight reaches 2 shows in one
// bit of all of them, and only then the block's weights are made again, with a higher base. Floats
// do not mind, and a base is a whole number (log2), so raising it multiplies by powers of two,
// exactly. Sums of weights come out of the product with the values, from a column of ones. Whether
// a base is raised depends on the row's own scores alone.
#ifndef GPTOSS_TRT_ATTENTION_PREFILL_WIDE_CUH_
#define GPTOSS_TRT_ATTENTION_PREFILL_WIDE_CUH_

#include <cstdint>

#include "attention/params.h"
#include "attention/prefill_products.cuh"
#include "attention/warp_mma.cuh"
#include "attention/wgmma_bf16.cuh"
#include "core/ptx.cuh"

namespace gptoss::attention {

// log2: what a row's largest weight is below 1 when its base is set. As much is left for later
// ones, and what is smaller by 2^-kAbove than the largest does not count.
constexpr float kAbove = 60.f;
constexpr uint32_t kTwoOrMore = 0x40004000;  // a bit that weights (and infinity) have from 2 on
constexpr int kWideOutputs = 36;             // 64 columns and the sum

// Two rows of a thread, of two neighbouring queries.
struct WideRows {
  float base[2] = {-INFINITY, -INFINITY};  // log2, a whole number; -inf: no key so far
  float minus[2] = {0.f, 0.f};             // -base, or 0 without a key
};

// What a step needs of the block and of its warp.
struct WidePlace {
  uint64_t query;       // descriptor
  uint32_t query_rows;  // address of the warp's 16
  float scale;          // log2
  int position;         // of the first row's query
  bool never;           // false, which the compiler does not know
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

// Raises the bases of rows with a score that weighs 2 or more, or without a base. shrink is what
// the output so far is multiplied by (1 where nothing changes).
template <int kKeys>
__device__ __forceinline__ void raise_bases(const float (&scores)[kKeys / 2], WideRows& rows,
                                            float (&shrink)[2], bool (&raised)[2], float scale) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float higher = scores[2 * row];
#pragma unroll
    for (int i = 2 * row; i < kKeys / 2; i += 4) {
      higher = fmaxf(higher, fmaxf(scores[i], scores[i + 1]));
    }
    higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 1));
    higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 2));
    raised[row] = rows.base[row] == -INFINITY || __fmaf_rn(higher, scale, rows.minus[row]) >= 1.f;
    const float base = raised[row] ? ceilf(higher * scale) + kAbove : rows.base[row];
    rows.minus[row] = base == -INFINITY ? 0.f : -base;
    shrink[row] = exp2_fast(rows.base[row] + rows.minus[row]);
    rows.base[row] = base;
  }
}

template <int kKeys>
__device__ __forceinline__ void make_weights(float (&scores)[kKeys / 2], const WideRows& rows,
                                             float scale) {
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    scores[i] = exp2_here(__fmaf_rn(scores[i], scale, rows.minus[(i & 2) >> 1]));
  }
}

// The scores of a warp's 16 rows from what still lies in shared memory, without WGMMA: a warp does
// this for itself.
template <int kKeys>
__device__ __forceinline__ void scores_again(float (&scores)[kKeys / 2], uint32_t query_rows,
                                             uint32_t keys) {
  const int lane = threadIdx.x & 31, turn = lane & 7;  // of the swizzle
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) scores[i] = 0.f;
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    uint32_t a[4];
    load_matrices(query_rows + (lane & 15) * kRowBytes + ((2 * k + (lane >> 4)) ^ turn) * 16, a);
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      const int key = 16 * j + (lane >> 4) * 8 + turn;
      uint32_t b[4];
      load_matrices(keys + key * kRowBytes + ((2 * k + (lane >> 3 & 1)) ^ turn) * 16, b);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float (&d)[4] = *reinterpret_cast<float (*)[4]>(&scores[8 * j + 4 * half]);
        mma_bf16(d, a[0], a[1], a[2], a[3], b[2 * half], b[2 * half + 1]);
      }
    }
  }
}

// A weight of the warp reached 2: weights of such rows are made again, relative to a higher base.
// Nothing may be in flight.
template <int kKeys>
__device__ __forceinline__ void weights_again(float (&scores)[kKeys / 2],
                                              float (&out)[kWideOutputs],
                                              uint32_t (&weights)[kKeys / 16][4], WideRows& rows,
                                              const WidePlace& place, uint32_t keys) {
  float shrink[2];
  bool raised[2];
  scores_again<kKeys>(scores, place.query_rows, keys);
  raise_bases<kKeys>(scores, rows, shrink, raised, place.scale);
  rescale(out, shrink);
#pragma unroll
  for (int i = 0; i < kKeys / 2; i += 2) {
    const int row = (i & 2) >> 1;
    const float low = exp2_fast(__fmaf_rn(scores[i], place.scale, rows.minus[row]));
    const float high = exp2_fast(__fmaf_rn(scores[i + 1], place.scale, rows.minus[row]));
    uint32_t& pair = weights[i / 8][i / 2 % 4];
    pair = raised[row] ? pack_bf16(low, high) : pair;
  }
}

// A branch that is never taken: the assembler starts what stands before it before what stands
// behind.
__device__ __forceinline__ void start_before(bool never) {
  if (never) __nanosleep(32);
}

// `block`, the first (kOdd: second) of pair `pair`: its `scores` become `weights`, those of the
// block before are added to `out` (kBefore), `next` becomes the scores of the block behind (kNext).
// kEdge: some keys are not seen, or a row has no base.
template <class Memory, bool kEdge, bool kBefore, bool kNext, int kOdd, int kKeys>
__device__ __forceinline__ void wide_step(float (&scores)[kKeys / 2], float (&next)[kKeys / 2],
                                          float (&out)[kWideOutputs],
                                          uint32_t (&weights)[kKeys / 16][4], WideRows& rows,
                                          const Memory& memory, const WidePlace& place, int pair,
                                          int block) {
  wgmma_fence();
  if constexpr (kBefore) {
    start_output<kKeys>(out, weights, memory.value_rows(kOdd ? pair : pair - 1, 1 - kOdd));
  }
  if constexpr (kNext && kOdd) memory.wait_full(pair + 1);
  if constexpr (kNext && !kOdd) start_before(place.never);
  float shrink[2];
  bool raised[2];
  if constexpr (kEdge) {
    hide_keys<kKeys>(scores, place, block * kKeys);
    raise_bases<kKeys>(scores, rows, shrink, raised, place.scale);
  }
  // The assembler spreads these four over the exponentials.
  if constexpr (kNext) {
    start_scores<kKeys>(next, place.query, memory.key_rows(kOdd ? pair + 1 : pair, 1 - kOdd));
  }
  make_weights<kKeys>(scores, rows, place.scale);
  uint32_t fresh[kKeys / 16][4], bits = 0;
  pack_weights<kKeys>(scores, fresh);
#pragma unroll
  for (int word = 0; word < kKeys / 4; ++word) bits |= fresh[word / 4][word % 4];
  const bool again = __any_sync(0xffffffffu, (bits & kTwoOrMore) != 0);
  wgmma_wait<0>();
  if constexpr (kBefore) {
    wgmma_settle(out);
    wgmma_release(weights);
    if (!kOdd && elect_lane()) barrier_arrive(memory.free(pair - 1));
    if constexpr (kEdge) rescale(out, shrink);
  }
#pragma unroll
  for (int word = 0; word < kKeys / 4; ++word) {
    weights[word / 4][word % 4] = fresh[word / 4][word % 4];
  }
  if constexpr (kNext) wgmma_settle(next);
  if constexpr (!kEdge) {
    if (again) weights_again<kKeys>(scores, out, weights, rows, place, memory.keys(pair, kOdd));
  }
}

template <bool kIsEdge>
struct WideEdges {
  static constexpr bool kEdge = kIsEdge;
};

// All `count` blocks from `last` down, in pairs from `pair` on: `out` is the sum of values by
// weights relative to rows.base, and that of the weights. Edges are blocks whose keys do not all
// lie before `begin`, the position of the tile's first query. The steps that are left behind the
// pairs come in forms of their own: a block without keys to make their number even costs as much as
// one with.
template <class Memory, int kKeys>
__device__ __forceinline__ void wide_walk(float (&out)[kWideOutputs], WideRows& rows,
                                          const Memory& memory, const WidePlace& place, int pair,
                                          int last, int count, int begin, uint32_t query_free) {
  float even[kKeys / 2], odd[kKeys / 2];
  uint32_t weights[kKeys / 16][4];
  int left = count;  // blocks
  const auto edge = [&](int block) { return (block + 1) * kKeys > begin; };
  memory.wait_full(pair);
  wgmma_fence();
  start_scores<kKeys>(even, place.query, memory.key_rows(pair, 0));
  wgmma_wait<0>();
  wgmma_settle(even);
  int half = 0;
  if (count == 1) {
    wide_step<Memory, true, false, false, 0, kKeys>(even, odd, out, weights, rows, memory, place,
                                                    pair, last);
  } else {
    wide_step<Memory, true, false, true, 0, kKeys>(even, odd, out, weights, rows, memory, place,
                                                   pair, last);
    --left, --last;
    for (; left > 2 && edge(last); left -= 2, last -= 2, ++pair) {
      wide_step<Memory, true, true, true, 1, kKeys>(odd, even, out, weights, rows, memory, place,
                                                    pair, last);
      wide_step<Memory, true, true, true, 0, kKeys>(even, odd, out, weights, rows, memory, place,
                                                    pair + 1, last - 1);
    }
    for (; left > 2; left -= 2, last -= 2, ++pair) {
      wide_step<Memory, false, true, true, 1, kKeys>(odd, even, out, weights, rows, memory, place,
                                                     pair, last);
      wide_step<Memory, false, true, true, 0, kKeys>(even, odd, out, weights, rows, memory, place,
                                                     pair + 1, last - 1);
    }
    // One or two are left.
    const auto last_steps = [&](auto edges) {
      constexpr bool kEdge = decltype(edges)::kEdge;
      if (left == 2) {
        wide_step<Memory, kEdge, true, true, 1, kKeys>(odd, even, out, weights, rows, memory, place,
                                                       pair, last);
        ++pair, --last;
        wide_step<Memory, kEdge, true, false, 0, kKeys>(even, odd, out, weights, rows, memory,
                                                        place, pair, last);
      } else {
        half = 1;
        wide_step<Memory, kEdge, true, false, 1, kKeys>(odd, even, out, weights, rows, memory,
                                                        place, pair, last);
      }
    };
    if (edge(last)) {
      last_steps(WideEdges<true>());
    } else {
      last_steps(WideEdges<false>());
    }
  }
  if (elect_lane()) barrier_arrive(query_free);
  wgmma_fence();
  start_output<kKeys>(out, weights, memory.value_rows(pair, half));
  wgmma_wait<0>();
  wgmma_settle(out);
  if (elect_lane()) barrier_arrive(memory.free(pair));
}

}  // namespace gptoss::attention

#endif  // GPTOSS_TRT_ATTENTION_PREFILL_WIDE_CUH_
