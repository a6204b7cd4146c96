// What a router makes of one token's logits: scores, choice of experts, routing weights, by one warp. Numbers are
// float32, rounded after each step to the dtype that eager has there. Of equals the lower expert comes first; NaN is
// the largest, as for torch.topk.
#pragma once

#include "number.cuh"

namespace mok::sm90 {

__device__ __forceinline__ float round_to(Dtype dtype, float v) {
  if (dtype == Dtype::kBFloat16) return __bfloat162float(__float2bfloat16_rn(v));
  if (dtype == Dtype::kFloat16) return __half2float(__float2half_rn(v));
  return v;
}

// Numbers as integers of the same order, both zeros as one. None is 0.
__device__ __forceinline__ uint32_t key_of(float v) {
  const uint32_t bits = __float_as_uint(v + 0.0f);
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

// `use` of the function of a step of single numbers. It is looked up once for a whole row.
template <class Use>
__device__ __forceinline__ auto with_function(const RouteStep& step, const Use& use) {
  switch (step.op) {
    case RouteStep::kSigmoid:
      return use([](float v) { return 1.0f / (1.0f + expf(-v)); });
    case RouteStep::kSoftplus:
      return use([](float v) { return v > 20.0f ? v : log1pf(expf(v)); });
    case RouteStep::kSqrt:
      return use([](float v) { return sqrtf(v); });
    case RouteStep::kTanh:
      return use([](float v) { return tanhf(v); });
    case RouteStep::kMul:
      return use([by = step.value](float v) { return v * by; });
    case RouteStep::kAdd:
      return use([by = step.value](float v) { return v + by; });
    default:  // a cast
      return use([](float v) { return v; });
  }
}

// The largest key of a lane's experts, and the lowest of those that have it. A lane without any has 0.
struct Best {
  uint32_t key;
  int expert;
};

// A token's scores and keys, in shared memory. Lane l has the experts l, l + 32, ...
struct SharedRow {
  float* s;
  uint32_t* k;
  const int experts, lane = threadIdx.x % 32;

  __device__ __forceinline__ SharedRow(float* scores, uint32_t* keys, int count) : s(scores), k(keys), experts(count) {}

  template <class Function>
  __device__ __forceinline__ void each(const Function& function) {
#pragma unroll 4
    for (int e = lane; e < experts; e += 32) function(e, s[e], k[e]);
  }
  template <class Function>
  __device__ __forceinline__ void map(const Function& function) {
    each([&](int, float& score, uint32_t&) { score = function(score); });
  }
  // Of the lane's own.
  template <class Function>
  __device__ __forceinline__ float map_and_sum(const Function& function) {
    float sum = 0.0f;
    each([&](int, float& score, uint32_t&) { sum += score = function(score); });
    return sum;
  }
  __device__ __forceinline__ float most() {
    float found = -INFINITY;
    each([&](int, float& score, uint32_t&) { found = fmaxf(found, score); });
    return found;
  }

  // All lanes' keys, to be read until the next call.
  __device__ __forceinline__ const uint32_t* keys() const {
    __syncwarp();
    return k;
  }
  __device__ __forceinline__ float score(int expert) const {
    __syncwarp();
    return s[expert];
  }

  __device__ __forceinline__ Best best() {
    Best found{0, kMaxRouted};
    each([&](int e, float&, uint32_t& key) {
      if (key > found.key) found = {key, e};
    });
    return found;
  }
  // The lane's best without `expert`, for ever.
  __device__ __forceinline__ Best best_but(int expert, const Best& found) {
    if (lane != expert % 32) return found;
    k[expert] = 0;
    return best();
  }
};

// The same in registers, for at most 32 * kPer experts. `shared` is room for as many, where lanes meet.
template <int kPer>
struct RegisterRow {
  float s[kPer];
  uint32_t k[kPer];
  float* shared;
  const int experts, lane = threadIdx.x % 32;

  __device__ __forceinline__ RegisterRow(float* room, int count) : shared(room), experts(count) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) k[i] = 0;
  }

  __device__ __forceinline__ bool has(int i) const { return lane + 32 * i < experts; }

  template <class Function>
  __device__ __forceinline__ void each(const Function& function) {
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (has(i)) function(lane + 32 * i, s[i], k[i]);
  }
  // What lies beyond the last expert is mapped too, without a branch, and counts for nothing.
  template <class Function>
  __device__ __forceinline__ void map(const Function& function) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) s[i] = function(s[i]);
  }
  template <class Function>
  __device__ __forceinline__ float map_and_sum(const Function& function) {
    map(function);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum += has(i) ? s[i] : 0.0f;
    return sum;
  }
  __device__ __forceinline__ float most() const {
    float found = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPer; ++i) found = fmaxf(found, has(i) ? s[i] : -INFINITY);
    return found;
  }

  __device__ __forceinline__ const uint32_t* keys() const {
    uint32_t* const to = reinterpret_cast<uint32_t*>(shared);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPer; ++i) to[lane + 32 * i] = k[i];
    __syncwarp();
    return to;
  }
  __device__ __forceinline__ float score(int expert) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPer; ++i) shared[lane + 32 * i] = s[i];
    __syncwarp();
    return shared[expert];
  }

  __device__ __forceinline__ Best best() const {
    Best found{k[0], lane};
#pragma unroll
    for (int i = 1; i < kPer; ++i)
      if (k[i] > found.key) found = {k[i], lane + 32 * i};
    return found;
  }
  __device__ __forceinline__ Best best_but(int expert, const Best&) {
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (expert == lane + 32 * i) k[i] = 0;
    return best();
  }
};

