// The ops mok_sm90::*: tensors in, launches out. The callers (mok_compile/engines/sm90.py) have checked shapes and
// dtypes and pass the stream.
#include <torch/csrc/stable/ops.h>

#include "exchange_ops.h"
#include "experts.h"
#include "memory.h"

namespace mok::sm90 {
namespace {

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
Block block_of(const Rows& of, const Tensors& up, const Tensor& down, const Integers& addresses, Layout layout,
               bool transposed, const Activation& activation) {
  const Block block{weights_of(up, down, addresses, of.sizes, layout, transposed, &of.plan), layout, transposed,
                    activation};
  if (block.weights.scattered) require(tell_places(of.sizes, of.plan, block.weights.places, stream_of(of.stream)));
  return block;
}

// The tiles of a forward pass over so many slots and experts. Low ones leave room for one more stage of weights where
// experts have few rows. Tall ones save a row block where an expert's rows fill more than one of 128 but seldom more
// than one of 192, and read its weights once instead of twice; elsewhere wide ones were as fast or faster on an H200
// (docs/kernels/sm90.md).
Tiles tiles_for(int64_t slots, int64_t experts) {
  if (slots <= 16 * experts) return Tiles::kLow;
  return slots > 112 * experts && slots <= 184 * experts ? Tiles::kTall : Tiles::kWide;
}

// rows and h (if given) of sorted rows, from x; a is scratch.
void experts(const Rows& of, const Block& block, const Tensors& up_bias, const MaybeTensor& down_bias, Tiles tiles,
             const TokenRows& x, const MaybeTensor& h, const Tensor& a, const Tensor& rows,
             const Pull* pull = nullptr) {
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
                   {data_of(up_bias, 0), data_of(up_bias, 1)},
                   data_of(down_bias),
                   const_cast<void*>(data_of(h)),
                   a.data_ptr(),
                   rows.data_ptr(),
                   pull},
                  stream_of(of.stream)));
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

Tensor empty_panels(const Parts& parts, int64_t rows, const Tensor& like) {
  return empty({parts.count * parts.panels(), rows, kPanel}, like.scalar_type(), like);
}

// y from the sorted slots' rows; fills order, offsets and h (if given).
Tensor many(const Operands& in, Dtype out, const MaybeTensor& h, int* order, int* offsets, int64_t stream) {
  const Sizes sizes = in.sizes();
  const Schedule made(sizes, in.x, order, offsets);
  const Rows of{sizes, made.plan, stream};
  const Block block = block_of(of, in.up, in.down, in.addresses, in.layout, in.transposed, in.activation);
  const Tensor y = empty({sizes.tokens, sizes.hidden}, scalar_of(out), in.x);
  const Tensor a = empty_panels({sizes.inner, 1}, sizes.slots(), in.x);
  const Tensor rows = empty({sizes.slots(), sizes.hidden}, in.x.scalar_type(), in.x);
  const Tiles tiles = tiles_for(sizes.slots(), sizes.experts);
  require(schedule({sizes, in.ids.data_ptr(), dtype_of(in.ids), order, offsets, made.counts, made.plan, tiles,
                    const_cast<void*>(data_of(h)), h ? h->size(1) : 0},
                   stream_of(stream)));
  experts(of, block, in.up_bias, in.down_bias, tiles, in.x.data_ptr(), h, a, rows);
  require(combine({sizes, dtype_of(in.x), made.plan, rows.data_ptr(), sizes.hidden, in.weights.data_ptr(),
                   dtype_of(in.weights), y.data_ptr(), out, sizes.hidden, nullptr, 0, nullptr, nullptr},
                  stream_of(stream)));
  return y;
}

