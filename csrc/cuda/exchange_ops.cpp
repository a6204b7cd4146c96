// The ops mok_sm90::* with which an exchange begins and ends, see sm90/exchange.h. `group`: see group_of.
#include "tensors.h"

namespace mok::sm90 {
namespace {

int64_t window_bytes(int64_t ranks, int64_t capacity, int64_t hidden, int64_t top_k, bool routes) {
  return Window::of(ranks, capacity, hidden, top_k, routes).bytes;
}

int64_t group_state() { return Group::kStates; }
int64_t fault_numbers() { return FaultNumbers::kCount; }

void publish_op(Tensor rows, MaybeTensor ids, MaybeTensor weights, int64_t top_k, int64_t experts, int64_t call,
                Integers group, int64_t stream) {
  require(publish({group_of(group),
                   {rows.size(0), rows.size(1), 0, experts, top_k},
                   int(call),
                   ids.has_value(),
                   rows.data_ptr(),
                   data_of(ids),
                   ids ? dtype_of(*ids) : Dtype::kInt32,
                   data_of(weights),
                   weights ? dtype_of(*weights) : Dtype::kFloat32},
                  stream_of(stream)));
}

// `kind` as in Fault.
void fail_op(int64_t kind, int64_t have, int64_t room, Integers group, int64_t stream) {
  require(fail_all(group_of(group), static_cast<Fault>(kind), have, room, stream_of(stream)));
}

// A rank without experts takes part by this alone; so does one that has more scores to push than `backward_parallel`.
void finish_op(Tensor ids, MaybeTensor scores, MaybeTensor plan, int64_t room, Integers group, int64_t stream) {
  FinishArguments end{group_of(group), ids.size(1), ints_of(ids), nullptr, nullptr, nullptr, room};
  if (scores) end.scores = static_cast<const float*>(scores->data_ptr());
  if (plan) {
    const Plan p = Plan::at(ints_of(*plan), nullptr, nullptr, Sizes{});
    end.error = p.error;
    end.count = p.rows;
  }
  require(finish(end, stream_of(stream)));
}

// y [T, H] and dweights [T, K], as far as they are given. `routes` is where the rows lie in this rank's window and
// `position` scratch, where routes are sent one by one.
void sum_op(Tensor ids, MaybeTensor weights, int64_t hidden, int64_t experts, int64_t experts_per_rank, bool half,
            MaybeTensor y, MaybeTensor dweights, MaybeTensor position, int64_t routes, Integers group, int64_t stream) {
  SumArguments in{};
  in.group = group_of(group);
  in.sizes = {ids.size(0), hidden, 0, experts, ids.size(1)};
  in.dtype = half ? Dtype::kFloat16 : Dtype::kBFloat16;
  in.experts_per_rank = experts_per_rank;
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
  if (position) {
    in.position = ints_of(*position);
    in.routes = reinterpret_cast<const void*>(routes + in.group.window.sums);
  }
  if (weights) {
    in.weights = weights->data_ptr();
    in.weights_dtype = dtype_of(*weights);
  }
  require(sum(in, stream_of(stream)));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mok_sm90, m) {
  m.def("window_bytes(int ranks, int capacity, int hidden, int top_k, bool routes) -> int");
  m.def("group_state() -> int");
  m.def("fail(int kind, int have, int room, int[] group, int stream) -> ()");
  m.def("fault_numbers() -> int");
  m.def(
      "publish(Tensor rows, Tensor? ids, Tensor? weights, int top_k, int experts, int call, int[] group, int stream) "
      "-> ()");
  m.def("finish(Tensor ids, Tensor? scores, Tensor? plan, int room, int[] group, int stream) -> ()");
  m.def(
      "sum(Tensor ids, Tensor? weights, int hidden, int experts, int experts_per_rank, bool half, Tensor(a!)? y, "
      "Tensor(b!)? dweights, Tensor(c!)? position, int routes, int[] group, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok_sm90, CompositeExplicitAutograd, m) {
  m.impl("window_bytes", TORCH_BOX(&window_bytes));
  m.impl("group_state", TORCH_BOX(&group_state));
  m.impl("fail", TORCH_BOX(&fail_op));
  m.impl("fault_numbers", TORCH_BOX(&fault_numbers));
}

STABLE_TORCH_LIBRARY_IMPL(mok_sm90, CUDA, m) {
  m.impl("publish", TORCH_BOX(&publish_op));
  m.impl("finish", TORCH_BOX(&finish_op));
  m.impl("sum", TORCH_BOX(&sum_op));
}

}  // namespace mok::sm90
