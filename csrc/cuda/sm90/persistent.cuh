// The persistent grouped matrix product that every kernel of this engine is an instance of.
//
// One CTA per SM, three warpgroups. Warpgroup 0 produces, into a ring of stages of 64 along K: its warp 0 takes the
// next task (one output tile) from a global ticket counter, tells the others and starts the copy engine (weights, and
// rows that lie in order); warps 1 to 3 gather rows that come from anywhere, by cp.async. Warpgroups 1 and 2 consume,
// each a whole tile in turn: while one writes its tile out, the other keeps the tensor cores busy.
//
// An operation `Op` says what the tasks are, how they are loaded and what happens to a finished tile. It has:
//
// - Element; Params, among them `int* error` and `int* ticket`; kProducerRegisters and kConsumerRegisters.
//
// - the shape of its tiles, see Common; kStages and kStrips: how the shared memory is used, stages of kBytesStage and
//   bytes for each consumer warp.
//
// - kTransposeA, kTransposeB: whether the operand is contiguous along M or N instead of K.
//
// - task(p, ticket): the task of a ticket, Task::none() when there is none.
//
// - locate(p, task): fills in `place`. See Common.
//
// - Boxes: what the copy engine does, started by one lane: bytes(p, task) per stage, weights(...) and rows(...).
//
// - kRagged: whether the last step may be incomplete; then slices(task), how many sixteens of it there are.
//
// - kWaits: whether tasks wait for others; then also Boxes::ready(p, task) and Boxes::wait(p, task, ring).
//
// - kPulls: whether rows to gather may come from other ranks; then also Params::pull and Gather::last_row(task).
//   kPullsAgain: whether others may be read after them, see Pull::again.
//
// - kGathers: whether there are rows to gather; then Gather(p, task, thread), whose step(p, task, step, phase, stage)
//   copies one thread's share of a stage; phase is step % Gather::kUnroll, known to the compiler.
//
// - prepare(p, task, warp): what a consumer warp does before it multiplies; finish(p, task, acc, warp): what it does
//   with its rows of the tile then (zeros, if the task has no steps); drain(): what a thread does at the end. See
//   Common.
//
// Tasks are handed out in order and a CTA works on its tasks in order; a task may wait for tasks with smaller tickets
// only. So the unfinished task with the smallest ticket never waits, however many CTAs are running.
#pragma once

#include "../ptx/barrier.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/wgmma.cuh"
#include "arguments.h"
#include "number.cuh"
#include "pull.cuh"

namespace mok::sm90 {

constexpr int kTileK = 64;
constexpr int kThreads = 384, kGatherers = 96;
constexpr int kTaskSlots = 4;
constexpr int kPartRows = 64;             // of a tile: what one multiply has
constexpr uint32_t kChunk = 64 * 64 * 2;  // 64 lines of 64 elements

// Rows that a box may start before the end of its rows, see panel_map. Not more of them than the highest box has: the
// map begins that far before the data, and expandable segments of PyTorch's allocator lie at low addresses.
constexpr int kRagged = 128;

static_assert(kPanel == kTileK, "a panel is a step wide");

// A row of a panel, among those of all panels: 32 bits count them in any memory there is.
__device__ __forceinline__ int panel_row(const Plan& plan, int panel, int row) { return panel * int(plan.room) + row; }

__host__ __device__ inline int steps_of(int k) { return (k + kTileK - 1) / kTileK; }
__device__ __forceinline__ int parts_of(int rows) { return (rows + kPartRows - 1) / kPartRows; }

// Where a wait took too long, as the error word says it; or that there is no room for all rows.
enum Site : int {
  kTaskTold = 1,
  kTaskSlotFree,
  kFreeForBoxes,
  kFreeForRows,
  kStageFull,
  kTurn,
  kUpDone,
  kNoRoom,
  kNotLanded,
  kMeeting
};

// What operations have in common: tiles of kMostParts parts of 64 rows, of which an expert's last may have fewer, times
// columns, and hooks that do nothing. In a stage A lies part by part, B behind it. `kSplit`: B is contiguous along N
// and its halves of 96 columns take two chunks each, of which the second is used by half.
template <int kMostParts, int kColumns, bool kSplitB = false>
struct Common {
  static constexpr int kParts = kMostParts, kTileM = kParts * kPartRows, kTileN = kColumns;
  static constexpr int kAccumulators = kTileN / 2;  // per thread and part
  static constexpr bool kSplit = kSplitB;
  static constexpr uint32_t kBytesA = kParts * kChunk, kBytesB = (kSplit ? 4 : kTileN / 64) * kChunk,
                            kBytesStage = kBytesA + kBytesB;
  static constexpr bool kPulls = false, kPullsAgain = false, kRagged = false;

