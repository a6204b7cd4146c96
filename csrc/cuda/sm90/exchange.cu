// The steps of an exchange that are not part of a product: see exchange.h.
#include "launch.cuh"
#include "number.cuh"
#include "pull.cuh"

namespace mok::sm90 {
namespace {

constexpr int kExchangeThreads = 512, kSumFlight = 4;

template <class Id>
__device__ __forceinline__ int id_at(const void* ids, int64_t i, int experts) {
  const int64_t id = static_cast<const Id*>(ids)[i];
  return id >= 0 && id < experts ? int(id) : -1;
}

__device__ __forceinline__ int id_at(const void* ids, Dtype dtype, int64_t i, int experts) {
  return dtype == Dtype::kInt64 ? id_at<int64_t>(ids, i, experts) : id_at<int32_t>(ids, i, experts);
}

__global__ void __launch_bounds__(kExchangeThreads)
    publish_kernel(const __grid_constant__ Group g, int call, bool routed, const uint4* rows, const uint4* again,
                   int64_t chunks, const void* ids, Dtype ids_dtype, Numbers weights, int tokens, int experts,
                   int top_k) {
  const int64_t threads = int64_t(gridDim.x) * blockDim.x, thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (tokens <= g.capacity) {
    const auto copy = [&](uint4* to, const uint4* from) {
      for (int64_t i = thread; i < chunks; i += threads * kInFlight) {
        uint4 part[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j)
          if (i + j * threads < chunks) part[j] = ptx::load_once(from + i + j * threads);
#pragma unroll
        for (int j = 0; j < kInFlight; ++j)
          if (i + j * threads < chunks) to[i + j * threads] = part[j];
      }
    };
    copy(in_window<uint4>(g, g.rank, g.window.rows), rows);
    if (again) copy(in_window<uint4>(g, g.rank, g.window.again), again);
    if (routed) {
      int* const to_ids = in_window<int>(g, g.rank, g.window.ids);
      float* const to_weights = in_window<float>(g, g.rank, g.window.weights);
      for (int64_t i = thread; i < int64_t(tokens) * top_k; i += threads) {
        to_ids[i] = id_at(ids, ids_dtype, i, experts);
        to_weights[i] = weights.load(i);
      }
    }
  }
  if (!is_last(g, Group::kPublishing)) return;
  for (int r = threadIdx.x; r < g.ranks; r += blockDim.x) {  // the thread that sets the flag afterwards
    header(g, r)[Window::kTokens + g.rank] = tokens;
    header(g, r)[Window::kCall + g.rank] = call;
  }
  tell_all(g, Window::kPublished);
}

// One CTA waits for all ranks, so that others find room on the device: what the late rank waits for may be among them.
__global__ void __launch_bounds__(128) wait_kernel(const __grid_constant__ Group g, int which) {
  wait_for_all(g, which);
}

__global__ void fail_kernel(const __grid_constant__ Group g, Fault kind, int have, int room) {
  fail(g, kind, g.rank, have, room);
}

__global__ void __launch_bounds__(kExchangeThreads)
    collect_kernel(const __grid_constant__ Group g, int top_k, int first, int experts, int4* ids, float4* weights) {
  __shared__ int counts[kMaxRanks];  // tokens of each rank
  const bool well = !has_failed(g);
  for (int r = threadIdx.x; r < g.ranks; r += blockDim.x) {
    const int tokens = well ? __ldcg(header(g, g.rank) + Window::kTokens + r) : 0;
    if (tokens > g.capacity && blockIdx.x == 0) fail(g, Fault::kTokens, r, tokens, int(g.capacity));
    counts[r] = tokens > g.capacity ? 0 : tokens;
  }
  __syncthreads();
  // Four slots a thread, one load for their ids and one for their weights: each has to go over the link.
  const int64_t fours = g.capacity * top_k / 4;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < g.ranks * fours;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int r = int(i / fours);
    const int64_t at = i - r * fours, count = int64_t(counts[r]) * top_k - at * 4;
    const int4 id = __ldcg(in_window<const int4>(g, r, g.window.ids) + at);
    const float4 weight = __ldcg(in_window<const float4>(g, r, g.window.weights) + at);
    int found[4] = {id.x - first, id.y - first, id.z - first, id.w - first};
    float weighs[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool here = j < count && found[j] >= 0 && found[j] < experts;
      if (!here) found[j] = -1, weighs[j] = 0.0f;
    }
    ids[i] = make_int4(found[0], found[1], found[2], found[3]);
    weights[i] = make_float4(weighs[0], weighs[1], weighs[2], weighs[3]);
  }
}

__global__ void __launch_bounds__(kExchangeThreads)
    finish_kernel(const __grid_constant__ Group g, int top_k, const int* ids, const float* scores, const int* error,
                  const int* count, int room) {
  const int64_t per_rank = g.capacity * top_k, slots = scores ? g.ranks * per_rank : 0;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < slots; i += int64_t(gridDim.x) * blockDim.x) {
    const int source = int(i / per_rank);
    if (ids[i] >= 0) in_window<float>(g, source, g.window.scores)[i - source * per_rank] = scores[i];
  }
  end_pushing(g, error, count, room);
}

