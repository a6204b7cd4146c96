// Gradients of biases, per expert the sum over its sorted rows: one CTA per expert and 64 columns; a thread adds every
// 32nd row, the 32 sums are added in order. And what the down bias adds to those of the routing weights.
#include <algorithm>

#include "launch.cuh"
#include "rows.cuh"

namespace mok::sm90 {
namespace {

constexpr int kSumThreads = 256, kLanes = kPanel / 8, kSums = kSumThreads / kLanes;

// `panels` null: the rows are those of dy.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    bias_grad_kernel(const T* panels, TokenRows dy, Numbers weights, Plan plan, T* out, int columns, int part_panels,
                     int parts, Dtype dtype, bool add) {
  __shared__ float sums[kSums][kPanel];
  const int panel = blockIdx.x, expert = blockIdx.y, number = threadIdx.x / kLanes, lane = threadIdx.x % kLanes * 8;
  const int part = panel / part_panels, column = (panel - part * part_panels) * kPanel;
  const int start = expert ? plan.offsets[expert - 1] : 0, end = plan.offsets[expert];
  const RowAddresses tokens(dy, columns, column + lane);
  float sum[8] = {};
  if (column + lane < columns) {
    for (int row = start + number; row < end; row += kSums) {
      if (panels) {
        const int64_t from = static_cast<int64_t>(panel_row(plan, panel, row)) * kPanel + lane;
        add8<T>(sum, *reinterpret_cast<const uint4*>(panels + from), 1.0f);
      } else {
        const auto from = reinterpret_cast<const uint4*>(tokens.of(plan.token[row]));
        add8<T>(sum, __ldg(from), weights.load(plan.order[row]));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[number][lane + i] = sum[i];
  __syncthreads();
  if (threadIdx.x >= kPanel || column + int(threadIdx.x) >= columns) return;
  float total = 0.0f;
  for (int i = 0; i < kSums; ++i) total += sums[i][threadIdx.x];
  const int64_t to = (static_cast<int64_t>(expert) * parts + part) * columns + column + threadIdx.x;
  const Numbers outs{out, dtype};
  outs.store(to, add ? outs.load(to) + total : total);
}

// A warp for every row; the CTAs of one y share an expert.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    bias_score_kernel(TokenRows dy, const T* bias, Plan plan, float* dscore, int columns) {
  const int expert = blockIdx.y, lane = threadIdx.x % 32, first = lane * 8;
  const int start = expert ? plan.offsets[expert - 1] : 0, end = plan.offsets[expert];
  const RowAddresses tokens(dy, columns, first);
  const T* const biases = bias + int64_t(expert) * columns;
  for (int row = start + (blockIdx.x * kSumThreads + threadIdx.x) / 32; row < end;
       row += gridDim.x * kSumThreads / 32) {
    const uint4* const from = reinterpret_cast<const uint4*>(tokens.of(plan.token[row]));
    float sum = 0.0f;
    for (int column = first; column < columns; column += 32 * 8) {
      float products[8] = {};
      add8<T>(products, __ldg(reinterpret_cast<const uint4*>(biases + column)), 1.0f);
      float values[8] = {};
      add8<T>(values, __ldg(from + (column - first) / 8), 1.0f);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += products[i] * values[i];
    }
#pragma unroll
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (lane == 0) dscore[row] += sum;
  }
}

template <class T>
const char* run(const BiasGradArguments& in, void* stream) {
  const dim3 grid(unsigned(in.parts.count * in.parts.panels()), unsigned(in.sizes.experts));
  bias_grad_kernel<T><<<grid, kSumThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const T*>(in.panels), in.dy, Numbers{const_cast<void*>(in.weights), in.weights_dtype}, in.plan,
      static_cast<T*>(in.out), int(in.parts.columns), int(in.parts.panels()), int(in.parts.count), in.dtype, in.add);
  return check(cudaGetLastError());
}

template <class T>
const char* run_score(const BiasScoreArguments& in, void* stream) {
  // Of an expert: enough for the device in all, and not too few where one expert has all rows.
  constexpr int64_t kRowsOfCta = kSumThreads / 32, kLeast = 32;
  const int64_t ctas = std::min((in.sizes.slots() + kRowsOfCta - 1) / kRowsOfCta,
                                std::max<int64_t>(kLeast, 8 * multiprocessors() / in.sizes.experts));
  const dim3 grid(unsigned(ctas), unsigned(in.sizes.experts));
  bias_score_kernel<T><<<grid, kSumThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      in.dy, static_cast<const T*>(in.bias), in.plan, in.dscore, int(in.sizes.hidden));
  return check(cudaGetLastError());
}

}  // namespace

const char* bias_grad(const BiasGradArguments& in, void* stream) {
  return in.dtype == Dtype::kBFloat16 ? run<__nv_bfloat16>(in, stream) : run<__half>(in, stream);
}

const char* bias_score(const BiasScoreArguments& in, void* stream) {
  return in.dtype == Dtype::kBFloat16 ? run_score<__nv_bfloat16>(in, stream) : run_score<__half>(in, stream);
}

}  // namespace mok::sm90
