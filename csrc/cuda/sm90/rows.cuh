// Tasks over row blocks: how tiles of sorted rows times an expert's weight are found, loaded and stored.
#pragma once

#include "strips.cuh"

namespace mok::sm90 {

__host__ __device__ inline int steps_of(int k) { return (k + kTileK - 1) / kTileK; }

// Where the rows of tokens are, from a column on.
struct RowAddresses {
  uint64_t rest, own;  // of place 0; of the lowest int's, had that been the number 2^31
  uint32_t stride;     // bytes

  __device__ __forceinline__ RowAddresses(const TokenRows& rows, int columns, int column)
      : rest(reinterpret_cast<uint64_t>(rows.rows) + column * 2), stride(columns * 2) {
    own = reinterpret_cast<uint64_t>(rows.own) + column * 2 - (static_cast<uint64_t>(stride) << 31);
  }
  __device__ __forceinline__ uint64_t of(int place) const {
    return (place < 0 ? own : rest) + static_cast<uint64_t>(static_cast<uint32_t>(place)) * stride;
  }
};

// One thread's share of a tile of gathered rows of k elements. Every row has its address in registers of its own, which
// changes once in four steps: copies that share a register for their addresses wait for one another.
template <class T>
struct RowGather {
  static constexpr int kUnroll = 4;
  static constexpr int kRows = (kTileM + GatherPlace::kStride - 1) / GatherPlace::kStride;

  GatherPlace place;
  bool last;  // whether the last of the rows lies in the tile
  bool tall;  // whether the tile has more than its first half
  uint64_t row[kRows];

  // Rows token[0] to token[count - 1] of `rows`; rows past them repeat the first: rows do not mix, and theirs are not
  // stored.
  __device__ __forceinline__ RowGather(const TokenRows& rows, const int* token, int count, int k, int thread)
      : place(thread) {
    const int first = thread / 8;
    last = first + (kRows - 1) * GatherPlace::kStride < kTileM;
    tall = count > kTileM / 2;
    int from[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int r = first + j * GatherPlace::kStride;
      from[j] = token[r < count ? r : 0];
    }
    const RowAddresses addresses(rows, k, thread % 8 * 8);
#pragma unroll
    for (int j = 0; j < kRows; ++j) row[j] = addresses.of(from[j]);
  }

  // The next step, `phase` of every four; `left` columns of the rows are left, what lies past them becomes zero.
  __device__ __forceinline__ void next(int phase, int left, uint32_t stage) {
    const uint32_t bytes = threadIdx.x % 8 * 8 < left ? 16 : 0;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (j * GatherPlace::kStride >= kTileM / 2 && !tall) break;
      if (j < kRows - 1 || last) ptx::copy16(stage + place.at(j), row[j] + phase * kTileK * 2, bytes);
    }
    if (phase == kUnroll - 1) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) row[j] += kUnroll * kTileK * 2;
    }
  }
};

// Neighbouring row blocks of one expert that pass under the weight's columns together, as the plan's words say it.
struct RowGroup {
  static constexpr int kMost = 10;

  int first, height;  // blocks
  bool backwards;     // columns in descending order: the next group starts where the last one ended

  __device__ __forceinline__ explicit RowGroup(int word)
      : first(word >> 5), height(word & 15), backwards((word & 16) != 0) {}
  // The word for block `i` of an expert whose `count` blocks start at `start`: as few groups as possible, of about the
  // same height.
  static __device__ __forceinline__ int word(int start, int count, int i) {
    const int groups = (count + kMost - 1) / kMost, low = count / groups, taller = count % groups;
    const int tall_blocks = taller * (low + 1);
    const bool tall = i < tall_blocks;
    const int height = tall ? low + 1 : low, number = tall ? i / height : taller + (i - tall_blocks) / height;
    const int first = tall ? number * height : tall_blocks + (number - taller) * height;
    return (start + first) << 5 | (number & 1) << 4 | height;
  }
};

// How an up projection's columns belong to gate and up: 96 columns of each make a tile, or they alternate, or there is
// no gate.
enum class Columns { kHalves, kInterleaved, kSingle };
constexpr bool is_gated(Columns c) { return c != Columns::kSingle; }

// See Weight.
__device__ __forceinline__ int place_of(const int* places, int expert) {
  return places ? __ldg(places + expert) : expert;
}

// A weight's matrix of one expert.
struct Matrix {
  const CUtensorMap* map;
  int place;
};

// Boxes of a weight's 192 rows from `row` on that are contiguous along K: two of 64 x 96 a stage.
__device__ __forceinline__ void straight_boxes(const Matrix& first, const Matrix& second, int k, int row,
                                               int second_row, uint32_t to, uint32_t barrier) {
  ptx::copy_box(to, first.map, k, row, first.place, barrier);
  ptx::copy_box(to + kTileN / 2 * kTileK * 2, second.map, k, second_row, second.place, barrier);
}

// Boxes of a weight [K, N] that is contiguous along N: three of 64 x 64 a stage.
__device__ __forceinline__ void transposed_boxes(const Matrix& from, int k, int column, uint32_t to, uint32_t barrier) {
#pragma unroll
  for (int i = 0; i < kTileN / 64; ++i)
    ptx::copy_box(to + i * kChunk, from.map, column + i * 64, k, from.place, barrier);
}

// Rows [row, row + rows) of a panel (see panel_map), at most as many as a box has: its other rows become zero.
__device__ __forceinline__ void panel_box(uint32_t to, const CUtensorMap* map, const Plan& plan, int panel, int row,
                                          int rows, uint32_t barrier) {
  ptx::copy_box(to, map, 0, kRagged - rows, panel_row(plan, panel, row) + rows, barrier);
}

// Row block and column tile of a ticket: all tiles of `columns` column tiles over the plan's blocks, group by group.
// Inside a group rows come first, so that the tiles in flight share the weight's columns in the L2, and no weight is
// read by two groups unless its expert has many rows. One look-up, because it keeps the whole CTA waiting.
__device__ __forceinline__ Task block_task(const Plan& plan, int num_blocks, int ticket, int columns, int kind,
                                           int steps, int width) {
  if (ticket >= num_blocks * columns) return Task::none();
  const int4 entry = __ldg(reinterpret_cast<const int4*>(plan.blocks) + ticket / columns);
  const RowGroup group(entry.w);
  const int rest = ticket - group.first * columns, column = rest / group.height, block = rest - column * group.height;
  const int row = entry.y + block * kBlockRows;
  return {kind,
          entry.x,
          row,
          min(kBlockRows, entry.z - row),
          (group.backwards ? columns - 1 - column : column) * width,
          steps,
          0,
          group.first + block,
          {0, 0}};
}

}  // namespace mok::sm90
