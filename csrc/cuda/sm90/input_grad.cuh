// The gradients that flow back through the two projections: dy to dh (with the activation's backward), dh to dx rows.
#pragma once

#include "activation.cuh"
#include "rows.cuh"

namespace mok::sm90 {

// da = dy @ down, from which dh, the weighted activation and the routing weight's gradient follow in the epilogue.
template <class T, Columns kColumns, bool kPlain, bool kTransposed>
struct DownGrad : Common<> {
  using Element = T;
  static constexpr bool kTransposeA = false, kTransposeB = !kTransposed;
  static constexpr bool kWaits = false, kGathers = true, kPulls = true;
  // h is read ahead, through two pairs of strips: one of gate and one of up (interleaved: one after the other).
  static constexpr int kStages = 4, kPair = 2 * Strip<64>::kBytes, kStrips = 2 * kPair;
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static constexpr bool kGated = is_gated(kColumns), kInterleaved = kColumns == Columns::kInterleaved;
  static constexpr int kAtOnce = kInterleaved ? 1 : 2;  // see Strip
  static constexpr int kPieces = kTileN / 64;  // of a half tile: 64 columns of da and of each of gate and up

  struct Params {
    CUtensorMap down;  // boxes of 64 x 64, or 64 x 96 if transposed
    const int* places;
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
    Pull pull;
    int hidden, inner, tiles, slots;
  };

  static __device__ __forceinline__ Task task(const Params& p, int ticket) {
    return block_task(p.plan, __ldg(p.plan.num_blocks), ticket, p.tiles, 0, steps_of(p.hidden), kTileN);
  }
  static __device__ __forceinline__ void locate(const Params& p, Task& task) {
    task.place[0] = place_of(p.places, task.expert);
  }

  struct Boxes {
    static __device__ __forceinline__ uint32_t bytes(const Params&, const Task&) { return DownGrad::kBytesB; }
    static __device__ __forceinline__ void weights(const Params& p, const Task& task, int step, uint32_t stage,
                                                   uint32_t barrier) {
      const int k = step * kTileK;
      const Matrix down{&p.down, task.place[0]};
      if constexpr (kTransposed) {
        straight_boxes(down, down, k, task.column, task.column + kTileN / 2, stage + kBytesA, barrier);
      } else {
        transposed_boxes(down, k, task.column, stage + kBytesA, barrier);
      }
    }
    static __device__ __forceinline__ void rows(const Params&, const Task&, int, uint32_t, uint32_t) {}
  };

  struct Gather : RowGather<T> {
    __device__ __forceinline__ Gather(const Params& p, const Task& task, int thread)
        : RowGather<T>(p.dy, p.plan.token + task.row, task.rows, p.hidden, thread) {}
    static __device__ __forceinline__ int last_row(const Task& task) { return task.row + task.rows - 1; }
    __device__ __forceinline__ void step(const Params& p, const Task&, int step, int phase, uint32_t stage) {
      this->next(phase, p.hidden - step * kTileK, stage);
    }
  };

  // Where a warp finds its 16 rows of h and dh, in the half tile that starts at row `first` of the tile.
  struct Place {
    int64_t at;  // element of the first row, in the piece of columns 0
    int rows;    // that exist, from the first on
    int room;    // columns that exist
    int second;  // columns from a strip's to those of the pair's other one
    int stride;

    __device__ __forceinline__ Place(const Params& p, const Task& task, const Warp& warp, int first) {
      const int row = first + warp.index() * 16, scale = kInterleaved ? 2 : 1;
      stride = kGated ? 2 * p.inner : p.inner;
      at = static_cast<int64_t>(task.row + row) * stride + scale * task.column;
      rows = task.rows - row;
      room = scale * (p.inner - task.column);
      second = kInterleaved ? 64 : p.inner;
    }
    // Of the piece's columns in the first or second strip of the pair.
    __device__ __forceinline__ int64_t element(int piece, bool other) const {
      return at + piece * (kInterleaved ? 128 : 64) + (kGated && other ? second : 0);
    }
    __device__ __forceinline__ int columns(int piece, bool other) const {
      return room - (kInterleaved ? piece * 128 + (other ? 64 : 0) : piece * 64);
    }
  };
  // Without a gate, the second strip alone.
  struct Strips {
    Strip<64> first, second;
    __device__ __forceinline__ Strips(const Warp& warp, int number)
        : first{warp.strips + number * kPair}, second{first.base + Strip<64>::kBytes} {}
  };

