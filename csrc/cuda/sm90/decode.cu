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

// A weight [E, rows, depth] whose tiles take `step` rows of each half; the second half begins `second` rows after the
// first, or at `apart` where that is another tensor.
template <class T>
Product<T> product(const void* weight, const void* apart, const void* bias, const void* bias_apart, int64_t rows,
                   int64_t depth, int64_t columns, int step, int64_t second) {
  Product<T> m{};
  m.weight[0] = static_cast<const T*>(weight);
  m.weight[1] = apart ? static_cast<const T*>(apart) : m.weight[0] + second * depth;
  m.bias[0] = static_cast<const T*>(bias);
  m.bias[1] = bias_apart ? static_cast<const T*>(bias_apart) : bias ? m.bias[0] + second : nullptr;
  m.expert_stride = rows * depth;
  m.bias_stride = rows;
  m.depth = int(depth);
  m.step = step;
  m.columns = int(columns);
  m.tiles = int((columns + step - 1) / step);
  return m;
}

template <class T>
const char* run(const DecodeArguments& in, cudaStream_t stream) {
  const int64_t hidden = in.sizes.hidden, inner = in.sizes.inner;
  const int grid = multiprocessors();
  DecodeParams<T> p{};
  p.ids = in.ids;
  p.wide = in.ids_dtype == Dtype::kInt64;
  p.weights = {const_cast<void*>(in.weights), in.weights_dtype};
  p.out = {in.y, in.y_dtype};
  p.x = static_cast<const T*>(in.x);
  p.a = static_cast<T*>(in.a);
  p.order = in.order;
  p.offsets = in.offsets;
  const auto up = [&](const void* apart, const void* bias_apart, int64_t rows, int64_t columns, int step,
                      int64_t second) {
    return product<T>(in.up[0], apart, in.up_bias[0], bias_apart, rows, hidden, columns, step, second);
  };
  switch (in.layout) {
    case Layout::kConcat:
      p.product[0] = up(nullptr, nullptr, 2 * inner, inner, 8, inner);
      break;
    case Layout::kSeparate:
      p.product[0] = up(in.up[1], in.up_bias[1], inner, inner, 8, 0);
      break;
    case Layout::kInterleaved:
      p.product[0] = up(nullptr, nullptr, 2 * inner, 2 * inner, 16, 8);
      break;
    case Layout::kSingle:
      p.product[0] = up(nullptr, nullptr, inner, inner, 16, 8);
      break;
  }
  p.product[1] = product<T>(in.down, nullptr, in.down_bias, nullptr, hidden, inner, hidden, 16, 8);
  p.each = p.product[1].tiles / grid;
  p.more = p.product[1].tiles % grid;
  const int row_bytes = int(in.sizes.slots()) * (p.each + (p.more > 0)) * kTileRows * 2;
  if (row_bytes > kRowsHere) p.rows = static_cast<T*>(in.rows);
  p.activation = in.activation;
  p.tokens = int(in.sizes.tokens);
  p.top_k = int(in.sizes.top_k);
  p.experts = int(in.sizes.experts);
  p.gated = in.layout != Layout::kSingle;
  p.interleaved = in.layout == Layout::kInterleaved;
  p.plain = is_plain_silu(in.activation) && !in.up_bias[0] && !in.down_bias && p.gated && !p.interleaved;
  void* const spare = static_cast<T*>(in.rows) + in.sizes.slots() * hidden;
  if (const char* error = find_meeting(&p.meeting, spare, stream)) return error;
  const int bytes = int(sizeof(DecodeTables)) + kRingBytes + (p.rows ? 0 : row_bytes);
  const auto kernel = decode_kernel<T>;
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
  return check(cudaLaunchKernelEx(&config, kernel, p));
}

}  // namespace

bool decode_takes(const Sizes& n) {
  return n.slots() > 0 && n.slots() <= kMaxSlots && n.tokens <= kMaxTokens && n.experts <= 1023;
}

const char* decode(const DecodeArguments& in, void* stream) {
  if (!decode_takes(in.sizes)) return "more tokens, slots or experts than the decode kernel takes";
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  return in.dtype == Dtype::kBFloat16 ? run<__nv_bfloat16>(in, s) : run<__half>(in, s);
}

}  // namespace mok::sm90
