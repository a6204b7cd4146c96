// The gradients that flow back through the two projections: dy to dh (with the activation's backward), dh to dx rows.
#pragma once

#include "activation.cuh"
#include "patches.cuh"
#include "rows.cuh"

namespace mok::sm90 {

// Of how many columns dscore has the sums.
constexpr int kScoreColumns = RowTiles<Tiles::kWide>::kTileN;

// da = dy @ down, from which dh, the weighted activation and the routing weight's gradient follow in the epilogue.
template <class T, Columns kColumns, bool kPlain, bool kTransposed>
struct DownGrad : RowTiles<Tiles::kWide> {
  using Element = T;
  static constexpr bool kTransposeA = false, kTransposeB = !kTransposed;
  static constexpr bool kWaits = false, kGathers = true, kPulls = true, kPullsAgain = true;
  static constexpr int kStages = 4, kPatches = 6,
                       kStrips = kPatches * kPatch;  // h is read ahead, through three pairs of patches
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static constexpr bool kGated = is_gated(kColumns), kInterleaved = kColumns == Columns::kInterleaved;
  static constexpr int kPieces = kTileN / 32;  // of a part of a tile: 32 columns of da and of each of gate and up
  static constexpr int kPairs = kPatches / 2;

  struct Params {
    CUtensorMap down;
    const int* places;
    Plan plan;
    int* error;
    int* ticket;
    TokenRows dy;
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
    return block_task<DownGrad>(p.plan, num_blocks<DownGrad>(p.plan), ticket, p.tiles, 0, steps_of(p.hidden), kTileN);
  }
  static __device__ __forceinline__ void locate(const Params& p, Task& task) {
    task.place[0] = place_of(p.places, task.expert);
  }

  struct Boxes {
    static __device__ __forceinline__ uint32_t bytes(const Params&, const Task&) { return DownGrad::kBytesB; }
    static __device__ __forceinline__ void weights(const Params& p, const Task& task, int step, uint32_t stage,
                                                   uint32_t barrier) {
      const Matrix down{&p.down, task.place[0]};
      weight_boxes<DownGrad, !kTransposed>(down, down, step * kTileK, task.column, task.column + kTileN / 2,
                                           stage + kBytesA, barrier);
    }
    static __device__ __forceinline__ void rows(const Params&, const Task&, int, uint32_t, uint32_t) {}
  };

  struct Gather : RowGather<DownGrad> {
    __device__ __forceinline__ Gather(const Params& p, const Task& task, uint32_t thread)
        : RowGather<DownGrad>(p.dy, p.plan.token + task.row, task.rows, p.hidden, thread) {}
    static __device__ __forceinline__ int last_row(const Task& task) { return task.row + task.rows - 1; }
    __device__ __forceinline__ void step(const Params& p, const Task&, int step, int phase, uint32_t stage) {
      this->next(phase, p.hidden - step * kTileK, stage);
    }
  };

  // Where a lane finds its lines of h, in the part that starts at row `first` of the tile.
  struct Lines {
    int64_t at;  // element of the first line, in the piece of columns 0
    int rows;    // lines from the lane's own on
    int room;    // columns from the lane's own on, of da
    int second;  // columns from a patch's to those of the pair's other one
    int stride;

    __device__ __forceinline__ Lines(const Params& p, const Task& task, const Warp& warp, int first) {
      const int row = first + warp.index() * 16 + warp.row(), scale = kInterleaved ? 2 : 1;
      stride = kGated ? 2 * p.inner : p.inner;
      at = static_cast<int64_t>(task.row + row) * stride + scale * task.column + Patches::line_column();
      rows = task.rows - row;
      room = scale * (p.inner - task.column) - Patches::line_column();
      second = kInterleaved ? 32 : p.inner;
    }
    // Of the piece's columns in the first or second patch of the pair.
    __device__ __forceinline__ int64_t place(int piece, bool other) const {
      return at + piece * (kInterleaved ? 64 : 32) + (kGated && other ? second : 0);
    }
    __device__ __forceinline__ int lines(int piece, bool other) const {
      const int column = kInterleaved ? piece * 64 + (other ? 32 : 0) : piece * 32;
      return room > column ? rows : 0;
    }
  };

  // Starts to read a piece of h into a pair of patches, that of number piece % kPairs.
  template <int kPair>
  static __device__ __forceinline__ void read_ahead(const Params& p, const Lines& lines, int piece,
                                                    const Patches& patches) {
    if (kGated)
      patches.template fetch<2 * kPair>(p.h + lines.place(piece, false), lines.stride, lines.lines(piece, false));
    patches.template fetch<2 * kPair + 1>(p.h + lines.place(piece, true), lines.stride, lines.lines(piece, true));
  }

