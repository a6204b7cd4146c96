// What the kernels of every instruction set and their driver share: plain data, almost no code.
//
// Legend: T tokens, K experts per token, E experts, H hidden size, I expert (intermediate) size, S = T * K slots. A
// *row* is the position of a slot once the slots are sorted by expert; rows of slots without expert come last.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mok {

enum class Dtype : int32_t { kFloat32, kBfloat16, kFloat16 };

// A weight of one expert, [out, in]; strides in elements. Any alignment.
struct Matrix {
  char* data;
  int64_t row;
  int64_t column;
};

struct Vector {
  char* data;
  int64_t stride;
};

// One operation of the activation's postfix program; `low` is also the constant of kConstant.
enum class Op : int32_t {
  kGate,
  kUp,
  kConstant,
  kAdd,
  kMul,
  kClamp,
  kSigmoid,
  kSilu,
  kGelu,
  kGeluTanh,
  kRelu,
  kSquare,
  kTanh,
  kExp,
  kErf,
  kSoftplus,
  kSqrt,
  kRsqrt,
  kReciprocal,
  kCount,
};

struct Instruction {
  Op op;
  float low;
  float high;
};

constexpr int64_t kMaxStack = 12;  // depth of the activation's program

// Everything a call works on. Arrays of matrices have E entries; a null pointer means "not there" or "not wanted".
struct Block {
  int64_t T, H, I, E, K;
  Dtype dtype;      // of x, the experts' weights and biases, h, a, dy, dh
  Dtype out_dtype;  // of y
  bool gated;
  bool interleaved;  // h alternates gate and up
  bool weight_on_input;
  const Instruction* program;
  int64_t program_size;

  const char* x;  // [T, H] contiguous
  const Matrix* gate;
  const Matrix* up;
  const Matrix* down;
  const Vector* gate_bias;
  const Vector* up_bias;
  const Vector* down_bias;

  const int32_t* order;    // [S]: the slot of each row
  const int32_t* offsets;  // [E]: the end of each expert's rows
  const int32_t* token;    // [S]: the token of each row
  const float* weight;     // [S]: the routing weight of each row

  char* h;  // [S, N]: pre-activations in the layout of the weights, N = 2I or I
  char* a;  // [S, I]: forward: activations; backward: activations times routing weight where that is on the output
  char* y;  // [T, H]
  const float* rows;  // [S, H]: what experts elsewhere made of each row

  const char* dy;  // [T, H] contiguous, in `dtype`
  char* dh;        // [S, N]: gate columns first, whatever the layout
  float* partial;  // [tiles, S]: the routing weights' gradients, one part per tile of columns
  char* dx;        // [T, H]
  float* dweight;  // [T, K]
  const Matrix* dgate;
  const Matrix* dup;
  const Matrix* ddown;
  bool past_cache;  // whether these are too large to be still in the cache when they are read
  const Vector* dgate_bias;
  const Vector* dup_bias;
  const Vector* ddown_bias;
};

// A piece of work: rows [r0, r1) (or tokens, or output rows of a weight gradient) and columns [c0, c1) of an expert.
struct Tile {
  int64_t expert;
  int64_t r0, r1;
  int64_t c0, c1;
};

enum class Weight : int32_t { kGate, kUp, kDown };

// Whether a weight gradient is computed transposed, because its rows are what lies contiguous.
constexpr bool is_transposed(const Matrix& m) { return m.column != 1 && m.row == 1; }

// A lane is what one step along the contracted dimension takes: a pair of bfloat16, or one float.
using Lane = uint32_t;