  template <class... A>
  static __device__ __forceinline__ void locate(const A&...) {}
  template <class... A>
  static __device__ __forceinline__ void prepare(const A&...) {}
  static __device__ __forceinline__ void drain() {}
};

template <int kValue>
struct Index {
  static constexpr int value = kValue;
};

struct Task {
  int kind;  // chosen by the operation; negative: no more tasks
  int expert;
  int row, rows;   // first row and number of rows of the tile, at most kTileM
  int column;      // first column of the tile
  int steps;       // along K
  int first_step;  // in the CTA's ring
  int extra;       // chosen by the operation
  int place[2];    // of the expert in the operation's weights, see Weight; known to warp 0 only

  static __device__ __forceinline__ Task none() { return {-1, 0, 0, 0, 0, 0, 0, 0, {0, 0}}; }

  // The same task, known to the compiler to be the same in all lanes: it then keeps it in uniform registers, from which
  // the copy engine takes its operands.
  __device__ __forceinline__ Task uniform() const {
    const auto same = [](int v) { return __shfl_sync(~0u, v, 0); };
    return {same(kind),       same(expert), same(row),
            same(rows),       same(column), same(steps),
            same(first_step), same(extra),  {same(place[0]), same(place[1])}};
  }
};

// Waits that end. One of seconds can only be a bug: it is marked and ends, as do all waits after it; `combine` then
// poisons the output, so that the mistake shows and the device does not hang.
struct Patience {
  int* error;

  template <class Ready>
  __device__ __forceinline__ bool patient(Ready ready, Site site) const {
    constexpr long long kLook = 1 << 18, kLimit = 1LL << 33;  // clocks
    const long long start = clock64();
    while (!ready()) {
      const long long waited = clock64() - start;
      if (waited < kLook) continue;
      if (*static_cast<volatile int*>(error) != 0) return false;
      if (waited > kLimit) {
        *static_cast<volatile int*>(error) = site;
        return false;
      }
    }
    return true;
  }
  // True if all is well.
  __device__ __forceinline__ bool wait(uint32_t barrier, uint32_t parity, Site site) const {
    return ptx::barrier_try_wait(barrier, parity) ||
           patient([&] { return ptx::barrier_try_wait(barrier, parity); }, site);
  }
};

// The CTA's shared memory, as an operation divides it: stages, then strips of the consumer warps, tasks, barriers.
template <class Op>
struct Ring : Patience {
  static constexpr int kStages = Op::kStages;
  static constexpr uint32_t kBytesStage = Op::kBytesStage, kAtStrips = kStages * kBytesStage;
  static constexpr uint32_t kAtTasks = kAtStrips + 8 * Op::kStrips;
  static constexpr uint32_t kAtBarriers = kAtTasks + kTaskSlots * 32;
  static constexpr uint32_t kBytes = kAtBarriers + (2 * kStages + 2 * kTaskSlots + 4) * 8;
  static_assert(kBytes <= 232448, "more shared memory than a CTA can have");

  uint32_t base;

