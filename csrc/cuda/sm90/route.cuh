// The router of few tokens in one launch: logits, scores, choice of experts, routing weights.
//
// A cluster serves kRouteTokens tokens. Its CTAs share the experts: each multiplies tiles of kRouteRows rows of the
// weight with all tokens, by mma.sync, its warps along K: every warp has one part of K, in ascending order in one
// accumulator, and the parts are added in order. The parts depend on R alone, so the bits of a logit do not depend on
// how many tokens there are. Operands go from global memory to registers, 16 bytes a lane: which of a group's numbers
// meet in which step of the tensor core is the same for both operands, and does not matter. The logits go to the shared
// memory of the CTA that owns the token, and there one warp does the rest: its numbers are float32, rounded after each
// step to the dtype that eager has there. No counters and no scratch: launches do not know of each other.
#pragma once

#include "../ptx/barrier.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/mma.cuh"
#include "number.cuh"

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

__device__ __forceinline__ float round_to(Dtype dtype, float v) {
  if (dtype == Dtype::kBFloat16) return __bfloat162float(__float2bfloat16_rn(v));
  if (dtype == Dtype::kFloat16) return __half2float(__float2half_rn(v));
  return v;
}

// Numbers as integers of the same order: NaN is the largest, as for torch.topk. None is 0.
__device__ __forceinline__ uint32_t key_of(float v) {
  const uint32_t bits = __float_as_uint(v);
  if (v != v) return 0xFFFFFFFFu;
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu));
}

// Sums over a warp, in the orders of torch's softmax and of its sums of few numbers.
__device__ __forceinline__ float sum_far_first(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
  return v;
}
__device__ __forceinline__ float sum_near_first(float v) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) v += __shfl_xor_sync(~0u, v, offset);
  return v;
}

