// Tensors and numbers of torch's ops as the kernels' launchers take them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "sm90/exchange.h"

namespace mok::sm90 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;
using Doubles = std::vector<double>;
using Integers = std::vector<int64_t>;

inline void require(const char* error) { STD_TORCH_CHECK(error == nullptr, "mok-compile, sm90 engine: ", error); }

inline Dtype dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::Int:
      return Dtype::kInt32;
    case ScalarType::Long:
      return Dtype::kInt64;
    default:
      STD_TORCH_CHECK(false, "mok-compile, sm90 engine: unsupported dtype");
  }
}

inline Dtype dtype_of(int64_t number) {
  STD_TORCH_CHECK(number >= 0 && number <= int64_t(Dtype::kFloat32), "mok-compile, sm90 engine: not a dtype's number");
  return static_cast<Dtype>(number);
}

inline ScalarType scalar_of(Dtype dtype) {
  constexpr ScalarType kTypes[] = {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float, ScalarType::Int,
                                   ScalarType::Long};
  return kTypes[int(dtype)];
}

inline const void* data_of(const MaybeTensor& t) { return t ? t->data_ptr() : nullptr; }
inline const void* data_of(const Tensors& list, size_t i) { return i < list.size() ? list[i].data_ptr() : nullptr; }
inline int* ints_of(const Tensor& t) { return static_cast<int*>(t.data_ptr()); }

inline Layout layout_of(int64_t layout) { return static_cast<Layout>(layout); }

inline Activation activation_of(const Doubles& v) {
  STD_TORCH_CHECK(v.size() == 8, "mok-compile, sm90 engine: an activation has 8 numbers");
  return {int(v[0]), v[1] != 0, float(v[2]), float(v[3]), float(v[4]), float(v[5]), float(v[6]), float(v[7])};
}

inline RouteProgram program_of(const Doubles& v) {
  constexpr size_t kHeader = 9, kStep = 3;
  const bool fits = v.size() >= kHeader && v[7] >= 0 && v[7] <= kMaxSteps && v[8] >= 0 && v[8] <= kMaxSteps &&
                    v.size() == kHeader + kStep * size_t(v[7] + v[8]);
  STD_TORCH_CHECK(fits, "mok-compile, sm90 engine: not a router's numbers");
  RouteProgram p{};
  p.choice = static_cast<Dtype>(int(v[0]));
  p.top_k = int(v[1]);
  p.groups = int(v[2]);
  p.groups_chosen = int(v[3]);
  p.group_best = int(v[4]);
  p.fill = float(v[5]);
  p.masked = v[6] != 0;
  p.num_scores = int(v[7]);
  p.num_weights = int(v[8]);
  for (int i = 0; i < p.num_scores + p.num_weights; ++i) {
    const double* const step = v.data() + kHeader + kStep * i;
    RouteStep& to = i < p.num_scores ? p.scores[i] : p.weights[i - p.num_scores];
    to = {int(step[0]), float(step[1]), static_cast<Dtype>(int(step[2]))};
    if (to.op == RouteStep::kDiv) to = {RouteStep::kMul, 1.0f / to.value, to.dtype};  // as torch's CUDA kernels do
  }
  return p;
}

// What a router gets and gives besides its product.
inline RouteArguments router_of(const RouteProgram& program, const Tensor& logits, const MaybeTensor& correction,
                                const MaybeTensor& scale, const MaybeTensor& values, const MaybeTensor& weights,
                                const Tensor& ids) {
  RouteArguments in{};
  in.tokens = logits.size(0);
  in.experts = logits.size(1);
  in.dtype = dtype_of(logits);
  in.program = program;
  in.correction = data_of(correction);
  if (correction) in.correction_dtype = dtype_of(*correction);
  in.scale = data_of(scale);
  if (scale) in.scale_dtype = dtype_of(*scale);
  in.logits = logits.data_ptr();
  in.values = const_cast<void*>(data_of(values));
  if (values) in.values_dtype = dtype_of(*values);
  in.weights = const_cast<void*>(data_of(weights));
  if (weights) in.weights_dtype = dtype_of(*weights);
  in.ids = static_cast<int64_t*>(ids.data_ptr());
  return in;
}

// The weights of a block as the kernels read them.
struct Weights {
  Weight up[2], down;
  Places places;
  bool scattered;  // whether the places are not 0, 1, 2, ...
};