// The same without h, in one launch; see decode_takes().
Tensor few(const Operands& in, Dtype out, int64_t stream) {
  const Sizes sizes = in.sizes();
  const Weights experts = weights_of(in.up, in.down, in.addresses, sizes, in.layout, false, nullptr);
  const Tensor y = empty({sizes.tokens, sizes.hidden}, scalar_of(out), in.x);
  const int64_t slots = sizes.slots(), activations = slots * sizes.inner;
  const Tensor ints = empty_ints(slots + sizes.experts, in.x);
  const Tensor scratch = empty({activations + (slots + 1) * sizes.hidden}, in.x.scalar_type(), in.x);
  require(decode({sizes,
                  dtype_of(in.x),
                  in.layout,
                  in.activation,
                  in.x.data_ptr(),
                  in.ids.data_ptr(),
                  dtype_of(in.ids),
                  in.weights.data_ptr(),
                  dtype_of(in.weights),
                  {experts.up[0], experts.up[1]},
                  experts.down,
                  experts.scattered ? &experts.places : nullptr,
                  {data_of(in.up_bias, 0), data_of(in.up_bias, 1)},
                  data_of(in.down_bias),
                  y.data_ptr(),
                  out,
                  ints_of(ints),
                  ints_of(ints) + slots,
                  scratch.data_ptr(),
                  static_cast<char*>(scratch.data_ptr()) + 2 * activations},
                 stream_of(stream)));
  return y;
}

// Whether the kernel for few tokens pays: it reads an expert's weights once for every 8 of its rows, so once for up to
// 8 tokens, and seldom twice where experts have 4 rows on average. With more slots the other path was as fast or faster
// on an H200 (docs/kernels/sm90.md).
bool pays(const Sizes& sizes) {
  return sizes.slots() <= (sizes.tokens <= 8 ? 64 : std::min<int64_t>(32, 4 * sizes.experts));
}

void route_op(Tensor x, Tensor weight, MaybeTensor bias, MaybeTensor correction, MaybeTensor scale, Doubles program,
              Tensor logits, MaybeTensor values, MaybeTensor weights, Tensor ids, int64_t stream) {
  RouteArguments in = router_of(program_of(program), logits, correction, scale, values, weights, ids);
  in.depth = x.size(1);
  in.x = x.data_ptr();
  in.weight = weight.data_ptr();
  in.bias = data_of(bias);
  require(route(in, stream_of(stream)));
}

void choose_op(Tensor logits, MaybeTensor correction, MaybeTensor scale, Doubles program, MaybeTensor values,
               MaybeTensor weights, Tensor ids, int64_t stream) {
  require(choose(router_of(program_of(program), logits, correction, scale, values, weights, ids), stream_of(stream)));
}

// The sums of score tiles: the gradients of the routing weights.
void add_scores(CombineArguments& sum, const Tensor& dscore, const Tensor& dweights) {
  sum.dscore = static_cast<const float*>(dscore.data_ptr());
  sum.dscore_tiles = score_tiles(sum.sizes);
  sum.dweights = dweights.data_ptr();
  sum.weights_dtype = dtype_of(dweights);
}

// The same over the tokens of all ranks of an exchange.
Schedule schedule_of(const Sizes& sizes, const Exchange& to, const Tensor& on, int* order, int* offsets) {
  Schedule made(sizes, on, order, offsets);
  made.plan.room = to.room;
  made.plan.own_first = int(to.group.rank * to.group.capacity);
  made.plan.own_count = int(to.group.capacity);
  return made;
}

// What forward keeps of an exchange for its backward, in ints: a slot each of order, ids and weights, and offsets.
struct Kept {
  int *order, *ids;
  float* weights;
  int* offsets;