// The steps of single numbers.
__device__ __forceinline__ float step_of(const RouteStep& step, float v) {
  switch (step.op) {
    case RouteStep::kSigmoid:
      return 1.0f / (1.0f + expf(-v));
    case RouteStep::kSoftplus:
      return v > 20.0f ? v : log1pf(expf(v));
    case RouteStep::kSqrt:
      return sqrtf(v);
    case RouteStep::kTanh:
      return tanhf(v);
    case RouteStep::kMul:
      return v * step.value;
    case RouteStep::kAdd:
      return v + step.value;
    default:  // a cast
      return v;
  }
}

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

  // ---- Choice, of one token by one warp. Lane l has the experts l, l + 32, ...

  template <class Function>
  __device__ __forceinline__ void each_expert(Function function) const {
#pragma unroll 4
    for (int e = lane; e < p.experts; e += 32) function(e);
  }

  __device__ __forceinline__ void scores(float* s) const {
#pragma unroll 1
    for (int i = 0; i < p.program.num_scores; ++i) {
      const RouteStep step = p.program.scores[i];
      if (step.op != RouteStep::kSoftmax) {
        each_expert([&](int e) { s[e] = round_to(step.dtype, step_of(step, s[e])); });
        continue;
      }
      uint32_t most = 0;
      each_expert([&](int e) { most = max(most, key_of(s[e] = round_to(step.dtype, s[e]))); });
      const float top = value_of(__reduce_max_sync(~0u, most));
      float sum = 0.0f;
      each_expert([&](int e) { sum += s[e] = expf(s[e] - top); });
      sum = sum_far_first(sum);
      each_expert([&](int e) { s[e] = round_to(step.dtype, s[e] / sum); });
    }
  }

  // A bit for each of the best groups.
  __device__ __forceinline__ uint32_t best_groups(const uint32_t* keys) const {
    const RouteProgram& in = p.program;
    uint32_t key = 0;
    if (lane < in.groups) {
      const int size = p.experts / in.groups;
      uint32_t most = 0, second = 0;
#pragma unroll 4
      for (int i = 0; i < size; ++i) {
        const int at = i + lane < size ? i + lane : (i + lane) % size;  // lanes in different banks
        const uint32_t k = keys[lane * size + at];
        second = max(second, min(most, k));
        most = max(most, k);
      }
      key = in.group_best == 1 ? most : key_of(round_to(in.choice, value_of(most) + value_of(second)));
    }
    uint32_t chosen = 0;
#pragma unroll 1
    for (int i = 0; i < in.groups_chosen; ++i) {
      const uint32_t most = __reduce_max_sync(~0u, key);
      const int group = __ffs(int(__ballot_sync(~0u, key == most))) - 1;
      chosen |= 1u << group;
      if (lane == group) key = 0;
    }
    return chosen;
  }

  // Of lane k the k-th best expert, the lower of equals first.
  __device__ __forceinline__ int best_experts(uint32_t* keys) const {
    uint32_t mine;
    int where, found = 0;
    const auto look = [&] {
      mine = 0, where = kMaxRouted;
      each_expert([&](int e) {
        const uint32_t key = keys[e];
        if (key > mine) mine = key, where = e;
      });
    };
    look();
#pragma unroll 1
    for (int k = 0; k < p.program.top_k; ++k) {
      const uint32_t most = __reduce_max_sync(~0u, mine);
      const int best = int(__reduce_min_sync(~0u, mine == most ? uint32_t(where) : uint32_t(kMaxRouted)));
      if (lane == k) found = best;
      if (lane == best % 32) {
        keys[best] = 0;
        look();
      }
    }
    return found;
  }

  // Lane k has the k-th value.
  __device__ __forceinline__ float weigh(float v, int id) const {
    const RouteProgram& in = p.program;
    const bool active = lane < in.top_k;
#pragma unroll 1
    for (int i = 0; i < in.num_weights; ++i) {
      const RouteStep step = in.weights[i];
      switch (step.op) {
        case RouteStep::kSoftmax: {
          v = round_to(step.dtype, v);
          const float top = value_of(__reduce_max_sync(~0u, active ? key_of(v) : 0));
          v = active ? expf(v - top) : 0.0f;
          v /= sum_far_first(v);
          break;
        }
        case RouteStep::kNormalise:
        case RouteStep::kNormaliseAdd:
        case RouteStep::kNormaliseClamp: {
          float sum = round_to(step.dtype, sum_near_first(active ? v : 0.0f));
          if (step.op == RouteStep::kNormaliseAdd) sum = round_to(step.dtype, sum + step.value);
          if (step.op == RouteStep::kNormaliseClamp) sum = round_to(step.dtype, sum < step.value ? step.value : sum);
          v /= sum;
          break;
        }
        case RouteStep::kExpertScale:
          v *= m.scale[id];
          break;
        default:
          v = step_of(step, v);
      }
      v = round_to(step.dtype, v);
    }
    return v;
  }

  // Of the cluster's tokens that number, the CTA's own `i`.
  __device__ __forceinline__ void choose(int token, int i) const {
    const RouteProgram& in = p.program;
    float* const s = m.scores + i * p.experts;
    uint32_t* const keys = m.keys + i * p.experts;
    scores(s);
    if (p.correction.data) {
      each_expert([&](int e) { keys[e] = key_of(round_to(in.choice, s[e] + m.correction[e])); });
    } else {
      each_expert([&](int e) { keys[e] = key_of(s[e]); });
    }
    uint32_t groups = ~0u;
    const float fill = round_to(in.choice, in.fill);
    const int size = in.groups ? p.experts / in.groups : p.experts;
    __syncwarp();
    if (in.groups) {
      groups = best_groups(keys);
      __syncwarp();
      each_expert([&](int e) {
        if (!(groups >> e / size & 1)) keys[e] = key_of(fill);
      });
    }
    const int id = best_experts(keys);
    const float value = in.masked && !(groups >> id / size & 1) ? fill : s[id];
    const float weight = weigh(value, id);
    if (lane >= in.top_k) return;
    const int64_t at = static_cast<int64_t>(first + token) * in.top_k + lane;
    p.ids[at] = id;
    if (p.values.data) p.values.store(at, value);
    if (p.weights.data) p.weights.store(at, weight);
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