  __device__ __forceinline__ Ring(uint32_t base, int* error) : Patience{error}, base(base) {}
  __device__ __forceinline__ uint32_t stage(int s) const { return base + s * kBytesStage; }
  __device__ __forceinline__ uint32_t full(int s) const { return base + kAtBarriers + s * 8; }
  __device__ __forceinline__ uint32_t empty(int s) const { return full(kStages + s); }
  __device__ __forceinline__ uint32_t task_full(int s) const { return full(2 * kStages + s); }
  __device__ __forceinline__ uint32_t task_empty(int s) const { return full(2 * kStages + kTaskSlots + s); }
  __device__ __forceinline__ uint32_t turn(int group) const { return full(2 * kStages + 2 * kTaskSlots + group); }
  __device__ __forceinline__ uint32_t task(int s) const { return base + kAtTasks + s * 32; }
  __device__ __forceinline__ uint32_t met(int group) const { return turn(2 + group); }
  __device__ __forceinline__ uint32_t strips(int group) const { return base + kAtStrips + group * 4 * Op::kStrips; }

  // Called by a whole warp.
  __device__ __forceinline__ bool wait_landed(const int* flag) const {
    return __all_sync(~0u, patient([&] { return ptx::load_acquire(flag) >= Plan::kUnits; }, kNotLanded));
  }
  __device__ __forceinline__ void wait_count(const int* count, int wanted, Site site) const {
    if (ptx::load_acquire(count) >= wanted) return;
    patient([&] { return ptx::load_acquire(count) >= wanted; }, site);
  }

  // Called by whole warps, once per task.
  __device__ __forceinline__ Task read_task(int i) const {
    const int slot = i % kTaskSlots;
    if (!wait(task_full(slot), i / kTaskSlots & 1, kTaskTold)) return Task::none();
    const uint4 a = ptx::load_shared(task(slot)), b = ptx::load_shared(task(slot) + 16);
    ptx::barrier_arrive(task_empty(slot));
    __syncwarp();
    return {int(a.x), int(a.y), int(a.z), int(a.w), int(b.x), int(b.y), int(b.z), int(b.w), {0, 0}};
  }
  // Called by warp 0.
  __device__ __forceinline__ void write_task(int i, const Task& t) const {
    const int slot = i % kTaskSlots;
    wait(task_empty(slot), (i / kTaskSlots & 1) ^ 1, kTaskSlotFree);
    if (threadIdx.x != 0) return;
    ptx::store_shared(task(slot), make_uint4(t.kind, t.expert, t.row, t.rows));
    ptx::store_shared(task(slot) + 16, make_uint4(t.column, t.steps, t.first_step, t.extra));
    ptx::barrier_arrive(task_full(slot));
  }
};

// A consumer warp: it owns 16 rows of each part of a tile, and `strips`, the address of its shared memory, a quarter of
// its group's. A lane's rows in an accumulator fragment are row() and the one 8 further.
struct Warp : Patience {
  uint32_t strips, group, met;  // `met`: the barrier of the group

  template <class Op>
  __device__ __forceinline__ Warp(const Ring<Op>& ring, int number)
      : Patience(ring),
        strips(ring.strips(number) + index() * Op::kStrips),
        group(ring.strips(number)),
        met(ring.met(number)) {}
  // Waits for the group's other warps; every meeting of kPhase 0 is followed by one of kPhase 1. What one warp wrote to
  // memory before is then visible to the others.
  template <int kPhase>
  __device__ __forceinline__ void meet() const {
    __syncwarp();
    if (lane() == 0) ptx::barrier_arrive(met);
    wait(met, kPhase, kMeeting);
  }

  static __device__ __forceinline__ int index() { return threadIdx.x / 32 % 4; }  // in its warpgroup
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int row() { return lane() / 4; }
};

// A thread's accumulators [parts][kAccumulators], rounded to pairs of 16-bit elements: element 2 * j + r of a part
// holds block j of 8 columns, rows 8 * r to 8 * r + 7. As floats they leave an epilogue no registers to work with.
template <class T, int kParts, int kWords>
__device__ __forceinline__ void round_tile(const float (&acc)[kParts][2 * kWords], uint32_t (&to)[kParts][kWords]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int i = 0; i < kWords; ++i) to[part][i] = Pair<T>::pack(acc[part][2 * i], acc[part][2 * i + 1]);
}

// An epilogue that loops over the parts works on the first and moves the others on: a third of the code, and the
// compiler does not keep values of several at once.
template <int kParts, class Value, int kCount>
__device__ __forceinline__ void next_part(Value (&values)[kParts][kCount]) {
#pragma unroll
  for (int part = 1; part < kParts; ++part)
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[part - 1][i] = values[part][i];
}

