// Clusters: CTAs that run at the same time and reach into each other's shared memory.
#pragma once

#include <cstdint>

namespace mok::ptx {

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  return int(rank);
}

__device__ __forceinline__ int cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %cluster_nctarank;" : "=r"(size));
  return int(size);
}

// Every thread of every CTA arrives, then waits. What was written before an arrival is seen after the wait for it.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Writes to where `address` of this CTA's shared memory lies in the CTA of that rank.
__device__ __forceinline__ void store_remote(uint32_t address, int rank, float value) {
  asm volatile(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.f32 [there], %2;\n}" ::"r"(
          address),
      "r"(rank), "f"(value)
      : "memory");
}

}  // namespace mok::ptx
