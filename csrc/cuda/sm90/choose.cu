// The choice of experts of any number of tokens from their logits, a warp for each token.
#include "choice.cuh"
#include "launch.cuh"

namespace mok::sm90 {
namespace {

constexpr int kWarps = 4;

struct ChooseParams {
  Numbers logits;             // [T, E]
  Numbers correction, scale;  // [E]; data null: none
  Numbers values, weights;    // [T, K]; data null: not wanted
  int64_t* ids;               // [T, K]
  int64_t tokens;
  int experts;
  RouteProgram program;
};

// `count` logits from element `at` on, lane l has l, l + 32, ...: all are asked for before the first is looked at.
template <int kPer>
__device__ __forceinline__ void load_logits(const Numbers& from, int64_t at, int count, float (&to)[kPer]) {
  const int lane = threadIdx.x % 32;
  if (from.dtype == Dtype::kFloat32) {
    const float* const logits = static_cast<const float*>(from.data) + at;
#pragma unroll
    for (int i = 0; i < kPer; ++i) to[i] = lane + 32 * i < count ? __ldg(logits + lane + 32 * i) : 0.0f;
    return;
  }
  const uint16_t* const logits = static_cast<const uint16_t*>(from.data) + at;
  uint16_t raw[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) raw[i] = lane + 32 * i < count ? __ldg(logits + lane + 32 * i) : uint16_t(0);
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    to[i] = from.dtype == Dtype::kBFloat16 ? __uint_as_float(uint32_t(raw[i]) << 16)
                                           : __half2float(__ushort_as_half(raw[i]));
}

// A block's shared memory. Up to kMost experts a row is in registers, else it is here.
template <int kMost>
struct Memory {
  static constexpr bool kRegisters = kMost <= 256;
  float scores[kWarps][kMost];
  uint32_t keys[kWarps][kRegisters ? 1 : kMost];
  float correction[kMost], scale[kMost];
};

template <class Row>
__device__ __forceinline__ void finish(const ChooseParams& p, Row& row, int64_t token, const float* correction,
                                       const float* scale) {
  const Choice<Row> choice(row, p.program, p.correction.data ? correction : nullptr, scale);
  const Chosen chosen = choice.run(p.weights.data);
  if (choice.lane >= p.program.top_k) return;
  const int64_t at = token * p.program.top_k + choice.lane;
  p.ids[at] = chosen.id;
  if (p.values.data) p.values.store(at, chosen.value);
  if (p.weights.data) p.weights.store(at, chosen.weight);
}

template <int kMost>
__global__ void __launch_bounds__(kWarps * 32) choose_kernel(const __grid_constant__ ChooseParams p) {
  constexpr int kPer = kMost / 32;
  __shared__ Memory<kMost> m;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  float logits[kPer];
  load_logits(p.logits, token * p.experts, token < p.tokens ? p.experts : 0, logits);
  if (p.correction.data || p.scale.data) {
    for (int e = threadIdx.x; e < p.experts; e += kWarps * 32) {
      if (p.correction.data) m.correction[e] = p.correction.load(e);
      if (p.scale.data) m.scale[e] = p.scale.load(e);
    }
    __syncthreads();
  }
  if (token >= p.tokens) return;
  if constexpr (Memory<kMost>::kRegisters) {
    RegisterRow<kPer> row(m.scores[warp], p.experts);
#pragma unroll
    for (int i = 0; i < kPer; ++i) row.s[i] = logits[i];
    finish(p, row, token, m.correction, m.scale);
  } else {
    SharedRow row(m.scores[warp], m.keys[warp], p.experts);
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (lane + 32 * i < p.experts) row.s[lane + 32 * i] = logits[i];
    finish(p, row, token, m.correction, m.scale);
  }
}

template <int kMost>
const char* run(const ChooseParams& p, cudaStream_t stream) {
  choose_kernel<kMost><<<unsigned((p.tokens + kWarps - 1) / kWarps), kWarps * 32, 0, stream>>>(p);
  return check(cudaGetLastError());
}

}  // namespace

const char* choose(const RouteArguments& in, void* stream) {
  constexpr int64_t kMostTokens = int64_t(kWarps) << 30;
  const RouteProgram& program = in.program;
  if (in.tokens < 0 || in.tokens > kMostTokens || in.experts < 1 || in.experts > kMaxRouted || program.top_k < 1 ||
      program.top_k > kMaxChosen || program.top_k > in.experts || program.groups > kMaxChosen)
    return "sizes that the router kernel does not take";
  if (in.tokens == 0) return nullptr;
  ChooseParams p{{in.logits, in.dtype},
                 {const_cast<void*>(in.correction), in.correction_dtype},
                 {const_cast<void*>(in.scale), in.scale_dtype},
                 {in.values, in.values_dtype},
                 {in.weights, in.weights_dtype},
                 in.ids,
                 in.tokens,
                 int(in.experts),
                 program};
  p.program.dtype = in.dtype;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (in.experts <= 32) return run<32>(p, s);
  if (in.experts <= 64) return run<64>(p, s);
  if (in.experts <= 128) return run<128>(p, s);
  if (in.experts <= 256) return run<256>(p, s);
  return run<kMaxRouted>(p, s);
}

}  // namespace mok::sm90
