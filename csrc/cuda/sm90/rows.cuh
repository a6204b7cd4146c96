// Tasks over row blocks: how tiles of sorted rows times an expert's weight are found, loaded and stored.
#pragma once

#include "strips.cuh"

namespace mok::sm90 {

// Their tiles. Rows that lie in order come in boxes of kBoxRows.
template <Tiles kShape, bool kSplit = false>
struct RowTiles : Common<height_of(kShape) / kPartRows, kShape == Tiles::kTall ? 128 : 192, kSplit> {
  static constexpr Tiles kTiles = kShape;
  static constexpr int kBoxRows = kShape == Tiles::kWide ? 128 : 64;

  // Of a stage of a tile of so many rows, by the copy engine.
  static __device__ __forceinline__ uint32_t bytes_of_rows(int rows) {
    return kShape == Tiles::kWide ? RowTiles::kBytesA : parts_of(rows) * kChunk;
  }
};

// Where the rows of tokens are, from a column on.
struct RowAddresses {
  uint64_t rest, own;  // of place 0; of the lowest int's, had that been the number 2^31
  uint32_t stride;     // bytes

  __device__ __forceinline__ RowAddresses(const TokenRows& rows, int columns, uint32_t column)
      : rest(reinterpret_cast<uint64_t>(rows.rows) + column * 2), stride(columns * 2) {
    own = reinterpret_cast<uint64_t>(rows.own) + column * 2 - (static_cast<uint64_t>(stride) << 31);
  }
  __device__ __forceinline__ uint64_t of(int place) const {
    return (place < 0 ? own : rest) + static_cast<uint64_t>(static_cast<uint32_t>(place)) * stride;
  }
};

// One thread's share of a tile of gathered rows of k elements. Every row has its address in registers of its own, which
// changes once in four steps: copies that share a register for their addresses wait for one another.
template <class Tile>
struct RowGather {
  static constexpr int kUnroll = 4, kStride = GatherPlace::kStride;
  static constexpr int kRows = (Tile::kTileM + kStride - 1) / kStride;

  GatherPlace place;
  int parts;  // that the tile has
  bool last;  // whether the last of the rows lies in the tile
  uint64_t row[kRows];

  // Rows token[0] to token[count - 1] of `rows`, none if there are none; rows past them repeat the last: rows do not
  // mix, and theirs are not stored.
  __device__ __forceinline__ RowGather(const TokenRows& rows, const int* token, int count, int k, uint32_t thread)
      : place(thread), parts(parts_of(count)) {
    const int first = int(thread / 8), end = max(count, 1) - 1 - first;
    last = first + (kRows - 1) * kStride < Tile::kTileM;
    int from[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) from[j] = token[first + min(j * kStride, end)];
    const RowAddresses addresses(rows, k, thread % 8 * 8);
#pragma unroll
    for (int j = 0; j < kRows; ++j) row[j] = addresses.of(from[j]);
  }

  // The next step, `phase` of every four; `left` columns of the rows are left, what lies past them becomes zero.
  __device__ __forceinline__ void next(int phase, int left, uint32_t stage) {
    const uint32_t bytes = threadIdx.x % 8 * 8 < left ? 16 : 0;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (j * kStride / kPartRows >= parts) break;  // no later row lies in a part that there is
      if (Tile::kTileM % kStride == 0 || j < kRows - 1 || last)
        ptx::copy16(place.at(stage, j), row[j] + phase * kTileK * 2, bytes);
    }
    if (phase == kUnroll - 1) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) row[j] += kUnroll * kTileK * 2;
    }
  }
};

// Neighbouring row blocks of one expert that pass under the weight's columns together, as the plan's words say it.
struct RowGroup {
  static constexpr int kMostRows = 1344, kHeightBits = 5;
  static_assert(kMostRows / height_of(Tiles::kLow) < 1 << kHeightBits, "a group's height fits its word");

  int first, height;  // blocks
  bool backwards;     // columns in descending order: the next group starts where the last one ended

