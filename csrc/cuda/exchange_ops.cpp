// The ops mok_sm90::* of an exchange, see sm90/exchange.h. `group`: see group_of; `how`: see Exchange.
#include "exchange_ops.h"

#include <torch/csrc/stable/ops.h>

#include "steps.h"

namespace mok::sm90 {
namespace {

int64_t window_bytes(int64_t ranks, int64_t capacity, int64_t hidden, int64_t top_k, bool routes, int64_t turns) {
  return Window::of(ranks, capacity, hidden, top_k, routes, turns).bytes;
}

int64_t group_state() { return Group::kStates; }
int64_t fault_numbers() { return FaultNumbers::kCount; }

// `kind` as in Fault.
void fail_op(int64_t kind, int64_t have, int64_t room, Integers group, int64_t stream) {
  require(fail_all(group_of(group), static_cast<Fault>(kind), have, room, stream_of(stream)));
}

// A plan over the tokens of all ranks.
Schedule schedule_of(const Sizes& sizes, const Exchange& to, const Tensor& on) {
  Schedule made(sizes, on, nullptr, nullptr);
  made.plan.room = to.room;
  made.plan.own_first = int(to.group.rank * to.group.capacity);
  made.plan.own_count = int(to.group.capacity);
  return made;
}

// What forward keeps of a turn for its backward, in ints: a slot each of order, ids and weights, and offsets. A turn's
// begin at a multiple of 16 bytes.
struct Kept {
  int *order, *ids;
  float* weights;
  int* offsets;

  static int64_t size(const Sizes& sizes) { return (3 * sizes.slots() + sizes.experts + 3) / 4 * 4; }
  Kept(const Tensor& ints, const Sizes& sizes, int64_t turn)
      : order(ints_of(ints) + turn * size(sizes)),
        ids(order + sizes.slots()),
        weights(reinterpret_cast<float*>(ids + sizes.slots())),
        offsets(ids + 2 * sizes.slots()) {}

