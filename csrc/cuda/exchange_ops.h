// What the ops of an exchange are told, as its launchers take it.
#pragma once

#include "memory.h"

namespace mok::sm90 {

// How a rank takes part in an exchange: `how` as mok_compile/distributed/peer_memory.py puts a call into numbers, and
// those of its group, of which this one knows more.
struct Exchange {
  Group group;
  int64_t hidden, top_k, turns;
  bool by_route;               // results come one by one
  int sms, backward_sms;       // how many CTAs pull
  int64_t window;              // this rank's, an address
  int64_t experts, per_rank;   // of all ranks; of each
  int64_t first, local, room;  // this rank's first expert, how many it has, and the sorted rows that it can take
  int call;                    // a number for the block and the pass
  Layout layout;
  Dtype out;

  Exchange(const Integers& how, const Integers& v) : group(group_of(v)) {
    STD_TORCH_CHECK(how.size() == 8, "mok-compile, sm90 engine: a call has 8 numbers");
    hidden = v[3];
    top_k = v[4];
    by_route = v[5] != 0;
    window = v[10];
    sms = int(v[11]);
    backward_sms = int(v[12]);
    turns = v[13];
    experts = how[0];
    per_rank = how[1];
    first = how[2];
    local = how[3];
    room = how[4];
    call = int(how[5]);
    layout = layout_of(how[6]);
    out = dtype_of(how[7]);
  }
};

// The arguments of `sum`: y [T, H] and dweights [T, K] as far as they are given, of slots ids [T, K]. Of routes that
// come one by one also their weights, or null, and `scratch` for capacity * K ints.
struct Summed {
  SumArguments arguments{};

  Summed(const Exchange& to, ScalarType dtype, const Tensor& ids, const Tensor* weights, const MaybeTensor& y,
         const MaybeTensor& dweights, const MaybeTensor& scratch) {
    SumArguments& in = arguments;
    in.group = to.group;
    in.sizes = {ids.size(0), to.hidden, 0, to.experts, to.top_k};
    in.dtype = dtype == ScalarType::Half ? Dtype::kFloat16 : Dtype::kBFloat16;
    in.experts_per_rank = to.per_rank;
    in.ids = ids.data_ptr();
    in.ids_dtype = dtype_of(ids);
    if (y) {
      in.out = y->data_ptr();
      in.out_dtype = dtype_of(*y);
    }
    if (dweights) {
      in.scores = dweights->data_ptr();
      in.scores_dtype = dtype_of(*dweights);
    }
    if (!to.by_route) return;
    if (y) {
      in.position = ints_of(*scratch);
      in.routes = reinterpret_cast<const void*>(to.window + to.group.window.sums);
    }
    if (weights) {
      in.weights = weights->data_ptr();
      in.weights_dtype = dtype_of(*weights);
    }
  }

  // What is marked if the exchange fails, of one dtype: it was made from what was not there. One element of each, for
  // the optimiser's and the reader's notice: passes over all weights cost time.
  void mark(const Tensors& results) {
    Marks& marks = arguments.marks;
    for (const Tensor& result : results) {
      if (result.numel() == 0) continue;
      STD_TORCH_CHECK(marks.count < Marks::kMost, "mok-compile, sm90 engine: too many results");
      marks.at[marks.count++] = result.data_ptr();
      marks.dtype = dtype_of(result);
    }
  }
};

}  // namespace mok::sm90
