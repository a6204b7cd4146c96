// The activation as a postfix program on blocks of floats, with forward-mode derivatives. A block is long enough that
// reading the program costs nothing beside the matrix products, so no formula needs code of its own.
#pragma once

#include <cmath>

#include "convert.h"

namespace mok {
namespace {

// The functions below have no branches, so that loops over them become vector code. Errors are a few units in the last
// place; NaN and infinities go where the formulas of torch send them.

MOK_INLINE float select(bool condition, float yes, float no) { return condition ? yes : no; }

MOK_INLINE float exp_(float x) {
  // e^x = 2^n * e^r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to an integer.
  const float bounded = select(x > 89.0f, 89.0f, select(x < -104.0f, -104.0f, x));
  const float shifted = bounded * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  float r = bounded - n * 0.693145752f;
  r = r - n * 1.42860677e-6f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // Two factors, since 2^n alone may be subnormal or too large.
  const int32_t whole = static_cast<int32_t>(bits_of(shifted)) - 0x4b400000;
  const int32_t half = whole >> 1;
  const float scale = float_of(static_cast<uint32_t>(half + 127) << 23);
  const float rest = float_of(static_cast<uint32_t>(whole - half + 127) << 23);
  return select(x == x, p * scale * rest, x);
}

MOK_INLINE float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }

MOK_INLINE float tanh_(float x) {
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float small = x + x * z * p;
  const float large = 1.0f - 2.0f / (exp_(2.0f * x) + 1.0f);
  return select(std::fabs(x) < 0.625f, small, large);
}

MOK_INLINE float erf_(float x) {
  // A rational function on [-4, 4]; beyond it the result rounds to +-1.
  const float bounded = select(x > 4.0f, 4.0f, select(x < -4.0f, -4.0f, x));
  const float z = bounded * bounded;
  float p = -2.72614225801306e-10f;
  p = p * z + 2.77068142495902e-08f;
  p = p * z - 2.10102402082508e-06f;
  p = p * z - 5.69250639462346e-05f;
  p = p * z - 7.34990630326855e-04f;
  p = p * z - 2.95459980854025e-03f;
  p = p * z - 1.60960333262415e-02f;
  float q = -1.45660718464996e-05f;
  q = q * z - 2.13374055278905e-04f;
  q = q * z - 1.68282697438203e-03f;
  q = q * z - 7.37332916720468e-03f;
  q = q * z - 1.42647390514189e-02f;
  return select(std::fabs(x) < 4.0f, bounded * p / q, select(x == x, std::copysign(1.0f, x), x));
}

MOK_INLINE float log1p_(float x) {
  // log(1 + x) for x >= 0: the logarithm of u = 1 + x, corrected for what the addition lost.
  const float u = 1.0f + x;
  const uint32_t bits = bits_of(u) - 0x3f3504f3;
  const float exponent = static_cast<float>(static_cast<int32_t>(bits) >> 23);
  const float m = float_of((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
  const float z = m * m;
  float p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  float log_u = m * z * p + exponent * -2.12194440e-4f;
  log_u = log_u - 0.5f * z;
  log_u = log_u + m + exponent * 0.693359375f;
  return log_u + (x - (u - 1.0f)) / u;
}

MOK_INLINE float softplus_(float x) { return select(x > 20.0f, x, select(x == x, log1p_(exp_(x)), x)); }

constexpr float kSqrtHalf = 0.70710678f, kGeluC = 0.79788456f;

// The normal distribution function with a small relative error in its lower tail too, where 1 + erf would cancel.
// Numerical Recipes, erfcc: 1.2e-7 everywhere.
MOK_INLINE float gelu_cdf(float x) {
  const float z = std::fabs(x) * kSqrtHalf;
  const float t = 1.0f / (1.0f + 0.5f * z);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  const float tail = 0.5f * t * exp_(p - z * z);
  return select(x > 0.0f, 1.0f - tail, tail);
}
// (1 + tanh(z)) / 2 = sigmoid(2 z), which does not cancel either.
MOK_INLINE float gelu_tanh_cdf(float x) { return sigmoid_(2.0f * kGeluC * (x + 0.044715f * x * x * x)); }

// Value and derivative of each function of one argument, as in mok_compile/activation.py.
template <Op op>
MOK_INLINE float value_of(float x) {
  if constexpr (op == Op::kSigmoid) return sigmoid_(x);
  if constexpr (op == Op::kSilu) return x / (1.0f + exp_(-x));
  if constexpr (op == Op::kGelu) return x * gelu_cdf(x);
  if constexpr (op == Op::kGeluTanh) return x * gelu_tanh_cdf(x);
  if constexpr (op == Op::kRelu) return select(x < 0.0f, 0.0f, x);
  if constexpr (op == Op::kSquare) return x * x;
  if constexpr (op == Op::kTanh) return tanh_(x);
  if constexpr (op == Op::kExp) return exp_(x);
  if constexpr (op == Op::kErf) return erf_(x);
  if constexpr (op == Op::kSoftplus) return softplus_(x);
  if constexpr (op == Op::kSqrt) return std::sqrt(x);
  if constexpr (op == Op::kRsqrt) return 1.0f / std::sqrt(x);
  if constexpr (op == Op::kReciprocal) return 1.0f / x;
}

template <Op op>
MOK_INLINE float derivative_of(float x) {
  if constexpr (op == Op::kSigmoid) {
    const float s = sigmoid_(x);
    return s * (1.0f - s);
  }
  if constexpr (op == Op::kSilu) {
    const float s = sigmoid_(x);
    return s * (1.0f + x * (1.0f - s));
  }
  if constexpr (op == Op::kGelu) return gelu_cdf(x) + x * exp_(-0.5f * x * x) * 0.39894228f;
  if constexpr (op == Op::kGeluTanh) {
    const float s = gelu_tanh_cdf(x);
    return s + 2.0f * x * s * (1.0f - s) * kGeluC * (1.0f + 0.134145f * x * x);
  }
  if constexpr (op == Op::kRelu) return select(x > 0.0f, 1.0f, 0.0f);
  if constexpr (op == Op::kSquare) return 2.0f * x;
  if constexpr (op == Op::kTanh) {
    const float t = tanh_(x);
    return 1.0f - t * t;
  }
  if constexpr (op == Op::kExp) return exp_(x);
  if constexpr (op == Op::kErf) return exp_(-x * x) * 1.12837917f;
  if constexpr (op == Op::kSoftplus) return sigmoid_(x);
  if constexpr (op == Op::kSqrt) return 0.5f / std::sqrt(x);
  if constexpr (op == Op::kRsqrt) return -0.5f * (1.0f / std::sqrt(x)) / x;
  if constexpr (op == Op::kReciprocal) {
    const float r = 1.0f / x;
    return -(r * r);
  }
}

// A value on the stack: a block of numbers and its derivatives by gate and by up, each only where it may be non-zero.
struct Entry {
  float* value;
  float* dgate;
  float* dup;
  bool has_dgate, has_dup;
};

// The results of a program: `dgate` and `dup` are null where the value does not depend on that leaf.
struct Activation {
  const float* value;
  const float* dgate;
  const float* dup;
};

// Pointers that the compiler may take to be disjoint: those of one entry, or of two.
using Floats = float* __restrict;

template <Op op>
inline void apply(Entry& x, int64_t n) {
  const Floats value = x.value, dgate = x.dgate, dup = x.dup;
  if (x.has_dgate || x.has_dup) {
    for (int64_t i = 0; i < n; i++) {
      const float d = derivative_of<op>(value[i]);
      value[i] = value_of<op>(value[i]);
      // An unused derivative holds garbage; multiplying it is cheaper than asking.
      dgate[i] *= d;
      dup[i] *= d;
    }
    return;
  }
  for (int64_t i = 0; i < n; i++) value[i] = value_of<op>(value[i]);
}

inline void fill(float* dst, float v, int64_t n) {
  for (int64_t i = 0; i < n; i++) dst[i] = v;
}

inline void leaf(Entry& x, const float* src, bool gate, bool derivatives, int64_t n) {
  std::memcpy(x.value, src, n * sizeof(float));
  if (!derivatives) return;
  fill(x.dgate, gate ? 1.0f : 0.0f, n);
  fill(x.dup, gate ? 0.0f : 1.0f, n);
  x.has_dgate = gate;
  x.has_dup = !gate;
}

inline void add_to(Floats x, const Floats y, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] += y[i];
}

inline void multiply_by(Floats x, const Floats y, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] *= y[i];
}

// dx = dx + dy, where either may not exist.
inline void sum_rule(float* dx, bool& has_dx, float* dy, bool has_dy, int64_t n) {
  if (has_dx && has_dy) add_to(dx, dy, n);
  if (!has_dx && has_dy) std::memcpy(dx, dy, n * sizeof(float));
  has_dx |= has_dy;
}

// dx = dx * y + x * dy; only terms that exist: 0 * infinity must not turn up where the reference has no term.
inline void product_rule(Floats dx, bool& has_dx, const Floats dy, bool has_dy, const Floats x, const Floats y,
                         int64_t n) {
  if (has_dx) multiply_by(dx, y, n);
  if (has_dx && has_dy)
    for (int64_t i = 0; i < n; i++) dx[i] += dy[i] * x[i];
  if (!has_dx && has_dy)
    for (int64_t i = 0; i < n; i++) dx[i] = dy[i] * x[i];
  has_dx |= has_dy;
}

inline void add(Entry& x, const Entry& y, int64_t n) {
  add_to(x.value, y.value, n);
  sum_rule(x.dgate, x.has_dgate, y.dgate, y.has_dgate, n);
  sum_rule(x.dup, x.has_dup, y.dup, y.has_dup, n);
}

inline void mul(Entry& x, const Entry& y, int64_t n) {
  product_rule(x.dgate, x.has_dgate, y.dgate, y.has_dgate, x.value, y.value, n);
  product_rule(x.dup, x.has_dup, y.dup, y.has_dup, x.value, y.value, n);
  multiply_by(x.value, y.value, n);
}

inline void clamp(Entry& x, float low, float high, int64_t n) {
  const Floats value = x.value, dgate = x.dgate, dup = x.dup;
  if (x.has_dgate || x.has_dup) {
    for (int64_t i = 0; i < n; i++) {
      const float inside = select(value[i] >= low, 1.0f, 0.0f) * select(value[i] <= high, 1.0f, 0.0f);
      dgate[i] *= inside;
      dup[i] *= inside;
    }
  }
  for (int64_t i = 0; i < n; i++) value[i] = select(value[i] < low, low, select(value[i] > high, high, value[i]));
}

// Runs the program on n <= kActivationBlock numbers of scratch.gate and scratch.up.
inline Activation activate(const Block& block, Scratch& scratch, bool derivatives, int64_t n) {
  Entry stack[kMaxStack];
  int64_t depth = 0;
  for (int64_t i = 0; i < block.program_size; i++) {
    const Instruction& instruction = block.program[i];
    if (instruction.op <= Op::kConstant) {
      float (&memory)[3][kActivationBlock] = scratch.stack[depth];
      Entry& x = stack[depth++] = {memory[0], memory[1], memory[2], false, false};
      if (instruction.op == Op::kConstant) {
        fill(x.value, instruction.low, n);
      } else {
        const bool gate = instruction.op == Op::kGate;
        leaf(x, gate ? scratch.gate : scratch.up, gate, derivatives, n);
      }
      continue;
    }
    if (instruction.op == Op::kAdd || instruction.op == Op::kMul) {
      Entry& y = stack[--depth];
      Entry& x = stack[depth - 1];
      instruction.op == Op::kAdd ? add(x, y, n) : mul(x, y, n);
      continue;
    }
    Entry& x = stack[depth - 1];
    switch (instruction.op) {
      case Op::kClamp:
        clamp(x, instruction.low, instruction.high, n);
        break;
      case Op::kSigmoid:
        apply<Op::kSigmoid>(x, n);
        break;
      case Op::kSilu:
        apply<Op::kSilu>(x, n);
        break;
      case Op::kGelu:
        apply<Op::kGelu>(x, n);
        break;
      case Op::kGeluTanh:
        apply<Op::kGeluTanh>(x, n);
        break;
      case Op::kRelu:
        apply<Op::kRelu>(x, n);
        break;
      case Op::kSquare:
        apply<Op::kSquare>(x, n);
        break;
      case Op::kTanh:
        apply<Op::kTanh>(x, n);
        break;
      case Op::kExp:
        apply<Op::kExp>(x, n);
        break;
      case Op::kErf:
        apply<Op::kErf>(x, n);
        break;
      case Op::kSoftplus:
        apply<Op::kSoftplus>(x, n);
        break;
      case Op::kSqrt:
        apply<Op::kSqrt>(x, n);
        break;
      case Op::kRsqrt:
        apply<Op::kRsqrt>(x, n);
        break;
      case Op::kReciprocal:
        apply<Op::kReciprocal>(x, n);
        break;
      default:
        break;
    }
  }
  const Entry& top = stack[0];
  return {top.value, top.has_dgate ? top.dgate : nullptr, top.has_dup ? top.dup : nullptr};
}

}  // namespace
}  // namespace mok
