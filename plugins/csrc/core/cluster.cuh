// What the blocks of a cluster need of each other.
#ifndef GPTOSS_TRT_CORE_CLUSTER_CUH_
#define GPTOSS_TRT_CORE_CLUSTER_CUH_

#include <cstdint>

namespace gptoss {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster; their writes to shared memory before it are visible behind it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// The address in block `rank` of the cluster of what is at `address` here.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// At a barrier of a block of the cluster, for what has been read; `release.cluster`, which writes
// would need, costs a fence of the whole memory.
__device__ __forceinline__ void cluster_arrive(uint32_t mapped_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped_barrier) : "memory");
}

// `count` arrivals of one thread.
__device__ __forceinline__ void cluster_arrive(uint32_t mapped_barrier, uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], %1;" ::"r"(mapped_barrier), "r"(count)
               : "memory");
}

__device__ __forceinline__ float4 cluster_load(uint32_t mapped) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(mapped)
               : "memory");
  return value;
}

__device__ __forceinline__ void cluster_store(uint32_t mapped, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(mapped), "f"(value) : "memory");
}

__device__ __forceinline__ void cluster_store(uint32_t mapped, int value) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(mapped), "r"(value) : "memory");
}

// A word that completes four bytes on a barrier of the same block.
__device__ __forceinline__ void cluster_store_async(uint32_t mapped, int value,
                                                    uint32_t mapped_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(mapped),
      "r"(value), "r"(mapped_barrier)
      : "memory");
}

}  // namespace gptoss

#endif  // GPTOSS_TRT_CORE_CLUSTER_CUH_
