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
  static constexpr bool kWaits = false, kGathers = true;
  static constexpr int kStages = 4, kPatches = 5;  // h is read ahead, through two pairs of patches
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  struct Params {
    CUtensorMap down;  // boxes of 64 x 64
    Plan plan;
    int* error;
    int* ticket;
    const T* dy;
    const T* h;
    Numbers weights;
    T* dh;
    T* a;
    float* dscore;  // [tiles][slots]
    Activation activation;
    int hidden, inner, tiles, slots;
  };

  static __device__ __forceinline__ Task task(const Params& p, int ticket) {
    return block_task(p.plan, *p.plan.num_blocks, ticket, p.tiles, 0, steps_of(p.hidden), kTileN);
  }

  struct Boxes {
    static __device__ __forceinline__ uint32_t bytes(const Params&, const Task&) { return kBytesB; }
    static __device__ __forceinline__ void weights(const Params& p, const Task& task, int step, uint32_t stage,
                                                   uint32_t barrier) {
      transposed_boxes(&p.down, step * kTileK, task.column, task.expert, stage + kBytesA, barrier);
    }
    static __device__ __forceinline__ void rows(const Params&, const Task&, int, uint32_t, uint32_t) {}
  };

  struct Gather : RowGather<T> {
    __device__ __forceinline__ Gather(const Params& p, const Task& task, int thread)
        : RowGather<T>(p.dy, p.plan.token + task.row, task.rows, p.hidden, thread) {}
    __device__ __forceinline__ void step(const Params& p, const Task&, int step, uint32_t stage) {
      this->next(p.hidden - step * kTileK, stage);
    }
  };

  static __device__ __forceinline__ void finish_empty(const Params&, const Task&, const Warp&) {}

  template <int kHalves>
  static __device__ __forceinline__ void finish(const Params& p, const Task& task, Accumulators<kHalves>& acc,
                                                const Warp& warp) {
    // da is rounded here, as PyTorch's own product would be.
    Rounded<kHalves> rounded;
    round_tile<T, kHalves>(acc, rounded);
    const Gate<kPlain> gate{p.activation};
    const int columns = kGated ? 2 * p.inner : p.inner;
    const int room = p.inner - task.column - warp.line_column();
    float weights[2 * kHalves];  // of the lane's rows, looked up together
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      const int row = i / 2 * 64 + i % 2 * 8 + warp.index() * 16 + warp.line_row();
      weights[i] = row < task.rows ? p.weights.load(p.plan.order[task.row + row]) : 0.0f;
    }
