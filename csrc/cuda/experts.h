// The passes of a block on one GPU: they allocate what they give and what they need, and launch their kernels. All
// throw NoRoom (memory.h).
#pragma once

#include "tensors.h"

namespace mok::sm90 {

// Of one `mok::experts` call, as mok_compile/engines/sm90.py prepares them: x, ids and weights without gaps, x at a
// multiple of 16 bytes, `up` and `down` as weights_of() takes them, at least one slot.
struct Operands {
  Tensor x, ids, weights;
  Tensors up;
  Tensor down;
  Integers addresses;
  Tensors up_bias;
  MaybeTensor down_bias;
  Layout layout;
  bool transposed;
  Activation activation;

  int64_t experts() const {
    return down.dim() == 3 ? down.size(0) : int64_t(addresses.size()) / (int64_t(up.size()) + 1);
  }
  Sizes sizes() const { return {x.size(0), x.size(1), down.size(down.dim() - 1), experts(), ids.size(1)}; }
};

// y, h, order, offsets.
Tensors forward(const Operands& in, Dtype out, int64_t stream);

// y, to the same bits. `few` says whether by the kernel for few tokens; without a value, whether it pays.
Tensor infer(const Operands& in, Dtype out, std::optional<bool> few, int64_t stream);

// The gradients of x, weights, up, down, up_bias, down_bias that are needed, those of several tensors one after the
// other.
struct Needs {
  bool x, weights, up, down, up_bias, down_bias;
};
inline Needs needs_of(const std::vector<bool>& v) {
  STD_TORCH_CHECK(v.size() == 6, "mok-compile, sm90 engine: needs are 6");
  return {v[0], v[1], v[2], v[3], v[4], v[5]};
}
Tensors backward(const Tensor& dy, const Operands& in, const Tensor& h, const Tensor& order, const Tensor& offsets,
                 const Needs& needs, int64_t stream);

}  // namespace mok::sm90
