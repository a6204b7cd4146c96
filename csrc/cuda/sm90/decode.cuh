// The forward pass of few tokens in one launch, at the speed of reading the weights of the experts that are hit.
//
// Products are made by mma.sync, 16 weight rows times 8 tokens times 16 along K: the same bits as wgmma, whichever
// operand is which, so a token's output does not depend on which path it took. K is never split, so the work is spread
// by weight rows. A unit is a tile: 16 rows of one expert's weight (of a gated one 8 rows of gate and the same 8 of up,
// or 16 that alternate) times a block, at most 8 sorted rows of that expert.
//
// Every warp works for itself: it has a ring of stages of 256 along K of its tiles' weights, waits for one, multiplies
// it and asks the copy engine for the next one in its place. The rows that are multiplied go to registers, a stage
// ahead. Tiles of up are taken by whoever is free; of down a CTA owns columns, with the tiles of all blocks, so that it
// can also sum them over each token's slots. The weights of down do not wait for the activations `a`: warps that have
// no tile of up any more ask for them, and by the time that all CTAs have met, they are in shared memory as far as it
// goes. All CTAs must be on the card together (a cooperative launch). Every CTA makes the schedule for itself.
#pragma once

#include <cuda.h>

#include "../ptx/barrier.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/mma.cuh"
#include "activation.cuh"
#include "arguments.h"
#include "number.cuh"

namespace mok::sm90 {

constexpr int kDecodeWarps = 8, kDecodeThreads = kDecodeWarps * 32;
constexpr int kMaxTokens = 32, kMaxSlots = kDecodeThreads;
constexpr int kTileRows = 16, kTileTokens = 8;
constexpr int kDepth = 256, kStages = 3;
constexpr int kGroup = 64, kGroups = kDepth / kGroup;  // along K, what a row of a swizzled box holds
constexpr int kBoxBytes = 8 * kGroup * 2, kStageBytes = 2 * kGroups * kBoxBytes;

// In shared memory, before the rows of down, if they fit.
struct alignas(1024) DecodeMemory {
  uint8_t stages[kDecodeWarps * kStages][kStageBytes];  // [half][group][8][kGroup], swizzled by 128 bytes
  uint64_t full[kDecodeWarps * kStages];
  int tiles[kDecodeWarps * kStages];  // whose weights are in a stage, see Decode::ask
  int failed;                         // not zero once a wait has timed out
  int num_blocks;
  uint32_t firsts[kMaxSlots / 32];         // a bit per sorted row: a block begins
  alignas(16) uint32_t blocks[kMaxSlots];  // see Block
  int sorted[kMaxSlots];                   // slot of each sorted row
  alignas(16) int keys[kMaxSlots];         // of each slot: expert (E for none) << 8 | slot
  float weights[kMaxSlots];
};
constexpr int kRowsHere = 232448 - int(sizeof(DecodeMemory));  // bytes left for the rows of down

// The places of the experts, see Weight. A kernel's parameters may have 32764 bytes.
struct InOrder {
  __device__ __forceinline__ int place(int, int expert) const { return expert; }
};
struct Scattered {
  Places places;
  __device__ __forceinline__ int place(int weight, int expert) const { return places.at[weight][expert]; }
};

// One of the two products.
template <class T>
struct Product {
  CUtensorMap maps[2];  // of the weight as [ends, halves, groups, rows, columns]; two where each half has its own
  bool apart;           // it has
  int box_halves, box_groups;  // of a stage, that come with one instruction
  const T* bias[2];            // of rows 0 to 7 and 8 to 15 of tile 0; null: none
  int64_t bias_stride;         // elements from one expert's bias to the next
  int depth;                   // along K
  int step;                    // from a tile to the next, in rows of each half
  int columns;                 // rows of the halves that exist
  int tiles;                   // of a block

