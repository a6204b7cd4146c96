// How a consumer warp writes its rows of a tile: through a strip of shared memory, 16 rows of 64 or 96 columns, from
// which whole lines of memory go out. Pieces of lines would cost the L2 a request each: weight gradients of few rows,
// which do little but write, took 1.7 times as long with pieces of 64 bytes.
#pragma once

#include "persistent.cuh"

namespace mok::sm90 {

// The strip lies row by row. Of its 16-byte chunks, eight (of 96 columns: four) that follow each other change places
// with the row, so that neither eight rows of one chunk nor eight chunks of one row meet in a bank.
template <int kColumns>
struct Strip {
  static_assert(kColumns == 64 || kColumns == 96);
  static constexpr int kChunks = kColumns / 8, kLoads = kChunks / 2;  // 16-byte loads of a lane
  static constexpr uint32_t kRow = kColumns * 2, kBytes = 16 * kRow;

  uint32_t base;  // of 64 columns: a multiple of 128

  static __device__ __forceinline__ uint32_t place(int row, int chunk) {
    return row * kRow + ((kColumns == 64 ? chunk ^ row % 8 : chunk ^ row / 2 % 4) << 4);
  }
  __device__ __forceinline__ uint32_t at(int row, int byte) const { return base + place(row, byte / 16) + byte % 16; }
  // Where this lane's part of 16 columns, the `number`-th, is put.
  __device__ __forceinline__ uint32_t cell(int number) const {
    const int lane = threadIdx.x % 32;
    const uint32_t first = base + place(lane % 16, lane / 16);
    return kColumns == 64 ? first ^ number * 32 : (first ^ number % 2 * 32) + number / 2 * 64;
  }
  // 16 columns of an accumulator fragment: fragment[2 * b + r] is block b of 8 columns, rows 8 * r to 8 * r + 7.
  __device__ __forceinline__ void put(int number, const uint32_t* fragment) const {
    ptx::store_matrices(cell(number), fragment);
  }
  // Writes the first `rows` rows and `columns` columns to `to`, of rows `stride` elements apart. `kAtOnce` loads are in
  // flight together, as far as there are registers for them.
  template <int kAtOnce = kLoads, class T>
  __device__ __forceinline__ void store(T* to, int stride, int rows, int columns) const {
    const Lane at(base);
#pragma unroll kAtOnce
    for (int i = 0; i < kLoads; ++i)
      if (at.row(i) < rows && at.chunk(i) * 8 < columns)
        *reinterpret_cast<uint4*>(to + (at.row(i) * stride + at.chunk(i) * 8)) = ptx::load_shared(at.from(i));
  }
  // The same to panels; `first` is the strip's first row there, `column` its first column of the `columns` that there
  // are. Those after them become zero, to the end of their panel.
  template <int kAtOnce = kLoads, class T>
  __device__ __forceinline__ void store_panels(T* to, const Plan& plan, int first, int rows, int column,
                                               int columns) const {
    const Lane lane(base);
    const int inside = kColumns == 64 ? 0 : column % kPanel;  // a strip of 64 columns is a panel
    const int left = columns - column, end = left + (kPanel - columns % kPanel) % kPanel;
    T* const start = to + static_cast<int64_t>(panel_row(plan, column / kPanel, first)) * kPanel;
    const int64_t next = plan.room * kPanel;
#pragma unroll kAtOnce
    for (int i = 0; i < kLoads; ++i) {
      const int column = lane.chunk(i) * 8, at = inside + column;
      if (lane.row(i) >= rows || column >= end) continue;
      const uint4 v = column < left ? ptx::load_shared(lane.from(i)) : make_uint4(0, 0, 0, 0);
      const int64_t panel = kColumns == 64 || at < kPanel ? 0 : next;
      *reinterpret_cast<uint4*>(start + panel + lane.row(i) * kPanel + at % kPanel) = v;
    }
  }

 private:
  // A lane's 16-byte loads, line by line: of 64 columns it has the same ones in every fourth row.
  struct Lane {
    uint32_t base, first;

