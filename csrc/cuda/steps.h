// What forward and backward on one GPU (ops.cpp) and those of an exchange (exchange_ops.cpp) have in common.
#pragma once

#include "experts.h"
#include "memory.h"

namespace mok::sm90 {

struct Rows {
  Sizes sizes;
  Plan plan;
  int64_t stream;
};

// The weights of a block and how it computes.
struct Block {
  Weights weights;
  Layout layout;
  bool transposed;
  Activation activation;
};

// Of kernels that follow on the stream and use the plan.
inline Block block_of(const Rows& of, const Operands& in) {
  const Block block{weights_of(in.up, in.down, in.addresses, of.sizes, in.layout, in.transposed, &of.plan), in.layout,
                    in.transposed, in.activation};
  if (block.weights.scattered) require(tell_places(of.sizes, of.plan, block.weights.places, stream_of(of.stream)));
  return block;
}

// The tiles of a forward pass over so many slots and experts. Low ones leave room for one more stage of weights where
// experts have few rows. Tall ones save a row block where an expert's rows fill more than one of 128 but seldom more
// than one of 192, and read its weights once instead of twice; elsewhere wide ones were as fast or faster on an H200
// (docs/kernels/sm90.md).
inline Tiles tiles_for(int64_t slots, int64_t experts) {
  if (slots <= 16 * experts) return Tiles::kLow;
  return slots > 112 * experts && slots <= 184 * experts ? Tiles::kTall : Tiles::kWide;
}

// A plan and the scratch of its sorting, as ints.
struct Schedule {
  Tensor ints;
  Plan plan;
  int* counts;

  Schedule(const Sizes& sizes, const Tensor& on, int* order, int* offsets)
      : ints(empty_ints(Plan::scratch(sizes) + schedule_scratch(sizes), on)),
        plan(Plan::at(ints_of(ints), order, offsets, sizes)),
        counts(ints_of(ints) + Plan::scratch(sizes)) {}
};

inline Tensor empty_panels(const Parts& parts, int64_t rows, const Tensor& like) {
  return empty({parts.count * parts.panels(), rows, kPanel}, like.scalar_type(), like);
}

// rows and h (if given) of sorted rows, from x; a is scratch.
inline void experts(const Rows& of, const Block& block, const Operands& in, Tiles tiles, const TokenRows& x,
                    const MaybeTensor& h, const Tensor& a, const Tensor& rows, const Pull* pull = nullptr) {
  require_room(Panels{{of.sizes.inner, 1}, a, of.plan.room}, "forward");
  require(forward({of.sizes,
                   dtype_of(rows),
                   block.layout,
                   block.transposed,
                   block.activation,
                   of.plan,
                   tiles,
                   x,
                   {block.weights.up[0], block.weights.up[1]},
                   block.weights.down,
                   {data_of(in.up_bias, 0), data_of(in.up_bias, 1)},
                   data_of(in.down_bias),
                   const_cast<void*>(data_of(h)),
                   a.data_ptr(),
                   rows.data_ptr(),
                   pull},
                  stream_of(of.stream)));
}

// The gradients of a block's weights and biases that are wanted: each one tensor for all experts, stored as the weights
// are. What fills them takes `add`: to what is there.
struct Gradients {
  Tensors up;
  MaybeTensor down;
  Tensors up_bias;
  MaybeTensor down_bias;

  Gradients(const Operands& in, const Needs& needs) {
    const auto weight = [&](const Tensor& of) {
      const int64_t dims = of.dim();
      return empty({in.experts(), of.size(dims - 2), of.size(dims - 1)}, in.x.scalar_type(), in.x, in.transposed);
    };
    const auto bias = [&](const Tensor& of) { return empty({of.size(0), of.size(1)}, in.x.scalar_type(), in.x); };
    for (size_t i = 0; needs.up && i < in.up.size(); ++i) up.push_back(weight(in.up[i]));
    if (needs.down) down = weight(in.down);
    for (size_t i = 0; needs.up_bias && i < in.up_bias.size(); ++i) up_bias.push_back(bias(in.up_bias[i]));
    if (needs.down_bias && in.down_bias) down_bias = bias(*in.down_bias);
  }

