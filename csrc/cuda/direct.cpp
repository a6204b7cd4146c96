// The ops mok_sm90::experts*, mok_sm90::route_train and mok_sm90::route_infer: those of mok:: (route_train: mok::route)
// with the very arguments of a call, for what most calls are: stacked weights without gaps, and a spec or router that
// this library has been told of. They check what Python would, in a tenth of its time, and give an empty list where
// anything is different: then Python says what is wrong, or prepares the operands.
#include <cuda_runtime_api.h>

#include <array>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>

#include "experts.h"
#include "memory.h"

namespace mok::sm90 {
namespace {

using torch::stable::accelerator::DeviceGuard;
using torch::stable::detail::from;
using torch::stable::detail::to;

// What mok_compile/engines/sm90.py makes of an ExpertsSpec.
struct Spec {
  Layout layout;
  Activation activation;
  Dtype out;
};

// And of a RouterSpec, for operands of some dtypes: `out` is that of the routing weights or, if it only chooses, of the
// chosen scores.
struct Router {
  RouteProgram program;
  Dtype out;
};

// What such a router is known by. The numbers are those of `Dtype`; -1 of what is not there, and kChoosesOnly as scale.
constexpr int64_t kChoosesOnly = -2;
std::string router_name(std::string_view spec, int64_t x, int64_t correction, int64_t scale) {
  std::string name(spec);
  for (const int64_t dtype : {x, correction, scale}) name += char('2' + dtype);
  return name;
}

// What the library has been told.
template <class Value>
class Known {
 public:
  void tell(std::string_view name, const Value& value) {
    const std::unique_lock lock(mutex_);
    known_.insert_or_assign(std::string(name), value);
  }
  std::optional<Value> find(std::string_view name) const {
    const std::shared_lock lock(mutex_);
    const auto found = known_.find(name);
    return found == known_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  mutable std::shared_mutex mutex_;
  std::map<std::string, Value, std::less<>> known_;
};

Known<Spec>& specs() {
  static Known<Spec> all;
  return all;
}
Known<Router>& routers() {
  static Known<Router> all;
  return all;
}

// A string argument. Not a std::string, which torch/csrc/stable (2.10 to 2.13) makes anew and never frees.
class Text {
 public:
  explicit Text(StableIValue at) : handle_(to<StringHandle>(at)) {}
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;
  ~Text() { torch_delete_string(handle_); }
  std::string_view view() const {
    size_t length = 0;
    const char* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle_, &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle_, &data));
    return {data, length};
  }

 private:
  StringHandle handle_;
};

bool is_hopper(int32_t device) {
  constexpr int kDevices = 64;
  static const std::array<bool, kDevices> hopper = [] {
    std::array<bool, kDevices> found{};
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) return found;
    for (int i = 0; i < count && i < kDevices; ++i) {
      int major = 0, minor = 0;
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i);
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, i);
      found[i] = major == 9 && minor == 0;
    }
    return found;
  }();
  return device >= 0 && device < kDevices && hopper[device];
}

bool is(const Tensor& t, std::initializer_list<int64_t> shape, ScalarType dtype, int32_t device) {
  if (t.dim() != int64_t(shape.size()) || t.scalar_type() != dtype || !t.is_cuda() || t.get_device_index() != device)
    return false;
  int64_t i = 0;
  for (const int64_t size : shape)
    if (t.size(i++) != size) return false;
  return true;
}

bool at_16(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0; }
bool is_dense(const Tensor& t, std::initializer_list<int64_t> shape, ScalarType dtype, int32_t device) {
  return is(t, shape, dtype, device) && t.is_contiguous() && at_16(t);
}

// Stored as [E, in, out] without gaps.
bool is_transposed(const Tensor& t) {
  return t.stride(1) == 1 && t.stride(2) == t.size(1) && (t.size(0) == 1 || t.stride(0) == t.size(1) * t.size(2));
}

// The arguments of mok::experts.
struct Arguments {
  Tensor x, ids, weights;
  Tensors up, down, up_bias, down_bias;
  const Text &spec, &engine;
};
// The seven tensors from `stack` on.
Arguments arguments_of(const StableIValue* stack, const Text& spec, const Text& engine) {
  return {to<Tensor>(stack[0]),
          to<Tensor>(stack[1]),
          to<Tensor>(stack[2]),
          to<Tensors>(stack[3]),
          to<Tensors>(stack[4]),
          to<Tensors>(stack[5]),
          to<Tensors>(stack[6]),
          spec,
          engine};
}

struct Ready {
  Operands operands;
  Dtype out;
};

