// The router of few tokens in one launch: logits, scores, choice of experts, routing weights.
//
// A cluster serves kRouteTokens tokens. Its CTAs share the experts: each multiplies tiles of kRouteRows rows of the
// weight with all tokens, by mma.sync, its warps along K: every warp has one part of K, in ascending order in one
// accumulator, and the parts are added in order. The parts depend on R alone, so the bits of a logit do not depend on
// how many tokens there are. Operands go from global memory to registers, 16 bytes a lane: which of a group's numbers
// meet in which step of the tensor core is the same for both operands, and does not matter. The logits go to the shared
// memory of the CTA that owns the token, and there one warp does the rest. No counters and no scratch: launches do not
// know of each other.
#pragma once

#include "../ptx/barrier.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/mma.cuh"
#include "choice.cuh"

namespace mok::sm90 {

constexpr int kRouteTokens = 16, kRouteRows = 8;
constexpr int kRouteParts = 8, kRouteThreads = kRouteParts * 32;
constexpr int kRouteChunk = 32, kRouteAhead = 8;  // along K: what 4 lanes load at once; chunks in flight
constexpr int kMostRanks = 16, kFewestRanks = 8;  // of a cluster, for many experts; CUDA guarantees the second

template <class T>
struct RouteParams {
  const T *x, *weight, *bias;  // [T, R], [E, R], [E] or null
  T* logits;                   // [T, E]
  Numbers correction, scale;   // [E]; data null: none
  Numbers values, weights;     // [T, K]; data null: not wanted
  int64_t* ids;                // [T, K]
  int tokens, depth, experts;
  RouteProgram program;
};

struct RouteMemory {
  float partial[2][kRouteParts][kRouteTokens * kRouteRows];
  // Of the tokens that this CTA owns: [token][E]. With fewer ranks than kFewestRanks there is a tile for each.
  float scores[kRouteTokens / kFewestRanks * kMaxRouted];
  uint32_t keys[kRouteTokens / kFewestRanks * kMaxRouted];
  float correction[kMaxRouted], scale[kMaxRouted];
  float bias[kMaxRouted];
};

template <class T>
struct Route {
  const RouteParams<T>& p;
  RouteMemory& m;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = ptx::cluster_rank(), ranks = ptx::cluster_size();
  const int first = int(blockIdx.x) / ranks * kRouteTokens;  // of the cluster's tokens
  const int tokens = min(kRouteTokens, p.tokens - first);
  // This warp's part of K, in chunks.
  const int chunks = (p.depth + kRouteChunk - 1) / kRouteChunk, each = (chunks + kRouteParts - 1) / kRouteParts;
  const int begin = warp * each, end = min(chunks, begin + each);

  __device__ __forceinline__ Route(const RouteParams<T>& params, RouteMemory& shared) : p(params), m(shared) {}

  // ---- Logits

  // Of both operands a lane has 8 neighbours along K: of one row of the weight and of two tokens.
  struct Operands {
    uint4 weight[kRouteAhead], low[kRouteAhead], high[kRouteAhead];
  };

  __device__ __forceinline__ void load(Operands& to, int tile, int chunk) const {
    const int row = tile * kRouteRows + lane / 4, token = lane / 4, column = lane % 4 * 8;
    const T* const weight = p.weight + static_cast<int64_t>(row) * p.depth + column;
    const T* const low = p.x + static_cast<int64_t>(first + token) * p.depth + column;
    const T* const high = low + static_cast<int64_t>(8) * p.depth;
    const auto exists = [&](int i) { return i < end && i * kRouteChunk + column < p.depth; };
#pragma unroll
    for (int i = chunk; i < chunk + kRouteAhead; ++i)
      to.weight[i - chunk] = ptx::load_once_if(exists(i) && row < p.experts, weight + i * kRouteChunk);
#pragma unroll
    for (int i = chunk; i < chunk + kRouteAhead; ++i) {
      to.low[i - chunk] = ptx::load_once_if(exists(i) && token < tokens, low + i * kRouteChunk);
      to.high[i - chunk] = ptx::load_once_if(exists(i) && token + 8 < tokens, high + i * kRouteChunk);
    }
  }

  static __device__ __forceinline__ void multiply(float (&sum)[4], const Operands& by) {
#pragma unroll
    for (int i = 0; i < kRouteAhead; ++i) {
      const uint4 w = by.weight[i], low = by.low[i], high = by.high[i];
      const uint32_t a[4] = {low.x, high.x, low.y, high.y}, b[2] = {w.x, w.y};
      ptx::multiply<T>(sum, a, b);
      const uint32_t a2[4] = {low.z, high.z, low.w, high.w}, b2[2] = {w.z, w.w};
      ptx::multiply<T>(sum, a2, b2);
    }
  }

