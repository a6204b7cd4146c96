#include "decode.cuh"

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "launch.cuh"

namespace mok::sm90 {
namespace {

// All zero but for the highest bit of `arrived` whenever no launch is using them. Launches that may run at the same
// time need different ones: eager launches have one per stream, every captured launch has its own. (Memory that is
// zeroed for each launch costs another node of the graph.)
constexpr int kMeetings = 1 << 16;
__device__ Meeting meetings[kMeetings];

// `spare` serves where all are taken.
const char* find_meeting(Meeting** meeting, void* spare, cudaStream_t stream) {
  static std::atomic<int> used{0};
  static std::mutex mutex;
  static std::unordered_map<unsigned long long, int> of_stream;
  cudaStreamCaptureStatus status;
  if (const char* error = check(cudaStreamIsCapturing(stream, &status))) return error;
  int index;
  if (status != cudaStreamCaptureStatusNone) {
    index = used++;
  } else {
    unsigned long long id;
    if (const char* error = check(cudaStreamGetId(stream, &id))) return error;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = of_stream.find(id);
    index = found != of_stream.end() ? found->second : of_stream[id] = used++;
  }
  if (index >= kMeetings) {
    *meeting = static_cast<Meeting*>(spare);
    return check(cudaMemsetAsync(spare, 0, sizeof(Meeting), stream));
  }
  void* first = nullptr;
  if (const char* error = check(cudaGetSymbolAddress(&first, meetings))) return error;
  *meeting = static_cast<Meeting*>(first) + index;
  return nullptr;
}

// A weight of matrices [rows, depth] whose tiles take `step` rows of each half; the second half begins `second` rows
// after the first, or with the second weight where there are two (null: there is one).
template <class T>
const char* set(Product<T>& m, Dtype dtype, const Weight* const (&weight)[2], const void* const (&bias)[2],
                int64_t rows, int64_t depth, int64_t columns, int step, int64_t second) {
  // Whole groups along K are a dimension of their own, and a stage is one box. Else a row's last group would run on
  // into the next row: then each group is a box.
  const bool whole = depth % kGroup == 0;
  m.apart = weight[1];
  m.box_halves = m.apart || !whole ? 1 : 2;
  m.box_groups = whole ? kGroups : 1;
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t columns_here = size(whole ? kGroup : depth), groups = size(whole ? depth / kGroup : 1),
                   rows_here = size(step == 8 ? columns : 8), halves = size(step == 8 ? 2 - m.apart : rows / 8);
  for (int i = 0; i <= m.apart; ++i) {
    const Weight& w = *weight[i];
    const cuuint64_t pitch = size(w.pitch) * 2;
    const MapShape<5> shape{{columns_here, rows_here, groups, halves, size(w.ends)},
                            {pitch, kGroup * 2, pitch * size(m.apart ? rows : second), size(w.unit)},
                            {kGroup, 8, cuuint32_t(m.box_groups), cuuint32_t(m.box_halves)}};
    if (const char* error = encode_map<5>(&m.maps[i], dtype, w.data, shape, CU_TENSOR_MAP_L2_PROMOTION_L2_128B))
      return error;
  }
  m.bias[0] = static_cast<const T*>(bias[0]);
  m.bias[1] = m.apart ? static_cast<const T*>(bias[1]) : bias[0] ? m.bias[0] + second : nullptr;
  m.bias_stride = rows;
  m.depth = int(depth);
  m.step = step;
  m.columns = int(columns);
  m.tiles = int((columns + step - 1) / step);
  return nullptr;
}

template <class T, class Order>
const char* run(const DecodeArguments& in, const Order& order, cudaStream_t stream) {
  const int64_t hidden = in.sizes.hidden, inner = in.sizes.inner;
  DecodeParams<T> p{};
  // First, since it gives a new thread the context that tensor maps are made in.
  void* const spare = static_cast<T*>(in.rows) + in.sizes.slots() * hidden;
  if (const char* error = find_meeting(&p.meeting, spare, stream)) return error;
  const int grid = multiprocessors();
  if (grid < 1) return "CUDA does not say how many multiprocessors the device has";
  p.ids = in.ids;
  p.wide = in.ids_dtype == Dtype::kInt64;
  p.weights = {const_cast<void*>(in.weights), in.weights_dtype};
  p.out = {in.y, in.y_dtype};
  p.x = static_cast<const T*>(in.x);
  p.a = static_cast<T*>(in.a);
  p.order = in.order;
  p.offsets = in.offsets;
  const bool gated = in.layout != Layout::kSingle, interleaved = in.layout == Layout::kInterleaved,
             apart = in.layout == Layout::kSeparate, halved = gated && !interleaved;
  const int64_t rows = gated && !apart ? 2 * inner : inner;
  const Weight *const up[2] = {&in.up[0], apart ? &in.up[1] : nullptr}, *const down[2] = {&in.down, nullptr};
  const void* const down_bias[2] = {in.down_bias, nullptr};
  if (const char* error = set(p.product[0], in.dtype, up, in.up_bias, rows, hidden, halved ? inner : rows,
                              halved ? 8 : 16, halved ? inner : 8))
    return error;
  if (const char* error = set(p.product[1], in.dtype, down, down_bias, hidden, inner, hidden, 16, 8)) return error;
  p.each = p.product[1].tiles / grid;
  p.more = p.product[1].tiles % grid;
  const int row_bytes = int(in.sizes.slots()) * (p.each + (p.more > 0)) * kTileRows * 2;
  if (row_bytes > kRowsHere) p.rows = static_cast<T*>(in.rows);
  p.activation = in.activation;
  p.tokens = int(in.sizes.tokens);
  p.top_k = int(in.sizes.top_k);
  p.experts = int(in.sizes.experts);
  p.gated = gated;
  p.interleaved = interleaved;
  p.plain = is_plain_silu(in.activation) && !in.up_bias[0] && !in.down_bias && halved;
  const int bytes = int(sizeof(DecodeMemory)) + (p.rows ? 0 : row_bytes);
  const auto kernel = decode_kernel<T, Order>;
  if (const char* error = check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)))
    return error;
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(kDecodeThreads);
  config.dynamicSmemBytes = size_t(bytes);
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  return check(cudaLaunchKernelEx(&config, kernel, p, order));
}

template <class T>
const char* choose(const DecodeArguments& in, cudaStream_t stream) {
  return in.places ? run<T>(in, Scattered{*in.places}, stream) : run<T>(in, InOrder{}, stream);
}

}  // namespace

bool decode_takes(const Sizes& n) {
  return n.slots() > 0 && n.slots() <= kMaxSlots && n.tokens <= kMaxTokens && n.experts <= kMaxExperts;
}

const char* decode(const DecodeArguments& in, void* stream) {
  if (!decode_takes(in.sizes)) return "more tokens, slots or experts than the decode kernel takes";
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  return in.dtype == Dtype::kBFloat16 ? choose<__nv_bfloat16>(in, s) : choose<__half>(in, s);
}

}  // namespace mok::sm90
