// The backward kernel: its products are phases of one persistent kernel, so that one begins while the last tiles of
// another are still worked on.
#pragma once

#include "input_grad.cuh"
#include "weight_grad.cuh"

namespace mok::sm90 {

template <class T, Columns kColumns, bool kPlain, bool kTransposed>
struct Backward : Common<> {
  using Element = T;
  static constexpr bool kWaits = true, kGathers = true, kPulls = true, kPhases = true;
  static constexpr int kStages = 4, kStrips = Outbox::kBytes / 4;
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

  // What all others need: its warps count what they have finished, for a block and for its expert.
  struct Down : DownGrad<T, kColumns, kPlain, kTransposed> {
    using Base = DownGrad<T, kColumns, kPlain, kTransposed>;
    template <int kHalves>
    static __device__ __forceinline__ void finish(const typename Base::Params& p, const Task& task,
                                                  Accumulators<kHalves>& acc, const Warp& warp) {
      Base::finish(p, task, acc, warp);
      ptx::fence_for_async();
      __syncwarp();
      if (warp.lane() == 0) {
        ptx::fence_release();
        ptx::add_relaxed(p.plan.done + task.extra, 1);
        const int expert = __ldg(p.plan.blocks + 4 * task.extra);  // no register for it all the time
        ptx::add_relaxed(p.plan.finished + expert, 1);
      }
    }
  };
  // Weights are stored [E, out, in], or the other way round, and so are their gradients.
  using DownWeight = WeightGrad<T, kTransposed>;
  // Its strips are where weight gradients are sent from.
  struct Up : UpGrad<T, kTransposed> {
    using Base = UpGrad<T, kTransposed>;
    template <int kHalves>
    static __device__ __forceinline__ void finish(const typename Base::Params& p, const Task& task,
                                                  Accumulators<kHalves>& acc, const Warp& warp) {
      empty_outbox();
      Base::finish(p, task, acc, warp);
    }
  };
  using UpWeight = WeightGrad<T, !kTransposed>;
  static_assert(Down::kPatches * kPatch <= kStrips && Strip<64>::kBytes <= kStrips, "not enough shared memory");

  // Of a task; that of the first and second part of up are kUpWeight and the one after it.
  enum Kind : int { kDown, kDownWeight, kUp, kUpWeight };

  // Phases that have no tasks have no tiles.
  struct Params {
    typename Down::Params down;
    typename DownWeight::Params down_weight;
    typename Up::Params up;
    typename UpWeight::Params up_weight[2];
    Plan plan;
    Pull pull;
    int* error;
    int* ticket;
    int tiles;  // of a block, that others wait for
  };

  template <class Visitor>
  static __device__ __forceinline__ void visit(const Params& p, int kind, const Visitor& f) {
    switch (kind) {
      case kDown:
        return f(Phase<Down>{}, p.down);
      case kDownWeight:
        return f(Phase<DownWeight>{}, p.down_weight);
      case kUp:
        return f(Phase<Up>{}, p.up);
      default:
        return f(Phase<UpWeight>{}, p.up_weight[kind - kUpWeight]);
    }
  }

  static __device__ __forceinline__ Task task(const Params& p, int ticket) {
    Task found = Task::none();
    int left = ticket;
#pragma unroll
    for (int kind = kDown; kind < kUpWeight + 2; ++kind) {
      visit(p, kind, [&](auto phase, const auto& of) {
        using Of = typename decltype(phase)::Operation;
        const int tasks = left < 0 ? 0 : Of::tasks(of);
        if (left >= 0 && left < tasks) {
          found = Of::task(of, left);
          found.kind = kind;
        }
        left -= tasks;
      });
    }
    return found;
  }
  static __device__ __forceinline__ void locate(const Params& p, Task& task) {
    visit(p, task.kind, [&](auto phase, const auto& of) { decltype(phase)::Operation::locate(of, task); });
  }
  // The last one whose token's row of dy is gathered.
  static __device__ __forceinline__ int last_row(const Task& task) {
    return task.kind == kDown ? task.row + task.rows - 1 : task.kind == kDownWeight ? task.extra + task.depth - 1 : -1;
  }

  struct Boxes {
    // Each tile is counted by the four warps that share its rows.
    static __device__ __forceinline__ int wanted(const Params& p, const Task& task) {
      const int blocks = task.kind == kUp ? 1 : (task.depth + kBlockRows - 1) / kBlockRows;
      return task.kind == kDown ? 0 : 4 * p.tiles * blocks;
    }
    static __device__ __forceinline__ const int* count(const Params& p, const Task& task) {
      return task.kind == kUp ? p.plan.done + task.extra : p.plan.finished + task.expert;
    }
    static __device__ __forceinline__ bool ready(const Params& p, const Task& task) {
      return task.kind == kDown || ptx::load_acquire(count(p, task)) >= wanted(p, task);
    }
    static __device__ __forceinline__ void wait(const Params& p, const Task& task, const Ring<Backward>& ring) {
      ring.wait_count(count(p, task), wanted(p, task), kFirstDone);
    }
    static __device__ __forceinline__ uint32_t bytes(const Params& p, const Task& task) {
      uint32_t bytes = 0;
      visit(p, task.kind,
            [&](auto phase, const auto& of) { bytes = decltype(phase)::Operation::Boxes::bytes(of, task); });
      return bytes;
    }
    static __device__ __forceinline__ void weights(const Params& p, const Task& task, int step, uint32_t stage,
                                                   uint32_t barrier) {
      visit(p, task.kind, [&](auto phase, const auto& of) {
        decltype(phase)::Operation::Boxes::weights(of, task, step, stage, barrier);
      });
    }
    static __device__ __forceinline__ void rows(const Params& p, const Task& task, int step, uint32_t stage,
                                                uint32_t barrier) {
      if (step == 0 && task.kind != kDown) ptx::fence_for_async();  // other CTAs wrote through ordinary stores
      visit(p, task.kind, [&](auto phase, const auto& of) {
        decltype(phase)::Operation::Boxes::rows(of, task, step, stage, barrier);
      });
    }
  };

  static __device__ __forceinline__ void drain() { ptx::sends_wait_read(); }
};

}  // namespace mok::sm90