  // Whether half 0 or 1 of a column tile exists: sizes are multiples of 8.
  __device__ __forceinline__ bool exists(int column_tile, int half) const {
    return column_tile * step + half * (step - 8) < columns;
  }

  // Asks for a stage of a tile from k on. What does not exist comes as zeros.
  __device__ __forceinline__ void ask(uint32_t to, const int (&place)[2], int column_tile, int k,
                                      uint32_t barrier) const {
    const bool whole = box_groups > 1;  // then K is counted in groups
    const int row = step == 8 ? column_tile * 8 : 0, first = step == 8 ? 0 : column_tile * 2;
#pragma unroll 1
    for (int half = 0; half < 2; half += box_halves)
#pragma unroll 1
      for (int group = 0; group < kGroups; group += box_groups)
        ptx::copy_box(to + (half * kGroups + group) * kBoxBytes, maps + (apart ? half : 0),
                      whole ? 0 : k + group * kGroup, row, whole ? k / kGroup : 0, first + (apart ? 0 : half),
                      apart && half ? place[1] : place[0], barrier);
  }
};

// What CTAs share. Both are as before once the launch is over, but for the highest bit of `arrived`.
struct Meeting {
  int arrived;  // holds no count between two launches: the arrivals add up to a change of its highest bit
  int taken;    // tiles of up, beyond those that warps begin with
};

template <class T>
struct DecodeParams {
  const void* ids;
  bool wide;  // ids are 64-bit
  Numbers weights, out;
  const T* x;
  T* a;     // [S, I] by sorted row
  T* rows;  // [S, H] by slot; null: in shared memory
  int *order, *offsets;
  Meeting* meeting;
  Product<T> product[2];  // up, down
  Activation activation;
  int tokens, top_k, experts;
  int each, more;  // column tiles of down that every CTA has; CTAs that have one more
  bool gated, interleaved, plain;

  __device__ __forceinline__ void prefetch_maps() const {
    ptx::prefetch_map(&product[0].maps[0]);
    if (product[0].apart) ptx::prefetch_map(&product[0].maps[1]);
    ptx::prefetch_map(&product[1].maps[0]);
  }
};

// Consecutive sorted rows of one expert, at most kTileTokens.
struct Block {
  uint32_t word;
  static __device__ __forceinline__ uint32_t pack(int expert, int first, int rows) {
    return uint32_t(expert) | uint32_t(first) << 10 | uint32_t(rows) << 20;
  }
  __device__ __forceinline__ int expert() const { return word & 1023; }
  __device__ __forceinline__ int first() const { return word >> 10 & 1023; }
  __device__ __forceinline__ int rows() const { return word >> 20; }
};

struct Tile {
  Block block;
  int column;  // column tile
};

template <class T, class Order>
struct Decode {
  // Numbers of tiles: of up block by block, then those of this CTA's columns of down, column by column.
  static constexpr int kDown = 1 << 30, kNone = 0x7FFFFFFF;

  const DecodeParams<T>& p;
  const Order& order;
  DecodeMemory& t;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Asked for next: a stage of `tile`, of which `left` along K is still to come.
  int ask_stage = 0, tile = 0, left = 0, place[2] = {0, 0}, column = 0;
  int next_tile;  // of up, in lane 0
  // Multiplied next.
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ Decode(const DecodeParams<T>& params, const Order& experts, DecodeMemory& shared)
      : p(params), order(experts), t(shared), next_tile(warp * gridDim.x + blockIdx.x) {}

  __device__ __forceinline__ volatile int* failed() const { return &t.failed; }
  __device__ __forceinline__ Block block(int b) const { return {t.blocks[b]}; }
  __device__ __forceinline__ int ring(int stage) const { return warp * kStages + stage; }
  __device__ __forceinline__ uint32_t memory(int stage) const { return ptx::shared_address(t.stages[ring(stage)]); }
  static __device__ __forceinline__ int after(int stage) { return stage + 1 == kStages ? 0 : stage + 1; }

