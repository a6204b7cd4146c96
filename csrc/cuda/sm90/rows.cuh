// Tasks over row blocks: how tiles of sorted rows times an expert's weight are found, loaded and stored.
#pragma once

#include "persistent.cuh"

namespace mok::sm90 {

// The left operand: rows of K elements in `parts` equal parts, each padded to whole stages with zeros.
template <class T>
struct RowSource {
  const T* data;
  const int* order;  // null: row r of a tile is row r here; else it is row order[r] / top_k
  int top_k;
  int part;  // elements per part, a multiple of 8
  int parts;

  __device__ __forceinline__ int part_steps() const { return (part + kTileK - 1) / kTileK; }
  __device__ __forceinline__ int steps() const { return parts * part_steps(); }
};

// One producer thread's share of the left operand: 16-byte chunk thread % 8 of rows thread / 8 + 16 * j.
template <class T>
struct RowLoader {
  static constexpr uint32_t kAbsent = ~0u;

  const T* data;
  uint32_t chunk[8];  // 16-byte chunks from `data` to this thread's first of each row
  uint32_t to;
  int column, part, part_steps;

  __device__ __forceinline__ RowLoader(const RowSource<T>& source, const Task& task, int thread)
      : data(source.data), column(thread % 8 * 8), part(source.part), part_steps(source.part_steps()) {
    const int first = thread / 8;
    to = first * 128 + ((thread % 8 ^ first % 8) << 4);
    const uint32_t row_chunks = source.parts * source.part / 8;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int row = first + 16 * j;
      chunk[j] = kAbsent;
      if (row < task.rows) {
        const int at = task.row + row;
        const uint32_t from = source.order ? source.order[at] / source.top_k : at;
        chunk[j] = from * row_chunks + thread % 8;
      }
    }
  }

  // Rows that do not exist are left as they are in shared memory: rows do not mix, and theirs are not stored.
  __device__ __forceinline__ void rows(int step, uint32_t stage) const {
    const int in_part = step % part_steps * kTileK, before = step / part_steps * part;
    const uint32_t bytes = in_part + column < part ? 16 : 0;
    const uint32_t offset = bytes ? (before + in_part) / 8 : 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (chunk[j] != kAbsent)
        ptx::copy16(stage + to + j * 2048, data + (static_cast<uint64_t>(chunk[j] + offset) << 3), bytes);
    }
  }
};

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
template <class T, bool kBias>
__device__ __forceinline__ void store_tile(const Task& task, const float (&acc)[2][kAccumulators], const Warp& warp,
                                           T* to, int stride, int columns, const T* bias) {
  const int room = columns - task.column - warp.line_column();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
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