// The arguments for the kernels, if nothing has to be done to them and nothing can be wrong with them.
std::optional<Ready> ready(const Arguments& in) {
  constexpr int64_t kMaxTopK = 32, kMaxSlots = 1 << 22;  // as in mok_compile/engines/sm90.py
  if (in.engine.view() != "sm90" || !can_ask_for_streams()) return std::nullopt;
  const std::optional<Spec> spec = specs().find(in.spec.view());
  const size_t parts = spec && spec->layout == Layout::kSeparate ? 2 : 1;
  if (!spec || in.down.size() != 1 || in.up.size() != parts || in.x.dim() != 2 || in.ids.dim() != 2 ||
      in.down[0].dim() != 3 || in.down_bias.size() > 1 || (!in.up_bias.empty() && in.up_bias.size() != parts))
    return std::nullopt;
  const Tensor& down = in.down[0];
  const ScalarType dtype = in.x.scalar_type(), ids = in.ids.scalar_type(), weights = in.weights.scalar_type();
  const int32_t device = in.x.get_device_index();
  const int64_t tokens = in.x.size(0), hidden = in.x.size(1), experts = down.size(0), inner = down.size(2),
                top_k = in.ids.size(1), slots = tokens * top_k;
  const bool halves = spec->layout == Layout::kConcat || spec->layout == Layout::kInterleaved;
  const int64_t columns = halves ? 2 * inner : inner;
  const bool sized = slots > 0 && slots <= kMaxSlots && top_k <= kMaxTopK && experts > 0 && experts <= kMaxExperts &&
                     hidden > 0 && inner > 0 && hidden % 8 == 0 && inner % 8 == 0;
  const bool typed = (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half) &&
                     (ids == ScalarType::Long || ids == ScalarType::Int) &&
                     (weights == ScalarType::Float || weights == ScalarType::BFloat16 || weights == ScalarType::Half) &&
                     (spec->out == Dtype::kFloat32 || scalar_of(spec->out) == dtype);
  if (!sized || !typed || !is_hopper(device) || !is_dense(in.x, {tokens, hidden}, dtype, device) ||
      !is(in.ids, {tokens, top_k}, ids, device) || !in.ids.is_contiguous() ||
      !is(in.weights, {tokens, top_k}, weights, device) || !in.weights.is_contiguous())
    return std::nullopt;
  const bool transposed = !down.is_contiguous();
  const auto is_weight = [&](const Tensor& t, int64_t rows, int64_t depth) {
    return is(t, {experts, rows, depth}, dtype, device) && at_16(t) &&
           (transposed ? is_transposed(t) : t.is_contiguous());
  };
  if (!is_weight(down, hidden, inner)) return std::nullopt;
  for (const Tensor& t : in.up)
    if (!is_weight(t, columns, hidden)) return std::nullopt;
  for (const Tensor& t : in.up_bias)
    if (!is_dense(t, {experts, columns}, dtype, device)) return std::nullopt;
  for (const Tensor& t : in.down_bias)
    if (!is_dense(t, {experts, hidden}, dtype, device)) return std::nullopt;
  return Ready{{in.x,
                in.ids,
                in.weights,
                in.up,
                down,
                {},
                in.up_bias,
                in.down_bias.empty() ? MaybeTensor() : MaybeTensor(in.down_bias[0]),
                spec->layout,
                transposed,
                spec->activation},
               spec->out};
}

// What `pass` gives for a stream, if the arguments are ready and there is memory for it.
template <class Pass>
Tensors run(const std::optional<Ready>& in, const Pass& pass) {
  if (!in) return {};
  const int32_t device = in->operands.x.get_device_index();
  const DeviceGuard guard(device);
  return if_there_is_room([&] { return pass(*in, current_stream(device)); });
}

void experts_op(StableIValue* stack, uint64_t, uint64_t) {
  const Text spec(stack[7]), engine(stack[8]);
  stack[0] = from(run(ready(arguments_of(stack, spec, engine)),
                      [](const Ready& in, int64_t stream) { return forward(in.operands, in.out, stream); }));
}

void experts_infer_op(StableIValue* stack, uint64_t, uint64_t) {
  const Text spec(stack[7]), engine(stack[8]);
  stack[0] = from(run(ready(arguments_of(stack, spec, engine)), [](const Ready& in, int64_t stream) {
    return Tensors{infer(in.operands, in.out, std::nullopt, stream)};
  }));
}