#pragma unroll 1  // see next_half
    for (int half = 0; half < kHalves; ++half) {
      const int first = half * 64 + warp.index() * 16, rows = task.rows - first - warp.line_row();
      if (task.rows <= first) break;
      const int row =
          task.row + first + warp.line_row();  // the lane's rows, in fragments as in lines: this one and + 8
      const float weight[2] = {half == 0 ? weights[0] : weights[2 * kHalves - 2],
                               half == 0 ? weights[1] : weights[2 * kHalves - 1]};
      float score[2] = {0.0f, 0.0f};
      const int64_t at_h = static_cast<int64_t>(row) * columns + task.column + warp.line_column();
      const int64_t at_a = static_cast<int64_t>(row) * p.inner + task.column + warp.line_column();
      const auto read_ahead = [&](auto piece) {
        constexpr int kPair = piece.value % 2 * 2;
        if constexpr (piece.value < 6) {
          const int lines = room > piece.value * 32 ? rows : 0;
          if (kGated) warp.template fetch<kPair>(p.h + at_h + piece.value * 32, columns, lines);
          warp.template fetch<kPair + 1>(p.h + at_h + piece.value * 32 + (kGated ? p.inner : 0), columns, lines);
        }
        ptx::copies_commit();
      };
      const auto work = [&](auto piece) {
        constexpr int kPair = piece.value % 2 * 2, kPieces = piece.value * 32;
        const int lines = room > kPieces ? rows : 0;
        read_ahead(Index<piece.value + 1>{});
        ptx::copies_wait<1>();
        __syncwarp();
        uint32_t a[8];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          uint32_t g[4], u[4];
          warp.template get<kPair + 1>(c, u);
          if (kGated) warp.template get<kPair>(c, g);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int r = i % 2;
            const float2 da = Pair<T>::unpack(rounded[0][(piece.value * 4 + c * 2 + i / 2) * 2 + r]);
            const float2 uu = Pair<T>::unpack(u[i]);
            const float2 gg = kGated ? Pair<T>::unpack(g[i]) : uu;
            const Derivatives x = kGated ? gate.derivatives(gg.x, uu.x) : gate.derivatives(uu.x);
            const Derivatives y = kGated ? gate.derivatives(gg.y, uu.y) : gate.derivatives(uu.y);
            score[r] += da.x * x.value + da.y * y.value;
            const float dx = da.x * weight[r], dy = da.y * weight[r];
            if (kGated) g[i] = Pair<T>::pack(dx * x.dgate, dy * y.dgate);
            u[i] = Pair<T>::pack(dx * x.dup, dy * y.dup);
            a[4 * c + i] = Pair<T>::pack(x.value * weight[r], y.value * weight[r]);
          }
          warp.template put<kPair + 1>(c, u);
          if (kGated) warp.template put<kPair>(c, g);
        }
        warp.template put<4>(a);
        __syncwarp();
        if (kGated) warp.template store<kPair>(p.dh + at_h + kPieces, columns, lines);
        warp.template store<kPair + 1>(p.dh + at_h + kPieces + (kGated ? p.inner : 0), columns, lines);
        warp.template store<4>(p.a + at_a + kPieces, p.inner, lines);
        __syncwarp();
      };
      read_ahead(Index<0>{});
      work(Index<0>{});
      work(Index<1>{});
      work(Index<2>{});
      work(Index<3>{});
      work(Index<4>{});
      work(Index<5>{});
      // Columns past the end added nothing: their da is an exact zero.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        score[r] += __shfl_xor_sync(~0u, score[r], 1);
        score[r] += __shfl_xor_sync(~0u, score[r], 2);
        if (warp.lane() % 4 == 0 && rows > 8 * r)
          p.dscore[static_cast<int64_t>(task.column / kTileN) * p.slots + row + 8 * r] = score[r];
      }
      next_half<kHalves>(rounded);
    }
  }
};

// rows = dh @ up, columns [first_column, first_column + columns).
template <class T>
struct UpGrad {
  using Element = T;
  static constexpr bool kTransposeA = false, kTransposeB = true;
  static constexpr bool kWaits = false, kGathers = false;
  static constexpr int kStages = 5, kPatches = 2;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  struct Params {
    CUtensorMap up[2];  // boxes of 64 x 64; the second for the second part of dh, where gate and up are separate
    CUtensorMap dh;     // ragged, boxes of 64 x 128
    Plan plan;
    int* error;
    int* ticket;
    T* rows;
    int part, parts;  // columns of dh: per weight, number of weights
    int first_column, columns, tiles;
  };

  static __device__ __forceinline__ Task task(const Params& p, int ticket) {
    return block_task(p.plan, *p.plan.num_blocks, ticket, p.tiles, 0, p.parts * steps_of(p.part), kTileN);
  }

  struct Boxes {
    static __device__ __forceinline__ uint32_t bytes(const Params&, const Task&) { return kBytesStage; }
    static __device__ __forceinline__ void weights(const Params& p, const Task& task, int step, uint32_t stage,
                                                   uint32_t barrier) {
      const int part_steps = steps_of(p.part);
      const bool second = step >= part_steps;
      const int k = (second ? step - part_steps : step) * kTileK;
      transposed_boxes(second ? &p.up[1] : &p.up[0], k, p.first_column + task.column, task.expert, stage + kBytesA,
                       barrier);
    }
    // Past the end of its part a box meets zeros of the weight.
    static __device__ __forceinline__ void rows(const Params& p, const Task& task, int step, uint32_t stage,
                                                uint32_t barrier) {
      const int part_steps = steps_of(p.part);
      const int k = step >= part_steps ? p.part + (step - part_steps) * kTileK : step * kTileK;
      ragged_box(stage, &p.dh, k, task.row, task.rows, barrier);
    }
  };

  static __device__ __forceinline__ void finish_empty(const Params&, const Task&, const Warp&) {}

  template <int kHalves>
  static __device__ __forceinline__ void finish(const Params& p, const Task& task, Accumulators<kHalves>& acc,
                                                const Warp& warp) {
    store_tile<T, false, kHalves>(task, acc, warp, p.rows, p.columns, p.columns, nullptr);
  }
};

}  // namespace mok::sm90