  // The plan with this turn's order and offsets.
  Plan in(Plan plan) const {
    plan.order = order;
    plan.offsets = offsets;
    return plan;
  }
};

// Pushes the sums of rows, weighted if there are weights, and those of score tiles, where there are any: these into
// `scores` if it is given. True if with that all is pushed and the other ranks have been told.
bool push(const Rows& of, const Exchange& in, const Tensor& rows, const float* weights, const Tensor* dscore = nullptr,
          const MaybeTensor& scores = std::nullopt) {
  CombineArguments sum{};
  sum.sizes = of.sizes;
  sum.dtype = sum.out_dtype = dtype_of(rows);
  sum.plan = of.plan;
  sum.weights = weights;
  sum.weights_dtype = Dtype::kFloat32;
  if (dscore) {
    sum.dscore = static_cast<const float*>(dscore->data_ptr());
    sum.dscore_tiles = score_tiles(of.sizes);
    sum.dweights = const_cast<void*>(data_of(scores));
  }
  if (in.by_route) {
    require(push_routes({in.group, of.sizes, of.plan, rows.data_ptr()}, stream_of(of.stream)));
    if (!dscore) return false;
  } else {
    sum.rows = rows.data_ptr();
    sum.columns = sum.out_stride = of.sizes.hidden;
    sum.push = &in.group;
    sum.ends = !scores;
  }
  require(combine(sum, stream_of(of.stream)));
  return sum.ends;
}

// Whether a stack of matrices is stored as [E, in, out] instead of [E, out, in]; nothing where the kernels cannot read
// it: rows must have one distance, in multiples of 16 bytes, and matrices must not lie inside of each other.
std::optional<bool> order_of(const Tensor& t) {
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % 16) return std::nullopt;
  if (t.is_contiguous()) return false;
  const bool transposed = t.stride(2) != 1;
  const int row = transposed ? 2 : 1, column = transposed ? 1 : 2;
  const int64_t pitch = t.stride(row);
  if (t.stride(column) != 1 || pitch % 8 || pitch < t.size(column)) return std::nullopt;
  if (t.size(0) > 1 && (t.stride(0) % 8 || t.stride(0) < t.size(row) * pitch)) return std::nullopt;
  return transposed;
}

// Whether weights are stored as [E, in, out]; nothing where something is not as it must be. What exactly, and in words,
// is found by mok_compile/distributed/peer_memory.py.
std::optional<bool> fit(const Operands& in, const Exchange& to) {
  if (in.x.dim() != 2 || in.ids.dim() != 2 || in.down.dim() != 3) return std::nullopt;
  const ScalarType dtype = in.x.scalar_type(), ids = in.ids.scalar_type(), weights = in.weights.scalar_type();
  const int32_t device = in.x.get_device_index();
  const int64_t tokens = in.x.size(0), hidden = in.x.size(1), inner = in.down.size(2);
  const auto is = [&](const Tensor& t, std::initializer_list<int64_t> shape, ScalarType wanted) {
    if (t.dim() != int64_t(shape.size()) || t.scalar_type() != wanted || t.get_device_index() != device) return false;
    int64_t i = 0;
    for (const int64_t size : shape)
      if (t.size(i++) != size) return false;
    return true;
  };
  const bool typed = (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half) &&
                     (ids == ScalarType::Long || ids == ScalarType::Int) &&
                     (weights == ScalarType::Float || weights == ScalarType::BFloat16 || weights == ScalarType::Half);
  const bool sized = tokens <= to.turns * to.group.capacity && hidden == to.hidden && hidden % 8 == 0 &&
                     inner % 8 == 0 && inner > 0 && to.top_k <= 32 && to.local <= kMaxExperts;
  if (!typed || !sized || !in.x.is_contiguous() || reinterpret_cast<uintptr_t>(in.x.data_ptr()) % 16 ||
      !is(in.ids, {tokens, to.top_k}, ids) || !in.ids.is_contiguous() || !is(in.weights, {tokens, to.top_k}, weights) ||
      !in.weights.is_contiguous())
    return std::nullopt;
  const bool halves = to.layout == Layout::kConcat || to.layout == Layout::kInterleaved;
  const int64_t columns = halves ? 2 * inner : inner;
  const size_t parts = to.layout == Layout::kSeparate ? 2 : 1;
  if (!is(in.down, {to.local, hidden, inner}, dtype) || in.up.size() != parts ||
      (!in.up_bias.empty() && in.up_bias.size() != parts) ||
      (in.down_bias && (!is(*in.down_bias, {to.local, hidden}, dtype) || !in.down_bias->is_contiguous() ||
                        reinterpret_cast<uintptr_t>(in.down_bias->data_ptr()) % 16)))
    return std::nullopt;
  const std::optional<bool> transposed = to.local ? order_of(in.down) : false;
  for (const Tensor& t : in.up)
    if (!is(t, {to.local, columns, hidden}, dtype) || (to.local && order_of(t) != transposed)) return std::nullopt;
  for (const Tensor& t : in.up_bias)
    if (!is(t, {to.local, columns}, dtype) || !t.is_contiguous()) return std::nullopt;
  return transposed;
}

Operands fitting(Operands in, const Exchange& to) {
  const std::optional<bool> transposed = fit(in, to);
  STD_TORCH_CHECK(transposed.has_value(), "mok-compile, sm90 engine: arguments that do not fit the exchange");
  in.transposed = *transposed;
  return in;
}

// The tokens of a turn, out of all of this rank's: perhaps none.
Tensor of_turn(Tensor all, const Exchange& to, int64_t turn) {
  if (to.turns == 1) return all;
  const int64_t first = std::min(turn * to.group.capacity, all.size(0));
  return narrow(all, 0, first, std::min(to.group.capacity, all.size(0) - first));
}

// A turn's call: publishes `rows`, and `again` if that is given.
PublishArguments published(const Exchange& to, const Tensor& rows, const Tensor* again = nullptr) {
  PublishArguments said{};
  said.group = to.group;
  said.sizes = {rows.size(0), rows.size(1), 0, to.experts, to.top_k};
  said.call = to.call;
  said.rows = rows.data_ptr();
  if (again) said.again = again->data_ptr();
  return said;
}

// The tokens of all ranks in a turn, and this rank's experts.
Sizes sizes_of(const Exchange& to, const Operands& in) {
  return {to.group.ranks * to.group.capacity, to.hidden, in.down.size(2), to.local, to.top_k};
}

// Rows of the other ranks' tokens in a turn; a rank without experts reads none.
int64_t other_tokens(const Exchange& to, const Sizes& sizes) {
  return sizes.experts > 0 ? sizes.tokens - to.group.capacity : 0;
}
Tensor other_rows(const Exchange& to, const Sizes& sizes, const Tensor& like) {
  return empty({other_tokens(to, sizes), to.hidden}, like.scalar_type(), like);
}

// What Summed needs where routes come one by one.
MaybeTensor positions(const Exchange& to, const Tensor& on) {
  return to.by_route ? MaybeTensor(empty_ints(to.group.capacity * to.top_k, on)) : std::nullopt;
}

// All memory is asked for before the first turn: the op is called again where there was none, and the other ranks would
// take that for the next turn.
//
// Forward: y and, with `save`, what backward needs: the other ranks' tokens of the last turn [(ranks - 1) * capacity,
// H], and of all turns h [turns * room, N] and Kept; tokens and h without rows on a rank without experts. No tensors
// where memory does not suffice.
Tensors forward_parallel_op(Tensor x, Tensor ids, Tensor weights, Tensors up, Tensor down, Tensors up_bias,
                            MaybeTensor down_bias, Doubles activation, bool save, Integers how, Integers numbers,
                            int64_t stream) {
  const Exchange to(how, numbers);
  const Operands in =
      fitting({x, ids, weights, up, down, {}, up_bias, down_bias, to.layout, false, activation_of(activation)}, to);
  return if_there_is_room([&]() -> Tensors {
    const Group& group = to.group;
    const Sizes sizes = sizes_of(to, in);
    const Parts parts = parts_of(to.layout, sizes.inner);
    const bool works = sizes.experts > 0;
    const int64_t room = works ? to.room : 0;
    const Tensor y = empty({x.size(0), to.hidden}, scalar_of(to.out), x);
    const Tensor others = other_rows(to, sizes, x);
    const Tensor ints = empty_ints((save ? to.turns : 1) * Kept::size(sizes), x);
    MaybeTensor h;
    if (save) h = empty({to.turns * room, parts.columns * parts.count}, x.scalar_type(), x);
    const Schedule made = schedule_of(sizes, to, x);
    const Tensor a = empty_panels({sizes.inner, 1}, room, x), rows = empty({room, to.hidden}, x.scalar_type(), x);
    const MaybeTensor position = positions(to, x);

    const Block block = block_of({sizes, made.plan, stream}, in);
    // As if all ranks were given as much.
    const Tiles tiles = tiles_for(std::min(x.size(0), group.capacity) * to.top_k, sizes.experts);
    for (int64_t turn = 0; turn < to.turns; ++turn) {
      const Tensor own = of_turn(x, to, turn), own_ids = of_turn(ids, to, turn),
                   own_weights = of_turn(weights, to, turn);
      const Kept kept(ints, sizes, save ? turn : 0);
      Summed summed(to, x.scalar_type(), own_ids, &own_weights, of_turn(y, to, turn), std::nullopt, position);
      summed.mark({y});  // earlier turns have written sums
      PublishArguments said = published(to, own);
      said.routed = true;
      said.ids = own_ids.data_ptr();
      said.ids_dtype = dtype_of(own_ids);
      said.weights = own_weights.data_ptr();
      said.weights_dtype = dtype_of(own_weights);
      require(publish(said, stream_of(stream)));
      require(collect({group, to.top_k, to.first, sizes.experts, kept.ids, kept.weights}, stream_of(stream)));
      bool ended = false;
      FinishArguments end{group, to.top_k, nullptr, nullptr, nullptr, nullptr, to.room};
      if (works) {
        const Rows of{sizes, kept.in(made.plan), stream};
        require(schedule({sizes, kept.ids, Dtype::kInt32, kept.order, kept.offsets, made.counts, of.plan, tiles},
                         stream_of(stream)));
        const Pull pull{group, others.data_ptr(), int(sizes.experts), int(to.top_k), int(to.hidden), to.sms};
        MaybeTensor saved;
        if (h) saved = narrow(*h, 0, turn * room, room);
        experts(of, block, in, tiles, {others.data_ptr(), own.data_ptr()}, saved, a, rows, &pull);
        ended = push(of, to, rows, kept.weights);
        end.error = of.plan.error;
        end.count = of.plan.rows;
      }
      if (!ended) require(finish(end, stream_of(stream)));
      require(sum(summed.arguments, stream_of(stream)));
    }
    if (!save) return {y};
    return {y, others, *h, ints};
  });
}

// Backward: the gradients of x, weights, up, down, up_bias and down_bias that are needed, those of several tensors one
// after the other. The turns in reverse: `other_x`, that of forward's last one, comes first, and is fetched again for
// the others. No tensors where memory does not suffice.
Tensors backward_parallel_op(Tensor dy, Tensor x, Tensor ids, Tensor weights, Tensors up, Tensor down, Tensors up_bias,
                             MaybeTensor down_bias, Doubles activation, Tensor other_x, Tensor h, Tensor ints,
                             std::vector<bool> needs, Integers how, Integers numbers, int64_t stream) {
  const Exchange to(how, numbers);
  const Operands in =
      fitting({x, ids, weights, up, down, {}, up_bias, down_bias, to.layout, false, activation_of(activation)}, to);
  const Group& group = to.group;
  const ScalarType dtype = x.scalar_type();
  const Sizes sizes = sizes_of(to, in);
  const Parts parts = parts_of(to.layout, sizes.inner);
  const bool works = sizes.experts > 0;
  const int64_t rows = works ? to.room : 0;
  STD_TORCH_CHECK(dy.dim() == 2 && dy.size(0) == x.size(0) && dy.size(1) == x.size(1) && dy.scalar_type() == dtype &&
                      dy.is_contiguous() && ints.numel() == to.turns * Kept::size(sizes) &&
                      h.numel() == to.turns * rows * parts.columns * parts.count &&
                      other_x.numel() == other_tokens(to, sizes) * to.hidden,
                  "mok-compile, sm90 engine: what forward has saved does not fit the exchange");
  return if_there_is_room([&]() -> Tensors {
    const Needs wanted = needs_of(needs);
    MaybeTensor dx, dweights;
    if (wanted.x) dx = empty({x.size(0), to.hidden}, dtype, x);
    if (wanted.weights) dweights = empty({x.size(0), to.top_k}, weights.scalar_type(), x);
    const Gradients grads(in, wanted);
    const Tensors of_experts = grads.all();

    const Tensor other_dy = other_rows(to, sizes, x);
    MaybeTensor fetched;  // nothing else than the gradients of up needs it
    if (to.turns > 1 && !grads.up.empty()) fetched = other_rows(to, sizes, x);
    const Schedule made = schedule_of(sizes, to, x);
    const Tensor dh_panels = empty_panels(parts, rows, x);
    const Panels dh{parts, dh_panels, to.room};
    const Tensor dscore = empty({score_tiles(sizes), works ? sizes.slots() : 0}, ScalarType::Float, x);
    const int64_t room = rows * std::max(to.hidden, panels_of(sizes.inner) * kPanel);
    // The first gradient of up is written last: until then its memory serves as scratch, if there is enough.
    const bool lent = to.turns == 1 && !grads.up.empty() && grads.up[0].numel() >= room;
    const Tensor scratch = lent ? grads.up[0] : empty({room}, dtype, x);
    MaybeTensor scores;
    if (works && to.by_route) scores = empty({sizes.tokens, to.top_k}, ScalarType::Float, x);
    const MaybeTensor position = positions(to, x);

    const Block block = block_of({sizes, made.plan, stream}, in);
    for (int64_t turn = to.turns - 1; turn >= 0; --turn) {
      const bool again = turn < to.turns - 1;
      const Tensor own = of_turn(x, to, turn), own_dy = of_turn(dy, to, turn);
      const Kept kept(ints, sizes, turn);
      const Rows of{sizes, kept.in(made.plan), stream};
      const auto part = [&](const MaybeTensor& all) { return all ? MaybeTensor(of_turn(*all, to, turn)) : all; };
      Summed summed(to, dtype, of_turn(ids, to, turn), nullptr, part(dx), part(dweights), position);
      summed.mark(of_experts);

      require(publish(published(to, own_dy, again ? &own : nullptr), stream_of(stream)));
      bool ended = false;
      FinishArguments end{group, to.top_k, kept.ids, nullptr, nullptr, nullptr, to.room};
      if (works) {
        const Tensor all_weights = torch::stable::from_blob(kept.weights, {sizes.tokens, to.top_k}, {to.top_k, 1},
                                                            x.device(), ScalarType::Float);
        require(replan(sizes, of.plan, stream_of(stream)));
        require(wait_published(group, stream_of(stream)));
        Pull pull{group, other_dy.data_ptr(), int(sizes.experts), int(to.top_k), int(to.hidden), to.backward_sms};
        if (again && fetched) pull.again = fetched->data_ptr();
        down_gradients(of, block, down_bias, {other_dy.data_ptr(), own_dy.data_ptr()}, narrow(h, 0, turn * rows, rows),
                       all_weights, dh, scratch, dscore, grads, again, &pull);
        up_gradients(of, block, dh, scratch);
        // What the other ranks need is not known here: the gradients of tokens and of routing weights are always sent.
        ended = push(of, to, scratch, nullptr, &dscore, scores);
        if (scores) end.scores = static_cast<const float*>(scores->data_ptr());
        end.error = of.plan.error;
        end.count = of.plan.rows;
      }
      if (!ended) require(finish(end, stream_of(stream)));  // the other ranks wait for it
      if (works)
        up_weight_gradients(of, block, dh, {again ? data_of(fetched) : other_x.data_ptr(), own.data_ptr()}, grads,
                            again);
      require(sum(summed.arguments, stream_of(stream)));
    }
    Tensors all;
    for (const MaybeTensor& one : {dx, dweights})
      if (one) all.push_back(*one);
    all.insert(all.end(), of_experts.begin(), of_experts.end());
    return all;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mok_sm90, m) {
  m.def("window_bytes(int ranks, int capacity, int hidden, int top_k, bool routes, int turns) -> int");
  m.def("group_state() -> int");
  m.def("fail(int kind, int have, int room, int[] group, int stream) -> ()");
  m.def("fault_numbers() -> int");
  const std::string block =
      "Tensor x, Tensor ids, Tensor weights, Tensor[] up, Tensor down, Tensor[] up_bias, Tensor? down_bias, "
      "float[] activation, ";
  const std::string how = "int[] how, int[] group, int stream";
  m.def(("forward_parallel(" + block + "bool save, " + how + ") -> Tensor[]").c_str());
  m.def(("backward_parallel(Tensor dy, " + block + "Tensor rows, Tensor h, Tensor plan, bool[] needs, " + how +
         ") -> Tensor[]")
            .c_str());
}

STABLE_TORCH_LIBRARY_IMPL(mok_sm90, CompositeExplicitAutograd, m) {
  m.impl("window_bytes", TORCH_BOX(&window_bytes));
  m.impl("group_state", TORCH_BOX(&group_state));
  m.impl("fail", TORCH_BOX(&fail_op));
  m.impl("fault_numbers", TORCH_BOX(&fault_numbers));
}

STABLE_TORCH_LIBRARY_IMPL(mok_sm90, CUDA, m) {
  m.impl("forward_parallel", TORCH_BOX(&forward_parallel_op));
  m.impl("backward_parallel", TORCH_BOX(&backward_parallel_op));
}

}  // namespace mok::sm90
