// What kernels say to the kernels of other ranks, and how they wait for them.
#pragma once

#include "../ptx/memory.cuh"
#include "exchange.h"

namespace mok::sm90 {

template <class T>
__device__ __forceinline__ T* in_window(const Group& g, int rank, int64_t offset) {
  return reinterpret_cast<T*>(g.windows[rank] + offset);
}
__device__ __forceinline__ int* header(const Group& g, int rank) { return in_window<int>(g, rank, 0); }

// The number of the exchange that is going on.
__device__ __forceinline__ int exchange(const Group& g) { return *static_cast<volatile int*>(g.state) + 1; }

__device__ __forceinline__ bool has_failed(const Group& g) {
  return *static_cast<volatile int*>(g.state + Group::kFailed) != 0;
}

// Hands a fault, its kind and its numbers, to the host.
__device__ __forceinline__ void report(const Group& g, const int* fault) {
  if (atomicExch(g.state + Group::kFailed, 1) != 0) return;
  volatile int* const to = g.report;
  for (int i = 1; i < FaultNumbers::kCount; ++i) to[i] = ptx::load_acquire_system(fault + i);
  ptx::fence_system();
  to[0] = ptx::load_acquire_system(fault);
}

// Tells all ranks of a fault. The first one that reaches a window is the one that counts there.
__device__ inline void fail(const Group& g, Fault kind, int peer, int have, int room) {
  const int numbers[FaultNumbers::kCount] = {int(kind), g.rank, peer, exchange(g), have, room};
  for (int r = 0; r < g.ranks; ++r) {
    int* const to = header(g, (g.rank + r) % g.ranks);  // its own first
    if (atomicCAS_system(to + Window::kClaimed, 0, 1) != 0) continue;
    for (int i = 1; i < FaultNumbers::kCount; ++i) *static_cast<volatile int*>(to + Window::kFault + i) = numbers[i];
    ptx::store_release_system(to + Window::kFault, numbers[0]);
  }
  int* const own = header(g, g.rank) + Window::kFault;
  constexpr uint64_t kPatience = 1000000000;  // nanoseconds that another rank may take to write, unless it has died
  const uint64_t start = ptx::global_nanoseconds();
  while (ptx::load_acquire_system(own) == 0) {
    if (ptx::global_nanoseconds() - start < kPatience) continue;
    for (int i = 1; i < FaultNumbers::kCount; ++i) *static_cast<volatile int*>(own + i) = numbers[i];
    ptx::store_release_system(own, numbers[0]);
  }
  report(g, own);
}

// Until flag `which` of rank `peer` in this rank's window reaches the exchange's number. False once any rank has
// failed.
__device__ inline bool wait_for(const Group& g, int which, int peer) {
  int* const own = header(g, g.rank);
  const int wanted = exchange(g);
  constexpr int kLook = 256;
  uint64_t start = 0;
  for (int i = 0;; ++i) {
    if (ptx::load_acquire_system(own + which + peer) - wanted >= 0) return true;
    if (i % kLook != kLook - 1) continue;
    if (ptx::load_acquire_system(own + Window::kFault) != 0) {
      report(g, own + Window::kFault);
      return false;
    }
    const uint64_t now = ptx::global_nanoseconds();
    if (start == 0) start = now;
    if (now - start > uint64_t(g.timeout)) {
      fail(g, which == Window::kPublished ? Fault::kNotPublished : Fault::kNotFinished, peer, 0, 0);
      return false;
    }
  }
}

// All threads of a CTA wait for flag `which` of all ranks. True if all is well: then all ranks are in the same call.
__device__ inline bool wait_for_all(const Group& g, int which) {
  bool well = true;
  for (int r = threadIdx.x; r < g.ranks; r += blockDim.x) {
    if (!wait_for(g, which, r)) {
      well = false;
    } else if (which == Window::kPublished) {
      const int* const said = header(g, g.rank) + Window::kCall;
      const int own = __ldcg(said + g.rank), other = __ldcg(said + r);
      if (own != other) {
        fail(g, Fault::kOtherCall, r, own, other);
        well = false;
      }
    }
  }
  __syncthreads();  // a rank says what is wrong before it sets its flag: only now is all of it here
  const int* const fault = header(g, g.rank) + Window::kFault;
  if (threadIdx.x == 0 && ptx::load_acquire_system(fault) != 0) {
    report(g, fault);
    well = false;
  }
  return __syncthreads_and(well);
}

// Called by all threads of all CTAs once they have written; true in the CTA that comes last. What all CTAs have written
// is then visible to whoever acquires what that CTA releases. Resets the counter.
__device__ inline bool is_last(const Group& g, int counter) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::fence_system();
    last = atomicAdd(g.state + counter, 1) == int(gridDim.x) - 1;
    if (last) {
      g.state[counter] = 0;
      ptx::fence_system();
    }
  }
  __syncthreads();
  return last;
}

// Called by all threads of one CTA: tells all ranks, this one too.
__device__ inline void tell_all(const Group& g, int which) {
  const int number = exchange(g);
  for (int r = threadIdx.x; r < g.ranks; r += blockDim.x)
    ptx::store_release_system(header(g, r) + which + g.rank, number);
}

// Called by all threads of all CTAs once they have pushed: the last CTA tells all ranks, first of what went wrong here:
// `error` of the plan, null if there were no experts, and the `count` of sorted rows, if there was no `room` for them.
__device__ inline void end_pushing(const Group& g, const int* error, const int* count, int room) {
  if (!is_last(g, Group::kPushing)) return;
  if (threadIdx.x == 0 && error && *error != 0 && !has_failed(g)) {
    const bool full = *count > room;
    fail(g, full ? Fault::kRows : Fault::kStuck, g.rank, full ? *count : *error, room);
  }
  __syncthreads();
  tell_all(g, Window::kFinished);
}

}  // namespace mok::sm90