  // Starts to read a piece of h.
  static __device__ __forceinline__ void read_ahead(const Params& p, const Place& place, int piece, const Strips& pair) {
    if (kGated)
      pair.first.template fetch<kAtOnce>(p.h + place.element(piece, false), place.stride, place.rows, place.columns(piece, false));
    pair.second.template fetch<kAtOnce>(p.h + place.element(piece, true), place.stride, place.rows, place.columns(piece, true));
  }

  // The first two pieces are on their way since before the tile's products.
  static __device__ __forceinline__ void prepare(const Params& p, const Task& task, const Warp& warp) {
    const Place place(p, task, warp, 0);
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      if (place.rows > 0) read_ahead(p, place, piece, Strips(warp, piece));
      ptx::copies_commit();
    }
  }

  template <int kHalves>
  static __device__ __forceinline__ void finish(const Params& p, const Task& task, Accumulators<kHalves>& acc,
                                                const Warp& warp) {
    // da is rounded here, as PyTorch's own product would be.
    Rounded<kHalves> rounded;
    round_tile<T, kHalves>(acc, rounded);
    const Gate<kPlain> gate{p.activation};
    float weights[2 * kHalves];  // of the lane's rows, looked up together
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      const int row = i / 2 * 64 + i % 2 * 8 + warp.index() * 16 + warp.row();
      weights[i] = row < task.rows ? p.weights.load(p.plan.order[task.row + row]) : 0.0f;
    }
    int number = 0;  // of the pair
#pragma unroll 1  // see next_half
    for (int half = 0; half < kHalves; ++half) {
      const int first = half * 64 + warp.index() * 16;
      if (task.rows <= first) break;
      const Place place(p, task, warp, half * 64);
      const bool more = half + 1 < kHalves && task.rows > first + 64;
      const float weight[2] = {half == 0 ? weights[0] : weights[2 * kHalves - 2],
                               half == 0 ? weights[1] : weights[2 * kHalves - 1]};
      float score[2] = {0.0f, 0.0f};
#pragma unroll 1  // as for the halves
      for (int piece = 0; piece < kPieces; ++piece, number ^= 1) {
        const Strips pair(warp, number);
        ptx::copies_wait<1>();
        __syncwarp();
        uint32_t a[16];
        // One pair of columns: da, gate and up (interleaved: gate and up of each) become their gradients.
        const auto element = [&](int block, int r, uint32_t& g, uint32_t& u) {
          const float2 da = Pair<T>::unpack(rounded[0][block * 2 + r]);
          const float2 first = Pair<T>::unpack(g), second = Pair<T>::unpack(u);
          const float2 gg = !kGated ? second : kInterleaved ? make_float2(first.x, second.x) : first;
          const float2 uu = kInterleaved ? make_float2(first.y, second.y) : second;
          const Derivatives x = kGated ? gate.derivatives(gg.x, uu.x) : gate.derivatives(uu.x);
          const Derivatives y = kGated ? gate.derivatives(gg.y, uu.y) : gate.derivatives(uu.y);
          score[r] += da.x * x.value + da.y * y.value;
          const float dx = da.x * weight[r], dy = da.y * weight[r];
          if (kInterleaved) {
            g = Pair<T>::pack(dx * x.dgate, dx * x.dup);
            u = Pair<T>::pack(dy * y.dgate, dy * y.dup);
          } else {
            if (kGated) g = Pair<T>::pack(dx * x.dgate, dy * y.dgate);
            u = Pair<T>::pack(dx * x.dup, dy * y.dup);
          }
          a[2 * block + r] = Pair<T>::pack(x.value * weight[r], y.value * weight[r]);
        };
        if constexpr (kInterleaved) {
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            const int block = i / 2, r = i % 2;
            const Strip<64>& strip = block < 4 ? pair.first : pair.second;
            const uint32_t at = strip.at(warp.row() + r * 8, block % 4 * 32 + warp.lane() % 4 * 8);
            uint2 v = ptx::load_shared_pair(at);
            element(block, r, v.x, v.y);
            ptx::store_shared_pair(at, v);
          }
        } else {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            uint32_t g[4], u[4];
            pair.second.get(c, u);
            if (kGated) pair.first.get(c, g);
#pragma unroll
            for (int i = 0; i < 4; ++i) element(2 * c + i / 2, i % 2, g[i], u[i]);
            pair.second.put(c, u);
            if (kGated) pair.first.put(c, g);
          }
        }
        __syncwarp();
        if (kGated)
          pair.first.template store<kAtOnce>(p.dh + place.element(piece, false), place.stride, place.rows,
                                       place.columns(piece, false));
        pair.second.template store<kAtOnce>(p.dh + place.element(piece, true), place.stride, place.rows,
                                      place.columns(piece, true));
        __syncwarp();
#pragma unroll
        for (int c = 0; c < 4; ++c) pair.first.put(c, a + 4 * c);
        __syncwarp();
        pair.first.template store<kAtOnce>(p.a + static_cast<int64_t>(task.row + first) * p.inner + task.column + piece * 64,
                                     p.inner, place.rows, p.inner - task.column - piece * 64);
        __syncwarp();
        if (piece + 2 < kPieces) {
          read_ahead(p, place, piece + 2, pair);
        } else if (more) {
          read_ahead(p, Place(p, task, warp, half * 64 + 64), piece + 2 - kPieces, pair);
        }
        ptx::copies_commit();
        next_piece<16>(rounded[0]);
      }
      // Columns past the end added nothing: their da is an exact zero.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        score[r] += __shfl_xor_sync(~0u, score[r], 1);
        score[r] += __shfl_xor_sync(~0u, score[r], 2);
        if (warp.lane() % 4 == 0 && place.rows > warp.row() + 8 * r)
          p.dscore[static_cast<int64_t>(task.column / kTileN) * p.slots + task.row + first + warp.row() + 8 * r] =
              score[r];
      }
      next_half<kHalves>(rounded);
    }
  }
};