  // Two pieces are always on their way, the first ones since before the tile's products.
  static __device__ __forceinline__ void prepare(const Params& p, const Task& task, const Warp& warp) {
    const Patches patches(warp);
    const Lines lines(p, task, warp, 0);
    const bool any = task.rows > warp.index() * 16;
    if (any) read_ahead<0>(p, lines, 0, patches);
    ptx::copies_commit();
    if (any) read_ahead<1>(p, lines, 1, patches);
    ptx::copies_commit();
  }

  template <int kHeight>
  static __device__ __forceinline__ void finish(const Params& p, const Task& task,
                                                const float (&acc)[kHeight][kAccumulators], const Warp& warp) {
    const Patches patches(warp);
    // da is rounded here, as PyTorch's own product would be.
    uint32_t rounded[kHeight][kAccumulators / 2];
    round_tile<T>(acc, rounded);
    const Gate<kPlain> gate{p.activation};
    float weights[kHeight][2];  // of the lane's rows, looked up together
#pragma unroll
    for (int i = 0; i < 2 * kHeight; ++i) {
      const int row = i / 2 * kPartRows + i % 2 * 8 + warp.index() * 16 + warp.row();
      weights[i / 2][i % 2] = row < task.rows ? p.weights.load(p.plan.order[task.row + row]) : 0.0f;
    }
#pragma unroll 1  // see next_part
    for (int part = 0; part < kHeight; ++part) {
      const int first = part * kPartRows + warp.index() * 16;
      if (task.rows <= first) break;
      const Lines lines(p, task, warp, part * kPartRows);
      const bool more = part + 1 < kHeight && task.rows > first + kPartRows;
      const int row = task.row + first + warp.row();  // in fragments as in lines: this one and + 8
      const int scale = kInterleaved ? 2 : 1;
      // Panels of a part of dh and of a, and the tile's first one.
      const int dh_panels = steps_of(scale * p.inner), dh_first = scale * task.column / kPanel;
      const int a_panels = steps_of(p.inner), a_first = task.column / kPanel;
      const auto at = [&](T* data, int panel, int column) {
        return data + static_cast<int64_t>(panel_row(p.plan, panel, row)) * kPanel + column + Patches::line_column();
      };
      float score[2] = {0.0f, 0.0f};
      const auto work = [&](int round, auto number) {
        constexpr int kNumber = number.value, kPair = 2 * kNumber, kNext = (kNumber + 2) % kPairs;
        const int piece = round * kPairs + kNumber;
        if (piece + 2 < kPieces) {
          read_ahead<kNext>(p, lines, piece + 2, patches);
        } else if (more) {
          read_ahead<kNext>(p, Lines(p, task, warp, (part + 1) * kPartRows), piece + 2 - kPieces, patches);
        }
        ptx::copies_commit();
        ptx::copies_wait<2>();
        __syncwarp();
        uint32_t a[8];
        // One pair of columns: da, gate and up (interleaved: gate and up of each) become their gradients.
        const auto element = [&](int block, int r, uint32_t& g, uint32_t& u) {
          const float2 da = Pair<T>::unpack(rounded[0][(kNumber * 4 + block) * 2 + r]);
          const float2 first = Pair<T>::unpack(g), second = Pair<T>::unpack(u);
          const float2 gg = !kGated ? second : kInterleaved ? make_float2(first.x, second.x) : first;
          const float2 uu = kInterleaved ? make_float2(first.y, second.y) : second;
          const Derivatives x = kGated ? gate.derivatives(gg.x, uu.x) : gate.derivatives(uu.x);
          const Derivatives y = kGated ? gate.derivatives(gg.y, uu.y) : gate.derivatives(uu.y);
          score[r] += da.x * x.value + da.y * y.value;
          const float dx = da.x * weights[0][r], dy = da.y * weights[0][r];
          if (kInterleaved) {
            g = Pair<T>::pack(dx * x.dgate, dx * x.dup);
            u = Pair<T>::pack(dy * y.dgate, dy * y.dup);
          } else {
            if (kGated) g = Pair<T>::pack(dx * x.dgate, dy * y.dgate);
            u = Pair<T>::pack(dx * x.dup, dy * y.dup);
          }
          a[2 * block + r] = Pair<T>::pack(x.value * weights[0][r], y.value * weights[0][r]);
        };
        if constexpr (kInterleaved) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const uint32_t at = patches.in_row(kPair + i / 4, i / 2 % 2 * 32 + warp.lane() % 4 * 8, i % 2);
            uint2 v = ptx::load_shared_pair(at);
            element(i / 2, i % 2, v.x, v.y);
            ptx::store_shared_pair(at, v);
          }
        } else {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            uint32_t g[4], u[4];
            patches.template get<kPair + 1>(c, u);
            if (kGated) patches.template get<kPair>(c, g);
#pragma unroll
            for (int i = 0; i < 4; ++i) element(2 * c + i / 2, i % 2, g[i], u[i]);
            patches.template put<kPair + 1>(c, u);
            if (kGated) patches.template put<kPair>(c, g);
          }
        }
        __syncwarp();
        const int within = piece % 2 * 32, a_panel = a_first + piece / 2;
        const int dh_panel = dh_first + (kInterleaved ? piece : piece / 2);
        const int dh_lines = dh_panel < dh_panels ? lines.rows : 0;
        if (kGated) patches.template store<kPair>(at(p.dh, dh_panel, kInterleaved ? 0 : within), kPanel, dh_lines);
        patches.template store<kPair + 1>(
            at(p.dh, dh_panel + (kColumns == Columns::kHalves ? dh_panels : 0), kInterleaved ? 32 : within), kPanel,
            dh_lines);
        __syncwarp();
        patches.template put<kPair>(a);
        __syncwarp();
        patches.template store<kPair>(at(p.a, a_panel, within), kPanel, a_panel < a_panels ? lines.rows : 0);
        __syncwarp();
      };
#pragma unroll 1  // as for the parts
      for (int round = 0; round < kPieces / kPairs; ++round) {
        work(round, Index<0>{});
        work(round, Index<1>{});
        work(round, Index<2>{});
        next_piece<kPairs * 8>(rounded[0]);
      }
      // Columns past the end added nothing: their da is an exact zero.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        score[r] += __shfl_xor_sync(~0u, score[r], 1);
        score[r] += __shfl_xor_sync(~0u, score[r], 2);
        if (warp.lane() % 4 == 0 && lines.rows > 8 * r)
          p.dscore[static_cast<int64_t>(task.column / kTileN) * p.slots + row + 8 * r] = score[r];
      }
      next_part(rounded);
      next_part(weights);
    }
  }
};

