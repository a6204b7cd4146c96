// The forward kernel: up projection with the activation in its epilogue, then the down projection of the finished
// blocks.
#pragma once

#include "activation.cuh"
#include "rows.cuh"

namespace mok::sm90 {

// kPlain: silu(gate) * up without biases. kTransposed: weights stored as [in, out].
template <class T, Tiles kShape, Columns kColumns, bool kPlain, bool kTransposed>
struct Forward : RowTiles<kShape, kShape != Tiles::kTall && kTransposed && kColumns == Columns::kHalves> {
  using Element = T;
  using Shape = typename Forward::RowTiles;
  using Shape::kTileN, Shape::kAccumulators, Shape::kBytesA;
  static constexpr bool kTransposeA = false, kTransposeB = kTransposed;
  static constexpr bool kWaits = true, kGathers = true, kPulls = true;
  static constexpr int kHalf = kTileN / 2;
  static constexpr int kStages = (Shape::kSplit ? 4 : 5) + (kShape == Tiles::kLow ? 1 : 0),
                       kStrips = Strip<kHalf>::kBytes;
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  // Columns of `a` per up tile: a gated tile holds as many of gate and the same of up, in the same threads.
  static constexpr int kWidth = is_gated(kColumns) ? kHalf : kTileN;
  // Columns of h per column of `a` from one tile to the next.
  static constexpr int kScale = kColumns == Columns::kInterleaved ? 2 : 1;
  static constexpr bool kGated = is_gated(kColumns);
  static constexpr int kWords = kAccumulators / 2;  // a thread's part, rounded
  enum Kind : int { kUp, kDown };

  struct Params {
    CUtensorMap up[2], down;  // where gate and up lie apart, they come from up[0] and up[1]
    CUtensorMap a;            // panels
    const int *up_places[2], *down_places;
    Plan plan;
    int* error;
    int* ticket;
    TokenRows x;
    T* h;  // may be null
    T* a_out;
    T* rows;
    const T* up_bias[2];
    const T* down_bias;
    int64_t up_bias_stride;  // elements from one expert to the next
    Activation activation;
    Pull pull;
    int hidden, inner;
    int second;  // row of up[1] at which the second half of a tile starts, relative to the first
    int up_tiles, down_tiles;
  };

