// The persistent grouped matrix product that every kernel of this engine is an instance of.
//
// One CTA per SM, three warpgroups. Warpgroup 0 produces: it takes the next task (one 128 x 192 output tile) from a
// global ticket counter, tells the consumers, and fills a ring of five stages of 64 along K: rows through cp.async (so
// a row may come from anywhere), weights through the copy engine. Warpgroups 1 and 2 consume, each a whole tile in
// turn: while one writes its tile out, the other keeps the tensor cores busy.
//
// An operation `Op` says what the tasks are and what happens to a finished tile:
//   Element, Params (with `int* error`, `int* ticket`)
//   kTransposeA, kTransposeB   operand contiguous along M or N instead of K
//   kBoxBytes                  bytes per stage that arrive by the copy engine
//   kProducerRegisters, kConsumerRegisters
//   task(p, ticket)            the task of a ticket; Task::none() when there is none
//   Loader(p, task, thread)    one producer thread's share: ready() and wait() for the tasks that this one needs,
//                              rows(step) into A (and B), boxes(step) into B by thread 0 alone
//   finish(p, task, accumulators, warp)    what a consumer warp does with its rows of the tile
//   finish_empty(p, task, warp)            the same for a task without steps
//
// Tasks are handed out in order and a CTA works on its tasks in order; a task may wait for tasks with smaller tickets
// only. So the unfinished task with the smallest ticket never waits, however many CTAs are running.
#pragma once

#include "../ptx/barrier.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/wgmma.cuh"
#include "arguments.h"
#include "number.cuh"

namespace mok::sm90 {

constexpr int kTileM = 128, kTileN = 192, kTileK = 64;
constexpr int kThreads = 384, kProducers = 128;
constexpr int kStages = 5, kTaskSlots = 4;
constexpr int kAccumulators = 96;  // per thread and half tile of 64 x 192
static_assert(kTileM == kBlockRows, "a row block is one tile high");

constexpr uint32_t kBytesA = kTileM * kTileK * 2, kBytesB = kTileN * kTileK * 2, kBytesStage = kBytesA + kBytesB;
constexpr uint32_t kHalfA = kBytesA / 2;  // 64 rows of A, or 64 of its columns where it is transposed
constexpr uint32_t kChunk = 64 * 64 * 2;  // 64 x 64 elements of a transposed operand
constexpr uint32_t kPatchStride = 80;     // 32 elements and 16 bytes against bank conflicts
constexpr uint32_t kPatch = 16 * kPatchStride;
constexpr uint32_t kPatches = 2;  // per consumer warp

// Shared memory, as offsets from its 1024-byte aligned start.
constexpr uint32_t kAtPatches = kStages * kBytesStage;
constexpr uint32_t kAtTasks = kAtPatches + 8 * kPatches * kPatch;
constexpr uint32_t kAtBarriers = kAtTasks + kTaskSlots * 32;
constexpr uint32_t kSharedBytes = kAtBarriers + (2 * kStages + 2 * kTaskSlots + 2) * 8;
static_assert(kSharedBytes <= 232448, "more shared memory than a CTA can have");

struct Task {
  int kind;  // chosen by the operation; negative: no more tasks
  int expert;
  int row, rows;   // first row and number of rows of the tile, at most 128
  int column;      // first column of the tile
  int steps;       // along K
  int first_step;  // in the CTA's ring
  int extra;       // chosen by the operation

  static __device__ __forceinline__ Task none() { return {-1, 0, 0, 0, 0, 0, 0, 0}; }
};

struct Ring {
  uint32_t base;
  int* error;

  __device__ __forceinline__ uint32_t stage(int s) const { return base + s * kBytesStage; }
  __device__ __forceinline__ uint32_t full(int s) const { return base + kAtBarriers + s * 8; }
  __device__ __forceinline__ uint32_t empty(int s) const { return full(kStages + s); }
  __device__ __forceinline__ uint32_t task_full(int s) const { return full(2 * kStages + s); }
  __device__ __forceinline__ uint32_t task_empty(int s) const { return full(2 * kStages + kTaskSlots + s); }
  __device__ __forceinline__ uint32_t turn(int group) const { return full(2 * kStages + 2 * kTaskSlots + group); }
  __device__ __forceinline__ uint32_t task(int s) const { return base + kAtTasks + s * 32; }

