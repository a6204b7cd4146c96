// The gradients that flow back through the two projections: dy to dh (with the activation's backward), dh to dx rows.
#pragma once

#include "activation.cuh"
#include "rows.cuh"

namespace mok::sm90 {

// Boxes of a weight [K, N] that is contiguous along N: three of 64 x 64 a stage.
__device__ __forceinline__ void transposed_boxes(const CUtensorMap* map, int k, int column, int expert, uint32_t to,
                                                 uint32_t barrier) {
#pragma unroll
  for (int i = 0; i < kTileN / 64; ++i) ptx::copy_box(to + i * kChunk, map, column + i * 64, k, expert, barrier);
}

// da = dy @ down, from which dh, the weighted activation and the routing weight's gradient follow in the epilogue.
template <class T, bool kGated, bool kPlain>
struct DownGrad {
  using Element = T;
  static constexpr bool kTransposeA = false, kTransposeB = true;
  static constexpr int kBoxBytes = kBytesB;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  struct Params {
    CUtensorMap down;  // boxes of 64 x 64
    Plan plan;
    int* error;
    int* ticket;
    RowSource<T> dy;
    const T* h;
    Numbers weights;
    T* dh;
    T* a;
    float* dscore;  // [tiles][slots]
    Activation activation;
    int inner, tiles, slots;
  };

  static __device__ __forceinline__ Task task(const Params& p, int ticket) {
    return block_task(p.plan, *p.plan.num_blocks, ticket, p.tiles, 0, p.dy.steps(), kTileN);
  }

  struct Loader : RowLoader<T> {
    __device__ __forceinline__ Loader(const Params& p, const Task& task, int thread)
        : RowLoader<T>(p.dy, task, thread) {}
    static __device__ __forceinline__ bool ready(const Params&, const Task&) { return true; }
    static __device__ __forceinline__ void wait(const Params&, const Task&, const Ring&) {}
    __device__ __forceinline__ void rows(const Params&, const Task&, int step, uint32_t stage) const {
      RowLoader<T>::rows(step, stage);
    }
    static __device__ __forceinline__ void boxes(const Params& p, const Task& task, int step, uint32_t to,
                                                 uint32_t barrier) {
      transposed_boxes(&p.down, step * kTileK, task.column, task.expert, to, barrier);
    }
  };

  static __device__ __forceinline__ void finish_empty(const Params&, const Task&, const Warp&) {}

