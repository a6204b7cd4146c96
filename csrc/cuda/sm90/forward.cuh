// The forward kernel: up projection with the activation in its epilogue, then the down projection of the finished
// blocks.
#pragma once

#include "activation.cuh"
#include "rows.cuh"

namespace mok::sm90 {

// kPlain: silu(gate) * up without biases.
template <class T, bool kGated, bool kPlain>
struct Forward {
  using Element = T;
  static constexpr bool kTransposeA = false, kTransposeB = false;
  static constexpr bool kWaits = true, kGathers = true;
  static constexpr int kStages = 5, kPatches = 2;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  // Columns of `a` per up tile: a gated tile holds 96 columns of gate and the same 96 of up, in the same threads.
  static constexpr int kWidth = kGated ? kTileN / 2 : kTileN;
  enum Kind : int { kUp, kDown };

  struct Params {
    CUtensorMap up[2], down;  // boxes of 64 x 96; gate and up of a gated tile come from up[0] and up[1]
    CUtensorMap a;            // ragged, boxes of 64 x 128
    Plan plan;
    int* error;
    int* ticket;
    const T* x;
    T* h;  // may be null
    T* a_out;
    T* rows;
    const T* up_bias[2];
    const T* down_bias;
    int64_t up_bias_stride;  // elements from one expert to the next
    Activation activation;
    int hidden, inner;
    int second;  // row of up[1] at which the second half of a tile starts, relative to the first
    int up_tiles, down_tiles;
  };

  static __device__ __forceinline__ Task task(const Params& p, int ticket) {
    const int blocks = *p.plan.num_blocks, up_tickets = blocks * p.up_tiles;
    return ticket < up_tickets
               ? block_task(p.plan, blocks, ticket, p.up_tiles, kUp, steps_of(p.hidden), kWidth)
               : block_task(p.plan, blocks, ticket - up_tickets, p.down_tiles, kDown, steps_of(p.inner), kTileN);
  }

  struct Boxes {
    // A block's down projection waits for its up projection: for each of the four warps that share each tile's rows.
    static __device__ __forceinline__ bool ready(const Params& p, const Task& task) {
      return task.kind == kUp || ptx::load_acquire(p.plan.done + task.extra) >= 4 * p.up_tiles;
    }
    static __device__ __forceinline__ void wait(const Params& p, const Task& task, const Ring<Forward>& ring) {
      ring.wait_count(p.plan.done + task.extra, 4 * p.up_tiles, kUpDone);
    }
    static __device__ __forceinline__ uint32_t bytes(const Params&, const Task& task) {
      return task.kind == kUp ? kBytesB : kBytesStage;
    }
    static __device__ __forceinline__ void weights(const Params& p, const Task& task, int step, uint32_t stage,
                                                   uint32_t barrier) {
      const bool up = task.kind == kUp;
      const uint32_t to = stage + kBytesA;
      const int second = up ? p.second : kTileN / 2;
      ptx::copy_box(to, up ? &p.up[0] : &p.down, step * kTileK, task.column, task.expert, barrier);
      ptx::copy_box(to + kBytesB / 2, up ? &p.up[1] : &p.down, step * kTileK, task.column + second, task.expert,
                    barrier);
    }
    static __device__ __forceinline__ void rows(const Params& p, const Task& task, int step, uint32_t stage,
                                                uint32_t barrier) {
      if (task.kind == kUp) return;
      if (step == 0) ptx::fence_for_async();  // other CTAs wrote these rows through ordinary stores
      ragged_box(stage, &p.a, step * kTileK, task.row, task.rows, barrier);
    }
  };

  struct Gather : RowGather<T> {
    __device__ __forceinline__ Gather(const Params& p, const Task& task, int thread)
        : RowGather<T>(p.x, p.plan.token + task.row, task.kind == kUp ? task.rows : 1, p.hidden, thread) {}
    __device__ __forceinline__ void step(const Params& p, const Task& task, int step, uint32_t stage) {
      if (task.kind == kUp) this->next(p.hidden - step * kTileK, stage);
    }
  };

  static __device__ __forceinline__ void finish_empty(const Params&, const Task&, const Warp&) {}

  template <int kHalves>
  static __device__ __forceinline__ void finish(const Params& p, const Task& task, Accumulators<kHalves>& acc,
                                                const Warp& warp) {
    if (task.kind == kDown) {
      const T* const bias = p.down_bias ? p.down_bias + static_cast<int64_t>(task.expert) * p.hidden : nullptr;
      store_tile<T, !kPlain, kHalves>(task, acc, warp, p.rows, p.hidden, p.hidden, bias);
      return;
    }
    if (kGated) {
      finish_gated(p, task, acc, warp);
    } else {
      finish_single(p, task, acc, warp);
    }
    ptx::fence_for_async();
    __syncwarp();
    if (warp.lane() == 0) {
      __threadfence();
      ptx::add_release(p.plan.done + task.extra, 1);
    }
  }

