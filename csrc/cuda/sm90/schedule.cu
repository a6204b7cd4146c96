// Sorting the slots by expert, on the device and in one launch: a stable counting sort. Every CTA counts a contiguous
// share of the slots, then places it behind the CTAs before it. Nothing depends on the order in which CTAs run.
#include <cooperative_groups.h>

#include <algorithm>
#include <climits>

#include "launch.cuh"
#include "rows.cuh"

namespace mok::sm90 {
namespace {

namespace cg = cooperative_groups;

constexpr int kSortThreads = 1024, kWarps = kSortThreads / 32;
static_assert(kMaxExperts < kSortThreads, "one thread per expert, and one for the slots without");

__host__ __device__ int sort_grid(int64_t slots) {
  constexpr int kMost = 64;
  const int64_t wanted = (slots + kSortThreads - 1) / kSortThreads;
  return wanted < 1 ? 1 : wanted < kMost ? int(wanted) : kMost;
}

// As Plan::token has it.
__device__ __forceinline__ int place_of_token(const Plan& plan, int token) {
  const int own = token - plan.own_first;
  return own < 0 ? token : own < plan.own_count ? own | INT_MIN : token - plan.own_count;
}

// Exclusive prefix sum over the CTA's threads; `sums` is shared memory of kWarps ints.
__device__ int prefix_sum(int value, int* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, inclusive, d);
    if (lane >= d) inclusive += other;
  }
  __syncthreads();
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  int before = 0;
  for (int w = 0; w < warp; ++w) before += sums[w];
  return before + inclusive - value;
}

// Writes the row blocks and zeroes the counters. `ends` and `starts` are shared memory of one int per thread; `end` is
// the end of the rows of the thread's expert, for threads of experts.
__device__ void fill_plan(const Plan& plan, int experts, int end, int* ends, int* starts, int* sums) {
  const int e = threadIdx.x;
  __syncthreads();
  if (e < experts) ends[e] = end;
  __syncthreads();
  const int rows = e < experts ? end - (e ? ends[e - 1] : 0) : 0;
  const int start = prefix_sum((rows + kBlockRows - 1) / kBlockRows, sums);
  if (e <= experts) starts[e] = start;
  __syncthreads();
  const bool full = ends[experts - 1] > plan.room;
  const int blocks = full ? 0 : starts[experts];
  for (int b = blockIdx.x * blockDim.x + e; b < blocks; b += gridDim.x * blockDim.x) {
    int low = 0, high = experts;  // the last expert whose first block is at most b
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (starts[middle] <= b ? low : high) = middle;
    }
    const int word = RowGroup::word(starts[low], starts[low + 1] - starts[low], b - starts[low]);
    const RowGroup group(word);
    const int first = (low ? ends[low - 1] : 0) + (group.first - starts[low]) * kBlockRows;
    const int end = min(first + group.height * kBlockRows, ends[low]);
    reinterpret_cast<int4*>(plan.blocks)[b] = make_int4(low, first, end, word);
    plan.done[b] = 0;
  }
  const int rows_of_all = ends[experts - 1], chunks = (rows_of_all + Plan::kChunk - 1) / Plan::kChunk;
  for (int i = blockIdx.x * blockDim.x + e; i < chunks; i += gridDim.x * blockDim.x) {
    constexpr int kUnit = Plan::kChunk / Plan::kUnits;
    const int units = min(Plan::kUnits, (rows_of_all - i * Plan::kChunk + kUnit - 1) / kUnit);
    plan.landed[i] = Plan::kUnits - units;  // those that there are not have landed
  }
  if (blockIdx.x == 0) {
    if (e < Plan::kTickets) plan.tickets[e] = 0;
    if (e == 0) *plan.num_blocks = blocks;
    if (e == 1) *plan.error = full ? kNoRoom : 0;
    if (e == 2) *plan.rows = ends[experts - 1];
  }
}