  Tensors all() const {
    Tensors found = up;
    if (down) found.push_back(*down);
    found.insert(found.end(), up_bias.begin(), up_bias.end());
    if (down_bias) found.push_back(*down_bias);
    return found;
  }
};

// A weight's gradient: per expert the sum over its rows of `dense` outer `gathered` [T, H], or the other way round.
inline void outer(const Rows& of, const void* dense, const Parts& parts, bool dense_first, const TokenRows& gathered,
                  const Tensor& out, int ticket, bool add) {
  require(weight_grad({of.sizes, dtype_of(out), of.plan, dense, parts, gathered, of.sizes.hidden, dense_first,
                       out.data_ptr(), ticket, add},
                      stream_of(of.stream)));
}

// The gradients through the down projection: dh, dscore, and those of down; `scratch` holds the activation.
inline void down_gradients(const Rows& of, const Block& block, const MaybeTensor& down_bias, const TokenRows& dy,
                           const Tensor& h, const Tensor& weights, const Panels& dh, const Tensor& scratch,
                           const Tensor& dscore, const Gradients& grads, bool add = false, const Pull* pull = nullptr) {
  const Panels a{{of.sizes.inner, 1}, scratch, of.plan.room};
  require_room(a, "backward");
  require_room(dh, "backward");
  float* const scores = static_cast<float*>(dscore.data_ptr());
  require(down_grad(
      {of.sizes, dtype_of(h), block.layout, block.transposed, block.activation, of.plan, dy, block.weights.down,
       h.data_ptr(), weights.data_ptr(), dtype_of(weights), dh.data.data_ptr(), scratch.data_ptr(), scores, pull},
      stream_of(of.stream)));
  if (down_bias)
    require(bias_score({of.sizes, dtype_of(h), of.plan, dy, down_bias->data_ptr(), scores}, stream_of(of.stream)));
  if (grads.down) outer(of, a.part(0), a.parts, block.transposed, dy, *grads.down, 3, add);
  if (grads.down_bias)
    require(bias_grad({of.sizes,
                       dtype_of(h),
                       of.plan,
                       nullptr,
                       {of.sizes.hidden, 1},
                       dy,
                       weights.data_ptr(),
                       dtype_of(weights),
                       grads.down_bias->data_ptr(),
                       add},
                      stream_of(of.stream)));
}

// The rows of dx, from dh.
inline void up_gradients(const Rows& of, const Block& block, const Panels& dh, const Tensor& rows) {
  STD_TORCH_CHECK(rows.numel() >= of.plan.room * of.sizes.hidden, "mok-compile, sm90 engine: backward needs more room");
  require(up_grad({of.sizes,
                   dtype_of(rows),
                   block.layout,
                   block.transposed,
                   of.plan,
                   dh.data.data_ptr(),
                   {block.weights.up[0], block.weights.up[1]},
                   rows.data_ptr()},
                  stream_of(of.stream)));
}

// The gradients of up: one tensor for all parts, or one for each.
inline void up_weight_gradients(const Rows& of, const Block& block, const Panels& dh, const TokenRows& x,
                                const Gradients& grads, bool add = false) {
  const auto parts = [&](const Tensors& out) { return Parts{dh.parts.columns, dh.parts.count / int64_t(out.size())}; };
  for (size_t i = 0; i < grads.up.size(); ++i)
    outer(of, dh.part(i), parts(grads.up), !block.transposed, x, grads.up[i], 4 + int(i), add);
  for (size_t i = 0; i < grads.up_bias.size(); ++i)
    require(bias_grad({of.sizes,
                       dtype_of(grads.up_bias[i]),
                       of.plan,
                       dh.part(i),
                       parts(grads.up_bias),
                       {},
                       nullptr,
                       Dtype::kFloat32,
                       grads.up_bias[i].data_ptr(),
                       add},
                      stream_of(of.stream)));
}

}  // namespace mok::sm90