void experts_backward_op(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor dy = to<Tensor>(stack[0]), h = to<Tensor>(stack[8]), order = to<Tensor>(stack[9]),
               offsets = to<Tensor>(stack[10]);
  const Text spec(stack[11]), engine(stack[12]);
  const Needs needs = needs_of(to<std::vector<bool>>(stack[13]));
  std::optional<Ready> in = ready(arguments_of(stack + 1, spec, engine));
  if (in) {
    const Operands& o = in->operands;
    const Sizes n = o.sizes();
    const Parts parts = parts_of(o.layout, n.inner);
    const ScalarType dtype = o.x.scalar_type();
    const int32_t device = o.x.get_device_index();
    const bool fits = is_dense(dy, {n.tokens, n.hidden}, dtype, device) &&
                      is_dense(h, {n.slots(), parts.columns * parts.count}, dtype, device) &&
                      is_dense(order, {n.slots()}, ScalarType::Int, device) &&
                      is_dense(offsets, {n.experts}, ScalarType::Int, device);
    if (!fits) in.reset();
  }
  stack[0] = from(run(in, [&](const Ready& in, int64_t stream) {
    return backward(dy, in.operands, h, order, offsets, needs, stream);
  }));
}

// A router's tensors, in the order of the ops' arguments, and how it is known.
struct Routing {
  Tensor x, weight;
  MaybeTensor bias, correction, scale;
  Router router;

  int64_t tokens() const { return x.size(0); }
  int64_t experts() const { return weight.size(0); }
  int64_t depth() const { return x.size(1); }
  ScalarType dtype() const { return x.scalar_type(); }
  int32_t device() const { return x.get_device_index(); }
};

int64_t number_of(const MaybeTensor& t) {
  if (!t) return -1;
  int64_t i = 0;
  while (i <= int64_t(Dtype::kFloat32) && scalar_of(Dtype(i)) != t->scalar_type()) ++i;
  return i;  // one more than the last for others, of which no router is told
}

// The tensors of a call, if nothing can be wrong with them.
std::optional<Routing> routing_of(const StableIValue* stack, bool weighs, const Text& spec, const Text& engine) {
  const Tensor x = to<Tensor>(stack[0]), weight = to<Tensor>(stack[1]);
  const MaybeTensor bias = to<MaybeTensor>(stack[2]), correction = to<MaybeTensor>(stack[3]),
                    scale = weighs ? to<MaybeTensor>(stack[4]) : MaybeTensor();
  const std::optional<Router> router = routers().find(
      router_name(spec.view(), number_of(x), number_of(correction), weighs ? number_of(scale) : kChoosesOnly));
  if (engine.view() != "sm90" || !can_ask_for_streams() || !router || x.dim() != 2 || weight.dim() != 2)
    return std::nullopt;
  const Routing in{x, weight, bias, correction, scale, *router};
  const int64_t experts = in.experts();
  const ScalarType dtype = in.dtype();
  const RouteProgram& program = router->program;
  // A number for each expert; of any shape, as corrections may be.
  const auto is_vector = [&](const MaybeTensor& t) {
    return !t || (t->numel() == experts && t->is_contiguous() && t->is_cuda() && t->get_device_index() == in.device());
  };
  if (in.tokens() < 1 || in.depth() < 1 || experts < program.top_k || experts > kMaxRouted || !is_hopper(in.device()) ||
      !is(x, {in.tokens(), in.depth()}, dtype, in.device()) || !is(weight, {experts, in.depth()}, dtype, in.device()) ||
      !is_vector(bias) || (bias && (bias->dim() != 1 || bias->scalar_type() != dtype)) || !is_vector(correction) ||
      !is_vector(scale) ||
      (program.groups && (experts % program.groups || experts / program.groups < program.group_best)))
    return std::nullopt;
  return in;
}

// The product by torch's own op, as in eager mode; nothing if that fails, for example for want of memory.
std::optional<Tensor> logits_of(const Routing& in) {
  std::array<StableIValue, 3> stack{from(in.x), from(in.weight), from(in.bias)};
  if (torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS)
    return std::nullopt;
  Tensor logits = to<Tensor>(stack[0]);
  if (!is_dense(logits, {in.tokens(), in.experts()}, in.dtype(), in.device())) return std::nullopt;
  return logits;
}

// logits, `out` (weights if it weighs, else the chosen scores), ids. `launch` is told where everything is and starts
// the kernel.
template <class Launch>
Tensors choose_into(const Routing& in, const Tensor& logits, bool weighs, Launch launch) {
  const int64_t top_k = in.router.program.top_k;
  const Tensor out = empty({in.tokens(), top_k}, scalar_of(in.router.out), in.x);
  const Tensor ids = empty({in.tokens(), top_k}, ScalarType::Long, in.x);
  const MaybeTensor none;
  RouteArguments arguments =
      router_of(in.router.program, logits, in.correction, in.scale, weighs ? none : out, weighs ? out : none, ids);
  require(launch(arguments, stream_of(current_stream(in.device()))));
  return {logits, out, ids};
}