// The sorted rows [count, H], each into the place of its slot in its rank's window.
__global__ void __launch_bounds__(kExchangeThreads)
    push_routes_kernel(const __grid_constant__ Group g, Plan plan, int experts, int top_k, int hidden,
                       const uint4* rows) {
  const int warps = gridDim.x * (kExchangeThreads / 32), chunks = hidden / 8;
  const int count = *plan.error != 0 ? 0 : plan.offsets[experts - 1];
  const int64_t per_rank = g.capacity * top_k;
  for (int row = blockIdx.x * (kExchangeThreads / 32) + threadIdx.x / 32; row < count; row += warps) {
    const int slot = plan.order[row], source = int(slot / per_rank);
    copy_row(in_window<uint4>(g, source, g.window.sums) + (slot - source * per_rank) * chunks,
             rows + int64_t(row) * chunks, chunks);
  }
  __syncthreads();
  if (threadIdx.x == 0) ptx::fence_system();  // as in combine_kernel
}

// Sums what was pushed; or, with `position`, only fills that with the slots that have an expert.
template <class T>
__global__ void __launch_bounds__(kExchangeThreads, 2)
    sum_kernel(const __grid_constant__ Group g, const void* ids, Dtype ids_dtype, Numbers out, Numbers scores,
               int tokens, int hidden, int top_k, int experts, int experts_per_rank, int* position,
               const __grid_constant__ Marks marks) {
  const bool failed = has_failed(g);
  const float poison = failed ? __int_as_float(0x7FC00000) : 0.0f;
  if (failed && blockIdx.x == 0 && threadIdx.x < marks.count)
    Numbers{marks.at[threadIdx.x], marks.dtype}.store(0, poison);
  const int lane = threadIdx.x % 32, warps = gridDim.x * (kExchangeThreads / 32);
  const T* const sums = in_window<T>(g, g.rank, g.window.sums);
  for (int token = blockIdx.x * (kExchangeThreads / 32) + threadIdx.x / 32; token < tokens; token += warps) {
    int holder = -1;  // the rank that has the expert of the lane's slot
    if (lane < top_k) {
      const int64_t slot = int64_t(token) * top_k + lane;
      const int id = id_at(ids, ids_dtype, slot, experts);
      if (id >= 0) holder = id / experts_per_rank;
      if (position) position[slot] = id >= 0 ? int(slot) : -1;
      if (scores.data)
        scores.store(slot, poison + (id >= 0 ? __ldcg(in_window<float>(g, g.rank, g.window.scores) + slot) : 0.0f));
    }
    if (!out.data || position) continue;
    for (int column = lane * 8; column - lane * 8 < hidden; column += 32 * 8) {
      float sum[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = poison;
      // The ranks that have pushed, in order, some at a time.
      int last = -1, pushed;
      __syncwarp();  // as in combine_columns
      do {
        uint4 part[kSumFlight];
        pushed = 0;
#pragma unroll
        for (int i = 0; i < kSumFlight; ++i) {
          const int next = int(__reduce_min_sync(~0u, unsigned(holder > last ? holder : kMaxRanks)));
          const bool there = next < kMaxRanks;
          part[i] = ptx::load_once_if(there && column < hidden,
                                      sums + (next * g.capacity + token) * int64_t(hidden) + column);
          if (there) last = next;
          pushed += there;
        }
#pragma unroll
        for (int i = 0; i < kSumFlight; ++i)
          if (i < pushed) add8<T>(sum, part[i], 1.0f);
      } while (pushed == kSumFlight);
      if (column < hidden) store8<T>(out, int64_t(token) * hidden + column, sum);
    }
  }
  // Nothing is handed over: what comes after on the stream sees all of it.
  if (threadIdx.x == 0 && atomicAdd(g.state + Group::kSumming, 1) == int(gridDim.x) - 1) {
    g.state[Group::kSumming] = 0;
    g.state[Group::kDone] += 1;
  }
}

int grid_for(int64_t work, int most) {
  const int64_t wanted = (work + kExchangeThreads - 1) / kExchangeThreads;
  return wanted < 1 ? 1 : wanted < most ? int(wanted) : most;
}

}  // namespace