// Tile sizes. An output element is summed along the contracted dimension in the same way for any number of rows: where
// weights are packed, in ascending order and in blocks of kSteps (half of it for dx), else in lanes and in blocks of
// Isa::kStreamedSteps. Only these and kColumns (which cuts `partial`) have a say in the bits of a result.
constexpr int64_t kColumns = 64;               // columns of a tile: four AVX-512 vectors
constexpr int64_t kGroups = 8;                 // such tiles side by side in one product, at most
constexpr int64_t kSteps = 512;                // lanes of the contracted dimension that are packed at a time
constexpr int64_t kRowsPacked = 48;            // rows of the left operand packed at a time: a multiple of 6 and of 16
constexpr int64_t kRows = 10 * kRowsPacked;    // rows of a tile, at most
constexpr int64_t kTokens = 4096;              // tokens whose 64 columns of output are summed at a time, at most
constexpr int64_t kLead = kGroups * kColumns;  // row length of a product
constexpr int64_t kRight = kSteps * (4 * kColumns + 4);  // lanes of the right operand that are packed at a time
constexpr int64_t kKept = 4;  // blocks of streamed weights' steps whose inputs stay packed: kRight lanes each
constexpr int64_t kLeadLanes = kSteps + 16;  // row length of the left operand; the pad spreads rows over cache sets
constexpr int64_t kActivationBlock = 4 * kColumns;

// The length of the parts that `rows` rows are cut into: at most `most`, about equal, whole packings.
constexpr int64_t rows_per_tile(int64_t rows, int64_t most = kRows) {
  const int64_t parts = (rows + most - 1) / most, unit = most < kRowsPacked ? 16 : kRowsPacked;
  return parts <= 1 ? rows : std::min(most, (rows + parts * unit - 1) / (parts * unit) * unit);
}

// Which inputs lie packed in a thread's buffer; none without `base`.
struct Inputs {
  const void* base = nullptr;
  const int32_t* index = nullptr;
  const float* scale = nullptr;
  int64_t first = 0, count = 0, k0 = 0, k = 0;

  bool operator==(const Inputs& o) const {
    return base == o.base && index == o.index && scale == o.scale && first == o.first && count == o.count &&
           k0 == o.k0 && k == o.k;
  }
};

// Buffers of one thread.
struct alignas(64) Scratch {
  Inputs packed;  // what is in `right`, where it is worth keeping
  alignas(64) Lane left[kRowsPacked * kLeadLanes];
  Lane left_across[kSteps * kRowsPacked];
  alignas(64) Lane right[kKept * kRight];
  float product[kRows * kLead];
  float sum[kTokens * kColumns];
  float gate[kActivationBlock], up[kActivationBlock];
  float stack[kMaxStack][3][kActivationBlock];
  float row[2][2 * kSteps];
  char scaled_row[2][2 * kSteps * sizeof(float)];
};

// The work of one instruction set and dtype.
struct Kernels {
  void (*enter)();  // called by each thread before its first tile
  void (*leave)();
  // Weights that lie contiguous along their k inputs are not packed, but all of a tile's inputs are: for how many rows
  // there is room.
  int64_t (*streamed_rows)(int64_t k);
  // The last tile of `up` and `dact` is the one likely to come next.
  void (*up)(const Block&, Scratch&, const Tile&, const Tile&);    // rows of x -> h, a
  void (*down)(const Block&, Scratch&, const Tile&);               // rows of a -> tokens of y
  void (*dact)(const Block&, Scratch&, const Tile&, const Tile&);  // rows of dy, h -> dh, a, partial
  void (*dinput)(const Block&, Scratch&, const Tile&);             // rows of dh -> tokens of dx, partial
  void (*dmatrix)(const Block&, Scratch&, const Tile&, Weight);
  void (*dbias)(const Block&, Scratch&, const Tile&, Weight);
  void (*dweight)(const Block&, Scratch&, const Tile&, int64_t tiles);
  void (*combine)(const Block&, Scratch&, const Tile&);  // rows -> tokens of y, as `down` does
};

enum class Level : int32_t { kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmx, kCount };

// Each defined in a translation unit of its own, compiled for that instruction set.
Kernels kernels_scalar(Dtype);
Kernels kernels_avx2(Dtype);
Kernels kernels_avx512(Dtype);
Kernels kernels_avx512bf16(Dtype);
Kernels kernels_amx(Dtype);

}  // namespace mok
