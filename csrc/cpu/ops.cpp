// The ops mok_cpu::forward, backward and combine: tensors in, tiles out. See mok_compile/engines/cpu.py for the
// callers, which allocate everything and have checked shapes and dtypes.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <vector>

#include "dispatch.h"
#include "schedule.h"
#include "threads.h"

namespace mok {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

enum class Layout : int64_t { kConcat, kInterleaved, kSeparate, kSingle };

Dtype dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::BFloat16:
      return Dtype::kBfloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    default:
      STD_TORCH_CHECK(false, "mok_cpu: unsupported dtype");
  }
}

int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

char* data_of(const Tensor& t) { return static_cast<char*>(t.data_ptr()); }

// One matrix or vector of each expert, from stacked tensors or from one tensor per expert.
template <class View>
std::vector<View> views(const Tensor* tensors, int64_t E, bool stacked) {
  std::vector<View> out(E);
  const int64_t bytes = stacked || E > 0 ? tensors[0].element_size() : 0;
  for (int64_t e = 0; e < E; e++) {
    const Tensor& t = stacked ? tensors[0] : tensors[e];
    char* data = data_of(t) + (stacked ? e * t.stride(0) * bytes : 0);
    const int64_t first = stacked ? 1 : 0;
    if constexpr (std::is_same_v<View, Matrix>) {
      out[e] = {data, t.stride(first), t.stride(first + 1)};
    } else {
      out[e] = {data, t.stride(first)};
    }
  }
  return out;
}

inline Matrix from_row(Matrix m, int64_t row, int64_t step, int64_t bytes) {
  return {m.data + row * m.row * bytes, m.row * step, m.column};
}
inline Vector from_row(Vector v, int64_t row, int64_t step, int64_t bytes) {
  return {v.data + row * v.stride * bytes, v.stride * step};
}

// Gate and up of each expert, whatever the layout keeps in one tensor.
template <class View>
struct Halves {
  std::vector<View> gate, up;

  Halves(const Tensors& tensors, const Block& block, Layout layout, bool stacked) {
    if (tensors.empty()) return;
    const int64_t bytes = size_of(block.dtype);
    up = views<View>(tensors.data(), block.E, stacked);
    if (layout == Layout::kSingle) return;
    gate = up;
    if (layout == Layout::kSeparate) {
      up = views<View>(tensors.data() + tensors.size() / 2, block.E, stacked);
      return;
    }
    const bool interleaved = layout == Layout::kInterleaved;
    for (int64_t e = 0; e < block.E; e++) {
      const View whole = up[e];
      gate[e] = from_row(whole, 0, interleaved ? 2 : 1, bytes);
      up[e] = from_row(whole, interleaved ? 1 : block.I, interleaved ? 2 : 1, bytes);
    }
  }
};

template <class T>
const T* pointer(const std::vector<T>& v) {
  return v.empty() ? nullptr : v.data();
}

std::vector<Instruction> program_of(const std::vector<int64_t>& ops, const std::vector<double>& limits) {
  std::vector<Instruction> program(ops.size());
  int64_t depth = 0;
  for (size_t i = 0; i < ops.size(); i++) {
    const Op op = static_cast<Op>(ops[i]);
    program[i] = {op, static_cast<float>(limits[2 * i]), static_cast<float>(limits[2 * i + 1])};
    depth += op <= Op::kConstant ? 1 : op == Op::kAdd || op == Op::kMul ? -1 : 0;
    STD_TORCH_CHECK(depth >= 1 && depth <= kMaxStack, "mok_cpu: bad activation program");
  }
  STD_TORCH_CHECK(depth == 1, "mok_cpu: bad activation program");
  return program;
}

// What follows from the schedule: token and routing weight (float, contiguous) of each row.
struct Rows {
  std::vector<int32_t> token;
  std::vector<float> weight;

  Rows(Block& block, const Tensor& order, const Tensor& offsets, const Tensor& weights) {
    const int64_t slots = block.T * block.K;
    block.order = static_cast<const int32_t*>(order.data_ptr());
    block.offsets = static_cast<const int32_t*>(offsets.data_ptr());
    token.resize(slots);
    weight.resize(slots);
    const char* w = data_of(weights);
    for (int64_t r = 0; r < slots; r++) {
      token[r] = block.order[r] / static_cast<int32_t>(block.K);
      std::memcpy(&weight[r], w + int64_t{block.order[r]} * 4, 4);
    }
    block.token = token.data();
    block.weight = weight.data();
  }

  Rows(const Rows&) = delete;
};

