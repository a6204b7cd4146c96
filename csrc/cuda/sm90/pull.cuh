// Reading tokens from the other ranks, beside the product that needs them: see exchange.h.
#pragma once

#include "peers.cuh"

namespace mok::sm90 {

constexpr int kInFlight = 8;  // 16-byte chunks of a lane

// A warp copies `chunks` of 16 bytes.
__device__ __forceinline__ void copy_row(uint4* to, const uint4* from, int chunks) {
  const int lane = threadIdx.x % 32;
  for (int first = lane; first < chunks; first += 32 * kInFlight) {
    uint4 part[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + 32 * i < chunks) part[i] = ptx::load_once(from + first + 32 * i);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + 32 * i < chunks) to[first + 32 * i] = part[i];
  }
}

// One warp's part of the work: the tokens of every `warps`-th chunk of sorted rows from the `warp`-th on. A token is
// read for the first of its rows; those of this rank are in their place already. In order of the rows, which is the
// order in which the product takes them.
__device__ inline void pull_rows(const Pull& pull, const Plan& plan, int warp, int warps) {
  const Group& g = pull.group;
  const int lane = threadIdx.x % 32, top_k = pull.top_k, capacity = int(g.capacity), chunks = pull.hidden / 8;
  const int count = pull.experts ? __ldg(plan.offsets + pull.experts - 1) : 0;
  const bool failed = has_failed(g);
  for (int chunk = warp; chunk * Plan::kChunk < count; chunk += warps) {
    const int row = chunk * Plan::kChunk + lane;
    int token = -1;
    if (row < count && !failed) {
      token = plan.token[row];
      if (token / capacity == g.rank) token = -1;
    }
    if (token >= 0) {
      for (int k = 0; k < top_k; ++k) {
        const int other = plan.position[static_cast<int64_t>(token) * top_k + k];
        if (other >= 0 && other < row) {
          token = -1;
          break;
        }
      }
    }
    for (unsigned wanted = __ballot_sync(~0u, token >= 0); wanted; wanted &= wanted - 1) {
      const int t = __shfl_sync(~0u, token, __ffs(wanted) - 1), source = t / capacity;
      copy_row(static_cast<uint4*>(pull.rows) + static_cast<int64_t>(t) * chunks,
               in_window<uint4>(g, source, g.window.rows) + static_cast<int64_t>(t - source * capacity) * chunks,
               chunks);
    }
    __syncwarp();
    if (lane == 0) ptx::store_release(plan.landed + chunk, 1);
    __syncwarp();
  }
}

// Whether the tokens of the sorted rows up to `row` have landed, or will have once this returns if `wait` is set.
// Called by a whole warp, which has seen the first `landed` chunks so far.
template <class Ring>
__device__ __forceinline__ bool has_landed(const Plan& plan, int row, int& landed, bool wait, const Ring& ring) {
  const int wanted = row < 0 ? 0 : row / Plan::kChunk + 1, lane = threadIdx.x % 32;
  while (landed < wanted) {
    const int mine = landed + lane;
    const bool there = mine >= wanted || ptx::load_acquire(plan.landed + mine) != 0;
    const unsigned missing = __ballot_sync(~0u, !there);
    landed = missing ? landed + __ffs(missing) - 1 : min(landed + 32, wanted);
    if (missing && !wait) return false;
    if (missing && !ring.wait_landed(plan.landed + landed)) return true;
  }
  __syncwarp();
  return true;
}

}  // namespace mok::sm90