  static __device__ __forceinline__ Task task(const Params& p, int ticket) {
    const int blocks = num_blocks<Shape>(p.plan), up_tickets = blocks * p.up_tiles;
    return ticket < up_tickets
               ? block_task<Shape>(p.plan, blocks, ticket, p.up_tiles, kUp, steps_of(p.hidden), kWidth)
               : block_task<Shape>(p.plan, blocks, ticket - up_tickets, p.down_tiles, kDown, steps_of(p.inner), kTileN);
  }
  static __device__ __forceinline__ void locate(const Params& p, Task& task) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      task.place[i] = place_of(task.kind == kUp ? p.up_places[i] : p.down_places, task.expert);
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
      return Shape::kBytesB + (task.kind == kUp ? 0 : Shape::bytes_of_rows(task.rows));
    }
    static __device__ __forceinline__ void weights(const Params& p, const Task& task, int step, uint32_t stage,
                                                   uint32_t barrier) {
      const bool up = task.kind == kUp;
      const int column = up ? kScale * task.column : task.column, k = step * kTileK;
      const int second = column + (up ? p.second : kHalf);
      const Matrix first{up ? &p.up[0] : &p.down, task.place[0]}, other{up ? &p.up[1] : &p.down, task.place[1]};
      weight_boxes<Shape, kTransposed>(first, other, k, column, second, stage + kBytesA, barrier);
    }
    static __device__ __forceinline__ void rows(const Params& p, const Task& task, int step, uint32_t stage,
                                                uint32_t barrier) {
      if (task.kind == kUp) return;
      if (step == 0) ptx::fence_for_async();  // other CTAs wrote these rows through ordinary stores
      panel_boxes<Shape>(stage, &p.a, p.plan, step, task, barrier);
    }
  };

  struct Gather : RowGather<Shape> {
    __device__ __forceinline__ Gather(const Params& p, const Task& task, uint32_t thread)
        : RowGather<Shape>(p.x, p.plan.token + task.row, task.kind == kUp ? task.rows : 0, p.hidden, thread) {}
    // Of those that are gathered.
    static __device__ __forceinline__ int last_row(const Task& task) {
      return task.kind == kUp ? task.row + task.rows - 1 : -1;
    }
    __device__ __forceinline__ void step(const Params& p, const Task& task, int step, int phase, uint32_t stage) {
      this->next(phase, p.hidden - step * kTileK, stage);
    }
  };

  template <int kHeight>
  static __device__ __forceinline__ void finish(const Params& p, const Task& task, float (&acc)[kHeight][kAccumulators],
                                                const Warp& warp) {
    if (task.kind == kDown) {
      const T* const bias = p.down_bias ? p.down_bias + static_cast<int64_t>(task.expert) * p.hidden : nullptr;
      store_tile<T, !kPlain>(task, acc, warp, p.rows, p.hidden, p.hidden, bias);
      return;
    }
    uint32_t h[kHeight][kWords];
    add_up_bias(p, task, acc, warp);
    round_tile<T>(acc, h);
#pragma unroll 1  // see next_part
    for (int part = 0; part < kHeight; ++part) {
      const int first = part * kPartRows + warp.index() * 16;
      if (task.rows <= first) break;
      finish_up(p, task, h[0], task.row + first, task.rows - first, warp);
      next_part(h);
    }
    ptx::fence_for_async();
    __syncwarp();
    if (warp.lane() == 0) {
      __threadfence();
      ptx::add_release(p.plan.done + task.extra, 1);
    }
  }

  // Adds the bias of the tile's columns; where gate and up lie apart, a tile has those of up[0] in its first half and
  // those of up[1] after it.
  template <int kHeight>
  static __device__ __forceinline__ void add_up_bias(const Params& p, const Task& task,
                                                     float (&acc)[kHeight][kAccumulators], const Warp& warp) {
    if (kPlain || !p.up_bias[0]) return;
    constexpr int kBlocks = (kColumns == Columns::kHalves ? kHalf : kTileN) / 8;
    const int first = kScale * task.column + warp.lane() % 4 * 2, room = kScale * p.inner - first;
    const T* bias = nullptr;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      if (j % kBlocks == 0) bias = p.up_bias[j / kBlocks] + task.expert * p.up_bias_stride + first;
      if (j % 4 == 0) ptx::order();  // else all is loaded at once, and there are no registers for it
      const float2 more = bias_pair(bias, j % kBlocks * 8, room);
#pragma unroll
      for (int part = 0; part < kHeight; ++part) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          acc[part][4 * j + 2 * r] += more.x;
          acc[part][4 * j + 2 * r + 1] += more.y;
        }
      }
    }
  }

  // Saves a part's h and a: of this warp's 16 rows, which start at `row`, the first `rows`. The activation sees h
  // as it is rounded for saving, so that backward finds the same value. A loop over pieces works on the first one and
  // moves the others there, see next_part; only the common gate is worth its whole code.
  static __device__ __forceinline__ void finish_up(const Params& p, const Task& task, uint32_t (&h)[kWords],
                                                   int64_t row, int rows, const Warp& warp) {
    constexpr int kPieces = kTileN / 64, kUnroll = kPlain ? kPieces : 1;
    constexpr bool kApart = kColumns == Columns::kHalves;
    const Gate<kPlain> gate{p.activation};
    const int columns = p.inner - task.column, stride = kGated ? 2 * p.inner : p.inner;
    const Strip<kHalf> half{warp.strips};
    const Strip<64> strip{warp.strips};
    const auto store = [&](const auto& from, T* to, int stride, int room) {
      __syncwarp();
      from.template store<2>(to, stride, rows, room);
      __syncwarp();
    };
    if (p.h) {
      T* const to = p.h + row * stride + kScale * task.column;
      if constexpr (kApart) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
#pragma unroll
          for (int i = 0; i < kHalf / 16; ++i) half.put(i, h + part * (kWords / 2) + 4 * i);
          store(half, to + part * p.inner, stride, columns);
        }
      } else {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
          for (int i = 0; i < 4; ++i) strip.put(i, h + 16 * piece + 4 * i);
          store(strip, to + piece * 64, stride, kScale * columns - piece * 64);
        }
      }
    }
    const auto store_a = [&](const auto& from, int column) {
      __syncwarp();
      from.template store_panels<2>(p.a_out, p.plan, int(row), rows, column, p.inner);
      __syncwarp();
    };
#pragma unroll kUnroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if constexpr (kApart) {
        const uint32_t *const g = h, *const u = h + kWords / 2;
        uint32_t a[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 gg = Pair<T>::unpack(g[i]), uu = Pair<T>::unpack(u[i]);
          a[i] = Pair<T>::pack(gate.value(gg.x, uu.x), gate.value(gg.y, uu.y));
        }
        half.put(2 * piece, a);
        half.put(2 * piece + 1, a + 4);
        next_piece<8>(h);
      } else if constexpr (kColumns == Columns::kInterleaved) {
        // A pair of neighbours is gate and up of one column of `a`.
#pragma unroll
        for (int i = 0; i < 16; ++i) {  // block i / 2 of 4 columns, rows 8 * (i % 2) on
          const float2 v = Pair<T>::unpack(h[i]);
          const uint32_t at = half.at(warp.row() + i % 2 * 8, piece * 64 + i / 2 * 8) + warp.lane() % 4 * 2;
          ptx::store_shared_half(at, Pair<T>::pack(gate.value(v.x, v.y), 0.0f));
        }
        next_piece<16>(h);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t a[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 v = Pair<T>::unpack(h[4 * i + j]);
            a[j] = Pair<T>::pack(gate.value(v.x), gate.value(v.y));
          }
          strip.put(i, a);
        }
        store_a(strip, task.column + piece * 64);
        next_piece<16>(h);
      }
    }
    if (kGated) store_a(half, task.column);
  }
};

}  // namespace mok::sm90