// The operands that forward and backward share, and what is derived from them.
struct Operands {
  Block block{};
  bool stacked;
  Layout layout;
  Halves<Matrix> up;
  Halves<Vector> up_bias;
  std::vector<Matrix> down;
  std::vector<Vector> down_bias;
  std::vector<Instruction> program;

  Operands(const Tensor& x, const Tensor& ids, const Tensors& up_tensors, const Tensors& down_tensors,
           const Tensors& up_bias_tensors, const Tensors& down_bias_tensors, int64_t layout_number,
           bool weight_on_input, const std::vector<int64_t>& ops, const std::vector<double>& limits)
      : block(sizes(x, ids, down_tensors)),
        stacked(down_tensors[0].dim() == 3),
        layout(static_cast<Layout>(layout_number)),
        up(up_tensors, block, layout, stacked),
        up_bias(up_bias_tensors, block, layout, stacked),
        down(views<Matrix>(down_tensors.data(), block.E, stacked)),
        program(program_of(ops, limits)) {
    if (!down_bias_tensors.empty()) down_bias = views<Vector>(down_bias_tensors.data(), block.E, stacked);
    block.gated = layout != Layout::kSingle;
    block.interleaved = layout == Layout::kInterleaved;
    block.weight_on_input = weight_on_input;
    block.program = program.data();
    block.program_size = program.size();
    block.x = data_of(x);
    block.gate = pointer(up.gate);
    block.up = pointer(up.up);
    block.down = pointer(down);
    block.gate_bias = pointer(up_bias.gate);
    block.up_bias = pointer(up_bias.up);
    block.down_bias = pointer(down_bias);
  }

  Operands(const Operands&) = delete;

  static Block sizes(const Tensor& x, const Tensor& ids, const Tensors& down) {
    const int64_t dim = down[0].dim();
    Block b{};
    b.T = x.size(0);
    b.H = x.size(1);
    b.I = down[0].size(dim - 1);
    b.E = dim == 3 ? down[0].size(0) : static_cast<int64_t>(down.size());
    b.K = ids.size(1);
    b.dtype = dtype_of(x);
    return b;
  }

  int64_t slots() const { return block.T * block.K; }
  int64_t routed() const { return block.E ? block.offsets[block.E - 1] : 0; }
  int64_t rows_begin(int64_t e) const { return e ? block.offsets[e - 1] : 0; }

  // Tiles of at most `rows` of each expert's rows and of `columns` columns, at most `width` wide.
  std::vector<Tile> expert_tiles(int64_t columns, int64_t width, int64_t rows = kRows) const {
    std::vector<Tile> tiles;
    for (int64_t e = 0; e < block.E; e++) {
      const int64_t begin = rows_begin(e), end = block.offsets[e], part = rows_per_tile(end - begin, rows);
      for (int64_t r = begin; r < end; r += part)
        for (int64_t c = 0; c < columns; c += width)
          tiles.push_back({e, r, std::min(r + part, end), c, std::min(c + width, columns)});
    }
    return tiles;
  }

  // Tiles of a gradient of `rows` x `columns` numbers of each expert, as wide as its packed rows leave room for: long
  // runs of memory, written in order.
  template <class Add>
  void gradient_tiles(int64_t e, int64_t rows, int64_t columns, Add add) const {
    const int64_t count = block.offsets[e] - rows_begin(e),
                  steps = std::clamp<int64_t>((count + 15) / 16 * 16, 16, kSteps);
    const int64_t width = kRight / steps / kColumns * kColumns, part = rows_per_tile(rows);
    for (int64_t c = 0; c < columns; c += width)
      for (int64_t r = 0; r < rows; r += part)
        add(Tile{e, r, std::min(r + part, rows), c, std::min(c + width, columns)});
  }

  // Tiles of `tokens` tokens and `width` columns.
  std::vector<Tile> token_tiles(int64_t columns, int64_t width, int64_t tokens) const {
    std::vector<Tile> tiles;
    for (int64_t t = 0; t < block.T; t += tokens)
      for (int64_t c = 0; c < columns; c += width)
        tiles.push_back({0, t, std::min(t + tokens, block.T), c, std::min(c + width, columns)});
    return tiles;
  }
};

constexpr int64_t kTilesPerThread = 4;  // at least, so that threads end at about the same time

// The tile that the thread which has tile i will probably take next.
const Tile& later(const std::vector<Tile>& tiles, int64_t i, int64_t threads) {
  return tiles[std::min<int64_t>(i + threads, tiles.size() - 1)];
}

