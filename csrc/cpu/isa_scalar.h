// The instruction set "none in particular": plain loops for the compiler to vectorise. Also the interface of the
// others:
//
//   kStepMultiple  the number of packed steps is a multiple of this (zero padded)
//   kRowMultiple   the left operand's rows are a multiple of this (zero padded); the product has as many rows
//   kLeftByRows    the left operand must have consecutive steps of a row beside each other
//   pairs<E>       whether a lane is a pair of E (else one float)
//   block<E>       product[m][n] (+)= sum over steps of left[m][s] * right[s][n]
//   kDirectRows<E> up to so many rows, a weight with unit stride along the steps is not packed: direct<E>
//   kStreams<E>    such a weight is never packed, but the left operand of the transposed product: stream<E>
//   write<E>       n floats as elements to memory that is not read again soon
//   transpose<E>   packs n <= w rows of k elements into lanes [step][w]; unset columns and steps become zero
#pragma once

#include "convert.h"

namespace mok {
namespace {

// Memory that the next product will read: `rows` pieces of `bytes` bytes. An inner loop asks for it line by line while
// it computes, so that packing does not wait for it. A hint: nothing depends on it, and it may be anywhere.
struct Ahead {
  uintptr_t row = 0;
  int64_t stride = 0, bytes = 0, rows = 0;
  int64_t at = 0;

  MOK_INLINE void ask() {
    if (rows == 0) return;
    __builtin_prefetch(reinterpret_cast<const char*>(row + at), 0, 2);
    at += 64;
    if (at < bytes) return;
    at = 0;
    row += stride;
    rows--;
  }
};

// The packed left operand: lane of row r and step s at data[r * row + s * step]; and what to ask for meanwhile.
struct Left {
  const Lane* data;
  int64_t row;
  int64_t step;
  Ahead* ahead = nullptr;
};

struct Scalar {
  static constexpr int64_t kStepMultiple = 1;
  static constexpr int64_t kRowMultiple = 1;
  static constexpr bool kLeftByRows = false;
  template <class Element>
  static constexpr int64_t kDirectRows = 0;
  template <class Element>
  static constexpr bool kStreams = false;
  template <class Element>
  static constexpr bool pairs = false;

  static void enter() {}
  static void leave() {}

  template <class Element>
  static void block(Left left, const Lane* right, int64_t w, float* product, int64_t ld, int64_t rows, int64_t steps,
                    bool accumulate) {
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t c = 0; c < w; c += 16) {
        float sum[16] = {};
        float* out = product + r * ld + c;
        const Lane* l = left.data + r * left.row;
        const Lane* b = right + c;
        for (int64_t s = 0; s < steps; s++, l += left.step, b += w) {
          const float x = float_of(*l);
          for (int64_t i = 0; i < 16; i++) sum[i] += x * float_of(b[i]);
        }
        for (int64_t i = 0; i < 16; i++) out[i] = accumulate ? out[i] + sum[i] : sum[i];
      }
    }
  }

  template <class Element>
  static void write(const float* src, Element* dst, int64_t n) {
    narrow_row(src, dst, n);
  }

  template <class Element>
  static void transpose(Lane* dst, int64_t w, const Element* src, int64_t stride, int64_t n, int64_t k, int64_t steps) {
    for (int64_t s = 0; s < steps; s++)
      for (int64_t c = 0; c < w; c++) dst[s * w + c] = c < n && s < k ? bits_of(widen(src[c * stride + s])) : 0;
  }
};

}  // namespace
}  // namespace mok
