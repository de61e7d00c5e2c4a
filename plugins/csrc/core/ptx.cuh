// The Hopper instructions that the kernels use, one function each: barriers in shared memory, bulk
// copies, WGMMA on e4m3, dependent launch. Addresses of shared memory are 32-bit
// (`shared_address`).
#ifndef GPTOSS_TRT_CORE_PTX_CUH_
#define GPTOSS_TRT_CORE_PTX_CUH_

#include <cstdint>

namespace gptoss {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- barriers -------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes freshly initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Returns once the phase with this parity is complete. A fresh barrier counts as having completed
// a phase of parity 1.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni finished;\n"
      "bra.uni again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// True in one lane of a warp whose lanes are all here. Only by this does the compiler know that one
// thread copies: otherwise it puts every bulk or tensor copy in a loop over the lanes.
__device__ __forceinline__ bool elect_lane() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      "elect.sync _|chosen, 0xFFFFFFFF;\n"
      "selp.b32 %0, 1, 0, chosen;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// Barrier `id` (1 to 15; 0 is __syncthreads) among `threads` threads of the block.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts the calling warp at barrier `id` without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- copies and shared memory ---------------------------------------------------------------

// Device to shared memory by the copy engine; addresses and bytes are multiples of 16. Completes on
// `barrier`.
__device__ __forceinline__ void bulk_copy(uint32_t target, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// bulk_copy of what is read once: other lines stay in the second-level cache rather than these. The
// policy is what createpolicy.fractional.L2::evict_first gives for all lines.
__device__ __forceinline__ void bulk_copy_once(uint32_t target, const void* source, uint32_t bytes,
                                               uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "mov.b64 policy, 0x12F0000000000000;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], policy;\n"
      "}\n" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Asks for `bytes`, a multiple of 16, to come into the second-level cache and to stay there rather
// than other lines. The policy is what createpolicy.fractional.L2::evict_last gives for all lines.
__device__ __forceinline__ void prefetch_to_keep(const void* source, uint32_t bytes) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "mov.b64 policy, 0x14F0000000000000;\n"
      "cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, policy;\n"
      "}\n" ::"l"(source),
      "r"(bytes)
      : "memory");
}

// Four bytes from device to shared memory without waiting; zeros when not `present`.
__device__ __forceinline__ void copy_word_async(uint32_t target, const void* source, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source),
               "r"(present ? 4 : 0)
               : "memory");
}

// Waits for all of the calling thread's copy_word_async.
__device__ __forceinline__ void copies_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// `bytes`, a multiple of 16, from shared to device memory; part of the calling thread's next
// bulk_stores_commit.
__device__ __forceinline__ void bulk_store(void* target, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_stores_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits for all that the calling thread has committed.
__device__ __forceinline__ void bulk_stores_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Waits until all that the calling thread has committed has been read from shared memory.
__device__ __forceinline__ void bulk_stores_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// `bytes`, a multiple of 16, to the second-level cache.
__device__ __forceinline__ void prefetch_to_l2(const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// The 128 bytes around `source` to the second-level cache.
__device__ __forceinline__ void prefetch_line(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source) : "memory");
}

// As one instruction: the compiler makes four of some stores of a uint4.
__device__ __forceinline__ void store_global_u128(void* target, const uint32_t (&words)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

__device__ __forceinline__ void store_shared_u128(uint32_t address, uint32_t x, uint32_t y,
                                                  uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z),
               "r"(w)
               : "memory");
}