// The same for pieces of a part, of kPiece each.
template <int kPiece, int kWords>
__device__ __forceinline__ void next_piece(uint32_t (&values)[kWords]) {
#pragma unroll
  for (int i = kPiece; i < kWords; ++i) values[i - kPiece] = values[i];
}

// A place in the ring that runs over all steps of all tasks.
template <int kStages>
struct Cursor {
  int stage = 0;
  uint32_t parity = 1;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// Warp 0, as a whole.
template <class Op>
__device__ __forceinline__ void lead(const typename Op::Params& p, const Ring<Op>& ring) {
  const bool leader = ptx::elect_lane();
  int ticket = 0, steps = 0;
  const auto draw = [&] {
    if (threadIdx.x == 0) ticket = atomicAdd(p.ticket, 1);
  };
  const auto take = [&] {
    Task task = Op::task(p, __shfl_sync(~0u, ticket, 0));
    Op::locate(p, task);
    task.first_step = steps;
    steps += task.steps;
    draw();
    return task.uniform();
  };
  // The others are told of a task once its rows are there: of the next one while this one goes on, if it can be.
  int landed = 0;
  const auto tell = [&](int i, const Task& t, bool wait) {
    if constexpr (Op::kPulls) {
      if (p.pull.ctas > 0 && !has_landed(p.plan, Op::Gather::last_row(t), landed, wait, ring)) return false;
    }
    ring.write_task(i, t);
    return true;
  };
  draw();
  Task task = take();
  tell(0, task, true);
  Cursor<Op::kStages> at;
  for (int i = 0;; ++i) {
    if (task.kind < 0) {
      ring.write_task(i + 1, task);  // the end is told twice: once to each consumer group
      return;
    }
    const auto weights = [&](int step, const Cursor<Op::kStages>& c) {
      ring.wait(ring.empty(c.stage), c.parity, kFreeForBoxes);
      if (leader) {
        ptx::barrier_arrive_expect(ring.full(c.stage), Op::Boxes::bytes(p, task));
        Op::Boxes::weights(p, task, step, ring.stage(c.stage), ring.full(c.stage));
      }
    };
    // Weights do not wait for other tasks: while the rows are not there yet, fill the ring with weights.
    int ahead = 0;
    if constexpr (Op::kWaits) {
      if (__shfl_sync(~0u, Op::Boxes::ready(p, task), 0) == 0) {
        Cursor<Op::kStages> c = at;
        for (; ahead < min(task.steps, Op::kStages); ++ahead, c.advance()) weights(ahead, c);
        Op::Boxes::wait(p, task, ring);
        __syncwarp();
      }
    }
    // The next task is looked up once the ring is full: that takes long, and then nobody waits for it.
    const int look_up = min(task.steps, Op::kStages);
    Task next;
    bool told = false;
    for (int k = 0;; ++k, at.advance()) {
      if (k == look_up) {
        next = take();
        told = tell(i + 1, next, false);
      }
      if (k == task.steps) break;
      if (k >= ahead) weights(k, at);
      if (leader) Op::Boxes::rows(p, task, k, ring.stage(at.stage), ring.full(at.stage));
    }
    if (!told) tell(i + 1, next, true);
    task = next;
  }
}

// Warps 1 to 3.
template <class Op>
__device__ __forceinline__ void gather(const typename Op::Params& p, const Ring<Op>& ring) {
  const uint32_t thread = threadIdx.x - 32;
  Cursor<Op::kStages> at;
  for (int i = 0;; ++i) {
    const Task task = ring.read_task(i);
    if (task.kind < 0) return;
    typename Op::Gather rows(p, task, thread);
    for (int k = 0; k < task.steps; k += Op::Gather::kUnroll) {
#pragma unroll
      for (int phase = 0; phase < Op::Gather::kUnroll; ++phase) {
        if (phase > 0 && k + phase >= task.steps) break;
        ring.wait(ring.empty(at.stage), at.parity, kFreeForRows);
        rows.step(p, task, k + phase, phase, ring.stage(at.stage));
        ptx::barrier_arrive_copies(ring.full(at.stage));
        at.advance();
      }
    }
  }
}

// Which rows a gathering thread copies: 16-byte chunk thread % 8 of rows thread / 8 + 12 * j, and where they go in a
// stage of rows of 128 bytes with the swizzle.
struct GatherPlace {
  static constexpr int kStride = kGatherers / 8;
  uint32_t first;  // of j = 0