// `tensor` holds all experts [E, out, in] ([E, in, out] in memory, if `transposed`), or it is one of E matrices alike,
// which lie at `addresses`.
inline Weight weight_of(const Tensor& tensor, const int64_t* addresses, int64_t experts, bool transposed, int* places) {
  const int64_t dims = tensor.dim(), pitch = tensor.stride(transposed ? dims - 1 : dims - 2);
  if (!addresses) return {tensor.data_ptr(), pitch, 2 * (experts > 1 ? tensor.stride(0) : pitch), experts, nullptr};
  const auto [low, high] = std::minmax_element(addresses, addresses + experts);
  int64_t unit = 0;
  for (int64_t e = 0; e < experts; ++e) unit = std::gcd(unit, addresses[e] - *low);
  if (unit == 0) unit = 2 * pitch;  // all are the same one
  const int64_t last = (*high - *low) / unit;
  STD_TORCH_CHECK(unit < int64_t(1) << 40 && last < int64_t(1) << 31,
                  "mok-compile, sm90 engine: weights lie too far apart");
  for (int64_t e = 0; e < experts; ++e) places[e] = int((addresses[e] - *low) / unit);
  return {reinterpret_cast<const void*>(*low), pitch, unit, last + 1, nullptr};
}

// `up` (gate, then up, where they are separate) and `down` hold all experts, or one of them each: then `addresses` has
// all experts' for each of these tensors in turn. `plan`: from which the kernels read the places, see tell_places(), or
// null.
inline Weights weights_of(const Tensors& up, const Tensor& down, const Integers& addresses, const Sizes& sizes,
                          Layout layout, bool transposed, const Plan* plan) {
  const int64_t experts = sizes.experts;
  const bool lists = down.dim() == 2;
  const size_t parts = layout == Layout::kSeparate ? 2 : 1;
  STD_TORCH_CHECK(experts <= kMaxExperts && up.size() == parts && (lists || down.size(0) == experts) &&
                      addresses.size() == (lists ? (parts + 1) * experts : 0),
                  "mok-compile, sm90 engine: a number of weights that is not that of the experts");
  Weights found;
  const Tensor* const tensors[] = {&up[0], &up[parts - 1], &down};
  const size_t banks[] = {0, parts - 1, parts};
  Weight* const weights[] = {&found.up[0], &found.up[1], &found.down};
  found.scattered = false;
  for (int i = 0; i < Places::kWeights; ++i) {
    int* const places = found.places.at[i];
    const int64_t* const at = lists ? addresses.data() + banks[i] * experts : nullptr;
    *weights[i] = weight_of(*tensors[i], at, experts, transposed, places);
    for (int64_t e = 0; at && e < experts; ++e) found.scattered |= places[e] != e;
  }
  if (found.scattered && plan)
    for (int i = 0; i < Places::kWeights; ++i) weights[i]->places = plan->places + i * experts;
  return found;
}

inline void* stream_of(int64_t stream) { return reinterpret_cast<void*>(stream); }

// As mok_compile/distributed/windows.py packs it.
inline Group group_of(const Integers& v) {
  STD_TORCH_CHECK(v.size() == 14, "mok-compile, sm90 engine: a group has 14 numbers");
  Group g{};
  g.rank = int(v[0]);
  g.ranks = int(v[1]);
  g.capacity = v[2];
  g.window = Window::of(v[1], v[2], v[3], v[4], v[5] != 0, v[13]);
  g.windows = reinterpret_cast<const int64_t*>(v[6]);
  g.state = reinterpret_cast<int*>(v[7]);
  g.report = reinterpret_cast<int*>(v[8]);
  g.timeout = v[9];
  return g;
}

// Panels of all parts, one under the other.
struct Panels {
  Parts parts;
  const Tensor& data;
  int64_t room;

  const void* part(int64_t i) const {
    return static_cast<const char*>(data.data_ptr()) + i * parts.panels() * room * kPanel * 2;
  }
  int64_t numel() const { return parts.count * parts.panels() * room * kPanel; }
};

inline void require_room(const Panels& in, const char* what) {
  STD_TORCH_CHECK(in.data.numel() >= in.numel(), "mok-compile, sm90 engine: ", what, " needs more room");
}

}  // namespace mok::sm90
