// Tasks over row blocks: how tiles of sorted rows times an expert's weight are found, loaded and stored.
#pragma once

#include "persistent.cuh"

namespace mok::sm90 {

__host__ __device__ inline int steps_of(int k) { return (k + kTileK - 1) / kTileK; }

// One thread's share of a tile of gathered rows of k elements.
template <class T>
struct RowGather {
  static constexpr int kRows = (kTileM + GatherPlace::kStride - 1) / GatherPlace::kStride;

  GatherPlace place;
  bool last;  // whether the last of the rows lies in the tile
  bool tall;  // whether the tile has more than its first half
  const T* row[kRows];

  // Rows token[0] to token[count - 1] of `data`; rows past them repeat the first: rows do not mix, and theirs are not
  // stored.
  __device__ __forceinline__ RowGather(const T* data, const int* token, int count, int k, int thread) : place(thread) {
    const int first = thread / 8;
    last = first + (kRows - 1) * GatherPlace::kStride < kTileM;
    tall = count > kTileM / 2;
    int from[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int r = first + j * GatherPlace::kStride;
      from[j] = token[r < count ? r : 0];
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) row[j] = data + static_cast<int64_t>(from[j]) * k + thread % 8 * 8;
  }

  // The next step; `left` columns of the rows are left, what lies past them becomes zero.
  __device__ __forceinline__ void next(int left, uint32_t stage) {
    const uint32_t bytes = threadIdx.x % 8 * 8 < left ? 16 : 0;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (j * GatherPlace::kStride >= kTileM / 2 && !tall) break;
      if (j < kRows - 1 || last) ptx::copy16(stage + place.at(j), row[j], bytes);
      row[j] += kTileK;
    }
  }
};

// Rows [row, row + rows) of a ragged map (see ragged_map): the box's other rows become zero.
__device__ __forceinline__ void ragged_box(uint32_t to, const CUtensorMap* map, int column, int row, int rows,
                                           uint32_t barrier) {
  ptx::copy_box(to, map, column, kRagged - rows, row + rows, barrier);
}

// Row block and column tile of a ticket: all tiles of `columns` column tiles over the plan's blocks.
__device__ __forceinline__ Task block_task(const Plan& plan, int num_blocks, int ticket, int columns, int kind,
                                           int steps, int width) {
  if (ticket >= num_blocks * columns) return Task::none();
  const int2 at = raster(ticket, num_blocks, columns);
  const int4 block = reinterpret_cast<const int4*>(plan.blocks)[at.x];
  return {kind, block.x, block.y, block.z, at.y * width, steps, 0, at.x};
}

template <class T>
__device__ __forceinline__ float2 bias_pair(const T* bias, int column, int columns) {
  if (column >= columns) return make_float2(0.0f, 0.0f);
  return Pair<T>::unpack(*reinterpret_cast<const uint32_t*>(bias + column));
}

// Writes the accumulators (plus `bias`, one per column, or null) of a tile to rows of `columns` elements.
template <class T, bool kBias, int kHalves>
__device__ __forceinline__ void store_tile(const Task& task, const Accumulators<kHalves>& acc, const Warp& warp, T* to,
                                           int stride, int columns, const T* bias) {
  const int room = columns - task.column - warp.line_column();
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int first = half * 64 + warp.index() * 16, rows = task.rows - first - warp.line_row();
    if (task.rows <= first) break;
    T* const at =
        to + static_cast<int64_t>(task.row + first + warp.line_row()) * stride + task.column + warp.line_column();
#pragma unroll
    for (int piece = 0; piece < 6; ++piece) {
      uint32_t out[8];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        float2 add = make_float2(0.0f, 0.0f);
        if (kBias && bias) add = bias_pair(bias, task.column + piece * 32 + b * 8 + warp.lane() % 4 * 2, columns);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* const v = &acc[half][(piece * 4 + b) * 4 + r * 2];
          out[2 * b + r] = Pair<T>::pack(v[0] + add.x, v[1] + add.y);
        }
      }
      __syncwarp();
      warp.put<0>(out);
      __syncwarp();
      warp.store<0>(at + piece * 32, stride, room > piece * 32 ? rows : 0);
    }
  }
}

}  // namespace mok::sm90