// Tiles as large as keeps all threads busy; of tokens, `least` of them.
std::vector<Tile> expert_tiles(const Operands& operands, int64_t threads, int64_t columns, int64_t rows = kRows,
                               int64_t widest = kColumns, int64_t narrowest = 16) {
  int64_t width = widest;
  std::vector<Tile> tiles = operands.expert_tiles(columns, width, rows);
  while (width > narrowest && static_cast<int64_t>(tiles.size()) < kTilesPerThread * threads)
    tiles = operands.expert_tiles(columns, width /= 2, rows);
  return tiles;
}

// Many tokens come in parts rather than in tiles of fewer than `few` columns.
std::vector<Tile> token_tiles(const Operands& operands, int64_t least, int64_t columns, int64_t widest,
                              int64_t narrowest = 16, int64_t few = 2 * kColumns) {
  int64_t width = widest;
  while (width > few && operands.block.T * width > kTokens * kColumns) width /= 2;
  int64_t tokens = std::min(operands.block.T, kTokens * kColumns / width);
  for (;;) {
    std::vector<Tile> tiles = operands.token_tiles(columns, width, std::max<int64_t>(tokens, 1));
    if (static_cast<int64_t>(tiles.size()) >= least || (tokens <= 512 && width <= narrowest)) return tiles;
    tokens > 512 ? tokens = (tokens + 1) / 2 : width /= 2;
  }
}

void schedule(Team& team, const Tensor& ids, int64_t E, const Tensor& order, const Tensor& offsets) {
  int32_t* o = static_cast<int32_t*>(order.data_ptr());
  int32_t* ends = static_cast<int32_t*>(offsets.data_ptr());
  const int64_t S = ids.numel();
  switch (ids.scalar_type()) {
    case ScalarType::Long:
      return sort_slots<int64_t>(team, data_of(ids), S, E, o, ends);
    case ScalarType::Int:
      return sort_slots<int32_t>(team, data_of(ids), S, E, o, ends);
    case ScalarType::Short:
      return sort_slots<int16_t>(team, data_of(ids), S, E, o, ends);
    case ScalarType::Byte:
      return sort_slots<uint8_t>(team, data_of(ids), S, E, o, ends);
    default:
      STD_TORCH_CHECK(false, "mok_cpu: unsupported dtype of ids");
  }
}

int64_t best_level_number() { return static_cast<int64_t>(best_level()); }

// y, h (if `save`), order and offsets; `a` is working memory.
void forward(Tensor x, Tensor ids, Tensor weights, Tensors up, Tensors down, Tensors up_bias, Tensors down_bias,
             Tensor y, Tensor h, Tensor order, Tensor offsets, Tensor a, bool save, int64_t layout,
             bool weight_on_input, std::vector<int64_t> ops, std::vector<double> limits, int64_t level) {
  Team team;
  Operands operands(x, ids, up, down, up_bias, down_bias, layout, weight_on_input, ops, limits);
  Block& block = operands.block;
  const Kernels table = kernels(std::min(static_cast<Level>(level), best_level()), block.dtype);
  schedule(team, ids, block.E, order, offsets);
  const Rows rows(block, order, offsets, weights);
  block.out_dtype = dtype_of(y);
  block.y = data_of(y);
  block.a = data_of(a);
  if (save) {
    block.h = data_of(h);
    const int64_t row_bytes = (block.gated ? 2 : 1) * block.I * size_of(block.dtype), routed = operands.routed();
    std::fill_n(block.h + routed * row_bytes, (operands.slots() - routed) * row_bytes, 0);
  }
  // Of weights that are not packed, tiles of rows whose packed inputs fit: the tiles of all columns then share them.
  const auto streamed = [&](const Matrix* matrices) { return block.E > 0 && matrices[0].column == 1; };
  const int64_t most_rows = streamed(block.up) ? std::min(table.streamed_rows(block.H), kRows) : kRows;
  const std::vector<Tile> up_tiles = expert_tiles(operands, team.threads(), block.I, most_rows);
  team.run(table, up_tiles.size(), [&](Scratch& scratch, int64_t i) {
    table.up(block, scratch, up_tiles[i], later(up_tiles, i, team.threads()));
  });
  const int64_t least = kTilesPerThread * team.threads();
  const std::vector<Tile> down_tiles = streamed(block.down)
                                           ? token_tiles(operands, least, block.H, kLead, 16, 4 * kColumns)
                                           : token_tiles(operands, least, block.H, kColumns);
  team.run(table, down_tiles.size(), [&](Scratch& scratch, int64_t i) { table.down(block, scratch, down_tiles[i]); });
}