__device__ __forceinline__ void store_shared_f32(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// Orders ordinary writes to shared memory before reads by WGMMA or the copy engine.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ uint32_t load_shared_u8(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ int32_t load_shared_s32(uint32_t address) {
  int32_t value;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ float load_shared_f32(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint2 load_shared_u64(uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ uint4 load_shared_u128(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ float2 load_shared_f64(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ float4 load_shared_f128(uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// Four matrices of 8 rows x 16 bytes: lane 8i + r gives the address of row r of matrix i, and gets
// word lane % 4 of row lane / 4 of each.
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// The way back of load_matrices.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Bytes of {low, high} chosen by the low four nibbles of `selectors`. Opaque to the compiler, which
// otherwise masks the halves of `selectors` apart and spends an operation more on each.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
  uint32_t value;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(value) : "r"(low), "r"(high), "r"(selectors));
  return value;
}

// 1 / value to about an ulp, for normal results.
__device__ __forceinline__ float approximate_reciprocal(float value) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(value));
  return reciprocal;
}

// A word of shared memory that another warp writes while this one runs.
__device__ __forceinline__ int load_volatile(const int* word) {
  return *static_cast<const volatile int*>(word);
}
__device__ __forceinline__ void store_volatile(int* word, int value) {
  *static_cast<volatile int*>(word) = value;
}

// The value, kept in a register: the compiler would rather compute it again in every turn of a
// loop.
__device__ __forceinline__ uint32_t keep_in_register(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ void keep_in_registers(uint4& value) {
  asm volatile("" : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)::"memory");
}

// Registers of each thread from here on; executed by all warps of a warpgroup. `release` gives
// registers back to the block, `claim` waits until it can have as many.
template <int kRegisters>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_claim() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- dependent launch -----------------------------------------------------------------------

// Waits until the kernel ahead in the stream has ended and its writes are visible. Returns at once
// in a kernel that was launched the ordinary way.
__device__ __forceinline__ void dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void dependents_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- WGMMA ----------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until no more than the last `kRunning` groups that were committed still run.
template <int kRunning>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kRunning) : "memory");
}
__device__ __forceinline__ void wgmma_wait_all() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Descriptor of a K-major operand in shared memory without swizzle: 8 x 16-byte core matrices of
// 128 contiguous bytes; `k_stride` bytes between neighbours in K, `n_stride` between groups of 8
// rows. Two words: the low one moves with the address (by bytes / 16), the high one is constant.
struct WgmmaDescriptor {
  uint32_t low;
  uint32_t high;

  __device__ __forceinline__ WgmmaDescriptor(uint32_t address, uint32_t k_stride, uint32_t n_stride)
      : low(keep_in_register(((address & 0x3FFFF) >> 4) | (k_stride >> 4 << 16))),
        high(n_stride >> 4) {}

  __device__ __forceinline__ uint64_t moved(uint32_t units) const {
    return static_cast<uint64_t>(high) << 32 | (low + units);
  }
};

// The same descriptor as one value, which the compiler may keep in uniform registers where the
// address is the same for the whole warp.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t k_stride,
                                                     uint32_t n_stride) {
  return static_cast<uint64_t>(n_stride >> 4) << 32 |
         (((address & 0x3FFFF) >> 4) | (k_stride >> 4 << 16));
}

// A-fragments are in their registers from here on: keeps the compiler from sinking their making
// below wgmma_fence, where it would have to serialise the instructions.
__device__ __forceinline__ void wgmma_operand_ready(uint32_t (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}
template <int kInstructions>
__device__ __forceinline__ void wgmma_operands_ready(uint32_t (&a)[kInstructions][4]) {
#pragma unroll
  for (int i = 0; i < kInstructions; ++i) wgmma_operand_ready(a[i]);
}

// The accumulators' values are there: keeps the compiler from reading them ahead of wgmma_wait_all.
template <int kCount>
__device__ __forceinline__ void wgmma_settle(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d[64, kTokens] = a[64, 32] b[kTokens, 32]^T (+ d when `accumulate` is not 0) in e4m3: a in
// registers, b by descriptor. Thread fragments, with lane = 4g + t: d[4j + c] is row g (c < 2) or
// g + 8 of the warp's 16, column 8j + 2t + (c & 1); a[0], a[1] are columns 4t..4t + 3 of rows g and
// g + 8, a[2], a[3] columns 16 + 4t.. of the same rows.
template <int kTokens>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[kTokens / 2], const uint32_t (&a)[4],
                                           uint64_t b, int accumulate);

template <>
__device__ __forceinline__ void wgmma_e4m3<8>(float (&d)[4], const uint32_t (&a)[4], uint64_t b,
                                              int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %9, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3"
      "}, {%4, %5, %6, %7}, %8, accumulate, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

template <>
__device__ __forceinline__ void wgmma_e4m3<16>(float (&d)[8], const uint32_t (&a)[4], uint64_t b,
                                               int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, {%8, %9, %10, %11}, %12, accumulate, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

template <>
__device__ __forceinline__ void wgmma_e4m3<24>(float (&d)[12], const uint32_t (&a)[4], uint64_t b,
                                               int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %17, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n24k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11"
      "}, {%12, %13, %14, %15}, %16, accumulate, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

template <>
__device__ __forceinline__ void wgmma_e4m3<32>(float (&d)[16], const uint32_t (&a)[4], uint64_t b,
                                               int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, accumulate, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

}  // namespace gptoss

#endif  // GPTOSS_TRT_CORE_PTX_CUH_
