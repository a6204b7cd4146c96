// Loads, stores, copies and fences that C++ cannot spell.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mok::ptx {

// Keeps the compiler from moving loads and stores across.
__device__ __forceinline__ void order() { asm volatile("" ::: "memory"); }

// a ^ b, computed where it stands: kept in registers for a whole kernel, such values take those that are short.
__device__ __forceinline__ uint32_t xor_here(uint32_t a, uint32_t b) {
  uint32_t result;
  asm volatile("xor.b32 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

__device__ __forceinline__ int load_acquire(const int* p) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(int* p, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

__device__ __forceinline__ void add_release(int* p, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// The same between GPUs.
__device__ __forceinline__ int load_acquire_system(const int* p) {
  int value;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_system(int* p, int value) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Orders what this thread has written, or has seen written, before what it writes next, for all GPUs.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value)::"memory");
  return value;
}

// 16 bytes that are read once.
__device__ __forceinline__ uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// The same if `there`, else zeros.
__device__ __forceinline__ uint4 load_once_if(bool there, const void* p) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.u32 there, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\n"
      "mov.u32 %3, 0;\n@there ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(uint32_t(there))
      : "memory");
  return v;
}

__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint2 load_shared_pair(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_pair(uint32_t address, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

// The low half of `v`.
__device__ __forceinline__ void store_shared_half(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(v)) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8 and holds, of each
// matrix, the elements (l / 4, 2 * (l % 4)) and (l / 4, 2 * (l % 4) + 1).
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t* m) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void store_flipped_matrices(uint32_t address, const uint32_t* m) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t* m) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// Asynchronous copy of 16 bytes, of which only the first `bytes` are read; the rest become zero.
__device__ __forceinline__ void copy16(uint32_t to, uint64_t from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy16(uint32_t to, const void* from, uint32_t bytes) {
  copy16(to, reinterpret_cast<uint64_t>(from), bytes);
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` groups of this thread's copies are unfinished.
template <int kPending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Copies the map's box at element (x, y, z) to shared memory; parts outside the tensor become zero.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// The same in five dimensions.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int x, int y, int z, int v, int w,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(v), "r"(w), "r"(barrier)
      : "memory");
}

// The other way: writes the box from shared memory, as far as it lies inside the tensor, on the copy engine's own time.
// It is the first to leave the L2, in favour of what the kernel still reads.
__device__ __forceinline__ void send_box(const CUtensorMap* map, uint32_t from, int x, int y, int z, int w) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], policy;\n"
      "}\n" ::"l"(map),
      "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// The same, but adds to what is there, rounded to the tensor's dtype.
__device__ __forceinline__ void add_box(const CUtensorMap* map, uint32_t from, int x, int y, int z, int w) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
__device__ __forceinline__ void sends_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until what this thread has sent is read: its shared memory can be written again.
__device__ __forceinline__ void sends_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Orders shared memory written through ordinary instructions (cp.async among them) before reads by the tensor cores and
// the copy engine.
__device__ __forceinline__ void fence_shared_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders global memory written through ordinary instructions before the copy engine's reads: on the writing and on the
// reading side.
__device__ __forceinline__ void fence_for_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace mok::ptx