// rows = dh @ up.
template <class T, bool kTransposed>
struct UpGrad : RowTiles<Tiles::kTall> {
  using Element = T;
  static constexpr bool kTransposeA = false, kTransposeB = !kTransposed;
  static constexpr bool kWaits = false, kGathers = false;
  static constexpr int kStages = 5, kStrips = Strip<64>::kBytes;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  struct Params {
    CUtensorMap up[2];  // the second for the second part of dh, where gate and up are separate
    CUtensorMap dh;     // panels
    const int* places[2];
    Plan plan;
    int* error;
    int* ticket;
    T* rows;
    int part, parts;  // columns of dh in each part, number of parts
    int second;       // row of up[1] at which the second part starts
    int hidden, tiles;
  };

  static __device__ __forceinline__ Task task(const Params& p, int ticket) {
    return block_task<UpGrad>(p.plan, num_blocks<UpGrad>(p.plan), ticket, p.tiles, 0, p.parts * steps_of(p.part),
                              kTileN);
  }
  static __device__ __forceinline__ void locate(const Params& p, Task& task) {
#pragma unroll
    for (int i = 0; i < 2; ++i) task.place[i] = place_of(p.places[i], task.expert);
  }

  struct Boxes {
    static __device__ __forceinline__ uint32_t bytes(const Params&, const Task& task) {
      return kBytesB + bytes_of_rows(task.rows);
    }
    static __device__ __forceinline__ void weights(const Params& p, const Task& task, int step, uint32_t stage,
                                                   uint32_t barrier) {
      const int part_steps = steps_of(p.part);
      const bool second = step >= part_steps;
      const int k = second ? p.second + (step - part_steps) * kTileK : step * kTileK;
      const Matrix up{second ? &p.up[1] : &p.up[0], second ? task.place[1] : task.place[0]};
      weight_boxes<UpGrad, !kTransposed>(up, up, k, task.column, task.column + kTileN / 2, stage + kBytesA, barrier);
    }
    // Past the end of its part dh is zero.
    static __device__ __forceinline__ void rows(const Params& p, const Task& task, int step, uint32_t stage,
                                                uint32_t barrier) {
      panel_boxes<UpGrad>(stage, &p.dh, p.plan, step, task, barrier);
    }
  };

  template <int kHeight>
  static __device__ __forceinline__ void finish(const Params& p, const Task& task,
                                                const float (&acc)[kHeight][kAccumulators], const Warp& warp) {
    store_tile<T, false>(task, acc, warp, p.rows, p.hidden, p.hidden, nullptr);
  }
};

}  // namespace mok::sm90