  // A wait of seconds can only be a bug. It is marked and ends, as do all waits after it; what is computed then becomes
  // NaN, so that the mistake shows and the device does not hang.
  template <class Ready>
  __device__ __forceinline__ void wait(Ready ready) const {
    if (ready()) return;
    constexpr long long kLimit = 1LL << 33;  // clocks
    const long long start = clock64();
    while (!ready()) {
      if (*failed()) return;
      if (clock64() - start > kLimit) *failed() = 1;
    }
  }

  struct Share {
    int first, end;
  };
  // This CTA's columns of down, in tiles. Those CTAs have one more whose warps begin with fewer tiles of up.
  __device__ __forceinline__ Share down_columns() const {
    const int cta = gridDim.x - 1 - blockIdx.x, first = p.each * cta + min(cta, p.more);
    return {first, first + p.each + (cta < p.more)};
  }

  __device__ __forceinline__ Tile locate(int tile) const {
    if (tile < kDown) {
      const int b = tile / p.product[0].tiles;
      return {block(b), tile - b * p.product[0].tiles};
    }
    const int i = tile - kDown, column = i / t.num_blocks;
    return {block(i - column * t.num_blocks), down_columns().first + column};
  }

  // ---- Schedule: a stable sort of the slots by expert, a thread for each slot.

  __device__ __forceinline__ void schedule() {
    const int slot = threadIdx.x, slots = p.tokens * p.top_k;
    int key = kNone;
    if (slot < slots) {
      const long long id = p.wide ? static_cast<const long long*>(p.ids)[slot] : static_cast<const int*>(p.ids)[slot];
      t.weights[slot] = p.weights.load(slot);
      key = int(id >= 0 && id < p.experts ? id : p.experts) << 8 | slot;
    }
    t.keys[slot] = key;
    if (slot < kMaxSlots / 32) t.firsts[slot] = 0;
    __syncthreads();
    int row = 0, begin = 0, end = 0;  // sorted row, those of its expert
    bool first = false;               // of a block
    if (slot < slots) {
      const int expert = key >> 8 << 8;
#pragma unroll 1
      for (int i = 0; i < slots; i += 4) {
        const int4 k = *reinterpret_cast<const int4*>(t.keys + i);
        row += (k.x < key) + (k.y < key) + (k.z < key) + (k.w < key);
        begin += (k.x < expert) + (k.y < expert) + (k.z < expert) + (k.w < expert);
        end += (k.x < expert + 256) + (k.y < expert + 256) + (k.z < expert + 256) + (k.w < expert + 256);
      }
      t.sorted[row] = slot;
      first = key >> 8 < p.experts && (row - begin) % kTileTokens == 0;
      if (first) atomicOr(&t.firsts[row / 32], 1u << row % 32);
    }
    __syncthreads();
    int before = 0, blocks = 0;
#pragma unroll
    for (int i = 0; i < kMaxSlots / 32; ++i) {
      const uint32_t bits = t.firsts[i];
      before += __popc(i < row / 32 ? bits : i == row / 32 ? bits & ((1u << row % 32) - 1) : 0);
      blocks += __popc(bits);
    }
    if (first) t.blocks[before] = Block::pack(key >> 8, row, min(kTileTokens, end - row));
    if (slot == 0) t.num_blocks = blocks;
    __syncthreads();
  }

  // What the caller gets of the schedule.
  __device__ __forceinline__ void publish() const {
    const int slots = p.tokens * p.top_k;
    if (threadIdx.x < slots) p.order[threadIdx.x] = t.sorted[threadIdx.x];
#pragma unroll 1
    for (int e = threadIdx.x; e < p.experts; e += kDecodeThreads) {
      int end = 0;
#pragma unroll 1
      for (int i = 0; i < slots; ++i) end += t.keys[i] >> 8 <= e;
      p.offsets[e] = end;
    }
  }

