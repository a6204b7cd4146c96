// Gradients of biases: per expert the sum over its sorted rows. One CTA per expert and 64 columns; a thread adds every
// 32nd row, the 32 sums are added in order.
#include "launch.cuh"
#include "rows.cuh"

namespace mok::sm90 {
namespace {

constexpr int kSumThreads = 256, kLanes = kPanel / 8, kSums = kSumThreads / kLanes;

// `panels` null: the rows are those of dy.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    bias_grad_kernel(const T* panels, TokenRows dy, Numbers weights, Plan plan, T* out, int columns, int part_panels,
                     int parts, Dtype dtype) {
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
  Numbers{out, dtype}.store(to, total);
}

template <class T>
const char* run(const BiasGradArguments& in, void* stream) {
  const dim3 grid(unsigned(in.parts.count * in.parts.panels()), unsigned(in.sizes.experts));
  bias_grad_kernel<T><<<grid, kSumThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const T*>(in.panels), in.dy, Numbers{const_cast<void*>(in.weights), in.weights_dtype}, in.plan,
      static_cast<T*>(in.out), int(in.parts.columns), int(in.parts.panels()), int(in.parts.count), in.dtype);
  return check(cudaGetLastError());
}

}  // namespace

const char* bias_grad(const BiasGradArguments& in, void* stream) {
  return in.dtype == Dtype::kBFloat16 ? run<__nv_bfloat16>(in, stream) : run<__half>(in, stream);
}

}  // namespace mok::sm90
