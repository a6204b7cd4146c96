// The ops mok_sm90::* around an exchange, see sm90/exchange.h. `group`: see group_of; `how`: see Exchange.
#include "exchange_ops.h"

namespace mok::sm90 {
namespace {

int64_t window_bytes(int64_t ranks, int64_t capacity, int64_t hidden, int64_t top_k, bool routes) {
  return Window::of(ranks, capacity, hidden, top_k, routes).bytes;
}

int64_t group_state() { return Group::kStates; }
int64_t fault_numbers() { return FaultNumbers::kCount; }

// `kind` as in Fault.
void fail_op(int64_t kind, int64_t have, int64_t room, Integers group, int64_t stream) {
  require(fail_all(group_of(group), static_cast<Fault>(kind), have, room, stream_of(stream)));
}

// The end of what `backward_parallel` has left open: this rank's scores are pushed, and what the ranks have pushed is
// summed into dx and dweights, as far as they are given. `plan` as that op gave it, `kept` as forward did.
void end_backward_op(Tensor x, Tensor ids, Tensor kept, Tensor scores, Tensor plan, MaybeTensor dx,
                     MaybeTensor dweights, Tensors grads, Integers how, Integers group, int64_t stream) {
  const Exchange to(how, group);
  const Plan p = Plan::at(ints_of(plan), nullptr, nullptr, Sizes{});
  Summed summed(to, x.scalar_type(), ids, nullptr, dx, dweights);
  summed.mark(grads);
  require(finish({to.group, to.top_k, ints_of(kept) + to.group.ranks * to.group.capacity * to.top_k,
                  static_cast<const float*>(scores.data_ptr()), p.error, p.rows, to.room},
                 stream_of(stream)));
  require(sum(summed.arguments, stream_of(stream)));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mok_sm90, m) {
  m.def("window_bytes(int ranks, int capacity, int hidden, int top_k, bool routes) -> int");
  m.def("group_state() -> int");
  m.def("fail(int kind, int have, int room, int[] group, int stream) -> ()");
  m.def("fault_numbers() -> int");
  m.def(
      "end_backward(Tensor x, Tensor ids, Tensor kept, Tensor scores, Tensor plan, Tensor(a!)? dx, "
      "Tensor(b!)? dweights, Tensor(c!)[] grads, int[] how, int[] group, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok_sm90, CompositeExplicitAutograd, m) {
  m.impl("window_bytes", TORCH_BOX(&window_bytes));
  m.impl("group_state", TORCH_BOX(&group_state));
  m.impl("fail", TORCH_BOX(&fail_op));
  m.impl("fault_numbers", TORCH_BOX(&fault_numbers));
}

STABLE_TORCH_LIBRARY_IMPL(mok_sm90, CUDA, m) { m.impl("end_backward", TORCH_BOX(&end_backward_op)); }

}  // namespace mok::sm90
