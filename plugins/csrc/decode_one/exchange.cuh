// How blocks of threads hand vectors to each other within one launch: packets of four bytes and the
// number of the layer that they belong to, written and read as one 64-bit word. A reader asks until
// the number is right, so there is no barrier, no fence and no second trip for the data.
//
// Invariant: a packet is overwritten only by a block that knows all its readers to be done. All
// blocks have rows of `down`, which each sends when it has read all else of its layer and the rows
// of the layer before; so whoever has seen the rows of layer l may write all mailboxes of layer l +
// 1, the rows' own but for those of layer l itself: rows have two mailboxes, by turns.
#ifndef GPTOSS_TRT_DECODE_ONE_EXCHANGE_CUH_
#define GPTOSS_TRT_DECODE_ONE_EXCHANGE_CUH_

#include <cstdint>

#include "decode_one/params.h"

namespace gptoss::one {

// Addresses are found anew where they are used: found once for all layers, there would be more of
// them than registers.
__device__ __forceinline__ uint64_t* mailbox_of(const Params& p, int first_packet) {
  uint64_t* packets = p.mailbox;
  asm volatile("" : "+l"(packets));
  return packets + first_packet;
}

constexpr int kPatience =
    1 << 22;  // turns of some 700 ns: a lost block ends the launch with a trap

__device__ __forceinline__ void send(uint64_t* packet, uint32_t value, uint32_t flag) {
  const uint64_t word = static_cast<uint64_t>(flag) << 32 | value;
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(packet), "l"(word) : "memory");
}

// Where a reader's packets lie: `kCount` runs of two, or of one, `stride` packets apart.
__device__ __forceinline__ ulonglong2 peek_pair(const uint64_t* packets) {
  ulonglong2 pair;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(pair.x), "=l"(pair.y)
               : "l"(packets)
               : "memory");
  return pair;
}
__device__ __forceinline__ uint64_t peek(const uint64_t* packet) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(packet) : "memory");
  return word;
}

__device__ __forceinline__ void send_pair(uint64_t* packets, uint32_t first, uint32_t second,
                                          uint32_t flag) {
  const uint64_t high = static_cast<uint64_t>(flag) << 32;
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(packets), "l"(high | first),
               "l"(high | second)
               : "memory");
}

__device__ __forceinline__ uint32_t flag_of(uint64_t word) {
  return static_cast<uint32_t>(word >> 32);
}

// Ends the launch when a block is lost.
class Patience {
 public:
  __device__ __forceinline__ void turn() {
    if (++turns_ > kPatience) __trap();
  }

 private:
  int turns_ = 0;
};

// The values of kCount packets, once all of them are of `flag`'s layer; `place` (i) is where the
// i-th lies.
template <int kCount, class Place>
__device__ __forceinline__ void receive_each(Place place, uint32_t flag,
                                             uint32_t (&values)[kCount]) {
  Patience patience;
  while (true) {
    uint64_t words[kCount];
    bool here = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = peek(place(i));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      here = here && flag_of(words[i]) == flag;
      values[i] = static_cast<uint32_t>(words[i]);
    }
    if (here) return;
    patience.turn();
  }
}

// The values of kCount pairs of neighbouring packets; `place` (i) is where the i-th pair lies.
// Zeros where `wanted` (i) says so: a block that waits asks for all of its packets again and again,
// which is much for the second-level cache.
template <int kCount, class Place, class Wanted>
__device__ __forceinline__ void receive_pairs(Place place, Wanted wanted, uint32_t flag,
                                              uint2 (&values)[kCount]) {
  const uint64_t nothing = static_cast<uint64_t>(flag) << 32;
  Patience patience;
  while (true) {
    ulonglong2 words[kCount];
    bool here = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      words[i] = wanted(i) ? peek_pair(place(i)) : make_ulonglong2(nothing, nothing);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      here = here && flag_of(words[i].x) == flag && flag_of(words[i].y) == flag;
      values[i] = make_uint2(static_cast<uint32_t>(words[i].x), static_cast<uint32_t>(words[i].y));
    }
    if (here) return;
    patience.turn();
  }
}

}  // namespace gptoss::one

#endif  // GPTOSS_TRT_DECODE_ONE_EXCHANGE_CUH_