  // A wait of seconds can only be a bug. It is marked and ends, as do all waits after it; `combine` then poisons the
  // output, so that the mistake shows and the device does not hang.
  template <class Ready>
  __device__ __forceinline__ bool patient(Ready ready, int site) const {
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
  __device__ __forceinline__ bool wait(uint32_t barrier, uint32_t parity, int site) const {
    return ptx::barrier_try_wait(barrier, parity) ||
           patient([&] { return ptx::barrier_try_wait(barrier, parity); }, site);
  }
  __device__ __forceinline__ void wait_count(const int* count, int wanted, int site) const {
    if (ptx::load_acquire(count) >= wanted) return;
    patient([&] { return ptx::load_acquire(count) >= wanted; }, site);
  }

  // Called by whole warps, each once per task it is told of.
  __device__ __forceinline__ Task read_task(int i) const {
    const int slot = i % kTaskSlots;
    if (!wait(task_full(slot), i / kTaskSlots & 1, 1)) return Task::none();
    const uint4 a = ptx::load_shared(task(slot)), b = ptx::load_shared(task(slot) + 16);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(task_empty(slot));
    return {int(a.x), int(a.y), int(a.z), int(a.w), int(b.x), int(b.y), int(b.z), int(b.w)};
  }
  // Called by one thread.
  __device__ __forceinline__ void write_task(int i, const Task& t) const {
    const int slot = i % kTaskSlots;
    wait(task_empty(slot), (i / kTaskSlots & 1) ^ 1, 2);
    ptx::store_shared(task(slot), make_uint4(t.kind, t.expert, t.row, t.rows));
    ptx::store_shared(task(slot) + 16, make_uint4(t.column, t.steps, t.first_step, t.extra));
    ptx::barrier_arrive(task_full(slot));
  }
};

// A consumer warp: it owns 16 rows of each half tile and moves them to and from global memory through two patches of
// shared memory of 16 rows x 32 columns. Per lane, a patch looks two ways: as matrices, in accumulator fragments
// (fragment[2 * b + r]: block b of 8 columns, rows 8 * r to 8 * r + 7), and as lines, row lane / 4 (+ 8) and 16 bytes
// at column lane % 4 * 8.
struct Warp {
  uint32_t cell, line;  // addresses in patch 0

  __device__ __forceinline__ Warp(uint32_t patches) {
    const uint32_t patch = patches + index() * kPatches * kPatch;
    cell = patch + lane() % 16 * kPatchStride + lane() / 16 * 16;
    line = patch + lane() / 4 * kPatchStride + lane() % 4 * 16;
  }
  static __device__ __forceinline__ int index() { return threadIdx.x / 32 % 4; }  // in its warpgroup
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int line_row() { return lane() / 4; }
  static __device__ __forceinline__ int line_column() { return lane() % 4 * 8; }