// Of a router whose product is torch's.
Tensors choose_from_logits(const Routing& in, bool weighs) {
  const std::optional<Tensor> logits = logits_of(in);
  return logits ? choose_into(in, *logits, weighs, choose) : Tensors{};
}

void route_train_op(StableIValue* stack, uint64_t, uint64_t) {
  const Text spec(stack[4]), engine(stack[5]);
  const std::optional<Routing> in = routing_of(stack, false, spec, engine);
  stack[0] = from(Tensors{});
  if (!in) return;
  const DeviceGuard guard(in->device());
  stack[0] = from(if_there_is_room([&] { return choose_from_logits(*in, false); }));
}

void route_infer_op(StableIValue* stack, uint64_t, uint64_t) {
  const Text spec(stack[5]), engine(stack[6]);
  const std::optional<Routing> in = routing_of(stack, true, spec, engine);
  stack[0] = from(Tensors{});
  if (!in) return;
  constexpr int64_t kTokens = 256;  // MAX_TOKENS in mok_compile/engines/sm90_router.py
  const bool few = in->tokens() <= kTokens && in->dtype() != ScalarType::Float && in->depth() % 8 == 0 &&
                   in->weight.is_contiguous() && at_16(in->weight);
  if (few && !(in->x.is_contiguous() && at_16(in->x))) return;
  const DeviceGuard guard(in->device());
  stack[0] = from(if_there_is_room([&] {
    if (!few) return choose_from_logits(*in, true);
    const Tensor logits = empty({in->tokens(), in->experts()}, in->dtype(), in->x);
    return choose_into(*in, logits, true, [&](RouteArguments& arguments, void* stream) {
      arguments.depth = in->depth();
      arguments.x = in->x.data_ptr();
      arguments.weight = in->weight.data_ptr();
      arguments.bias = data_of(in->bias);
      return route(arguments, stream);
    });
  }));
}

// The last number is a `Dtype`.
void tell_op(StableIValue* stack, uint64_t, uint64_t) {
  const Text spec(stack[0]);
  const auto layout = to<int64_t>(stack[1]), out = to<int64_t>(stack[3]);
  specs().tell(spec.view(), {layout_of(layout), activation_of(to<Doubles>(stack[2])), dtype_of(out)});
}

// `program` as for program_of(); then the numbers that a router is known by, and the dtype of `out`.
void tell_router_op(StableIValue* stack, uint64_t, uint64_t) {
  const Text router(stack[0]);
  const auto x = to<int64_t>(stack[2]), correction = to<int64_t>(stack[3]), scale = to<int64_t>(stack[4]);
  const auto out = to<int64_t>(stack[5]);
  routers().tell(router_name(router.view(), x, correction, scale), {program_of(to<Doubles>(stack[1])), dtype_of(out)});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mok_sm90, m) {
  const std::string block =
      "Tensor x, Tensor ids, Tensor weights, Tensor[] up, Tensor[] down, Tensor[] up_bias, Tensor[] down_bias, ";
  const std::string how = "str spec, str engine";
  m.def(("experts(" + block + how + ") -> Tensor[]").c_str());
  m.def(("experts_infer(" + block + how + ") -> Tensor[]").c_str());
  m.def(("experts_backward(Tensor dy, " + block + "Tensor h, Tensor order, Tensor offsets, " + how +
         ", bool[] needs) -> Tensor[]")
            .c_str());
  m.def("route_train(Tensor x, Tensor weight, Tensor? bias, Tensor? correction, str router, str engine) -> Tensor[]");
  m.def(
      "route_infer(Tensor x, Tensor weight, Tensor? bias, Tensor? correction, Tensor? expert_scale, str router, "
      "str engine) -> Tensor[]");
  m.def("tell_router(str router, float[] program, int x, int correction, int scale, int out) -> ()");
  m.def("tell(str spec, int layout, float[] activation, int out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok_sm90, CompositeExplicitAutograd, m) {
  m.impl("tell", &tell_op);
  m.impl("tell_router", &tell_router_op);
}

STABLE_TORCH_LIBRARY_IMPL(mok_sm90, CUDA, m) {
  m.impl("experts", &experts_op);
  m.impl("experts_infer", &experts_infer_op);
  m.impl("experts_backward", &experts_backward_op);
  m.impl("route_train", &route_train_op);
  m.impl("route_infer", &route_infer_op);
}

}  // namespace mok::sm90