// rows = dh @ up, columns [first_column, first_column + columns).
template <class T, bool kTransposed>
struct UpGrad : Common<> {
  using Element = T;
  static constexpr bool kTransposeA = false, kTransposeB = !kTransposed;
  static constexpr bool kWaits = false, kGathers = false;
  static constexpr int kStages = 5, kStrips = Strip<64>::kBytes;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  struct Params {
    // Boxes of 64 x 64, or 64 x 96 if transposed; the second for the second part of dh, where gate and up are separate.
    CUtensorMap up[2];
    CUtensorMap dh;  // ragged, boxes of 64 x 128
    const int* places[2];
    Plan plan;
    int* error;
    int* ticket;
    T* rows;
    int part, parts;  // columns of dh: per weight, number of weights
    int first_column, columns, tiles;
  };

  static __device__ __forceinline__ Task task(const Params& p, int ticket) {
    return block_task(p.plan, __ldg(p.plan.num_blocks), ticket, p.tiles, 0, p.parts * steps_of(p.part), kTileN);
  }
  static __device__ __forceinline__ void locate(const Params& p, Task& task) {
#pragma unroll
    for (int i = 0; i < 2; ++i) task.place[i] = place_of(p.places[i], task.expert);
  }

  struct Boxes {
    static __device__ __forceinline__ uint32_t bytes(const Params&, const Task&) { return UpGrad::kBytesStage; }
    static __device__ __forceinline__ void weights(const Params& p, const Task& task, int step, uint32_t stage,
                                                   uint32_t barrier) {
      const int part_steps = steps_of(p.part);
      const bool second = step >= part_steps;
      const int k = (second ? step - part_steps : step) * kTileK;
      const Matrix up{second ? &p.up[1] : &p.up[0], second ? task.place[1] : task.place[0]};
      const int column = p.first_column + task.column;
      if constexpr (kTransposed) {
        straight_boxes(up, up, k, column, column + kTileN / 2, stage + kBytesA, barrier);
      } else {
        transposed_boxes(up, k, column, stage + kBytesA, barrier);
      }
    }
    // Past the end of its part a box meets zeros of the weight.
    static __device__ __forceinline__ void rows(const Params& p, const Task& task, int step, uint32_t stage,
                                                uint32_t barrier) {
      const int part_steps = steps_of(p.part);
      const int k = step >= part_steps ? p.part + (step - part_steps) * kTileK : step * kTileK;
      ragged_box(stage, &p.dh, k, task.row, task.rows, barrier);
    }
  };

  template <int kHalves>
  static __device__ __forceinline__ void finish(const Params& p, const Task& task, Accumulators<kHalves>& acc,
                                                const Warp& warp) {
    store_tile<T, false, kHalves>(task, acc, warp, p.rows, p.columns, p.columns, nullptr);
  }
};

}  // namespace mok::sm90
