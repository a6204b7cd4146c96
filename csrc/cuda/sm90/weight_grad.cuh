// Weight gradients: per expert a product over its rows, both operands contiguous along the output's dimensions. One
// side is gathered, by cp.async; the other lies in sorted order and comes by the copy engine. Rows past an expert's end
// are zero on both sides: a zero against somebody else's NaN would not do.
#pragma once

#include "rows.cuh"

namespace mok::sm90 {

// Tile `number` of a grid of `rows` x `columns` tiles: groups of 8 rows, inside a group rows first, so that the tiles
// in flight share operands in the L2; every other group runs backwards.
__device__ __forceinline__ int2 raster(int number, int rows, int columns) {
  constexpr int kGroup = 8;
  const int group = number / (kGroup * columns), rest = number - group * kGroup * columns;
  const int height = min(kGroup, rows - group * kGroup);
  const int column = rest / height, row = group * kGroup + rest - column * height;
  return make_int2(row, group % 2 ? columns - 1 - column : column);
}

// A tile is 128 columns of the gathered side times 192 of the dense one. kFlipped: out has the dense side's columns
// first.
template <class T, bool kFlipped>
struct WeightGrad : Common<2, 192> {
  using Element = T;
  static constexpr bool kTransposeA = true, kTransposeB = true;
  static constexpr bool kWaits = false, kGathers = true, kRagged = true;
  static constexpr int kStages = 4, kStrips = kOutbox / 4;
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static constexpr int kGatheredGroups = kTileM / 64, kDenseGroups = kTileN / 64;

  struct Params {
    CUtensorMap dense;  // panels, boxes of 64 rows
    CUtensorMap sent;   // out, see send_tile
    Plan plan;
    int* error;
    int* ticket;
    TokenRows gathered;  // [tokens, gathered_columns]
    int experts, gathered_columns, gathered_tiles, dense_tiles;
    int panels, part;  // of the dense side: all of them, and those of a part
    bool add;          // to what out holds
  };

  static __device__ __forceinline__ Task task(const Params& p, int ticket) {
    const int tiles = p.gathered_tiles * p.dense_tiles, expert = ticket / tiles;
    if (expert >= p.experts) return Task::none();
    const int2 at = raster(ticket - expert * tiles, p.gathered_tiles, p.dense_tiles);
    const int start = expert ? p.plan.offsets[expert - 1] : 0, rows = p.plan.offsets[expert] - start;
    const int row = at.x * kTileM, height = min(kTileM, p.gathered_columns - row);
    // The kind is the expert's rows.
    return {rows, expert, row, height, at.y * kTileN, steps_of(rows), 0, start, {0, 0}};
  }

  static __device__ __forceinline__ int slices(const Task& task) {
    return (task.kind - (task.steps - 1) * kTileK + 15) / 16;
  }

  struct Boxes {
    // Panels that exist. The others are not asked for: a box that lies outside altogether faults.
    static __device__ __forceinline__ int groups(const Params& p, const Task& task) {
      return min(kDenseGroups, p.panels - task.column / kPanel);
    }
    static __device__ __forceinline__ uint32_t bytes(const Params& p, const Task& task) {
      return groups(p, task) * kChunk;
    }
    static __device__ __forceinline__ void weights(const Params&, const Task&, int, uint32_t, uint32_t) {}
    static __device__ __forceinline__ void rows(const Params& p, const Task& task, int step, uint32_t stage,
                                                uint32_t barrier) {
      const int done = step * kTileK, left = min(task.kind - done, kTileK);
#pragma unroll
      for (int g = 0; g < kDenseGroups; ++g)
        if (g < groups(p, task))
          panel_box(stage + kBytesA + g * kChunk, &p.dense, p.plan, task.column / kPanel + g, task.extra + done, left,
                    barrier);
    }
  };

  // One thread's share of each step's 64 gathered rows, in groups of 64 columns. Addresses are found a step ahead, so
  // that copies need not wait for them. A look-up of rows takes as long as a step or two, so a warp looks up its rows
  // of four steps at once, four steps ahead: the i-th lane of eight those of the eight's i-th row. Look-ups past the
  // expert's end repeat its last row: a default would have to be merged with what is loaded, that is waited for.
  struct Gather {
    static constexpr int kStride = GatherPlace::kStride, kRows = (kTileK + kStride - 1) / kStride, kBatch = 4;
    static constexpr int kUnroll = 2 * kBatch;  // choosing a look-up at run time would wait for those under way
    static_assert(kRows <= 8, "a lane for each row of a step");

    GatherPlace place;
    RowAddresses rows;   // from this thread's first column on
    int inside;          // groups of this thread that exist
    int left;            // rows that are left, counted from this thread's first
    bool last;           // whether the last of the rows lies in the stage
    const int* from;     // the expert's first look-up
    int row, end;        // the row that this lane looks up next, the expert's last
    int token[kUnroll];  // look-ups of two batches
    uint64_t at[kRows];  // where the rows of the next step are

    __device__ __forceinline__ Gather(const Params& p, const Task& task, uint32_t thread)
        : place(thread), rows(p.gathered, p.gathered_columns, task.row + thread % 8 * 8) {
      const int first = thread / 8, column = task.row + int(thread % 8 * 8);
      inside = (p.gathered_columns - column + 63) / 64;
      left = task.kind - first;
      last = first + (kRows - 1) * kStride < kTileK;
      from = p.plan.token + task.extra;
      row = first + thread % 8 * kStride;
      end = max(task.kind - 1, 0);
      look_up(0);
      look_up(kBatch);
      find(0);
    }
    __device__ __forceinline__ void look_up(int first) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) token[first + i] = __ldg(from + min(row + i * kTileK, end));
      row += kBatch * kTileK;
    }
    // The rows of the step of that phase.
    __device__ __forceinline__ void find(int phase) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) at[j] = rows.of(__shfl_sync(~0u, token[phase], j, 8));
      if (phase % kBatch == kBatch - 1) look_up(phase - (kBatch - 1));
    }
    __device__ __forceinline__ void step(const Params&, const Task&, int, int phase, uint32_t stage) {
      if (left >= kTileK && inside >= kGatheredGroups) {
        copy(stage, [](int, int) { return true; });
      } else {
        copy(stage, [&](int j, int group) { return j * kStride < left && group < inside; });
      }
      left -= kTileK;
      find((phase + 1) % kUnroll);
    }
    template <class Exists>
    __device__ __forceinline__ void copy(uint32_t stage, Exists exists) const {
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        if (j == kRows - 1 && !last) break;
#pragma unroll
        for (int g = 0; g < kGatheredGroups; ++g)
          ptx::copy16(place.at(stage, j) + g * kChunk, at[j] + g * 128, exists(j, g) ? 16 : 0);
      }
    }
  };

  template <int kHeight>
  static __device__ __forceinline__ void finish(const Params& p, const Task& task,
                                                const float (&acc)[kHeight][kAccumulators], const Warp& warp) {
    if (p.add && task.steps == 0) return;  // an expert without rows
    send_tile<T, kFlipped>(acc, warp, &p.sent, task.row, {task.column / kPanel, p.panels, p.part}, task.expert, p.add);
  }
  static __device__ __forceinline__ void drain() { ptx::sends_wait_read(); }
};

}  // namespace mok::sm90