  static __device__ __forceinline__ void finish(const Params& p, const Task& task, const float (&acc)[2][kAccumulators],
                                                const Warp& warp) {
    const Gate<kPlain> gate{p.activation};
    const int columns = kGated ? 2 * p.inner : p.inner;
    const int room = p.inner - task.column - warp.line_column();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = half * 64 + warp.index() * 16, rows = task.rows - first - warp.line_row();
      if (task.rows <= first) break;
      const int row =
          task.row + first + warp.line_row();  // the lane's rows, in fragments as in lines: this one and + 8
      const float weight[2] = {rows > 0 ? p.weights.load(p.plan.order[row]) : 0.0f,
                               rows > 8 ? p.weights.load(p.plan.order[row + 8]) : 0.0f};
      float score[2] = {0.0f, 0.0f};
      const int64_t at_h = static_cast<int64_t>(row) * columns + task.column + warp.line_column();
      const int64_t at_a = static_cast<int64_t>(row) * p.inner + task.column + warp.line_column();
#pragma unroll
      for (int piece = 0; piece < 6; ++piece) {
        const int lines = room > piece * 32 ? rows : 0;
        uint32_t g[8], u[8];
        __syncwarp();
        warp.load<1>(p.h + at_h + piece * 32 + (kGated ? p.inner : 0), columns, lines);
        if (kGated) warp.load<0>(p.h + at_h + piece * 32, columns, lines);
        __syncwarp();
        warp.get<1>(u);
        if (kGated) warp.get<0>(g);
        uint32_t a[8];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int i = 2 * b + r;
            const float* const da = &acc[half][(piece * 4 + b) * 4 + r * 2];
            const float2 uu = Pair<T>::unpack(u[i]);
            const float2 gg = kGated ? Pair<T>::unpack(g[i]) : uu;
            const Derivatives x = kGated ? gate.derivatives(gg.x, uu.x) : gate.derivatives(uu.x);
            const Derivatives y = kGated ? gate.derivatives(gg.y, uu.y) : gate.derivatives(uu.y);
            score[r] += da[0] * x.value + da[1] * y.value;
            const float dx = da[0] * weight[r], dy = da[1] * weight[r];
            if (kGated) g[i] = Pair<T>::pack(dx * x.dgate, dy * y.dgate);
            u[i] = Pair<T>::pack(dx * x.dup, dy * y.dup);
            a[i] = Pair<T>::pack(x.value * weight[r], y.value * weight[r]);
          }
        }
        __syncwarp();
        if (kGated) warp.put<0>(g);
        warp.put<1>(u);
        __syncwarp();
        if (kGated) warp.store<0>(p.dh + at_h + piece * 32, columns, lines);
        warp.store<1>(p.dh + at_h + piece * 32 + (kGated ? p.inner : 0), columns, lines);
        __syncwarp();
        warp.put<0>(a);
        __syncwarp();
        warp.store<0>(p.a + at_a + piece * 32, p.inner, lines);
      }
      // Columns past the end added nothing: their da is an exact zero.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        score[r] += __shfl_xor_sync(~0u, score[r], 1);
        score[r] += __shfl_xor_sync(~0u, score[r], 2);
        if (warp.lane() % 4 == 0 && rows > 8 * r)
          p.dscore[static_cast<int64_t>(task.column / kTileN) * p.slots + row + 8 * r] = score[r];
      }
    }
  }
};

// rows = dh @ up, columns [first_column, first_column + columns).
template <class T>
struct UpGrad {
  using Element = T;
  static constexpr bool kTransposeA = false, kTransposeB = true;
  static constexpr int kBoxBytes = kBytesB;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  struct Params {
    CUtensorMap up[2];  // boxes of 64 x 64; the second for the second part of dh, where gate and up are separate
    Plan plan;
    int* error;
    int* ticket;
    RowSource<T> dh;
    T* rows;
    int first_column, columns, tiles;
  };

  static __device__ __forceinline__ Task task(const Params& p, int ticket) {
    return block_task(p.plan, *p.plan.num_blocks, ticket, p.tiles, 0, p.dh.steps(), kTileN);
  }

  struct Loader : RowLoader<T> {
    __device__ __forceinline__ Loader(const Params& p, const Task& task, int thread)
        : RowLoader<T>(p.dh, task, thread) {}
    static __device__ __forceinline__ bool ready(const Params&, const Task&) { return true; }
    static __device__ __forceinline__ void wait(const Params&, const Task&, const Ring&) {}
    __device__ __forceinline__ void rows(const Params&, const Task&, int step, uint32_t stage) const {
      RowLoader<T>::rows(step, stage);
    }
    __device__ __forceinline__ void boxes(const Params& p, const Task& task, int step, uint32_t to,
                                          uint32_t barrier) const {
      const bool second = step >= this->part_steps;
      const int k = (second ? step - this->part_steps : step) * kTileK;
      transposed_boxes(second ? &p.up[1] : &p.up[0], k, p.first_column + task.column, task.expert, to, barrier);
    }
  };

  static __device__ __forceinline__ void finish_empty(const Params&, const Task&, const Warp&) {}

  static __device__ __forceinline__ void finish(const Params& p, const Task& task, const float (&acc)[2][kAccumulators],
                                                const Warp& warp) {
    store_tile<T, false>(task, acc, warp, p.rows, p.columns, p.columns, nullptr);
  }
};

}  // namespace mok::sm90