const char* wait_published(const Group& group, void* stream) {
  wait_kernel<<<1, 128, 0, static_cast<cudaStream_t>(stream)>>>(group, Window::kPublished);
  return check(cudaGetLastError());
}

const char* publish(const PublishArguments& in, void* stream) {
  const Sizes& n = in.sizes;
  const int64_t chunks = n.tokens * n.hidden / 8;
  publish_kernel<<<grid_for(chunks / kInFlight + n.slots() / 4, 2 * multiprocessors()), kExchangeThreads, 0,
                   static_cast<cudaStream_t>(stream)>>>(
      in.group, in.call, in.routed, static_cast<const uint4*>(in.rows), static_cast<const uint4*>(in.again), chunks,
      in.ids, in.ids_dtype, Numbers{const_cast<void*>(in.weights), in.weights_dtype}, int(n.tokens), int(n.experts),
      int(n.top_k));
  return check(cudaGetLastError());
}

const char* collect(const CollectArguments& in, void* stream) {
  if (const char* error = wait_published(in.group, stream)) return error;
  const int64_t slots = in.group.ranks * in.group.capacity * in.top_k;
  collect_kernel<<<grid_for(slots / 4, 4 * multiprocessors()), kExchangeThreads, 0,
                   static_cast<cudaStream_t>(stream)>>>(in.group, int(in.top_k), int(in.first_expert), int(in.experts),
                                                        reinterpret_cast<int4*>(in.ids),
                                                        reinterpret_cast<float4*>(in.weights));
  return check(cudaGetLastError());
}

const char* fail_all(const Group& group, Fault kind, int64_t have, int64_t room, void* stream) {
  fail_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(group, kind, int(have), int(room));
  return check(cudaGetLastError());
}

const char* push_routes(const PushArguments& in, void* stream) {
  const Sizes& n = in.sizes;
  push_routes_kernel<<<2 * multiprocessors(), kExchangeThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      in.group, in.plan, int(n.experts), int(n.top_k), int(n.hidden), static_cast<const uint4*>(in.rows));
  return check(cudaGetLastError());
}

const char* finish(const FinishArguments& in, void* stream) {
  const int64_t slots = in.scores ? in.group.ranks * in.group.capacity * in.top_k : 1;
  finish_kernel<<<grid_for(slots, multiprocessors()), kExchangeThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      in.group, int(in.top_k), in.ids, in.scores, in.error, in.count, int(in.room));
  return check(cudaGetLastError());
}

namespace {

template <class T>
const char* run_sum(const SumArguments& in, void* stream) {
  const Sizes& n = in.sizes;
  const Numbers out{in.out, in.out_dtype}, scores{in.scores, in.scores_dtype};
  sum_kernel<T>
      <<<grid_for(n.tokens * 32, 4 * multiprocessors()), kExchangeThreads, 0, static_cast<cudaStream_t>(stream)>>>(
          in.group, in.ids, in.ids_dtype, out, scores, int(n.tokens), int(n.hidden), int(n.top_k), int(n.experts),
          int(in.experts_per_rank), in.position, in.marks);
  return check(cudaGetLastError());
}

}  // namespace

const char* sum(const SumArguments& in, void* stream) {
  if (in.sizes.top_k > 32) return "more slots per token than a warp has lanes";
  wait_kernel<<<1, 128, 0, static_cast<cudaStream_t>(stream)>>>(in.group, Window::kFinished);
  const char* const error =
      in.dtype == Dtype::kBFloat16 ? run_sum<__nv_bfloat16>(in, stream) : run_sum<__half>(in, stream);
  if (error || !in.position || !in.out) return error;
  // Routes that came one by one are combined as those of one rank, with the same bits.
  CombineArguments all{};
  all.sizes = in.sizes;
  all.dtype = in.dtype;
  all.plan.position = in.position;
  all.plan.error = in.group.state + Group::kFailed;
  all.rows = in.routes;
  all.columns = all.out_stride = in.sizes.hidden;
  all.weights = in.weights;
  all.weights_dtype = in.weights_dtype;
  all.out = in.out;
  all.out_dtype = in.out_dtype;
  return combine(all, stream);
}

}  // namespace mok::sm90