  template <int kNumber>
  __device__ __forceinline__ void put(const uint32_t (&fragment)[8]) const {
    ptx::store_matrices(cell + kNumber * kPatch, fragment);
    ptx::store_matrices(cell + kNumber * kPatch + 32, fragment + 4);
  }
  template <int kNumber>
  __device__ __forceinline__ void get(uint32_t (&fragment)[8]) const {
    ptx::load_matrices(cell + kNumber * kPatch, fragment);
    ptx::load_matrices(cell + kNumber * kPatch + 32, fragment + 4);
  }
  // `at` is this lane's place in the first line, `rows` the lines that exist from its own on.
  template <int kNumber, class T>
  __device__ __forceinline__ void store(T* at, int stride, int rows) const {
    const uint32_t from = line + kNumber * kPatch;
    if (rows > 0) *reinterpret_cast<uint4*>(at) = ptx::load_shared(from);
    if (rows > 8)
      *reinterpret_cast<uint4*>(at + 8 * static_cast<int64_t>(stride)) = ptx::load_shared(from + 8 * kPatchStride);
  }
  template <int kNumber, class T>
  __device__ __forceinline__ void load(const T* at, int stride, int rows) const {
    const uint32_t to = line + kNumber * kPatch;
    uint4 low = make_uint4(0, 0, 0, 0), high = low;
    if (rows > 0) low = *reinterpret_cast<const uint4*>(at);
    if (rows > 8) high = *reinterpret_cast<const uint4*>(at + 8 * static_cast<int64_t>(stride));
    ptx::store_shared(to, low);
    ptx::store_shared(to + 8 * kPatchStride, high);
  }
};

// Tile `number` of a grid of `rows` x `columns` tiles: groups of 8 rows, inside a group rows first, so that the tiles
// in flight share operands in the L2; every other group runs backwards.
__device__ __forceinline__ int2 raster(int number, int rows, int columns) {
  constexpr int kGroup = 8;
  const int group = number / (kGroup * columns), rest = number - group * kGroup * columns;
  const int height = min(kGroup, rows - group * kGroup);
  const int column = rest / height, row = group * kGroup + rest - column * height;
  return make_int2(row, group % 2 ? columns - 1 - column : column);
}

template <class Op>
__device__ __forceinline__ void produce(const typename Op::Params& p, const Ring& ring) {
  const int thread = threadIdx.x;
  int ticket = 0, steps = 0;  // of thread 0: the next task's ticket and first step
  if (thread == 0) ticket = atomicAdd(p.ticket, 1);
  int stage = 0;
  uint32_t parity = 1;
  // Tasks are told one ahead. The end is told twice: once to each consumer group.
  for (int i = -1;; ++i) {
    if (thread == 0) {
      Task next = Op::task(p, ticket);
      next.first_step = steps;
      steps += next.steps;
      ticket = atomicAdd(p.ticket, 1);
      ring.write_task(i + 1, next);
    }
    if (i < 0) continue;
    const Task task = ring.read_task(i);
    if (task.kind < 0) break;
    typename Op::Loader loader(p, task, thread);
    // Weights do not wait for other tasks: while the rows are not there yet, fill the ring with weights.
    int ahead = 0;
    if (Op::kBoxBytes && thread == 0 && !loader.ready(p, task)) {
      ahead = min(task.steps, kStages);
      int s = stage;
      uint32_t q = parity;
      for (int k = 0; k < ahead; ++k) {
        ring.wait(ring.empty(s), q, 3);
        ptx::barrier_arrive_expect(ring.full(s), Op::kBoxBytes);
        loader.boxes(p, task, k, ring.stage(s) + kBytesA, ring.full(s));
        if (++s == kStages) s = 0, q ^= 1;
      }
    }
    loader.wait(p, task, ring);
    for (int k = 0; k < task.steps; ++k) {
      ring.wait(ring.empty(stage), parity, 4);
      if (Op::kBoxBytes && thread == 0 && k >= ahead) {
        ptx::barrier_arrive_expect(ring.full(stage), Op::kBoxBytes);
        loader.boxes(p, task, k, ring.stage(stage) + kBytesA, ring.full(stage));
      }
      loader.rows(p, task, k, ring.stage(stage));
      ptx::barrier_arrive_copies(ring.full(stage));
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  }
}

// All steps of one tile, of which only the first kHalves halves of 64 rows exist. Passes the turn on as early as it
// can.
template <class Op, int kHalves>
__device__ __forceinline__ void multiply(float (&acc)[2][kAccumulators], const Ring& ring, const Task& task, int lane,
                                         uint32_t next_turn) {
  using Mma = ptx::Mma<typename Op::Element>;
  constexpr uint64_t kStepA = ptx::mma_offset(Op::kTransposeA ? 2048 : 32);  // 16 along K
  constexpr uint64_t kStepB = ptx::mma_offset(Op::kTransposeB ? 2048 : 32);
  const uint64_t a0 = ptx::mma_operand(ring.base, kChunk), b0 = ptx::mma_operand(ring.base + kBytesA, kChunk);
  int stage = task.first_step % kStages, last = -1;
  uint32_t parity = task.first_step / kStages & 1;
  for (int k = 0; k < task.steps; ++k) {
    ring.wait(ring.full(stage), parity, 5);
    ptx::fence_shared_for_async();
    ptx::mma_fence();
    const uint64_t offset = ptx::mma_offset(stage * kBytesStage);
#pragma unroll
    for (int q = 0; q < kTileK / 16; ++q) {
      const uint64_t a = a0 + offset + q * kStepA, b = b0 + offset + q * kStepB;
      Mma::template run<Op::kTransposeA, Op::kTransposeB>(acc[0], a, b, (k | q) != 0);
      if (kHalves == 2)
        Mma::template run<Op::kTransposeA, Op::kTransposeB>(acc[1], a + ptx::mma_offset(kHalfA), b, (k | q) != 0);
    }
    ptx::mma_commit();
    ptx::mma_wait<1>();
    if (last >= 0 && lane == 0) ptx::barrier_arrive(ring.empty(last));
    last = stage;
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  if (lane == 0) ptx::barrier_arrive(next_turn);
  ptx::mma_wait<0>();
  if (lane == 0) ptx::barrier_arrive(ring.empty(last));
}

template <class Op>
__device__ __forceinline__ void consume(const typename Op::Params& p, const Ring& ring, int group) {
  const Warp warp(ring.base + kAtPatches + group * 4 * kPatches * kPatch);
  // A one-bit phase cannot tell a use of a stage from the one before the last, so the groups' main loops take turns.
  for (int i = group;; i += 2) {
    const Task task = ring.read_task(i);
    if (task.kind < 0) break;
    float acc[2][kAccumulators];
    ring.wait(ring.turn(group), (i / 2 & 1) ^ group ^ 1, 6);
    __syncwarp();
    const uint32_t next_turn = ring.turn(group ^ 1);
    if (task.steps == 0) {
      if (warp.lane() == 0) ptx::barrier_arrive(next_turn);
      Op::finish_empty(p, task, warp);
      continue;
    }
    multiply<Op, 2>(acc, ring, task, warp.lane(), next_turn);
    Op::finish(p, task, acc, warp);
  }
}

template <class Op>
__global__ void __launch_bounds__(kThreads, 1) persistent(const __grid_constant__ typename Op::Params p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Ring ring{ptx::shared_address(shared), p.error};
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::barrier_init(ring.full(s), kProducers + (Op::kBoxBytes ? 1 : 0));
      ptx::barrier_init(ring.empty(s), 4);
    }
    for (int s = 0; s < kTaskSlots; ++s) {
      ptx::barrier_init(ring.task_full(s), 1);
      ptx::barrier_init(ring.task_empty(s), 8);  // four producer warps, the four of one consumer group
    }
    for (int g = 0; g < 2; ++g) ptx::barrier_init(ring.turn(g), 4);
    ptx::barrier_init_fence();
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
