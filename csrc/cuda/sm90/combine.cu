// The sum over each token's slots, in slot order: the last step of forward (weighted) and of backward (of dx). One warp
// per token and 256 columns; a slot's rows are read 16 bytes a lane, all slots in flight together.
#include <algorithm>

#include "launch.cuh"
#include "peers.cuh"

namespace mok::sm90 {
namespace {

constexpr int kCombineThreads = 256, kColumns = 256;
constexpr int kMaxSlots = 32;  // slots per token: one per lane

// One warp's sum of task % slabs-th columns of a token.
template <class T, bool kPush>
__device__ __forceinline__ void combine_columns(int64_t token, int slab, const T* rows, const Plan& plan,
                                                const Numbers& weights, const Numbers& out, int64_t out_stride,
                                                const float* dscore, int dscore_tiles, const Numbers& dweights,
                                                int tokens, int top_k, int columns, const Group& group) {
  const int lane = threadIdx.x % 32;
  const int column = slab * kColumns + lane * 8;
  const int source = kPush ? int(token / group.capacity) : 0;
  const int64_t local = token - source * group.capacity;  // its number there
  const float poison = *plan.error ? __int_as_float(0x7FC00000) : 0.0f;

  int position = -1;
  float weight = 1.0f;
  if (lane < top_k) {
    const int64_t slot = token * top_k + lane;
    position = plan.position[slot];
    if (weights.data) weight = weights.load(slot);
    if (dscore && slab == 0) {
      float sum = poison;
      if (position >= 0)
        for (int n = 0; n < dscore_tiles; ++n) sum += dscore[n * int64_t(tokens) * top_k + position];
      if (!kPush || dweights.data)
        dweights.store(slot, sum);
      else if (position >= 0)
        in_window<float>(group, source, group.window.scores)[local * top_k + lane] = sum;
    }
  }
  if (kPush && (*plan.error != 0 || __ballot_sync(~0u, position >= 0) == 0)) return;
  float sum[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = poison;
  constexpr int kFlight = 8;
  __syncwarp();  // else the compiler makes ready for lanes that are apart, and the loads wait for one another
  for (int k0 = 0; k0 < top_k; k0 += kFlight) {
    uint4 part[kFlight];
#pragma unroll
    for (int k = 0; k < kFlight; ++k) {
      const int from = __shfl_sync(~0u, position, k0 + k);
      part[k] = ptx::load_once_if(from >= 0 && column < columns, rows + from * int64_t(columns) + column);
    }
#pragma unroll
    for (int k = 0; k < kFlight; ++k)
      if (__shfl_sync(~0u, position, k0 + k) >= 0) add8<T>(sum, part[k], __shfl_sync(~0u, weight, k0 + k));
  }
  if (column >= columns) return;
  if constexpr (kPush) {
    store8<T>({in_window<T>(group, source, group.window.sums), out.dtype},
              (group.rank * group.capacity + local) * out_stride + column, sum);
  } else {
    store8<T>(out, token * out_stride + column, sum);
  }
}

// kPush: the tokens are those of all ranks of `group`, and a sum goes into the window of its token's rank. Tokens
// without an expert here have none. With `ends`, the last CTA ends what this rank has to push.
template <class T, bool kPush>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const T* rows, Plan plan, Numbers weights, Numbers out, int64_t out_stride, const float* dscore,
                   int dscore_tiles, Numbers dweights, int tokens, int top_k, int columns, int slabs, bool ends,
                   const __grid_constant__ Group group) {
  const int64_t first = (blockIdx.x * int64_t(kCombineThreads) + threadIdx.x) / 32;
  const int64_t warps = gridDim.x * int64_t(kCombineThreads / 32);
  const auto sum = [&](int64_t token, int slab) {
    combine_columns<T, kPush>(token, slab, rows, plan, weights, out, out_stride, dscore, dscore_tiles, dweights, tokens,
                              top_k, columns, group);
  };
  if constexpr (!kPush) {
    for (int64_t task = first; task < int64_t(tokens) * slabs; task += warps) sum(task / slabs, int(task % slabs));
  } else {
    // The ranks take turns: all of one together would leave the link idle, or memory. There is room for more tokens
    // than there may be.
    __shared__ int counts[kMaxRanks], most;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    for (int r = threadIdx.x; r < group.ranks; r += kCombineThreads) {
      const int count = __ldcg(header(group, group.rank) + Window::kTokens + r);
      counts[r] = count > group.capacity ? 0 : count;
      atomicMax(&most, counts[r]);
    }
    __syncthreads();
    for (int64_t task = first; task < int64_t(most) * group.ranks * slabs; task += warps) {
      const int turn = int(task / slabs), source = (group.rank + 1 + turn % group.ranks) % group.ranks;
      const int local = turn / group.ranks;
      if (local < counts[source]) sum(source * group.capacity + local, int(task % slabs));
    }
    // The end of a kernel does not order what it wrote to another GPU before what the next kernel tells that GPU.
    if (ends) {
      end_pushing(group, plan.error, plan.rows, int(plan.room));
    } else {
      __syncthreads();
      if (threadIdx.x == 0) ptx::fence_system();
    }
  }
}

template <class T>
const char* run(const CombineArguments& in, void* stream) {
  const int slabs = in.columns ? int((in.columns + kColumns - 1) / kColumns) : 1;
  const int64_t threads = in.sizes.tokens * slabs * 32;
  const Numbers weights{const_cast<void*>(in.weights), in.weights_dtype}, out{in.out, in.out_dtype},
      dweights{in.dweights, in.weights_dtype};
  const auto launch = [&](auto kernel) {
    const int64_t most = in.push ? 4 * multiprocessors() : threads;  // each CTA ends with a fence that takes long
    kernel<<<unsigned(std::min((threads + kCombineThreads - 1) / kCombineThreads, most)), kCombineThreads, 0,
             static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(in.rows), in.plan, weights, out, in.out_stride, in.dscore, int(in.dscore_tiles), dweights,
        int(in.sizes.tokens), int(in.sizes.top_k), int(in.columns), slabs, in.ends, in.push ? *in.push : Group{});
  };
  in.push ? launch(combine_kernel<T, true>) : launch(combine_kernel<T, false>);
  return check(cudaGetLastError());
}

}  // namespace

const char* combine(const CombineArguments& in, void* stream) {
  if (in.sizes.top_k > kMaxSlots) return "more slots per token than the combine kernel has lanes";
  return in.dtype == Dtype::kBFloat16 ? run<__nv_bfloat16>(in, stream) : run<__half>(in, stream);
}

}  // namespace mok::sm90
