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
  static_assert(kWarps == 32, "a lane for each warp");
  return __reduce_add_sync(~0u, lane < warp ? sums[lane] : 0) + inclusive - value;
}

// Shared memory to fill a plan: an int for each thread, or for each expert.
struct Fill {
  int ends[kSortThreads], starts[kSortThreads], sums[kWarps];
};

// Writes where the experts' rows end: `end` is that of the thread's expert, for threads of experts.
__device__ void fill_ends(Fill& fill, int experts, int end) {
  __syncthreads();
  if (threadIdx.x < experts) fill.ends[threadIdx.x] = end;
  __syncthreads();
}

// Writes row blocks, and zeroes their counters.
__device__ void fill_blocks(const Plan& plan, const RowBlocks& blocks, int experts, Fill& fill) {
  const int e = threadIdx.x, height = blocks.height;
  const int* const ends = fill.ends;
  int* const starts = fill.starts;
  const int rows = e < experts ? ends[e] - (e ? ends[e - 1] : 0) : 0;
  const int start = prefix_sum((rows + height - 1) / height, fill.sums);
  if (e <= experts) starts[e] = start;
  __syncthreads();
  const int count = ends[experts - 1] > plan.room ? 0 : starts[experts];
  for (int b = blockIdx.x * blockDim.x + e; b < count; b += gridDim.x * blockDim.x) {
    int low = 0, high = experts;  // the last expert whose first block is at most b
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (starts[middle] <= b ? low : high) = middle;
    }
    const int word = RowGroup::word(starts[low], starts[low + 1] - starts[low], b - starts[low], height);
    const RowGroup group(word);
    const int first = (low ? ends[low - 1] : 0) + (group.first - starts[low]) * height;
    const int end = min(first + group.height * height, ends[low]);
    reinterpret_cast<int4*>(blocks.groups)[b] = make_int4(low, first, end, word);
    plan.done[b] = 0;
  }
  if (blockIdx.x == 0 && e == 0) *blocks.count = count;
}

// Sets all other counters.
__device__ void fill_counters(const Plan& plan, int rows) {
  const int thread = threadIdx.x, chunks = (rows + Plan::kChunk - 1) / Plan::kChunk;
  for (int i = blockIdx.x * blockDim.x + thread; i < chunks; i += gridDim.x * blockDim.x) {
    constexpr int kUnit = Plan::kChunk / Plan::kUnits;
    const int units = min(Plan::kUnits, (rows - i * Plan::kChunk + kUnit - 1) / kUnit);
    plan.landed[i] = Plan::kUnits - units;  // those that there are not have landed
  }
  if (blockIdx.x == 0) {
    if (thread < Plan::kTickets) plan.tickets[thread] = 0;
    if (thread == 0) *plan.error = rows > plan.room ? kNoRoom : 0;
    if (thread == 1) *plan.rows = rows;
  }
}

template <class Id>
__global__ void __launch_bounds__(kSortThreads)
    sort_kernel(const Id* ids, int slots, int experts, int top_k, int* order, int* offsets, int* counts, Plan plan,
                RowBlocks blocks, uint4* h, int64_t h_chunks) {
  extern __shared__ int shared[];
  __shared__ Fill fill;
  __shared__ int begins[kSortThreads];  // where this CTA's slots of each bucket are put
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
    int total = 0, count[kWarps];  // all are read before the first is written, or each would wait for the one before
#pragma unroll
    for (int w = 0; w < kWarps; ++w) count[w] = shared[w * buckets + thread];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      shared[w * buckets + thread] = total;
      total += count[w];
    }
    counts[blockIdx.x * buckets + thread] = total;
  }
  cg::this_grid().sync();
  int before = 0, total = 0;
  if (thread < buckets) {
#pragma unroll 16
    for (int c = 0; c < gridDim.x; ++c) {
      const int count = __ldcg(counts + c * buckets + thread);
      before += c < blockIdx.x ? count : 0;
      total += count;
    }
  }
  const int start = prefix_sum(total, fill.sums);
  if (thread < buckets) {
    begins[thread] = start + before;
    if (blockIdx.x == 0 && thread < experts) offsets[thread] = start + total;
  }
  __syncthreads();
  for (int i = 0; i < rounds; ++i) {
    const int slot = first + i * 32, b = slot < slots ? bucket(slot) : -1;
    const unsigned same = __match_any_sync(~0u, b);
    if (b >= 0) {
      const int at = begins[b] + mine[b] + __popc(same & ((1u << lane) - 1));
      order[at] = slot;
      plan.token[at] = place_of_token(plan, slot / top_k);
      plan.position[slot] = b < experts ? at : -1;
    }
    __syncwarp();
    if (b >= 0 && lane == __ffs(same) - 1) mine[b] += __popc(same);
    __syncwarp();
  }
  fill_ends(fill, experts, start + total);
  fill_blocks(plan, blocks, experts, fill);
  const int rows = fill.ends[experts - 1];
  fill_counters(plan, rows);
  if (blockIdx.x == 0 && thread < experts && rows > plan.room) offsets[thread] = 0;
  if (h) {
    const int64_t from = rows * h_chunks, to = slots * h_chunks;
    for (int64_t i = from + blockIdx.x * blockDim.x + thread; i < to; i += gridDim.x * blockDim.x)
      h[i] = make_uint4(0, 0, 0, 0);
  }
}

// Its second dimension are the heights of backward's row blocks.
__global__ void __launch_bounds__(kSortThreads) plan_kernel(int slots, int experts, int top_k, Plan plan) {
  __shared__ Fill fill;
  fill_ends(fill, experts, threadIdx.x < experts ? plan.offsets[threadIdx.x] : 0);
  fill_blocks(plan, blockIdx.y ? plan.blocks[1] : plan.blocks[0], experts, fill);
  if (blockIdx.y) return;
  const int valid = fill.ends[experts - 1];
  fill_counters(plan, valid);
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
  RowBlocks blocks = plan.blocks[int(in.tiles)];
  uint4* h = static_cast<uint4*>(in.h);
  int64_t h_chunks = in.h_columns / 8;
  void* arguments[] = {&ids, &slots, &experts, &top_k, &order, &offsets, &counts, &plan, &blocks, &h, &h_chunks};
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
  static_assert(kBackwardShapes == 2);
  const dim3 grid(unsigned(sort_grid(sizes.slots())), kBackwardShapes);
  plan_kernel<<<grid, kSortThreads, 0, static_cast<cudaStream_t>(stream)>>>(int(sizes.slots()), int(sizes.experts),
                                                                            int(sizes.top_k), plan);
  return check(cudaGetLastError());
}

}  // namespace mok::sm90