  static int64_t size(const Sizes& sizes) { return 3 * sizes.slots() + sizes.experts; }
  Kept(const Tensor& ints, const Sizes& sizes)
      : order(ints_of(ints)),
        ids(order + sizes.slots()),
        weights(reinterpret_cast<float*>(ids + sizes.slots())),
        offsets(ids + 2 * sizes.slots()) {}
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
  const bool sized = tokens <= to.group.capacity && hidden == to.hidden && hidden % 8 == 0 && inner % 8 == 0 &&
                     inner > 0 && to.top_k <= 32 && to.local <= kMaxExperts;
  if (!typed || !sized || !in.x.is_contiguous() || reinterpret_cast<uintptr_t>(in.x.data_ptr()) % 16 ||
      !is(in.ids, {tokens, to.top_k}, ids) || !in.ids.is_contiguous() || !is(in.weights, {tokens, to.top_k}, weights) ||
      !in.weights.is_contiguous())
    return std::nullopt;
  const bool halves = to.layout == Layout::kConcat || to.layout == Layout::kInterleaved;
  const int64_t columns = halves ? 2 * inner : inner;
  const size_t parts = to.layout == Layout::kSeparate ? 2 : 1;
  if (!is(in.down, {to.local, hidden, inner}, dtype) || in.up.size() != parts ||
      (!in.up_bias.empty() && in.up_bias.size() != parts) ||
      (in.down_bias && (!is(*in.down_bias, {to.local, hidden}, dtype) || !in.down_bias->is_contiguous())))
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

void publish_rows(const Exchange& to, const Tensor& rows, const Operands* routing, int64_t stream) {
  PublishArguments said{};
  said.group = to.group;
  said.sizes = {rows.size(0), rows.size(1), 0, to.experts, to.top_k};
  said.call = to.call;
  said.rows = rows.data_ptr();
  if (routing) {
    said.routed = true;
    said.ids = routing->ids.data_ptr();
    said.ids_dtype = dtype_of(routing->ids);
    said.weights = routing->weights.data_ptr();
    said.weights_dtype = dtype_of(routing->weights);
  }
  require(publish(said, stream_of(stream)));
}

// Forward of an exchange: y and, with `save`, what backward needs: the other ranks' tokens [(ranks - 1) * capacity, H],
// h, and Kept. No tensors where memory does not suffice.
Tensors forward_parallel_op(Tensor x, Tensor ids, Tensor weights, Tensors up, Tensor down, Tensors up_bias,
                            MaybeTensor down_bias, Doubles activation, bool save, Integers how, Integers numbers,
                            int64_t stream) {
  const Exchange to(how, numbers);
  const Operands in =
      fitting({x, ids, weights, up, down, {}, up_bias, down_bias, to.layout, false, activation_of(activation)}, to);
  return if_there_is_room([&]() -> Tensors {
    const Group& group = to.group;
    const ScalarType dtype = x.scalar_type();
    const Sizes sizes{group.ranks * group.capacity, to.hidden, down.size(2), to.local, to.top_k};
    const Parts parts = parts_of(to.layout, sizes.inner);
    const Tensor y = empty({x.size(0), to.hidden}, scalar_of(to.out), x);
    const Tensor others = empty({sizes.tokens - group.capacity, to.hidden}, dtype, x);
    const Tensor ints = empty_ints(Kept::size(sizes), x);
    const Kept kept(ints, sizes);
    MaybeTensor h;
    if (save) h = empty({to.room, parts.columns * parts.count}, dtype, x);
    const bool works = sizes.experts > 0;
    const Schedule made = schedule_of(sizes, to, x, kept.order, kept.offsets);
    const int64_t room = works ? to.room : 0;
    const Tensor a = empty_panels({sizes.inner, 1}, room, x), rows = empty({room, to.hidden}, dtype, x);
    const Summed summed(to, dtype, ids, &weights, y, std::nullopt);

    publish_rows(to, x, &in, stream);
    require(collect({group, to.top_k, to.first, sizes.experts, kept.ids, kept.weights}, stream_of(stream)));
    bool ended = false;
    FinishArguments end{group, to.top_k, nullptr, nullptr, nullptr, nullptr, to.room};
    if (works) {
      const Tiles tiles = tiles_for(x.size(0) * to.top_k, sizes.experts);  // as if all ranks were given as much
      require(schedule({sizes, kept.ids, Dtype::kInt32, kept.order, kept.offsets, made.counts, made.plan, tiles},
                       stream_of(stream)));
      const Rows of{sizes, made.plan, stream};
      const Pull pull{group, others.data_ptr(), int(sizes.experts), int(to.top_k), int(to.hidden), to.sms};
      const Block block = block_of(of, up, down, {}, in.layout, in.transposed, in.activation);
      experts(of, block, up_bias, down_bias, tiles, {others.data_ptr(), x.data_ptr()}, h, a, rows, &pull);
      ended = push(of, to, rows, kept.weights);
      end.error = made.plan.error;
      end.count = made.plan.rows;
    }
    if (!ended) require(finish(end, stream_of(stream)));
    require(sum(summed.arguments, stream_of(stream)));
    if (!save) return {y};
    return {y, others, *h, ints};
  });
}

// The gradients of a block's weights and biases that are wanted.
struct Gradients {
  Tensors up;
  MaybeTensor down;
  Tensors up_bias;
  MaybeTensor down_bias;
};

// A weight's gradient: per expert the sum over its rows of `dense` outer `gathered` [T, H], or the other way round.
void outer(const Rows& of, const void* dense, const Parts& parts, bool dense_first, const TokenRows& gathered,
           const Tensor& out, int ticket) {
  require(weight_grad(
      {of.sizes, dtype_of(out), of.plan, dense, parts, gathered, of.sizes.hidden, dense_first, out.data_ptr(), ticket},
      stream_of(of.stream)));
}

// The gradients through the down projection: dh, dscore, and those of down; `scratch` holds the activation.
void down_gradients(const Rows& of, const Block& block, const TokenRows& dy, const Tensor& h, const Tensor& weights,
                    const Panels& dh, const Tensor& scratch, const Tensor& dscore, const Gradients& grads,
                    const Pull* pull = nullptr) {
  const Panels a{{of.sizes.inner, 1}, scratch, of.plan.room};
  require_room(a, "backward");
  require_room(dh, "backward");
  require(down_grad({of.sizes, dtype_of(h), block.layout, block.transposed, block.activation, of.plan, dy,
                     block.weights.down, h.data_ptr(), weights.data_ptr(), dtype_of(weights), dh.data.data_ptr(),
                     scratch.data_ptr(), static_cast<float*>(dscore.data_ptr()), pull},
                    stream_of(of.stream)));
  if (grads.down) outer(of, a.part(0), a.parts, block.transposed, dy, *grads.down, 3);
  if (grads.down_bias)
    require(bias_grad({of.sizes,
                       dtype_of(h),
                       of.plan,
                       nullptr,
                       {of.sizes.hidden, 1},
                       dy,
                       weights.data_ptr(),
                       dtype_of(weights),
                       grads.down_bias->data_ptr()},
                      stream_of(of.stream)));
}

// The rows of dx, from dh.
void up_gradients(const Rows& of, const Block& block, const Panels& dh, const Tensor& rows) {
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
void up_weight_gradients(const Rows& of, const Block& block, const Panels& dh, const TokenRows& x,
                         const Gradients& grads) {
  const auto parts = [&](const Tensors& out) { return Parts{dh.parts.columns, dh.parts.count / int64_t(out.size())}; };
  for (size_t i = 0; i < grads.up.size(); ++i)
    outer(of, dh.part(i), parts(grads.up), !block.transposed, x, grads.up[i], 4 + int(i));
  for (size_t i = 0; i < grads.up_bias.size(); ++i)
    require(bias_grad({of.sizes,
                       dtype_of(grads.up_bias[i]),
                       of.plan,
                       dh.part(i),
                       parts(grads.up_bias),
                       {},
                       nullptr,
                       Dtype::kFloat32,
                       grads.up_bias[i].data_ptr()},
                      stream_of(of.stream)));
}

// Backward: the gradients of x, weights, up, down, up_bias and down_bias that are needed, those of several tensors one
// after the other. With a down bias, whose part of the gradient of weights Python knows, the exchange is left before
// its end, and there come more tensors: the other ranks' dy, this rank's scores [ranks * capacity, K] and the plan. No
// tensors where memory does not suffice.
Tensors backward_parallel_op(Tensor dy, Tensor x, Tensor ids, Tensor weights, Tensors up, Tensor down, Tensors up_bias,
                             MaybeTensor down_bias, Doubles activation, Tensor other_x, Tensor h, Tensor ints,
                             std::vector<bool> needs, Integers how, Integers numbers, int64_t stream) {
  const Exchange to(how, numbers);
  const Operands in =
      fitting({x, ids, weights, up, down, {}, up_bias, down_bias, to.layout, false, activation_of(activation)}, to);
  const Group& group = to.group;
  const ScalarType dtype = x.scalar_type();
  const Sizes sizes{group.ranks * group.capacity, to.hidden, down.size(2), to.local, to.top_k};
  const Parts parts = parts_of(to.layout, sizes.inner);
  STD_TORCH_CHECK(needs.size() == 6 && dy.dim() == 2 && dy.size(0) == x.size(0) && dy.size(1) == x.size(1) &&
                      dy.scalar_type() == dtype && dy.is_contiguous() && ints.numel() == Kept::size(sizes) &&
                      h.numel() == to.room * parts.columns * parts.count &&
                      other_x.numel() == (sizes.tokens - group.capacity) * to.hidden,
                  "mok-compile, sm90 engine: what forward has saved does not fit the exchange");
  return if_there_is_room([&]() -> Tensors {
    const bool works = sizes.experts > 0;
    const auto gradient = [&](const Tensor& of) {
      return empty({of.size(0), of.size(1), of.size(2)}, dtype, x, in.transposed);
    };
    MaybeTensor dx, dweights;
    Gradients grads;
    if (needs[0]) dx = empty({x.size(0), to.hidden}, dtype, x);
    if (needs[1]) dweights = empty({x.size(0), to.top_k}, weights.scalar_type(), x);
    for (size_t i = 0; needs[2] && i < up.size(); ++i) grads.up.push_back(gradient(up[i]));
    if (needs[3]) grads.down = gradient(down);
    for (size_t i = 0; needs[4] && i < up_bias.size(); ++i)
      grads.up_bias.push_back(empty({up_bias[i].size(0), up_bias[i].size(1)}, dtype, x));
    if (needs[5] && down_bias) grads.down_bias = empty({sizes.experts, to.hidden}, dtype, x);
    Tensors of_experts = grads.up;
    if (grads.down) of_experts.push_back(*grads.down);
    of_experts.insert(of_experts.end(), grads.up_bias.begin(), grads.up_bias.end());
    if (grads.down_bias) of_experts.push_back(*grads.down_bias);

    const Kept kept(ints, sizes);
    const Tensor other_dy = empty({sizes.tokens - group.capacity, to.hidden}, dtype, x);
    const Schedule made = schedule_of(sizes, to, x, kept.order, kept.offsets);
    const int64_t rows = works ? to.room : 0;
    const Tensor dh_panels = empty_panels(parts, rows, x);
    const Tensor dscore = empty({score_tiles(sizes), works ? sizes.slots() : 0}, ScalarType::Float, x);
    const int64_t room = rows * std::max(to.hidden, panels_of(sizes.inner) * kPanel);
    // The first gradient of up is written last: until then its memory serves as scratch, if there is enough.
    const bool lent = !grads.up.empty() && grads.up[0].numel() >= room;
    const Tensor scratch = lent ? grads.up[0] : empty({room}, dtype, x);
    MaybeTensor scores;
    if (works && (to.by_route || down_bias)) scores = empty({sizes.tokens, to.top_k}, ScalarType::Float, x);
    Summed summed(to, dtype, ids, nullptr, dx, dweights);
    summed.mark(of_experts);

    publish_rows(to, dy, nullptr, stream);
    bool ended = false, open = false;
    FinishArguments end{group, to.top_k, kept.ids, nullptr, nullptr, nullptr, to.room};
    if (works) {
      const Rows of{sizes, made.plan, stream};
      const Block block = block_of(of, up, down, {}, in.layout, in.transposed, in.activation);
      const Panels dh{parts, dh_panels, to.room};
      const Tensor all_weights = torch::stable::from_blob(kept.weights, {sizes.tokens, to.top_k}, {to.top_k, 1},
                                                          x.device(), ScalarType::Float);
      require(replan(sizes, made.plan, stream_of(stream)));
      require(wait_published(group, stream_of(stream)));
      const Pull pull{group, other_dy.data_ptr(), int(sizes.experts), int(to.top_k), int(to.hidden), to.backward_sms};
      down_gradients(of, block, {other_dy.data_ptr(), dy.data_ptr()}, h, all_weights, dh, scratch, dscore, grads,
                     &pull);
      up_gradients(of, block, dh, scratch);
      // What the other ranks need is not known here: the gradients of tokens and of routing weights are always sent.
      ended = push(of, to, scratch, nullptr, &dscore, scores);
      open = !ended && down_bias;
      if (scores) end.scores = static_cast<const float*>(scores->data_ptr());
      end.error = made.plan.error;
      end.count = made.plan.rows;
      if (!ended && !open) require(finish(end, stream_of(stream)));
      up_weight_gradients(of, block, dh, {other_x.data_ptr(), x.data_ptr()}, grads);
    } else {
      require(finish(end, stream_of(stream)));
    }
    if (!open) require(sum(summed.arguments, stream_of(stream)));
    Tensors all;
    for (const MaybeTensor& one : {dx, dweights})
      if (one) all.push_back(*one);
    all.insert(all.end(), of_experts.begin(), of_experts.end());
    if (open) all.insert(all.end(), {other_dy, *scores, made.ints});
    return all;
  });
}

}  // namespace

Tensors forward(const Operands& in, Dtype out, int64_t stream) {
  const Sizes sizes = in.sizes();
  const Parts parts = parts_of(in.layout, sizes.inner);
  const Tensor h = empty({sizes.slots(), parts.columns * parts.count}, in.x.scalar_type(), in.x);
  const Tensor order = empty_ints(sizes.slots(), in.x), offsets = empty_ints(sizes.experts, in.x);
  return {many(in, out, h, ints_of(order), ints_of(offsets), stream), h, order, offsets};
}

Tensor infer(const Operands& in, Dtype out, std::optional<bool> by_few, int64_t stream) {
  const Sizes sizes = in.sizes();
  if (!in.transposed && by_few.value_or(pays(sizes))) return few(in, out, stream);
  const Tensor ints = empty_ints(sizes.slots() + sizes.experts, in.x);
  return many(in, out, std::nullopt, ints_of(ints), ints_of(ints) + sizes.slots(), stream);
}

// dh is written first; then `scratch` holds the panels of the weighted activation, after it the rows of dx. The
// gradients of up are written last: one of them is the scratch, if it is large enough.
Tensors backward(const Tensor& dy, const Operands& in, const Tensor& h, const Tensor& order, const Tensor& offsets,
                 const Needs& needs, int64_t stream) {
  const Sizes sizes = in.sizes();
  const ScalarType dtype = in.x.scalar_type();
  const int64_t slots = sizes.slots();
  // One tensor for all experts, stored as the weights are.
  const auto gradient = [&](const Tensor& of) {
    const int64_t dims = of.dim();
    return empty({sizes.experts, of.size(dims - 2), of.size(dims - 1)}, dtype, in.x, in.transposed);
  };
  const auto bias_gradient = [&](const Tensor& of) { return empty({of.size(0), of.size(1)}, dtype, in.x); };
  MaybeTensor dx, dweights;
  Gradients grads;
  if (needs.x) dx = empty({sizes.tokens, sizes.hidden}, dtype, in.x);
  if (needs.weights) dweights = empty({sizes.tokens, sizes.top_k}, in.weights.scalar_type(), in.x);
  for (size_t i = 0; needs.up && i < in.up.size(); ++i) grads.up.push_back(gradient(in.up[i]));
  if (needs.down) grads.down = gradient(in.down);
  for (size_t i = 0; needs.up_bias && i < in.up_bias.size(); ++i) grads.up_bias.push_back(bias_gradient(in.up_bias[i]));
  if (needs.down_bias && in.down_bias) grads.down_bias = bias_gradient(*in.down_bias);

  const Schedule made(sizes, in.x, ints_of(order), ints_of(offsets));
  const Rows of{sizes, made.plan, stream};
  const Parts a{sizes.inner, 1};
  const Tensor dh_panels = empty_panels(parts_of(in.layout, sizes.inner), slots, in.x);
  const Tensor dscore = empty({score_tiles(sizes), slots}, ScalarType::Float, in.x);
  const int64_t room = slots * std::max(sizes.hidden, a.panels() * kPanel);
  const bool lent = !grads.up.empty() && grads.up[0].numel() >= room;
  const Tensor scratch = lent ? grads.up[0] : empty({room}, dtype, in.x);

  const Block block = block_of(of, in.up, in.down, in.addresses, in.layout, in.transposed, in.activation);
  const Panels dh{parts_of(in.layout, sizes.inner), dh_panels, slots};
  require(replan(sizes, made.plan, stream_of(stream)));
  down_gradients(of, block, dy.data_ptr(), h, in.weights, dh, scratch, dscore, grads);
  CombineArguments sum{};
  sum.sizes = sizes;
  sum.dtype = sum.out_dtype = dtype_of(in.x);
  sum.plan = made.plan;
  if (dx) {
    up_gradients(of, block, dh, scratch);
    sum.rows = scratch.data_ptr();
    sum.out = dx->data_ptr();
    sum.columns = sum.out_stride = sizes.hidden;
  }
  if (dweights) add_scores(sum, dscore, *dweights);
  if (dx || dweights) require(combine(sum, stream_of(stream)));
  up_weight_gradients(of, block, dh, in.x.data_ptr(), grads);

  Tensors all;
  for (const MaybeTensor& one : {dx, dweights})
    if (one) all.push_back(*one);
  all.insert(all.end(), grads.up.begin(), grads.up.end());
  if (grads.down) all.push_back(*grads.down);
  all.insert(all.end(), grads.up_bias.begin(), grads.up_bias.end());
  if (grads.down_bias) all.push_back(*grads.down_bias);
  return all;
}

namespace {

// `layout`, `out` and so on as mok_compile/engines/sm90.py numbers them.
Operands operands_of(Tensor x, Tensor ids, Tensor weights, Tensors up, Tensor down, Integers addresses, Tensors up_bias,
                     MaybeTensor down_bias, int64_t layout, bool transposed, const Doubles& activation) {
  return {std::move(x),      std::move(ids),       std::move(weights),       std::move(up),
          std::move(down),   std::move(addresses), std::move(up_bias),       down_bias,
          layout_of(layout), transposed,           activation_of(activation)};
}

// These three give no tensors where memory does not suffice.
Tensors forward_op(Tensor x, Tensor ids, Tensor weights, Tensors up, Tensor down, Integers addresses, Tensors up_bias,
                   MaybeTensor down_bias, int64_t layout, bool transposed, Doubles activation, int64_t out,
                   int64_t stream) {
  const Operands in =
      operands_of(x, ids, weights, up, down, addresses, up_bias, down_bias, layout, transposed, activation);
  return if_there_is_room([&] { return forward(in, dtype_of(out), stream); });
}

Tensors infer_op(Tensor x, Tensor ids, Tensor weights, Tensors up, Tensor down, Integers addresses, Tensors up_bias,
                 MaybeTensor down_bias, int64_t layout, bool transposed, Doubles activation, int64_t out,
                 std::optional<bool> few, int64_t stream) {
  const Operands in =
      operands_of(x, ids, weights, up, down, addresses, up_bias, down_bias, layout, transposed, activation);
  return if_there_is_room([&] { return Tensors{infer(in, dtype_of(out), few, stream)}; });
}

Tensors backward_op(Tensor dy, Tensor x, Tensor ids, Tensor weights, Tensors up, Tensor down, Integers addresses,
                    Tensors up_bias, MaybeTensor down_bias, int64_t layout, bool transposed, Doubles activation,
                    Tensor h, Tensor order, Tensor offsets, std::vector<bool> needs, int64_t stream) {
  const Operands in =
      operands_of(x, ids, weights, up, down, addresses, up_bias, down_bias, layout, transposed, activation);
  return if_there_is_room([&] { return backward(dy, in, h, order, offsets, needs_of(needs), stream); });
}

int64_t bytes_missing_op() { return bytes_missing(); }

}  // namespace

STABLE_TORCH_LIBRARY(mok_sm90, m) {
  m.def("bytes_missing() -> int");
  const std::string block =
      "Tensor x, Tensor ids, Tensor weights, Tensor[] up, Tensor down, int[] addresses, Tensor[] up_bias, "
      "Tensor? down_bias, int layout, bool transposed, float[] activation, ";
  m.def(("forward(" + block + "int out, int stream) -> Tensor[]").c_str());
  m.def(("infer(" + block + "int out, bool? few, int stream) -> Tensor[]").c_str());
  m.def(
      ("backward(Tensor dy, " + block + "Tensor h, Tensor order, Tensor offsets, bool[] needs, int stream) -> Tensor[]")
          .c_str());
  m.def(
      "route(Tensor x, Tensor weight, Tensor? bias, Tensor? correction, Tensor? scale, float[] program, "
      "Tensor(a!) logits, Tensor(b!)? values, Tensor(c!)? weights, Tensor(d!) ids, int stream) -> ()");
  m.def(
      "choose(Tensor logits, Tensor? correction, Tensor? scale, float[] program, Tensor(a!)? values, "
      "Tensor(b!)? weights, Tensor(c!) ids, int stream) -> ()");
  m.def(
      "forward_parallel(Tensor x, Tensor ids, Tensor weights, Tensor[] up, Tensor down, Tensor[] up_bias, "
      "Tensor? down_bias, float[] activation, bool save, int[] how, int[] group, int stream) -> Tensor[]");
  m.def(
      "backward_parallel(Tensor dy, Tensor x, Tensor ids, Tensor weights, Tensor[] up, Tensor down, Tensor[] up_bias, "
      "Tensor? down_bias, float[] activation, Tensor rows, Tensor h, Tensor plan, bool[] needs, int[] how, int[] "
      "group, "
      "int stream) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(mok_sm90, CompositeExplicitAutograd, m) {
  m.impl("bytes_missing", TORCH_BOX(&bytes_missing_op));
}

STABLE_TORCH_LIBRARY_IMPL(mok_sm90, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward_op));
  m.impl("infer", TORCH_BOX(&infer_op));
  m.impl("route", TORCH_BOX(&route_op));
  m.impl("choose", TORCH_BOX(&choose_op));
  m.impl("backward", TORCH_BOX(&backward_op));
  m.impl("forward_parallel", TORCH_BOX(&forward_parallel_op));
  m.impl("backward_parallel", TORCH_BOX(&backward_parallel_op));
}

}  // namespace mok::sm90