    __device__ __forceinline__ explicit Lane(uint32_t base) : base(base), first(base + place(row(0), chunk(0))) {}
    static __device__ __forceinline__ int number(int i) { return i * 32 + int(threadIdx.x % 32); }
    static __device__ __forceinline__ int row(int i) { return number(i) / kChunks; }
    static __device__ __forceinline__ int chunk(int i) { return number(i) % kChunks; }
    __device__ __forceinline__ uint32_t from(int i) const {
      return kColumns == 64 ? (first ^ i % 2 * 64) + i * 4 * kRow : base + place(row(i), chunk(i));
    }
  };
};

template <class T>
__device__ __forceinline__ float2 bias_pair(const T* bias, int column, int columns) {
  if (column >= columns) return make_float2(0.0f, 0.0f);
  return Pair<T>::unpack(*reinterpret_cast<const uint32_t*>(bias + column));
}

// Writes the accumulators (plus `bias`, one per column, or null) of a tile to rows of `columns` elements.
template <class T, bool kBias, int kParts, int kCount>
__device__ __forceinline__ void store_tile(const Task& task, const float (&acc)[kParts][kCount], const Warp& warp,
                                           T* to, int stride, int columns, const T* bias) {
  const Strip<64> strip{warp.strips};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int first = part * kPartRows + warp.index() * 16;
    if (task.rows <= first) break;
    T* const at = to + static_cast<int64_t>(task.row + first) * stride + task.column;
#pragma unroll
    for (int piece = 0; piece < kCount / 32; ++piece) {
      __syncwarp();
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        uint32_t out[4];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const int block = (piece * 4 + quarter) * 2 + b;
          float2 add = make_float2(0.0f, 0.0f);
          if (kBias && bias) add = bias_pair(bias, task.column + block * 8 + warp.lane() % 4 * 2, columns);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float* const v = &acc[part][block * 4 + r * 2];
            out[2 * b + r] = kBias ? Pair<T>::pack(v[0] + add.x, v[1] + add.y) : Pair<T>::pack(v[0], v[1]);
          }
        }
        strip.put(quarter, out);
      }
      __syncwarp();
      strip.store<kBias ? 1 : 4>(at + piece * 64, stride, task.rows - first, columns - task.column - piece * 64);
    }
  }
}

// Where a group collects boxes of 64 x 64 for the copy engine: one for each warp to send.
constexpr int kBoxes = 4;
constexpr uint32_t kOutbox = kBoxes * kChunk;

// A tile's columns as panels: its first one, how many there are, and how many make a part.
struct TilePanels {
  int first, count, part;
};

// Leaves the tile to the copy engine, which writes it or, if `add`, adds it to what is there. `map` [experts, parts,
// rows, columns of a part] has boxes of 64 x 64; `row` is the tile's first one. If kFlipped, columns and rows change
// places: the tile's columns become lines. The group's shared memory is the outbox.
//
// What it costs are its fences, barriers and instructions that start the copy engine, because a group can do nothing
// else meanwhile: so as many boxes as there is room for go together, each started by another warp.
template <class T, bool kFlipped, int kParts, int kCount>
__device__ __forceinline__ void send_tile(const float (&acc)[kParts][kCount], const Warp& warp, const CUtensorMap* map,
                                          int row, const TilePanels& panels, int expert, bool add) {
  constexpr int kPanels = kCount / 32, kAll = kParts * kPanels;
  const int lane = warp.lane();
  const uint32_t cell =
      warp.group + (kFlipped ? Strip<64>::place(lane / 16 * 8 + lane % 8, warp.index() * 2 + lane / 8 % 2)
                             : Strip<64>::place(warp.index() * 16 + lane % 16, lane / 16));
#pragma unroll
  for (int first = 0; first < kAll; first += kBoxes) {
    if (lane == 0) ptx::sends_wait_read();
    warp.meet<0>();
#pragma unroll
    for (int i = 0; i < kBoxes && first + i < kAll; ++i) {
      const int part = (first + i) / kPanels, panel = (first + i) % kPanels;
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        const float* const v = &acc[part][(panel * 4 + quarter) * 8];
        uint32_t out[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] = Pair<T>::pack(v[j * 2], v[j * 2 + 1]);
        if constexpr (kFlipped) {
          ptx::store_flipped_matrices(cell + i * kChunk + quarter * Strip<64>::kBytes, out);
        } else {
          ptx::store_matrices((cell ^ quarter * 32) + i * kChunk, out);
        }
      }
    }
    ptx::fence_shared_for_async();
    warp.meet<1>();
    const int box = first + warp.index(), panel = panels.first + box % kPanels;
    if (lane == 0 && box < kAll && panel < panels.count) {
      const bool second = panel >= panels.part;
      const int x = (second ? panel - panels.part : panel) * kPanel, y = row + box / kPanels * kPartRows;
      const uint32_t from = warp.group + warp.index() * kChunk;
      if (add) {
        ptx::add_box(map, from, kFlipped ? y : x, kFlipped ? x : y, second, expert);
      } else {
        ptx::send_box(map, from, kFlipped ? y : x, kFlipped ? x : y, second, expert);
      }
      ptx::sends_commit();
    }
  }
}

}  // namespace mok::sm90
