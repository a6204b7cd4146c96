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

// The same for two rows together: one alone leaves the link idle while it is on its way.
__device__ __forceinline__ void copy_rows(uint4* const (&to)[2], const uint4* const (&from)[2], int chunks) {
  const int lane = threadIdx.x % 32;
  for (int first = lane; first < chunks; first += 32 * kInFlight) {
    uint4 part[2][kInFlight];
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        if (first + 32 * i < chunks) part[r][i] = ptx::load_once(from[r] + first + 32 * i);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        if (first + 32 * i < chunks) to[r][first + 32 * i] = part[r][i];
  }
}

// The token at a place that is not an own one's.
__device__ __forceinline__ int token_at(const Plan& plan, int place) {
  return place < plan.own_first ? place : place + plan.own_count;
}

// The place of sorted row `row`'s token if it has to be read for that row, else -1: others than those of this rank are,
// for the first of their rows.
__device__ __forceinline__ int wanted_token(const Pull& pull, const Plan& plan, int row, int count) {
  if (row >= count) return -1;
  const int place = __ldg(plan.token + row);
  if (place < 0) return -1;
  const int token = token_at(plan, place);
  bool first = true;  // no way out of the loop: its loads are under way together
#pragma unroll 8
  for (int k = 0; k < pull.top_k; ++k) {
    const int other = __ldg(plan.position + static_cast<int64_t>(token) * pull.top_k + k);
    first = first && !(other >= 0 && other < row);
  }
  return first ? place : -1;
}

// One warp's part of the work: the tokens of every `warps`-th unit of sorted rows from the `warp`-th on. In order of
// the rows, which is the order in which the product takes them; units are small, so that the first rows land first.
// `again`: those that are read again, for which nobody waits.
__device__ __forceinline__ void pull_units(const Pull& pull, const Plan& plan, int warp, int warps, bool again) {
  constexpr int kUnit = Plan::kChunk / Plan::kUnits;
  const Group& g = pull.group;
  const int lane = threadIdx.x % 32, capacity = int(g.capacity), chunks = pull.hidden / 8;
  const int count = pull.experts ? __ldg(plan.offsets + pull.experts - 1) : 0;
  const int wanted_rows = has_failed(g) ? 0 : count;  // else who waits for them is let go
  const auto look_up = [&](int unit) {
    return lane < kUnit ? wanted_token(pull, plan, unit * kUnit + lane, wanted_rows) : -1;
  };
  uint4* const to = static_cast<uint4*>(again ? pull.again : pull.rows);
  const int64_t from = again ? g.window.again : g.window.rows;
  const auto target = [&](int place) { return to + static_cast<int64_t>(place) * chunks; };
  const auto source = [&](int place) {
    const int token = token_at(plan, place), rank = token / capacity;
    return in_window<const uint4>(g, rank, from) + static_cast<int64_t>(token - rank * capacity) * chunks;
  };
  int next = look_up(warp);
  for (int unit = warp; unit * kUnit < count; unit += warps) {
    const int place = next;
    next = look_up(unit + warps);
    const auto take = [&](unsigned& wanted) {
      const int found = __shfl_sync(~0u, place, __ffs(wanted) - 1);
      wanted &= wanted - 1;
      return found;
    };
    for (unsigned wanted = __ballot_sync(~0u, place >= 0); wanted;) {
      const int first = take(wanted);
      if (wanted) {
        const int second = take(wanted);
        copy_rows({target(first), target(second)}, {source(first), source(second)}, chunks);
      } else {
        copy_row(target(first), source(first), chunks);
      }
    }
    __syncwarp();
    if (lane == 0 && !again) ptx::add_release(plan.landed + unit / Plan::kUnits, 1);
  }
}

template <bool kAgain>
__device__ __forceinline__ void pull_rows(const Pull& pull, const Plan& plan, int warp, int warps) {
#pragma unroll 1  // two copies of the code would spill registers
  for (int i = 0; i < (kAgain && pull.again ? 2 : 1); ++i) pull_units(pull, plan, warp, warps, i > 0);
}

// Whether the tokens of the sorted rows up to `row` have landed, or will have once this returns if `wait` is set.
// Called by a whole warp, which has seen the first `landed` chunks so far.
template <class Ring>
__device__ __forceinline__ bool has_landed(const Plan& plan, int row, int& landed, bool wait, const Ring& ring) {
  const int wanted = row < 0 ? 0 : row / Plan::kChunk + 1, lane = threadIdx.x % 32;
  while (landed < wanted) {
    const int mine = landed + lane;
    const bool there = mine >= wanted || ptx::load_acquire(plan.landed + mine) >= Plan::kUnits;
    const unsigned missing = __ballot_sync(~0u, !there);
    landed = missing ? landed + __ffs(missing) - 1 : min(landed + 32, wanted);
    if (missing && !wait) return false;
    if (missing && !ring.wait_landed(plan.landed + landed)) return true;
  }
  __syncwarp();
  return true;
}

}  // namespace mok::sm90
