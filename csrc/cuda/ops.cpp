// The ops mok_sm90::*: tensors in, launches out. The callers (mok_compile/engines/sm90.py) have checked shapes and
// dtypes and pass the stream.
#include "steps.h"

namespace mok::sm90 {
namespace {

// y from the sorted slots' rows; fills order, offsets and h (if given).
Tensor many(const Operands& in, Dtype out, const MaybeTensor& h, int* order, int* offsets, int64_t stream) {
  const Sizes sizes = in.sizes();
  const Schedule made(sizes, in.x, order, offsets);
  const Rows of{sizes, made.plan, stream};
  const Block block = block_of(of, in);
  const Tensor y = empty({sizes.tokens, sizes.hidden}, scalar_of(out), in.x);
  const Tensor a = empty_panels({sizes.inner, 1}, sizes.slots(), in.x);
  const Tensor rows = empty({sizes.slots(), sizes.hidden}, in.x.scalar_type(), in.x);
  const Tiles tiles = tiles_for(sizes.slots(), sizes.experts);
  require(schedule({sizes, in.ids.data_ptr(), dtype_of(in.ids), order, offsets, made.counts, made.plan, tiles,
                    const_cast<void*>(data_of(h)), h ? h->size(1) : 0},
                   stream_of(stream)));
  experts(of, block, in, tiles, in.x.data_ptr(), h, a, rows);
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
  MaybeTensor dx, dweights;
  if (needs.x) dx = empty({sizes.tokens, sizes.hidden}, dtype, in.x);
  if (needs.weights) dweights = empty({sizes.tokens, sizes.top_k}, in.weights.scalar_type(), in.x);
  const Gradients grads(in, needs);

  const Schedule made(sizes, in.x, ints_of(order), ints_of(offsets));
  const Rows of{sizes, made.plan, stream};
  const Parts a{sizes.inner, 1};
  const Tensor dh_panels = empty_panels(parts_of(in.layout, sizes.inner), slots, in.x);
  const Tensor dscore = empty({score_tiles(sizes), slots}, ScalarType::Float, in.x);
  const int64_t room = slots * std::max(sizes.hidden, a.panels() * kPanel);
  const bool lent = !grads.up.empty() && grads.up[0].numel() >= room;
  const Tensor scratch = lent ? grads.up[0] : empty({room}, dtype, in.x);

  const Block block = block_of(of, in);
  const Panels dh{parts_of(in.layout, sizes.inner), dh_panels, slots};
  require(replan(sizes, made.plan, stream_of(stream)));
  down_gradients(of, block, dweights ? in.down_bias : std::nullopt, dy.data_ptr(), h, in.weights, dh, scratch, dscore,
                 grads);
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
  if (dweights) {
    sum.dscore = static_cast<const float*>(dscore.data_ptr());
    sum.dscore_tiles = score_tiles(sizes);
    sum.dweights = dweights->data_ptr();
    sum.weights_dtype = dtype_of(*dweights);
  }
  if (dx || dweights) require(combine(sum, stream_of(stream)));
  up_weight_gradients(of, block, dh, in.x.data_ptr(), grads);

  Tensors all;
  for (const MaybeTensor& one : {dx, dweights})
    if (one) all.push_back(*one);
  const Tensors of_experts = grads.all();
  all.insert(all.end(), of_experts.begin(), of_experts.end());
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
}

}  // namespace mok::sm90
