// What the host passes to the kernels' launchers. Plain C++: the binding includes torch, the kernels include CUDA.
//
// Legend: T tokens, K experts per token, E experts, H hidden size, I expert size, S = T * K slots (slot s = t * K + k),
// N columns of the up projection (2 * I, or I for ungated experts). "Sorted rows" are the slots sorted by expert.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>

namespace mok::sm90 {

enum class Dtype : int { kBFloat16, kFloat16, kFloat32, kInt32, kInt64 };

// How gate and up are stored, see mok_compile/spec.py. Separate weights have two base addresses, the others one.
enum class Layout : int { kConcat, kSeparate, kSingle, kInterleaved };

// kind(clamp(gate)) * (clamp(up) + up_offset), see GatedForm in mok_compile/activation.py.
struct Activation {
  enum Kind : int { kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kSigmoid, kIdentity, kSwish };
  int kind;
  bool swapped;  // the nonlinear factor takes the second half
  float alpha, gate_min, gate_max, up_min, up_max, up_offset;
};

// silu(gate) * up, for which the kernels have a version without run-time choices.
inline bool is_plain_silu(const Activation& f) {
  constexpr float kNone = std::numeric_limits<float>::infinity();
  return f.kind == Activation::kSilu && !f.swapped && f.gate_min == -kNone && f.gate_max == kNone &&
         f.up_min == -kNone && f.up_max == kNone && f.up_offset == 0.0f;
}

constexpr int kMaxExperts = 1023;

// The activation and dh, which nobody else sees, lie in panels of 64 columns, [panels][room][64] for sorted rows: what
// the copy engine fetches is then one piece of memory. A part of dh (gate, up; or all columns, where these alternate or
// there is no gate) begins with a panel of its own.
constexpr int kPanel = 64;
constexpr int64_t panels_of(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

struct Parts {
  int64_t columns, count;  // of each part; at most two
  int64_t panels() const { return panels_of(columns); }
};
inline Parts parts_of(Layout layout, int64_t inner) {
  if (layout == Layout::kSingle) return {inner, 1};
  return layout == Layout::kInterleaved ? Parts{2 * inner, 1} : Parts{inner, 2};
}

// A weight of all experts: matrices of 16-bit elements, their rows `pitch` elements apart, wherever they are. That of
// expert e begins place(e) * unit bytes after `data`, the lowest of their addresses; `unit` divides all distances, so
// that a place is a coordinate of a tensor map: `ends` of them, at most 2^31.
struct Weight {
  const void* data;
  int64_t pitch, unit, ends;
  const int* places;  // [E] on the device; null: place(e) = e
};

// The places of a block's weights: of up (two, where gate and up are separate) and of down.
struct Places {
  static constexpr int kWeights = 3, kDown = 2;
  int at[kWeights][kMaxExperts];
};

struct Group;  // see exchange.h
struct Pull;

struct Sizes {
  int64_t tokens, hidden, inner, experts, top_k;
  int64_t slots() const { return tokens * top_k; }
};

// The shapes of output tiles of products over sorted rows: 128 rows x 192 columns, 192 x 128, or 64 x 192. A tile's
// rows are those of a row block: neighbours of one expert. Backward has the first two.
enum class Tiles : int { kWide, kTall, kLow };
constexpr int kTileShapes = 3, kBackwardShapes = 2;
constexpr int height_of(Tiles tiles) { return tiles == Tiles::kWide ? 128 : tiles == Tiles::kTall ? 192 : 64; }

// All row blocks of one height, in order of rows.
struct RowBlocks {
  int height;
  int* count;   // 1
  int* groups;  // [most][4]: of the block's group: expert, first row, end of its rows, RowGroup::word

  static int64_t most(const Sizes& n, Tiles tiles) {
    const int64_t slots = n.slots();
    return slots / height_of(tiles) + (slots < n.experts ? slots : n.experts);
  }
};

// Rows of tokens [tokens, H], by their place (Plan::token). Only in an exchange are there `own` ones.
struct TokenRows {
  const void* rows;
  const void* own;

  TokenRows(const void* rows = nullptr, const void* own = nullptr) : rows(rows), own(own) {}
};

// Device scratch shared by the kernels of one pass: counters, the inverse of `order`, and the row blocks.
struct Plan {
  static constexpr int kHeader = 64;  // ints before the arrays
  static constexpr int kTickets = 8;  // ticket counters

  const int* order;    // [S] slot at each sorted position
  const int* offsets;  // [E] ends of the experts' rows
  int* error;          // not zero once a wait has timed out
  int* tickets;        // [kTickets]
  int* position;       // [S] sorted position of each slot, -1 if it has no expert
  int* token;          // [S] place of each sorted position's token: its number. See own_count
  int* rows;           // 1: sorted rows that have an expert
  int* landed;         // [S / kChunk] units of each chunk of sorted rows whose tokens were pulled, see exchange.h
  int* places;         // [Places::kWeights][E] of weights whose places are not 0, 1, 2, ...
  int* done;           // warps that have finished the up projection of each of the blocks that forward takes
  RowBlocks blocks[kTileShapes];  // of every `Tiles`; forward has those that it takes, backward all of its own
  int64_t room;  // sorted rows that there is memory for; with more of them there is an error, and nothing else
  // In an exchange, so many tokens from that one on are this rank's own, and their rows lie apart from the others':
  // they have places of their own, from the lowest int on, and the tokens behind them move up.
  int own_first, own_count;

  // Size of the scratch in ints.
  static int64_t scratch(const Sizes& n) {
    const int64_t wide = RowBlocks::most(n, Tiles::kWide), tall = RowBlocks::most(n, Tiles::kTall),
                  low = RowBlocks::most(n, Tiles::kLow);
    return kHeader + 4 * (wide + tall + low) + low + 2 * n.slots() + chunks(n.slots()) + Places::kWeights * n.experts;
  }
  // Sorted rows are pulled in units, and looked at in chunks.
  static constexpr int kChunk = 32, kUnits = 4;
  static int64_t chunks(int64_t rows) { return (rows + kChunk - 1) / kChunk; }
  static Plan at(int* scratch, const int* order, const int* offsets, const Sizes& n) {
    Plan plan{};
    plan.order = order;
    plan.offsets = offsets;
    plan.error = scratch;
    plan.tickets = scratch + 1;
    plan.rows = plan.tickets + kTickets;
    int* next = scratch + kHeader;
    for (const Tiles tiles : {Tiles::kWide, Tiles::kTall, Tiles::kLow}) {
      plan.blocks[int(tiles)] = {height_of(tiles), plan.rows + 1 + int(tiles), next};
      next += 4 * RowBlocks::most(n, tiles);
    }
    plan.done = next;
    plan.position = plan.done + RowBlocks::most(n, Tiles::kLow);  // of which there are most
    plan.token = plan.position + n.slots();
    plan.landed = plan.token + n.slots();
    plan.places = plan.landed + chunks(n.slots());
    plan.room = n.slots();
    return plan;  // no own ones
  }
};

// Sorts ids [T, K] and fills order, offsets and the plan; zeroes the rows of h [S, columns] that belong to no expert
// (h may be null). `counts` is scratch of schedule_scratch() ints.
struct ScheduleArguments {
  Sizes sizes;
  const void* ids;
  Dtype ids_dtype;
  int* order;
  int* offsets;
  int* counts;
  Plan plan;
  Tiles tiles;  // whose blocks the plan gets
  void* h;
  int64_t h_columns;
};
int64_t schedule_scratch(const Sizes& sizes);
const char* schedule(const ScheduleArguments& arguments, void* stream);

// Fills the plan from order and offsets, with the blocks of backward's tiles.
const char* replan(const Sizes& sizes, const Plan& plan, void* stream);

// Copies the experts' places to the plan.
const char* tell_places(const Sizes& sizes, const Plan& plan, const Places& places, void* stream);

// `transposed`, here and below: the weights are stored as [E, in, out] instead of [E, out, in].
//
// rows[r] = down(activation(up(x[token of r]))) for every sorted row r; a, panels of I columns, is scratch; h [S, N]
// may be null.
struct ForwardArguments {
  Sizes sizes;
  Dtype dtype;
  Layout layout;
  bool transposed;
  Activation activation;
  Plan plan;
  Tiles tiles;  // no bit depends on them
  TokenRows x;
  Weight up[2];
  Weight down;
  const void* up_bias[2];  // null: none
  const void* down_bias;   // null: none
  void* h;
  void* a;
  void* rows;
  const Pull* pull;  // x, or null
};
const char* forward(const ForwardArguments& arguments, void* stream);

// The same and the sum over slots in one launch, for few tokens (see decode_takes()) and weights [E, out, in]. Saves no
// h; a [S, I] and rows [S + 1, H] are scratch. Also fills order and offsets.
struct DecodeArguments {
  Sizes sizes;
  Dtype dtype;
  Layout layout;
  Activation activation;
  const void* x;
  const void* ids;
  Dtype ids_dtype;
  const void* weights;
  Dtype weights_dtype;
  Weight up[2];
  Weight down;
  const Places* places;    // on the host; null: place(e) = e
  const void* up_bias[2];  // null: none
  const void* down_bias;   // null: none
  void* y;
  Dtype y_dtype;
  int* order;
  int* offsets;
  void* a;
  void* rows;
};
bool decode_takes(const Sizes& sizes);
const char* decode(const DecodeArguments& arguments, void* stream);

// A router: mok_compile/router.py in numbers. `dtype` of a step is what its result is rounded to.
constexpr int kMaxRouted = 1024, kMaxChosen = 32, kMaxSteps = 8;  // experts; chosen ones and groups; steps of a chain
constexpr int64_t kMaxRoutedTokens = 1 << 16;

struct RouteStep {
  enum Op : int {
    kCast,
    kSoftmax,
    kSigmoid,
    kSoftplus,
    kSqrt,
    kTanh,
    kMul,
    kAdd,
    kNormalise,
    kNormaliseAdd,
    kNormaliseClamp,
    kExpertScale,
    kDiv  // for the host only, see program_of()
  };
  int op;
  float value;
  Dtype dtype;
};

struct RouteProgram {
  Dtype dtype;   // of the logits
  Dtype choice;  // of what experts are chosen by
  int tiles;     // of the weight's rows
  int top_k;
  int groups, groups_chosen, group_best;  // no groups: 0
  float fill;                             // of the other groups
  bool masked;                            // values of chosen experts outside the groups are `fill` too
  int num_scores, num_weights;
  RouteStep scores[kMaxSteps], weights[kMaxSteps];
};

// logits [T, E], values and weights [T, K] (each may be null), ids [T, K] from x [T, R], weight [E, R] and what is not
// null of bias, correction and scale [E], in 16 bits. x and weight lie at multiples of 16 bytes, R is a multiple of 8.
struct RouteArguments {
  int64_t tokens, depth, experts;
  Dtype dtype;  // of x, weight, bias and logits
  RouteProgram program;
  const void *x, *weight, *bias;
  const void* correction;
  Dtype correction_dtype;
  const void* scale;
  Dtype scale_dtype;
  void* logits;
  void* values;
  Dtype values_dtype;
  void* weights;
  Dtype weights_dtype;
  int64_t* ids;
};
const char* route(const RouteArguments& arguments, void* stream);

// The same from logits that are there, in float32 too, of any number of tokens; x, weight, bias and depth are not used.
const char* choose(const RouteArguments& arguments, void* stream);

// dh (panels of the parts of N), a (panels of I columns, times the routing weight) and dscore [tiles][S], whose sum
// over tiles is <dy, expert output>.
struct DownGradArguments {
  Sizes sizes;
  Dtype dtype;
  Layout layout;
  bool transposed;
  Activation activation;
  Plan plan;
  TokenRows dy;
  Weight down;
  const void* h;
  const void* weights;
  Dtype weights_dtype;
  void* dh;
  void* a;
  float* dscore;
  const Pull* pull;  // dy, or null
};
int64_t score_tiles(const Sizes& sizes);
const char* down_grad(const DownGradArguments& arguments, void* stream);

// rows [S, H] = dh @ up.
struct UpGradArguments {
  Sizes sizes;
  Dtype dtype;
  Layout layout;
  bool transposed;
  Plan plan;
  const void* dh;
  Weight up[2];
  void* rows;
};
const char* up_grad(const UpGradArguments& arguments, void* stream);

// out [E, dense columns, gathered columns] = per expert the sum over its sorted rows of dense[row] outer
// gathered[token of row], or [E, gathered columns, dense columns] unless `dense_first`. The dense side lies in panels.
struct WeightGradArguments {
  Sizes sizes;
  Dtype dtype;
  Plan plan;
  const void* dense;
  Parts parts;  // of dense
  TokenRows gathered;
  int64_t gathered_columns;
  bool dense_first;
  void* out;
  int ticket;  // which counter of the plan
  bool add;    // to what `out` holds, rounded once more
};
const char* weight_grad(const WeightGradArguments& arguments, void* stream);

// The gradient of a bias: out [E, columns] = per expert the sum over its sorted rows, of panels or, if these are null,
// of weight * dy[token of row].
struct BiasGradArguments {
  Sizes sizes;
  Dtype dtype;
  Plan plan;
  const void* panels;
  Parts parts;  // of panels, or of dy
  TokenRows dy;
  const void* weights;
  Dtype weights_dtype;
  void* out;
  bool add;  // to what `out` holds
};
const char* bias_grad(const BiasGradArguments& arguments, void* stream);

// dscore[row] += <dy[token of row], the down bias [E, H] of its expert>, for every sorted row.
struct BiasScoreArguments {
  Sizes sizes;
  Dtype dtype;
  Plan plan;
  TokenRows dy;
  const void* bias;
  float* dscore;
};
const char* bias_score(const BiasScoreArguments& arguments, void* stream);

// out [T, out_stride] columns [0, columns) = sum over the token's slots, in slot order, of (weight *) rows [S,
// columns]. With dscore, also dweights[slot] = sum over tiles of dscore. Poisons the output if a wait has timed out.
struct CombineArguments {
  Sizes sizes;
  Dtype dtype;
  Plan plan;
  const void* rows;
  int64_t columns;
  const void* weights;  // null: all one
  Dtype weights_dtype;
  void* out;
  Dtype out_dtype;
  int64_t out_stride;
  const float* dscore;  // null: none
  int64_t dscore_tiles;
  void* dweights;
  // Not null: the tokens are those of all its ranks, and the sums go there instead of to `out`. Those of dscore do so
  // too, unless there are dweights. `ends`: nothing more is pushed, see `finish`.
  const Group* push;
  bool ends;
};
const char* combine(const CombineArguments& arguments, void* stream);

}  // namespace mok::sm90