  // Brings what this warp will read later than its first chunks nearer.
  __device__ __forceinline__ void prefetch() const {
#pragma unroll 1
    for (int tile = rank; tile < p.program.tiles; tile += ranks) {
      const int row = tile * kRouteRows + lane / 4;
      if (row >= p.experts) break;
      const T* const from = p.weight + static_cast<int64_t>(row) * p.depth;
#pragma unroll 1
      for (int chunk = begin + (tile == rank ? kRouteAhead : 0) + lane % 4; chunk < end; chunk += 4)
        ptx::prefetch_l2(from + chunk * kRouteChunk);
    }
  }

  // Numbers of all experts, which come late if they are asked for when they are needed.
  __device__ __forceinline__ void fetch() const {
#pragma unroll 1
    for (int e = threadIdx.x; e < p.experts; e += kRouteThreads) {
      if (p.bias) m.bias[e] = to_float(p.bias[e]);
      if (p.correction.data) m.correction[e] = p.correction.load(e);
      if (p.scale.data) m.scale[e] = p.scale.load(e);
    }
  }

  __device__ __forceinline__ void logits() const {
    Operands operands;
    load(operands, rank, begin);
    fetch();
    prefetch();
    __syncwarp();
    int buffer = 0;
#pragma unroll 1
    for (int tile = rank; tile < p.program.tiles; tile += ranks, buffer ^= 1) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
      for (int chunk = begin; chunk < end; chunk += kRouteAhead) {
        if (chunk > begin || tile > rank) load(operands, tile, chunk);
        multiply(sum, operands);
      }
      // Tokens lane / 4, then 8 further, times rows 2 * (lane % 4) and one more.
      float2* const to = reinterpret_cast<float2*>(m.partial[buffer][warp]) + lane;
      to[0] = make_float2(sum[0], sum[1]);
      to[kRouteTokens * kRouteRows / 4] = make_float2(sum[2], sum[3]);
      if (tile == rank) ptx::cluster_wait();  // the others have started: their memory can be written
      __syncthreads();
      finish(tile, m.partial[buffer]);
      __syncwarp();
    }
    if (rank >= p.program.tiles) ptx::cluster_wait();
  }

  // A thread for each logit of a tile.
  __device__ __forceinline__ void finish(int tile, const float (*partial)[kRouteTokens * kRouteRows]) const {
    const int token = threadIdx.x / kRouteRows, e = tile * kRouteRows + threadIdx.x % kRouteRows;
    if (token >= tokens || e >= p.experts) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kRouteParts; ++i) sum += partial[i][threadIdx.x];
    if (p.bias) sum += m.bias[e];
    const Numbers to{p.logits, p.program.dtype};
    sum = round_to(to.dtype, sum);
    to.store(static_cast<int64_t>(first + token) * p.experts + e, sum);
    ptx::store_remote(ptx::shared_address(m.scores + token / ranks * p.experts + e), token % ranks, sum);
  }

  // ---- Of the cluster's tokens that number, the CTA's own `i`

  __device__ __forceinline__ void choose(int token, int i) const {
    SharedRow row(m.scores + i * p.experts, m.keys + i * p.experts, p.experts);
    const Choice<SharedRow> choice(row, p.program, p.correction.data ? m.correction : nullptr, m.scale);
    const Chosen chosen = choice.run(p.weights.data);
    if (lane >= p.program.top_k) return;
    const int64_t at = static_cast<int64_t>(first + token) * p.program.top_k + lane;
    p.ids[at] = chosen.id;
    if (p.values.data) p.values.store(at, chosen.value);
    if (p.weights.data) p.weights.store(at, chosen.weight);
  }

  __device__ __forceinline__ void run() const {
    ptx::cluster_arrive();
    logits();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    // A cluster of one CTA has more tokens than warps.
#pragma unroll 1
    for (int i = warp; i * ranks + rank < tokens; i += kRouteParts) {
      choose(i * ranks + rank, i);
      __syncwarp();
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kRouteThreads, 2) route_kernel(const __grid_constant__ RouteParams<T> p) {
  __shared__ RouteMemory memory;
  Route<T>(p, memory).run();
}

}  // namespace mok::sm90
