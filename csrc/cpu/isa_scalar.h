// The instruction set "none in particular": plain loops for the compiler to vectorise. Also the interface of the
// others:
//
//   kStepMultiple  the number of packed steps is a multiple of this (zero padded)
//   kRowMultiple   the left operand's rows are a multiple of this (zero padded); the product has as many rows
//   kInTiles<E>    whether products are made in tile registers: the left operand then has consecutive steps of a row
//                  beside each other, and `stream` takes the place of stream_dots
//   kPerLane<E>    2 where a lane is a pair of E, else 1 (a float)
//   block<E>       product[m][n] (+)= sum over steps of left[m][s] * right[s][n]
//   kPanel<E>      columns at a time of a weight that lies contiguous along the steps, which is never packed, with
//                  kStreamedSteps<E> steps at a time and rows of lanes_streamed<E> lanes
//   write<E>       n floats as elements to memory that is not read again soon
#pragma once

#include "stream.h"

namespace mok {
namespace {

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
  template <class Element>
  static constexpr bool kInTiles = false;
  template <class Element>
  static constexpr int64_t kPerLane = 1;
  template <class Element>
  static constexpr int64_t kPanel = kDotColumns;
  template <class Element>
  static constexpr int64_t kStreamedSteps = 2 * kSteps;

  // What `dots` is made of: four lanes, which every processor's vectors have room for.
  using Lanes = Quad;
  using Sums = Quad;
  static constexpr int kLanes = 4;
  // As many sums as there are registers for.
  static constexpr int kRowsAtOnce = 3;  // by four columns
  template <class Element>
  static constexpr int kWideRows = 1;  // by eight

  // The pad spreads rows over the sets of the cache.
  template <class Element>
  static constexpr int64_t lanes_streamed(int64_t steps) {
    return steps + 16;
  }

  static Lanes packed_lanes(const Lane* src) {
    Quad lanes;
    std::memcpy(&lanes, src, sizeof(lanes));
    return lanes;
  }

  static Sums no_sums() { return Quad{}; }
  static Lanes held(Lanes lanes) { return lanes; }
  template <class Element>
  static Lanes lanes(const Element* src) {
    return Quad{widen(src[0]), widen(src[1]), widen(src[2]), widen(src[3])};
  }

  static Lanes lanes(const Bf16* src) {
    uint16_t bits __attribute__((vector_size(8)));
    std::memcpy(&bits, src, sizeof(bits));
    using Words = uint32_t __attribute__((vector_size(16)));
    return reinterpret_cast<Quad>(__builtin_convertvector(bits, Words) << 16);
  }

  // From the first n < 4 numbers; zeros after them.
  template <class Element>
  static Lanes lanes(const Element* src, int64_t n) {
    return Quad{widen(src[0]), n > 1 ? widen(src[1]) : 0, n > 2 ? widen(src[2]) : 0, 0};
  }

  template <class Element>
  static Sums multiply_add(Lanes left, Lanes right, Sums sum) {
    return sum + left * right;
  }

  // The sums of each one's lanes.
  static Quad add_across(Quad a, Quad b, Quad c, Quad d) {
    const auto sum = [](Quad v) { return (v[0] + v[2]) + (v[1] + v[3]); };
    return Quad{sum(a), sum(b), sum(c), sum(d)};
  }

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
};

}  // namespace
}  // namespace mok