template <class Id>
__global__ void __launch_bounds__(kSortThreads)
    sort_kernel(const Id* ids, int slots, int experts, int top_k, int* order, int* offsets, int* counts, Plan plan,
                uint4* h, int64_t h_chunks) {
  extern __shared__ int shared[];
  __shared__ int ends[kSortThreads], starts[kSortThreads], sums[kWarps];
  const int buckets = experts + 1, thread = threadIdx.x, lane = thread % 32;
  int* const mine = shared + thread / 32 * buckets;  // [warps][buckets]
  for (int i = thread; i < kWarps * buckets; i += kSortThreads) shared[i] = 0;
  __syncthreads();
  const int rounds = (slots + gridDim.x * kSortThreads - 1) / (gridDim.x * kSortThreads);
  const int first = (blockIdx.x * kWarps + thread / 32) * rounds * 32 + lane;
  const auto bucket = [&](int slot) {
    const long long id = ids[slot];
    return id >= 0 && id < experts ? static_cast<int>(id) : experts;
  };
  for (int i = 0; i < rounds; ++i) {
    const int slot = first + i * 32, b = slot < slots ? bucket(slot) : -1;
    const unsigned same = __match_any_sync(~0u, b);
    if (b >= 0 && lane == __ffs(same) - 1) mine[b] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
  // Per bucket: from counts to the number of its slots in the warps before.
  if (thread < buckets) {
    int total = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int count = shared[w * buckets + thread];
      shared[w * buckets + thread] = total;
      total += count;
    }
    counts[blockIdx.x * buckets + thread] = total;
  }
  cg::this_grid().sync();
  int before = 0, total = 0;
  if (thread < buckets) {
    for (int c = 0; c < gridDim.x; ++c) {
      const int count = __ldcg(counts + c * buckets + thread);
      before += c < blockIdx.x ? count : 0;
      total += count;
    }
  }
  const int start = prefix_sum(total, sums);
  if (thread < buckets) {
    for (int w = 0; w < kWarps; ++w) shared[w * buckets + thread] += start + before;
    if (blockIdx.x == 0 && thread < experts) offsets[thread] = start + total;
  }
  __syncthreads();
  for (int i = 0; i < rounds; ++i) {
    const int slot = first + i * 32, b = slot < slots ? bucket(slot) : -1;
    const unsigned same = __match_any_sync(~0u, b);
    if (b >= 0) {
      const int at = mine[b] + __popc(same & ((1u << lane) - 1));
      order[at] = slot;
      plan.token[at] = place_of_token(plan, slot / top_k);
      plan.position[slot] = b < experts ? at : -1;
    }
    __syncwarp();
    if (b >= 0 && lane == __ffs(same) - 1) mine[b] += __popc(same);
    __syncwarp();
  }
  fill_plan(plan, experts, start + total, ends, starts, sums);
  if (blockIdx.x == 0 && thread < experts && ends[experts - 1] > plan.room) offsets[thread] = 0;
  if (h) {
    const int64_t from = ends[experts - 1] * h_chunks, to = slots * h_chunks;
    for (int64_t i = from + blockIdx.x * blockDim.x + thread; i < to; i += gridDim.x * blockDim.x)
      h[i] = make_uint4(0, 0, 0, 0);
  }
}

__global__ void __launch_bounds__(kSortThreads) plan_kernel(int slots, int experts, int top_k, Plan plan) {
  __shared__ int ends[kSortThreads], starts[kSortThreads], sums[kWarps];
  fill_plan(plan, experts, threadIdx.x < experts ? plan.offsets[threadIdx.x] : 0, ends, starts, sums);
  const int valid = ends[experts - 1];
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < slots; i += gridDim.x * blockDim.x) {
    const int slot = plan.order[i];
    plan.position[slot] = i < valid ? i : -1;
    plan.token[i] = place_of_token(plan, slot / top_k);
  }
}

// The places come as a parameter: no copy from the host, which would have to wait or outlive a captured graph.
__global__ void __launch_bounds__(kSortThreads)
    places_kernel(const __grid_constant__ Places places, int experts, int* to) {
  const int weight = blockIdx.x, expert = threadIdx.x;
  if (expert < experts) to[weight * experts + expert] = places.at[weight][expert];
}

template <class Id>
const char* sort(const ScheduleArguments& in, void* stream) {
  const int buckets = int(in.sizes.experts) + 1, shared_bytes = kWarps * buckets * int(sizeof(int));
  if (const char* error =
          check(cudaFuncSetAttribute(sort_kernel<Id>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes)))
    return error;
  const Id* ids = static_cast<const Id*>(in.ids);
  int slots = int(in.sizes.slots()), experts = int(in.sizes.experts), top_k = int(in.sizes.top_k);
  int *order = in.order, *offsets = in.offsets, *counts = in.counts;
  Plan plan = in.plan;
  uint4* h = static_cast<uint4*>(in.h);
  int64_t h_chunks = in.h_columns / 8;
  void* arguments[] = {&ids, &slots, &experts, &top_k, &order, &offsets, &counts, &plan, &h, &h_chunks};
  const dim3 grid(unsigned(std::min(sort_grid(slots), std::max(1, multiprocessors()))));  // they wait for each other
  return check(cudaLaunchCooperativeKernel(sort_kernel<Id>, grid, dim3(kSortThreads), arguments, size_t(shared_bytes),
                                           static_cast<cudaStream_t>(stream)));
}

}  // namespace

int64_t schedule_scratch(const Sizes& sizes) { return sort_grid(sizes.slots()) * (sizes.experts + 1); }

const char* schedule(const ScheduleArguments& in, void* stream) {
  if (in.sizes.experts > kMaxExperts) return "more experts than the schedule kernel has threads";
  return in.ids_dtype == Dtype::kInt64 ? sort<int64_t>(in, stream) : sort<int32_t>(in, stream);
}

const char* tell_places(const Sizes& sizes, const Plan& plan, const Places& places, void* stream) {
  if (sizes.experts > kMaxExperts) return "more experts than there are places for";
  places_kernel<<<Places::kWeights, kSortThreads, 0, static_cast<cudaStream_t>(stream)>>>(places, int(sizes.experts),
                                                                                          plan.places);
  return check(cudaGetLastError());
}

const char* replan(const Sizes& sizes, const Plan& plan, void* stream) {
  if (sizes.experts > kMaxExperts) return "more experts than the schedule kernel has threads";
  plan_kernel<<<sort_grid(sizes.slots()), kSortThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      int(sizes.slots()), int(sizes.experts), int(sizes.top_k), plan);
  return check(cudaGetLastError());
}

}  // namespace mok::sm90