// The gradients in `grads`: those of dx, weights (float), up, down, up_bias and down_bias that `needs` asks for. dh, a
// and partial are working memory (a and partial empty where not needed).
void backward(Tensor dy, Tensor x, Tensor ids, Tensor weights, Tensors up, Tensors down, Tensors up_bias,
              Tensors down_bias, Tensor h, Tensor order, Tensor offsets, Tensor dh, Tensor a, Tensor partial,
              Tensors grads, std::vector<int64_t> needs, int64_t layout, bool weight_on_input, std::vector<int64_t> ops,
              std::vector<double> limits, int64_t level) {
  Team team;
  Operands operands(x, ids, up, down, up_bias, down_bias, layout, weight_on_input, ops, limits);
  Block& block = operands.block;
  const Kernels table = kernels(std::min(static_cast<Level>(level), best_level()), block.dtype);
  const Rows rows(block, order, offsets, weights);
  block.h = data_of(h);
  block.dy = data_of(dy);

  const bool need_x = needs[0], need_weights = needs[1];
  auto next = grads.begin();
  const auto take = [&](bool needed, size_t count) {
    Tensors taken;
    if (needed) {
      taken.assign(next, next + count);
      next += count;
    }
    return taken;
  };
  const Tensors dx = take(need_x, 1), dweight = take(need_weights, 1), dup = take(needs[2], up.size()),
                ddown = take(needs[3], down.size()), dup_bias = take(needs[4], up_bias.size()),
                ddown_bias = take(needs[5], down_bias.size());
  const Halves<Matrix> dup_halves(dup, block, operands.layout, operands.stacked);
  const Halves<Vector> dup_bias_halves(dup_bias, block, operands.layout, operands.stacked);
  std::vector<Matrix> ddown_views;
  std::vector<Vector> ddown_bias_views;
  if (!ddown.empty()) ddown_views = views<Matrix>(ddown.data(), block.E, operands.stacked);
  if (!ddown_bias.empty()) ddown_bias_views = views<Vector>(ddown_bias.data(), block.E, operands.stacked);
  block.dgate = pointer(dup_halves.gate);
  block.dup = pointer(dup_halves.up);
  block.ddown = pointer(ddown_views);
  int64_t gradient_bytes = 0;
  for (const Tensor& grad : grads) gradient_bytes += grad.numel() * grad.element_size();
  block.past_cache = gradient_bytes > int64_t{16} << 20;
  block.dgate_bias = pointer(dup_bias_halves.gate);
  block.dup_bias = pointer(dup_bias_halves.up);
  block.ddown_bias = pointer(ddown_bias_views);
  const bool need_products = need_x || (need_weights && weight_on_input);  // dh @ up
  const bool need_dh = need_products || block.dup || block.dup_bias;
  if (need_x) block.dx = data_of(dx[0]);
  if (need_dh) block.dh = data_of(dh);
  if (block.ddown) block.a = data_of(a);
  if (need_weights) {
    block.partial = static_cast<float*>(partial.data_ptr());
    block.dweight = static_cast<float*>(dweight[0].data_ptr());
    std::fill_n(block.dweight, operands.slots(), 0.0f);
  }

  if (need_dh || block.a || need_weights) {
    const std::vector<Tile> tiles = expert_tiles(operands, team.threads(), block.I, kRows, 4 * kColumns, kColumns);
    team.run(table, tiles.size(), [&](Scratch& scratch, int64_t i) {
      table.dact(block, scratch, tiles[i], later(tiles, i, team.threads()));
    });
  }

  struct Task {
    enum Kind { kInput, kMatrix, kBias } kind;
    Tile tile;
    Weight which;
  };
  std::vector<Task> tasks;
  if (need_products) {
    // `partial` has one part for each full tile of columns.
    const int64_t narrowest = need_weights && weight_on_input ? kColumns : 16;
    // The wider a tile, the longer the runs of memory. A weight's gradients, if any, fill the time that few tiles
    // leave.
    const int64_t per_thread = block.dup || block.ddown ? 1 : kTilesPerThread;
    const std::vector<Tile> tiles = token_tiles(operands, per_thread * team.threads(), block.H, kLead, narrowest);
    for (const Tile& tile : tiles) tasks.push_back({Task::kInput, tile, Weight::kUp});
  }
  const auto add_matrices = [&](const Matrix* matrices, int64_t rows, int64_t columns, Weight which) {
    for (int64_t e = 0; matrices && e < block.E; e++) {
      const bool swap = is_transposed(matrices[e]);
      operands.gradient_tiles(e, swap ? columns : rows, swap ? rows : columns,
                              [&](const Tile& tile) { tasks.push_back({Task::kMatrix, tile, which}); });
    }
  };
  add_matrices(block.dgate, block.I, block.H, Weight::kGate);
  add_matrices(block.dup, block.I, block.H, Weight::kUp);
  add_matrices(block.ddown, block.H, block.I, Weight::kDown);
  const auto add_biases = [&](const Vector* vectors, int64_t columns, Weight which) {
    for (int64_t e = 0; vectors && e < block.E; e++)
      for (int64_t c = 0; c < columns; c += kColumns)
        tasks.push_back(
            {Task::kBias, {e, operands.rows_begin(e), block.offsets[e], c, std::min(c + kColumns, columns)}, which});
  };
  add_biases(block.dgate_bias, block.I, Weight::kGate);
  add_biases(block.dup_bias, block.I, Weight::kUp);
  add_biases(block.ddown_bias, block.H, Weight::kDown);
  team.run(table, tasks.size(), [&](Scratch& scratch, int64_t i) {
    const Task& task = tasks[i];
    switch (task.kind) {
      case Task::kInput:
        return table.dinput(block, scratch, task.tile);
      case Task::kMatrix:
        return table.dmatrix(block, scratch, task.tile, task.which);
      case Task::kBias:
        return table.dbias(block, scratch, task.tile, task.which);
    }
  });

  if (need_weights) {
    const int64_t columns = weight_on_input ? block.H : block.I, parts = (columns + kColumns - 1) / kColumns;
    const std::vector<Tile> tiles = operands.expert_tiles(1, 1);
    team.run(table, tiles.size(), [&](Scratch& scratch, int64_t i) { table.dweight(block, scratch, tiles[i], parts); });
  }
}