  // Adds the bias of the tile's columns; a gated tile has those of up[0] in its first half and those of up[1] after it.
  template <int kHalves>
  static __device__ __forceinline__ void add_up_bias(const Params& p, const Task& task, Accumulators<kHalves>& acc,
                                                     const Warp& warp) {
    if (kPlain || !p.up_bias[0]) return;
    constexpr int kBlocks = kWidth / 8;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      const T* const bias = p.up_bias[j / kBlocks] + task.expert * p.up_bias_stride;
      const float2 more = bias_pair(bias, task.column + j % kBlocks * 8 + warp.lane() % 4 * 2, p.inner);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          acc[half][4 * j + 2 * r] += more.x;
          acc[half][4 * j + 2 * r + 1] += more.y;
        }
      }
    }
  }

  // The activation sees h as it is rounded for saving, so that backward finds the same value.
  template <int kHalves>
  static __device__ __forceinline__ void finish_gated(const Params& p, const Task& task, Accumulators<kHalves>& acc,
                                                      const Warp& warp) {
    constexpr int kBlocks = kTileN / 16;  // of gate, and as many of up
    const Gate<kPlain> gate{p.activation};
    const int room = p.inner - task.column - warp.line_column();
    Rounded<kHalves> h;
    add_up_bias<kHalves>(p, task, acc, warp);
    round_tile<T, kHalves>(acc, h);
#pragma unroll 1  // see next_half
    for (int half = 0; half < kHalves; ++half) {
      const int first = half * 64 + warp.index() * 16, rows = task.rows - first - warp.line_row();
      if (task.rows <= first) break;
      const int64_t row = task.row + first + warp.line_row();
      const int column = task.column + warp.line_column();
      T* const to_h = p.h + row * 2 * p.inner + column;
      T* const to_a = p.a_out + row * p.inner + column;
#pragma unroll
      for (int piece = 0; piece < 3; ++piece) {
        const int lines = room > piece * 32 ? rows : 0;
        const uint32_t* const g = &h[0][piece * 8];
        const uint32_t* const u = &h[0][2 * kBlocks + piece * 8];
        if (p.h) {
          __syncwarp();
          warp.put<0>(g);
          warp.put<1>(u);
          __syncwarp();
          warp.store<0>(to_h + piece * 32, 2 * p.inner, lines);
          warp.store<1>(to_h + p.inner + piece * 32, 2 * p.inner, lines);
        }
        uint32_t a[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 gg = Pair<T>::unpack(g[i]), uu = Pair<T>::unpack(u[i]);
          a[i] = Pair<T>::pack(gate.value(gg.x, uu.x), gate.value(gg.y, uu.y));
        }
        __syncwarp();
        warp.put<0>(a);
        __syncwarp();
        warp.store<0>(to_a + piece * 32, p.inner, lines);
      }
      next_half<kHalves>(h);
    }
  }

  template <int kHalves>
  static __device__ __forceinline__ void finish_single(const Params& p, const Task& task, Accumulators<kHalves>& acc,
                                                       const Warp& warp) {
    const Gate<kPlain> gate{p.activation};
    const int room = p.inner - task.column - warp.line_column();
    Rounded<kHalves> h;
    add_up_bias<kHalves>(p, task, acc, warp);
    round_tile<T, kHalves>(acc, h);
#pragma unroll 1  // see next_half
    for (int half = 0; half < kHalves; ++half) {
      const int first = half * 64 + warp.index() * 16, rows = task.rows - first - warp.line_row();
      if (task.rows <= first) break;
      const int64_t at =
          (task.row + first + warp.line_row()) * static_cast<int64_t>(p.inner) + task.column + warp.line_column();
#pragma unroll
      for (int piece = 0; piece < 6; ++piece) {
        const int lines = room > piece * 32 ? rows : 0;
        uint32_t a[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 v = Pair<T>::unpack(h[0][piece * 8 + i]);
          a[i] = Pair<T>::pack(gate.value(v.x), gate.value(v.y));
        }
        __syncwarp();
        if (p.h) warp.put<0>(&h[0][piece * 8]);
        warp.put<1>(a);
        __syncwarp();
        if (p.h) warp.store<0>(p.h + at + piece * 32, p.inner, lines);
        warp.store<1>(p.a_out + at + piece * 32, p.inner, lines);
      }
      next_half<kHalves>(h);
    }
  }
};

}  // namespace mok::sm90
