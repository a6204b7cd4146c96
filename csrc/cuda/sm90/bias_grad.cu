// Gradients of biases: per expert the sum over its sorted rows. One CTA per expert and 64 columns; a thread adds every
// 32nd row, the 32 sums are added in order.
#include "launch.cuh"
#include "rows.cuh"

namespace mok::sm90 {
namespace {

constexpr int kSumThreads = 256, kLanes = kPanel / 8, kSums = kSumThreads / kLanes;

template <class T>
__device__ __forceinline__ void add8(float (&sum)[8], const T* from, float weight) {
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = Pair<T>::unpack(word[i]);
    sum[2 * i] += weight * pair.x;
    sum[2 * i + 1] += weight * pair.y;
  }
}

// dy null: the rows are those of `panels`.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    bias_grad_kernel(const T* panels, const T* dy, Numbers weights, Plan plan, T* out, int columns, int part_panels,
                     int parts, Dtype dtype) {
  __shared__ float sums[kSums][kPanel];
  const int panel = blockIdx.x, expert = blockIdx.y, number = threadIdx.x / kLanes, lane = threadIdx.x % kLanes * 8;
  const int part = panel / part_panels, column = (panel - part * part_panels) * kPanel;
  const int start = expert ? plan.offsets[expert - 1] : 0, end = plan.offsets[expert];
  float sum[8] = {};
  if (column + lane < columns) {
    for (int row = start + number; row < end; row += kSums) {
      if (dy) {
        add8(sum, dy + static_cast<int64_t>(plan.token[row]) * columns + column + lane, weights.load(plan.order[row]));
      } else {
        add8(sum, panels + static_cast<int64_t>(panel_row(plan, panel, row)) * kPanel + lane, 1.0f);
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
      static_cast<const T*>(in.panels), static_cast<const T*>(in.dy),
      Numbers{const_cast<void*>(in.weights), in.weights_dtype}, in.plan, static_cast<T*>(in.out), int(in.parts.columns),
      int(in.parts.panels()), int(in.parts.count), in.dtype);
  return check(cudaGetLastError());
}

}  // namespace

const char* bias_grad(const BiasGradArguments& in, void* stream) {
  return in.dtype == Dtype::kBFloat16 ? run<__nv_bfloat16>(in, stream) : run<__half>(in, stream);
}

}  // namespace mok::sm90