// y from rows [S, H] (float, contiguous), sorted by expert, that experts elsewhere made of the tokens; order and
// offsets are working memory.
void combine(Tensor rows, Tensor ids, Tensor weights, Tensor y, Tensor order, Tensor offsets, bool weight_on_input,
             int64_t level) {
  Team team;
  Block block{};
  block.T = ids.size(0);
  block.K = ids.size(1);
  block.H = rows.size(1);
  block.E = offsets.numel();
  block.weight_on_input = weight_on_input;
  block.rows = static_cast<const float*>(rows.data_ptr());
  block.out_dtype = dtype_of(y);
  block.y = data_of(y);
  schedule(team, ids, block.E, order, offsets);
  const Rows of_rows(block, order, offsets, weights);
  const Kernels table = kernels(std::min(static_cast<Level>(level), best_level()), Dtype::kFloat32);
  std::vector<Tile> tiles;
  for (int64_t t = 0; t < block.T; t += kColumns)
    for (int64_t c = 0; c < block.H; c += kColumns)
      tiles.push_back({0, t, std::min(t + kColumns, block.T), c, std::min(c + kColumns, block.H)});
  team.run(table, tiles.size(), [&](Scratch& scratch, int64_t i) { table.combine(block, scratch, tiles[i]); });
}

}  // namespace
}  // namespace mok

STABLE_TORCH_LIBRARY(mok_cpu, m) {
  m.def("best_level() -> int");
  m.def(
      "forward(Tensor x, Tensor ids, Tensor weights, Tensor[] up, Tensor[] down, Tensor[] up_bias, Tensor[] down_bias, "
      "Tensor(a!) y, Tensor(b!) h, Tensor(c!) order, Tensor(d!) offsets, Tensor(e!) a, bool save, int layout, "
      "bool weight_on_input, int[] ops, float[] limits, int level) -> ()");
  m.def(
      "backward(Tensor dy, Tensor x, Tensor ids, Tensor weights, Tensor[] up, Tensor[] down, Tensor[] up_bias, "
      "Tensor[] down_bias, Tensor h, Tensor order, Tensor offsets, Tensor(a!) dh, Tensor(b!) a, Tensor(c!) partial, "
      "Tensor(d!)[] grads, int[] needs, int layout, bool weight_on_input, int[] ops, float[] limits, int level) -> ()");
  m.def(
      "combine(Tensor rows, Tensor ids, Tensor weights, Tensor(a!) y, Tensor(b!) order, Tensor(c!) offsets, "
      "bool weight_on_input, int level) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok_cpu, CompositeExplicitAutograd, m) {
  m.impl("best_level", TORCH_BOX(&mok::best_level_number));
  m.impl("forward", TORCH_BOX(&mok::forward));
  m.impl("backward", TORCH_BOX(&mok::backward));
  m.impl("combine", TORCH_BOX(&mok::combine));
}