// Lane k has the k-th expert, the value it was chosen with and its routing weight.
struct Chosen {
  int id;
  float value, weight;
};

template <class Row>
struct Choice {
  Row& row;
  const RouteProgram& in;
  const float *correction, *scale;  // [E], in shared memory; null: none
  const int lane = threadIdx.x % 32;

  __device__ __forceinline__ Choice(Row& of, const RouteProgram& program, const float* corrections, const float* scales)
      : row(of), in(program), correction(corrections), scale(scales) {}

  template <class Function>
  __device__ __forceinline__ void map(Dtype to, const Function& function) const {
    if (to == Dtype::kFloat32) {
      row.map(function);
    } else {
      row.map([&](float v) { return round_to(to, function(v)); });
    }
  }

  __device__ __forceinline__ void score() const {
#pragma unroll 1
    for (int i = 0; i < in.num_scores; ++i) {
      const RouteStep step = in.scores[i];
      if (step.op != RouteStep::kSoftmax) {
        with_function(step, [&](const auto& function) { map(step.dtype, function); });
        continue;
      }
      if (step.dtype != Dtype::kFloat32) row.map([&](float v) { return round_to(step.dtype, v); });
      // Without NaN, which makes the sum one.
      const float top = value_of(__reduce_max_sync(~0u, key_of(row.most())));
      const float sum = sum_far_first(row.map_and_sum([&](float v) { return expf(v - top); }));
      map(step.dtype, [&](float v) { return v / sum; });
    }
  }

  // A bit for each of the best groups. A power of two of lanes shares a group, in parts of `each` neighbours; a lane
  // begins somewhere within its part, so that lanes are in different banks.
  __device__ __forceinline__ uint32_t best_groups(const uint32_t* keys, int size) const {
    const int shift = __clz(in.groups - 1) - 27, sharing = 1 << shift, group = lane >> shift;
    const int each = (size + sharing - 1) >> shift, begin = (lane & (sharing - 1)) * each;
    const int count = group < in.groups ? min(each, size - begin) : 0;
    uint32_t most = 0, second = 0;
    int at = min(lane * each / 32, count - 1);
#pragma unroll 4
    for (int i = 0; i < count; ++i, ++at) {
      if (at >= count) at -= count;
      const uint32_t key = keys[group * size + begin + at];
      second = max(second, min(most, key));
      most = max(most, key);
    }
#pragma unroll 1
    for (int offset = 1; offset < sharing; offset *= 2) {
      const uint32_t others = __shfl_xor_sync(~0u, most, offset);
      second = max(max(second, __shfl_xor_sync(~0u, second, offset)), min(most, others));
      most = max(most, others);
    }
    uint32_t key = 0;
    if (group < in.groups)
      key = in.group_best == 1 ? most : key_of(round_to(in.choice, value_of(most) + value_of(second)));
    uint32_t chosen = 0;
#pragma unroll 1
    for (int i = 0; i < in.groups_chosen; ++i) {
      const uint32_t best = __reduce_max_sync(~0u, key);
      const int found = (__ffs(int(__ballot_sync(~0u, key == best))) - 1) >> shift;
      chosen |= 1u << found;
      if (group == found) key = 0;
    }
    return chosen;
  }

  // Of lane k the k-th best expert.
  __device__ __forceinline__ int best_experts() const {
    int found = 0;
    Best mine = row.best();
#pragma unroll 1
    for (int k = 0; k < in.top_k; ++k) {
      const uint32_t most = __reduce_max_sync(~0u, mine.key);
      const int expert = int(__reduce_min_sync(~0u, mine.key == most ? uint32_t(mine.expert) : uint32_t(kMaxRouted)));
      if (lane == k) found = expert;
      mine = row.best_but(expert, mine);
    }
    return found;
  }

  // Lane k has the k-th value.
  __device__ __forceinline__ float weigh(float v, int id) const {
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
          v *= scale[id];
          break;
        default:
          v = with_function(step, [&](const auto& function) { return function(v); });
      }
      v = round_to(step.dtype, v);
    }
    return v;
  }

  // The row has the logits. `weighted`: the weights are wanted.
  __device__ __forceinline__ Chosen run(bool weighted) const {
    score();
    if (correction) {
      row.each([&](int e, float& score, uint32_t& key) { key = key_of(round_to(in.choice, score + correction[e])); });
    } else {
      row.each([](int, float& score, uint32_t& key) { key = key_of(score); });
    }
    const float fill = round_to(in.choice, in.fill);
    const int size = in.groups ? row.experts / in.groups : 1;
    const float per_expert = 1.0f / float(size);
    const auto group_of = [&](int e) { return int((float(e) + 0.5f) * per_expert); };  // e / size
    uint32_t groups = ~0u;
    if (in.groups) {
      groups = best_groups(row.keys(), size);
      __syncwarp();
      row.each([&](int e, float&, uint32_t& key) {
        if (!(groups >> group_of(e) & 1)) key = key_of(fill);
      });
    }
    const int id = best_experts();
    const float score = row.score(id);
    const float value = in.masked && !(groups >> group_of(id) & 1) ? fill : score;
    return {id, value, weighted ? weigh(value, id) : 0.0f};
  }
};

}  // namespace mok::sm90