  // ---- Loading

  // Goes on to the next tile; kNone after the last one.
  __device__ __forceinline__ void open_next() {
    if (tile == kNone) return;
    if (tile < kDown) {
      tile = __shfl_sync(~0u, next_tile, 0);
      if (tile >= t.num_blocks * p.product[0].tiles) tile = kDown + warp;
    } else {
      tile += kDecodeWarps;
    }
    if (tile >= kDown) {
      const Share share = down_columns();
      if (tile - kDown >= (share.end - share.first) * t.num_blocks) {
        tile = kNone;
        return;
      }
    }
    const Tile at = locate(tile);
    const bool down = tile >= kDown;
    place[0] = order.place(down ? Places::kDown : 0, at.block.expert());
    place[1] = order.place(1, at.block.expert());
    column = at.column;
    left = p.product[down].depth;
  }

  // Asks for the next stage. Whoever finishes with the last of a tile of up takes another one, which is known by the
  // time it is needed.
  __device__ __forceinline__ void ask() {
    if (left <= 0) open_next();
    if (lane == 0) t.tiles[ring(ask_stage)] = tile;
    if (tile != kNone) {
      if (ptx::elect_lane()) {
        const Product<T>& m = p.product[tile >= kDown];
        const uint32_t barrier = ptx::shared_address(t.full + ring(ask_stage));
        ptx::barrier_arrive_expect(barrier, kStageBytes);
        m.ask(memory(ask_stage), place, column, m.depth - left, barrier);
      }
      left -= kDepth;
      if (left <= 0 && tile < kDown) {
        next_tile = gridDim.x * kDecodeWarps;
        if (lane == 0 && next_tile < t.num_blocks * p.product[0].tiles) next_tile += atomicAdd(&p.meeting->taken, 1);
      }
    }
    __syncwarp();
    ask_stage = after(ask_stage);
  }

  // ---- Multiplying

  // Of a lane, the operand of a stage's products: of one row the pairs 8 apart along K, of which `left` are there.
  using Operand = uint32_t[kDepth / 8];
  static __device__ __forceinline__ void load_row(Operand& to, const T* row, int left) {
#pragma unroll
    for (int i = 0; i < kDepth / 8; ++i) to[i] = i * 8 < left ? *reinterpret_cast<const uint32_t*>(row + i * 8) : 0;
  }