  __device__ __forceinline__ explicit GatherPlace(uint32_t thread)
      : first(thread / 8 * 128 + ((thread % 8 ^ thread / 8 % 8) << 4)) {}
  __device__ __forceinline__ uint32_t at(uint32_t stage, int j) const {
    return ((stage + first) ^ j % 2 * 64) + j * kStride * 128;
  }
};
static_assert(GatherPlace::kStride % 8 == 4, "every second j has bit 2 of its row turned over, and thus of its chunks");

template <class Op>
__device__ __forceinline__ void produce(const typename Op::Params& p, const Ring<Op>& ring) {
  if (threadIdx.x < 32) {
    lead<Op>(p, ring);
  } else if constexpr (Op::kGathers) {
    gather<Op>(p, ring);
  }
}

// All steps of one tile, if there are any. Passes the turn on as early as it can.
template <class Op, int kParts>
__device__ __forceinline__ void multiply(float (&acc)[kParts][Op::kAccumulators], const Ring<Op>& ring,
                                         const Task& task, int lane, uint32_t next_turn) {
  using Mma = ptx::Mma<typename Op::Element>;
  if (task.steps == 0) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int i = 0; i < Op::kAccumulators; ++i) acc[part][i] = 0.0f;
    if (lane == 0) ptx::barrier_arrive(next_turn);
    return;
  }
  constexpr uint32_t kStepA = ptx::mma_offset(Op::kTransposeA ? 2048 : 32);  // 16 along K
  constexpr uint32_t kStepB = ptx::mma_offset(Op::kTransposeB ? 2048 : 32);
  // Known to the compiler to be the same in all lanes: the operands' places are then found in uniform registers.
  const uint32_t base = __shfl_sync(~0u, ring.base, 0);
  const int first_step = __shfl_sync(~0u, task.first_step, 0);
  const uint32_t a0 = ptx::mma_operand(base, kChunk), b0 = ptx::mma_operand(base + Op::kBytesA, kChunk);
  int stage = first_step % Op::kStages;
  uint32_t parity = first_step / Op::kStages & 1;
  const auto slice = [&](auto first, uint32_t offset, int q) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint32_t a = a0 + offset + q * kStepA + part * ptx::mma_offset(kChunk), b = b0 + offset + q * kStepB;
      constexpr int kHalves = Op::kSplit ? 2 : 1, kCount = Op::kAccumulators / kHalves;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        auto& d = reinterpret_cast<float (&)[kCount]>(acc[part][half * kCount]);
        const uint32_t b_half = b + half * ptx::mma_offset(2 * kChunk);
        if (first.value) {
          Mma::template start<Op::kTransposeA, Op::kTransposeB>(d, a, b_half);
        } else {
          Mma::template add<Op::kTransposeA, Op::kTransposeB>(d, a, b_half);
        }
      }
    }
  };
  // Waits for the next stage, returns where it lies.
  const auto begin = [&] {
    ring.wait(ring.full(stage), parity, kStageFull);
    if constexpr (Op::kGathers) ptx::fence_shared_for_async();
    ptx::mma_fence();
    const uint32_t offset = ptx::mma_offset(stage * Op::kBytesStage);
    if (++stage == Op::kStages) stage = 0, parity ^= 1;
    return offset;
  };
  // The stage that was begun `kBack` ago is free.
  const auto release = [&](auto back) {
    constexpr int kBack = back.value;
    if (lane == 0) ptx::barrier_arrive(ring.empty(stage < kBack ? stage + Op::kStages - kBack : stage - kBack));
  };
  constexpr Index<0> kMore;
  constexpr Index<1> kFirst, kLast;
  constexpr Index<2> kBeforeLast;
  constexpr int kSlices = kTileK / 16;
  const auto step = [&](auto first) {
    const uint32_t offset = begin();
    slice(first, offset, 0);
#pragma unroll
    for (int q = 1; q < kSlices; ++q) slice(kMore, offset, q);
    ptx::mma_commit();
    if (first.value) return;
    ptx::mma_wait<1>();
    release(kBeforeLast);
  };
  const int whole = task.steps - (Op::kRagged ? 1 : 0);
  if (whole > 0) step(kFirst);
  for (int k = 1; k < whole; ++k) step(kMore);
  if constexpr (Op::kRagged) {
    const int slices = __shfl_sync(~0u, Op::slices(task), 0);
    const auto rest = [&](auto first) {
      const uint32_t offset = begin();
      slice(first, offset, 0);
      ptx::mma_commit();
      if (!first.value) {
        ptx::mma_wait<1>();
        release(kBeforeLast);
      }
#pragma unroll 1
      for (int q = 1; q < slices; ++q) {
        ptx::mma_fence();
        slice(kMore, offset, q);
        ptx::mma_commit();
      }
    };
    if (whole > 0) {
      rest(kMore);
    } else {
      rest(kFirst);
    }
  }
  if (lane == 0) ptx::barrier_arrive(next_turn);
  ptx::mma_wait<0>();
  release(kLast);
}