  __device__ __forceinline__ explicit RowGroup(int word)
      : first(word >> (kHeightBits + 1)),
        height(word & ((1 << kHeightBits) - 1)),
        backwards((word >> kHeightBits & 1) != 0) {}
  // The word for block `i` of an expert whose `count` blocks of `rows` rows start at `start`: as few groups as
  // possible, of about the same height.
  static __device__ __forceinline__ int word(int start, int count, int i, int rows) {
    const int most = kMostRows / rows, groups = (count + most - 1) / most, low = count / groups,
              taller = count % groups;
    const int tall_blocks = taller * (low + 1);
    const bool tall = i < tall_blocks;
    const int height = tall ? low + 1 : low, number = tall ? i / height : taller + (i - tall_blocks) / height;
    const int first = tall ? number * height : tall_blocks + (number - taller) * height;
    return (start + first) << (kHeightBits + 1) | (number & 1) << kHeightBits | height;
  }
};

// How an up projection's columns belong to gate and up: as many columns of each make a tile, or they alternate, or
// there is no gate.
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

// The weights of a stage: half a tile's columns from `column` on, the other half from `other_column` on. kTransposed:
// they are contiguous along the columns instead of K; halves of 96 columns then follow each other, unless the tile is
// split.
template <class Tile, bool kTransposed>
__device__ __forceinline__ void weight_boxes(const Matrix& weight, const Matrix& other, int k, int column,
                                             int other_column, uint32_t to, uint32_t barrier) {
  const auto box = [&](const Matrix& from, int column, uint32_t to) {
    ptx::copy_box(to, from.map, kTransposed ? column : k, kTransposed ? k : column, from.place, barrier);
  };
  constexpr int kHalf = Tile::kTileN / 2;
  if constexpr (kTransposed && kHalf % 64 && !Tile::kSplit) {
#pragma unroll
    for (int i = 0; i < Tile::kTileN / 64; ++i) box(weight, column + i * 64, to + i * kChunk);
  } else {
    constexpr int kBoxes = kTransposed ? (kHalf + 63) / 64 : 1;  // of a half
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      box(weight, column + i * 64, to + i * kChunk);
      box(other, other_column + i * 64, to + Tile::kBytesB / 2 + i * kChunk);
    }
  }
}

// Rows [row, row + rows) of a panel (see panel_map), at most as many as a box has: its other rows become zero.
__device__ __forceinline__ void panel_box(uint32_t to, const CUtensorMap* map, const Plan& plan, int panel, int row,
                                          int rows, uint32_t barrier) {
  ptx::copy_box(to, map, 0, kRagged - rows, panel_row(plan, panel, row) + rows, barrier);
}

// A panel's rows of a tile.
template <class Tile>
__device__ __forceinline__ void panel_boxes(uint32_t to, const CUtensorMap* map, const Plan& plan, int panel,
                                            const Task& task, uint32_t barrier) {
#pragma unroll
  for (int first = 0; first < Tile::kTileM; first += Tile::kBoxRows) {
    const int rows = min(task.rows - first, Tile::kBoxRows);
    if (first == 0 || rows > 0) panel_box(to + first * kTileK * 2, map, plan, panel, task.row + first, rows, barrier);
  }
}

template <class Tile>
__device__ __forceinline__ int num_blocks(const Plan& plan) {
  return __ldg(plan.blocks[int(Tile::kTiles)].count);
}

// Row block and column tile of a ticket: all tiles of `columns` column tiles over the plan's blocks, group by group.
// Inside a group rows come first, so that the tiles in flight share the weight's columns in the L2, and no weight is
// read by two groups unless its expert has many rows. One look-up, because it keeps the whole CTA waiting.
template <class Tile>
__device__ __forceinline__ Task block_task(const Plan& plan, int num_blocks, int ticket, int columns, int kind,
                                           int steps, int width) {
  if (ticket >= num_blocks * columns) return Task::none();
  const int4 entry = __ldg(reinterpret_cast<const int4*>(plan.blocks[int(Tile::kTiles)].groups) + ticket / columns);
  const RowGroup group(entry.w);
  const int rest = ticket - group.first * columns, column = rest / group.height, block = rest - column * group.height;
  const int row = entry.y + block * Tile::kTileM;
  return {kind,
          entry.x,
          row,
          min(Tile::kTileM, entry.z - row),
          (group.backwards ? columns - 1 - column : column) * width,
          steps,
          0,
          group.first + block,
          {0, 0}};
}

}  // namespace mok::sm90