  // One stage, K ascending: every product waits for the one before, so the weights are read ahead. Beyond the end of
  // K both operands are zero.
  static __device__ __forceinline__ void multiply(float (&acc)[4], uint32_t weight, const Operand& row) {
    constexpr int kSteps = kDepth / 16, kAhead = 4, kInGroup = kGroup / 16;
    uint32_t a[kSteps][4];
    const auto load = [&](int i) { ptx::load_matrices((weight ^ i % kInGroup * 32) + i / kInGroup * kBoxBytes, a[i]); };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i + kAhead < kSteps) load(i + kAhead);
      ptx::multiply<T>(acc, a[i], row + 2 * i);
    }
  }

  __device__ __forceinline__ void multiply_tile(bool down, const Tile& tile) {
    const Product<T>& m = p.product[down];
    const int token = min(lane / 4, tile.block.rows() - 1), sorted = tile.block.first() + token;
    const T* row = (down ? p.a + static_cast<int64_t>(sorted) * m.depth
                         : p.x + static_cast<int64_t>(t.sorted[sorted] / p.top_k) * m.depth) +
                   lane % 4 * 2;
    // Of this lane, in a stage: rows of matrices, see ptx::load_matrices. The swizzle exchanges a row's 16 bytes.
    const uint32_t weight = lane / 8 % 2 * kGroups * kBoxBytes + lane % 8 * 128 + (lane / 16 ^ lane % 8) * 16;
    Operand ahead;
    load_row(ahead, row, m.depth);
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int k = 0; k < m.depth; k += kDepth) {
      Operand now;
#pragma unroll
      for (int i = 0; i < kDepth / 8; ++i) now[i] = ahead[i];
      row += kDepth;
      load_row(ahead, row, m.depth - k - kDepth);
      const uint32_t barrier = ptx::shared_address(t.full + ring(stage));
      wait([&] { return ptx::barrier_try_wait(barrier, parity); });
      multiply(acc, memory(stage) + weight, now);
      __syncwarp();
      ask();
      stage = after(stage);
      if (stage == 0) parity ^= 1;
    }
    if (m.bias[0]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!m.exists(tile.column, half)) break;
        const float bias =
            to_float(m.bias[half][tile.block.expert() * m.bias_stride + tile.column * m.step + lane / 4]);
        acc[2 * half] += bias, acc[2 * half + 1] += bias;
      }
    }
    // Rows lane / 4 of the weight, then 8 further, times tokens 2 * (lane % 4) and one more.
    uint32_t low = Pair<T>::pack(acc[0], acc[1]), high = Pair<T>::pack(acc[2], acc[3]);
    if (*failed()) low = high = 0x7FFF7FFF;
    if (down) {
      finish_down(tile, low, high);
    } else if (p.plain) {
      finish_up(Gate<true>{p.activation}, tile, low, high);
    } else {
      finish_up(Gate<false>{p.activation}, tile, low, high);
    }
  }

  static __device__ __forceinline__ void put(T* to, uint32_t value) {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(value);
  }

  // The activation sees h rounded, as where it is saved.
  template <class Gate>
  __device__ __forceinline__ void finish_up(const Gate& gate, const Tile& tile, uint32_t low, uint32_t high) {
    const int inner = p.product[1].depth, n = lane % 4 * 2;
    T* const to = p.a + static_cast<int64_t>(tile.block.first() + n) * inner;
    const auto write = [&](int column, uint32_t pair) {
      if (n < tile.block.rows()) put(to + column, pair);
      if (n + 1 < tile.block.rows()) put(to + inner + column, pair >> 16);
    };
    if (!p.gated) {
      const int column = tile.column * 16 + lane / 4;
      const float2 v = Pair<T>::unpack(low), w = Pair<T>::unpack(high);
      write(column, Pair<T>::pack(gate.value(v.x), gate.value(v.y)));
      if (p.product[0].exists(tile.column, 1)) write(column + 8, Pair<T>::pack(gate.value(w.x), gate.value(w.y)));
      return;
    }
    int column = tile.column * 8 + lane / 4;
    if (p.interleaved) {  // gate is in even rows, up in the odd ones after them: neighbours exchange halves
      const bool odd = lane & 4;
      const uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 4);
      (odd ? low : high) = other;
      column = tile.column * 8 + lane / 8 + (odd ? 4 : 0);
    }
    const float2 g = Pair<T>::unpack(low), u = Pair<T>::unpack(high);
    write(column, Pair<T>::pack(gate.value(g.x, u.x), gate.value(g.y, u.y)));
  }

  // The rows of down: this CTA's columns of each slot.
  struct Rows {
    T* data;
    int stride, first, columns;  // first of the columns
  };
  __device__ __forceinline__ Rows rows() const {
    const Share share = down_columns();
    const int hidden = p.product[0].depth, first = share.first * kTileRows,
              columns = min(share.end * kTileRows, hidden) - first;
    if (p.rows) return {p.rows + first, hidden, first, columns};
    return {reinterpret_cast<T*>(&t + 1), columns, first, columns};
  }

  __device__ __forceinline__ void finish_down(const Tile& tile, uint32_t low, uint32_t high) {
    const Rows to = rows();
    const int n = lane % 4 * 2, column = tile.column * kTileRows - to.first + lane / 4;
    const bool both = p.product[1].exists(tile.column, 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (n + i >= tile.block.rows()) break;
      const int slot = t.sorted[tile.block.first() + n + i];
      T* const at = to.data + static_cast<int64_t>(slot) * to.stride + column;
      put(at, low >> 16 * i);
      if (both) put(at + 8, high >> 16 * i);
    }
  }

  // All tiles of one product that this warp has.
  __device__ __forceinline__ void consume(bool down) {
#pragma unroll 1
    while (true) {
      const int tile = t.tiles[ring(stage)];
      if (tile >= (down ? kNone : kDown)) return;
      multiply_tile(down, locate(tile));
    }
  }

  // Waits until `a` is complete: all warps of all CTAs have arrived. `before`: the barrier's word before that.
  __device__ __forceinline__ void meet(int before) const {
    __syncthreads();
    if (threadIdx.x == 0) {
      int* const arrived = &p.meeting->arrived;
      ptx::add_release(arrived, int(blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u));
      wait([&] { return (ptx::load_acquire(arrived) ^ before) < 0; });
      if (blockIdx.x == 0) p.meeting->taken = 0;
    }
    __syncthreads();
  }

  // The weighted sum over each token's slots, in slot order: 8 threads for each token.
  __device__ __forceinline__ void combine() const {
    constexpr int kThreads = kDecodeThreads / kMaxTokens, kFlight = 8;
    const int token = threadIdx.x / kThreads, hidden = p.product[0].depth;
    if (token >= p.tokens) return;
    const Rows from = rows();
    const float poison = *failed() ? __int_as_float(0x7FC00000) : 0.0f;
#pragma unroll 1
    for (int column = threadIdx.x % kThreads * 2; column < from.columns; column += 2 * kThreads) {
      float2 sum = make_float2(poison, poison);
#pragma unroll 1
      for (int k0 = 0; k0 < p.top_k; k0 += kFlight) {
        uint32_t part[kFlight];
        bool counts[kFlight];
#pragma unroll
        for (int k = 0; k < kFlight; ++k) {
          const int slot = token * p.top_k + k0 + k;
          counts[k] = k0 + k < p.top_k && t.keys[slot] >> 8 < p.experts;
          part[k] = 0;
          if (counts[k])
            part[k] = *reinterpret_cast<const uint32_t*>(from.data + static_cast<int64_t>(slot) * from.stride + column);
        }
#pragma unroll
        for (int k = 0; k < kFlight; ++k) {
          if (!counts[k]) continue;
          const float2 v = Pair<T>::unpack(part[k]);
          const float w = t.weights[token * p.top_k + k0 + k];
          sum.x += w * v.x;
          sum.y += w * v.y;
        }
      }
      const int64_t at = static_cast<int64_t>(token) * hidden + from.first + column;
      if (p.out.dtype == Dtype::kFloat32) {
        *reinterpret_cast<float2*>(static_cast<float*>(p.out.data) + at) = sum;
      } else {
        *reinterpret_cast<uint32_t*>(static_cast<T*>(p.out.data) + at) = Pair<T>::pack(sum.x, sum.y);
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (lane < kStages) {
      ptx::barrier_init(ptx::shared_address(t.full + ring(lane)), 1);
      ptx::barrier_init_fence();
    }
    int before = 0;
    if (threadIdx.x == 0) {
      p.prefetch_maps();
      t.failed = 0;
      // Read before this CTA arrives: until then the highest bit cannot change.
      before = *static_cast<volatile const int*>(&p.meeting->arrived);
    }
    schedule();
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) ask();
    if (blockIdx.x == gridDim.x - 1) publish();
#pragma unroll 1
    for (int down = 0; down < 2; ++down) {
      consume(down);
      if (!down) meet(before);
    }
    __syncthreads();
    combine();
  }
};

template <class T, class Order>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams<T> p, const __grid_constant__ Order order) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Decode<T, Order>(p, order, *reinterpret_cast<DecodeMemory*>(memory)).run();
}

}  // namespace mok::sm90