// A tile of at most kParts parts: it costs the multiplies of those that it has.
template <class Op, int kParts>
__device__ __forceinline__ void work(const typename Op::Params& p, const Ring<Op>& ring, const Task& task,
                                     const Warp& warp, uint32_t next_turn) {
  if constexpr (kParts > 1) {
    if (task.rows <= (kParts - 1) * kPartRows) return work<Op, kParts - 1>(p, ring, task, warp, next_turn);
  }
  float acc[kParts][Op::kAccumulators];
  multiply<Op, kParts>(acc, ring, task, warp.lane(), next_turn);
  Op::finish(p, task, acc, warp);
}

template <class Op>
__device__ __forceinline__ void consume(const typename Op::Params& p, const Ring<Op>& ring, int group) {
  const Warp warp(ring, group);
  // A one-bit phase cannot tell a use of a stage from the one before the last, so the groups' main loops take turns.
  for (int i = group;; i += 2) {
    const Task task = ring.read_task(i);
    if (task.kind < 0) break;
    if (task.steps > 0) Op::prepare(p, task, warp);
    ring.wait(ring.turn(group), (i / 2 & 1) ^ group ^ 1, kTurn);
    __syncwarp();
    work<Op, Op::kParts>(p, ring, task, warp, ring.turn(group ^ 1));
  }
  Op::drain();
}

template <class Op>
__global__ void __launch_bounds__(kThreads, 1) persistent(const __grid_constant__ typename Op::Params p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Ring<Op> ring(ptx::shared_address(shared), p.error);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Op::kStages; ++s) {
      ptx::barrier_init(ring.full(s), 1 + (Op::kGathers ? kGatherers : 0));
      ptx::barrier_init(ring.empty(s), 4);
    }
    for (int s = 0; s < kTaskSlots; ++s) {
      ptx::barrier_init(ring.task_full(s), 1);
      ptx::barrier_init(ring.task_empty(s), (Op::kGathers ? kGatherers : 0) + 128);  // and one consumer group
    }
    for (int g = 0; g < 2; ++g) {
      ptx::barrier_init(ring.turn(g), 4);
      ptx::barrier_init(ring.met(g), 4);
    }
    ptx::barrier_init_fence();
  }
  if constexpr (Op::kPulls) {
    if (int(blockIdx.x) < p.pull.ctas)
      pull_rows<Op::kPullsAgain>(p.pull, p.plan, blockIdx.x * (kThreads / 32) + threadIdx.x / 32,
                                 p.pull.ctas * (kThreads / 32));
  }
  __syncthreads();
  const int group = threadIdx.x / 128;
  if (group == 0) {
    ptx::shrink_registers<Op::kProducerRegisters>();
    produce<Op>(p, ring);
  } else {
    ptx::grow_registers<Op::kConsumerRegisters>();
    consume<Op>(p, ring, group - 1);
  }
}

}  // namespace mok::sm90
