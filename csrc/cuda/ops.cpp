// The ops mok_sm90::*: tensors in, launches out. The callers (mok_compile/engines/sm90.py) have checked shapes and
// dtypes and pass the stream.
#include "experts.h"
#include "memory.h"

namespace mok::sm90 {
namespace {

int64_t plan_scratch(int64_t tokens, int64_t experts, int64_t top_k) {
  return Plan::scratch({tokens, 0, 0, experts, top_k});
}

int64_t sort_scratch(int64_t tokens, int64_t experts, int64_t top_k) {
  return schedule_scratch({tokens, 0, 0, experts, top_k});
}

int64_t score_rows(int64_t inner) { return score_tiles({0, 0, inner, 0, 0}); }

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

// rows and h (if given) of sorted rows, from x; a is scratch.
void experts(const Rows& of, const Block& block, const Tensors& up_bias, const MaybeTensor& down_bias,
             const TokenRows& x, const MaybeTensor& h, const Tensor& a, const Tensor& rows,
             const Pull* pull = nullptr) {
  require_room(Panels{{of.sizes.inner, 1}, a, of.plan.room}, "forward");
  require(forward({of.sizes,
                   dtype_of(rows),
                   block.layout,
                   block.transposed,
                   block.activation,
                   of.plan,
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
  require(schedule({sizes, in.ids.data_ptr(), dtype_of(in.ids), order, offsets, made.counts, made.plan,
                    const_cast<void*>(data_of(h)), h ? h->size(1) : 0},
                   stream_of(stream)));
  experts(of, block, in.up_bias, in.down_bias, in.x.data_ptr(), h, a, rows);
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

// A router; `program` as mok_compile/engines/sm90_router.py puts it into numbers.
void route_op(Tensor x, Tensor weight, MaybeTensor bias, MaybeTensor correction, MaybeTensor scale, Doubles program,
              Tensor logits, MaybeTensor values, MaybeTensor weights, Tensor ids, int64_t stream) {
  RouteArguments in{};
  in.tokens = x.size(0);
  in.depth = x.size(1);
  in.experts = weight.size(0);
  in.dtype = dtype_of(x);
  in.program = program_of(program);
  in.x = x.data_ptr();
  in.weight = weight.data_ptr();
  in.bias = data_of(bias);
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
  require(route(in, stream_of(stream)));
}

// The sums of score tiles: the gradients of the routing weights.
void add_scores(CombineArguments& sum, const Tensor& dscore, const Tensor& dweights) {
  sum.dscore = static_cast<const float*>(dscore.data_ptr());
  sum.dscore_tiles = score_tiles(sum.sizes);
  sum.dweights = dweights.data_ptr();
  sum.weights_dtype = dtype_of(dweights);
}

// Where the rows' sums go in an exchange, instead of to this rank's own tokens; with `scores`, also their sums.
void push(const Rows& of, const Integers& numbers, const Group& group, const Tensor& rows, const Tensor* weights,
          const Tensor* dscore = nullptr, const Tensor* dweights = nullptr) {
  CombineArguments sum{};
  sum.sizes = of.sizes;
  sum.dtype = sum.out_dtype = dtype_of(rows);
  sum.plan = of.plan;
  if (weights) {
    sum.weights = weights->data_ptr();
    sum.weights_dtype = dtype_of(*weights);
  }
  if (dweights) add_scores(sum, *dscore, *dweights);
  if (sends_routes(numbers)) {
    require(push_routes({group, of.sizes, of.plan, rows.data_ptr()}, stream_of(of.stream)));
    if (!dweights) return;
  } else {
    sum.rows = rows.data_ptr();
    sum.columns = sum.out_stride = of.sizes.hidden;
    sum.push = &group;
  }
  require(combine(sum, stream_of(of.stream)));
}

// A plan over the tokens of all ranks.
Plan plan_of(const Tensor& scratch, const Tensor& order, const Tensor& offsets, const Sizes& sizes, const Group& group,
             int64_t room) {
  Plan plan = plan_of(scratch, order, offsets, sizes);
  plan.room = room;
  plan.own_first = int(group.rank * group.capacity);
  plan.own_count = int(group.capacity);
  return plan;
}

// Forward of the part of an exchange between `publish` and `sum`: ids and weights are filled, with those of the tokens
// of all ranks, and x [(ranks - 1) * capacity, H] with the other ranks' tokens, as they are needed; own_x are this
// rank's. As many sorted rows as `rows` has may come.
void forward_parallel_op(Tensor x, Tensor ids, Tensor weights, Tensors up, Tensor down, Tensors up_bias,
                         MaybeTensor down_bias, int64_t layout, bool transposed, Doubles activation, MaybeTensor h,
                         Tensor order, Tensor offsets, Tensor plan, Tensor counts, Tensor a, Tensor rows, Tensor own_x,
                         int64_t first_expert, Integers numbers, int64_t stream) {
  const Sizes sizes = sizes_of(x, ids, down, offsets);
  const Group group = group_of(numbers);
  require(
      collect({group, sizes.top_k, first_expert, sizes.experts, ints_of(ids), static_cast<float*>(weights.data_ptr())},
              stream_of(stream)));
  FinishArguments end{group, sizes.top_k, nullptr, nullptr, nullptr, nullptr, rows.size(0)};
  if (sizes.experts > 0) {
    const Plan p = plan_of(plan, order, offsets, sizes, group, end.room);
    require(schedule({sizes, ids.data_ptr(), dtype_of(ids), ints_of(order), ints_of(offsets), ints_of(counts), p},
                     stream_of(stream)));
    const Rows of{sizes, p, stream};
    const Pull pull = pull_of(numbers, group, sizes, x, false);
    const Block block = block_of(of, up, down, {}, layout_of(layout), transposed, activation_of(activation));
    experts(of, block, up_bias, down_bias, {x.data_ptr(), own_x.data_ptr()}, h, a, rows, &pull);
    push(of, numbers, group, rows, &weights);
    end.error = p.error;
    end.count = p.rows;
  }
  require(finish(end, stream_of(stream)));
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
                   rows.data_ptr(),
                   0,
                   of.sizes.hidden},
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

// Backward of the same part: dy is filled as x was. The gradients of x are pushed; dweights [ranks * capacity, K] float
// is this rank's part of the scores, pushed as well if `ends` is set, with which the exchange needs nothing more than
// `sum`.
void backward_parallel_op(Tensor dy, Tensor x, Tensor ids, Tensor weights, Tensors up, Tensor down, int64_t layout,
                          bool transposed, Doubles activation, Tensor h, Tensor order, Tensor offsets, Tensor plan,
                          Tensor dh_panels, Tensor scratch, Tensor dscore, MaybeTensor dweights, Tensors dup,
                          MaybeTensor ddown, Tensors dup_bias, MaybeTensor ddown_bias, Tensor own_dy, Tensor own_x,
                          bool ends, Integers numbers, int64_t stream) {
  const Sizes sizes = sizes_of(x, ids, down, offsets);
  const Group group = group_of(numbers);
  const Rows of{sizes, plan_of(plan, order, offsets, sizes, group, h.size(0)), stream};
  const Block block = block_of(of, up, down, {}, layout_of(layout), transposed, activation_of(activation));
  const Gradients grads{dup, ddown, dup_bias, ddown_bias};
  const Panels dh{parts_of(block.layout, sizes.inner), dh_panels, of.plan.room};
  require(replan(sizes, of.plan, stream_of(stream)));
  require(wait_published(group, stream_of(stream)));
  const Pull pull = pull_of(numbers, group, sizes, dy, true);
  down_gradients(of, block, {dy.data_ptr(), own_dy.data_ptr()}, h, weights, dh, scratch, dscore, grads, &pull);
  up_gradients(of, block, dh, scratch);
  push(of, numbers, group, scratch, nullptr, &dscore, dweights ? &*dweights : nullptr);
  if (ends)
    require(
        finish({group, sizes.top_k, ints_of(ids), dweights ? static_cast<const float*>(dweights->data_ptr()) : nullptr,
                of.plan.error, of.plan.rows, of.plan.room},
               stream_of(stream)));
  up_weight_gradients(of, block, dh, {x.data_ptr(), own_x.data_ptr()}, grads);
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
  m.def("plan_scratch(int tokens, int experts, int top_k) -> int");
  m.def("sort_scratch(int tokens, int experts, int top_k) -> int");
  m.def("score_rows(int inner) -> int");
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
      "forward_parallel(Tensor(a!) x, Tensor(b!) ids, Tensor(c!) weights, Tensor[] up, Tensor down, Tensor[] up_bias, "
      "Tensor? down_bias, int layout, bool transposed, float[] activation, Tensor(d!)? h, Tensor(e!) order, "
      "Tensor(f!) offsets, Tensor(g!) plan, Tensor(i!) counts, Tensor(j!) a, Tensor(k!) rows, Tensor own_x, "
      "int first_expert, int[] group, int stream) -> ()");
  m.def(
      "backward_parallel(Tensor(a!) dy, Tensor x, Tensor ids, Tensor weights, Tensor[] up, Tensor down, int layout, "
      "bool transposed, float[] activation, Tensor h, Tensor order, Tensor offsets, Tensor(b!) plan, Tensor(c!) dh, "
      "Tensor(d!) scratch, Tensor(e!) dscore, Tensor(f!)? dweights, Tensor(g!)[] dup, "
      "Tensor(i!)? ddown, Tensor(j!)[] dup_bias, Tensor(k!)? ddown_bias, Tensor own_dy, Tensor own_x, bool ends, "
      "int[] group, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok_sm90, CompositeExplicitAutograd, m) {
  m.impl("plan_scratch", TORCH_BOX(&plan_scratch));
  m.impl("sort_scratch", TORCH_BOX(&sort_scratch));
  m.impl("score_rows", TORCH_BOX(&score_rows));
  m.impl("bytes_missing", TORCH_BOX(&bytes_missing_op));
}

STABLE_TORCH_LIBRARY_IMPL(mok_sm90, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward_op));
  m.impl("infer", TORCH_BOX(&infer_op));
  m.impl("route", TORCH_BOX(&route_op));
  m.impl("backward", TORCH_BOX(&backward_op));
  m.impl("forward_parallel", TORCH_BOX(&forward_parallel_op));
  m.impl("backward_parallel", TORCH_BOX(&backward_parallel_op));
}

}  // namespace mok::sm90
