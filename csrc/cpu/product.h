// One product of tiles: packing both operands into lanes and running the instruction set's inner loop over them.
#pragma once

#include "convert.h"
#include "isa_scalar.h"

namespace mok {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Rows of elements: row p starts at base + index[p] * stride (p * stride without index) and counts scale[p] times.
template <class Element>
struct Rows {
  const Element* base;
  int64_t stride;
  const int32_t* index = nullptr;
  const float* scale = nullptr;

  const Element* operator[](int64_t p) const { return base + (index ? index[p] : p) * stride; }
};

// A weight seen as a right operand: the element of column n and step k at data[n * column + k * step].
template <class Element>
struct Strided {
  const Element* data;
  int64_t column;
  int64_t step;
};

// How elements become lanes.
template <class Isa, class Element>
struct Packing {
  static constexpr bool kPairs = Isa::template pairs<Element>;
  static constexpr int64_t kPerLane = kPairs ? 2 : 1;

  static constexpr int64_t kAhead = 32;                   // rows to prefetch ahead
  static constexpr int64_t kLine = 64 / sizeof(Element);  // elements of a cache line

  static int64_t steps(int64_t k) { return round_up((k + kPerLane - 1) / kPerLane, kPairs ? Isa::kStepMultiple : 1); }

  // n elements of row p from column c0 on; where they are scaled they lie in one of two buffers.
  static const Element* scaled(Scratch& scratch, int which, const Rows<Element>& rows, int64_t p, int64_t c0,
                               int64_t n) {
    const Element* src = rows[p] + c0;
    if (!rows.scale) return src;
    float* wide = scratch.row[which];
    Element* out = elements<Element>(scratch.scaled_row[which]);
    widen_row(src, wide, n);
    for (int64_t i = 0; i < n; i++) wide[i] *= rows.scale[p];
    narrow_row(wide, out, n);
    return out;
  }

  // Rows p0 .. p0 + n as rows of lanes, columns k0 .. k0 + k along the steps.
  static Left rows(Scratch& scratch, const Rows<Element>& rows, int64_t p0, int64_t n, int64_t k0, int64_t k,
                   int64_t lead = kLeadLanes) {
    const int64_t count = steps(k);
    Lane* dst = scratch.left;
    for (int64_t r = 0; r < n; r++, dst += lead) {
      const Element* src = scaled(scratch, 0, rows, p0 + r, k0, k);
      if constexpr (kPairs) {
        std::memcpy(dst, src, k * sizeof(Element));
        std::memset(reinterpret_cast<char*>(dst) + k * sizeof(Element), 0, count * sizeof(Lane) - k * sizeof(Element));
      } else {
        widen_row(src, reinterpret_cast<float*>(dst), k);
      }
    }
    for (int64_t r = n; r < round_up(n, Isa::kRowMultiple); r++, dst += lead) std::memset(dst, 0, count * sizeof(Lane));
    return {scratch.left, lead, 1};
  }

  // Columns c0 .. c0 + n of rows p0 .. p0 + k, the rows along the steps: lanes [step][w].
  static void across(Scratch& scratch, Lane* dst, int64_t w, const Rows<Element>& rows, int64_t p0, int64_t k,
                     int64_t c0, int64_t n) {
    const int64_t count = steps(k);
    for (int64_t s = 0; s < count; s++, dst += w) {
      const int64_t p = s * kPerLane;
      if (p >= k) {
        std::memset(dst, 0, w * sizeof(Lane));
        continue;
      }
      // Short pieces of distant rows: the hardware's prefetcher does not see them coming.
      for (int64_t ahead = kAhead; ahead < kAhead + kPerLane && p + ahead < k; ahead++)
        for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(rows[p0 + p + ahead] + c0 + i);
      const Element* first = scaled(scratch, 0, rows, p0 + p, c0, n);
      if constexpr (!kPairs) {
        widen_row(first, reinterpret_cast<float*>(dst), n);
      } else if (p + 1 < k) {
        const Element* second = scaled(scratch, 1, rows, p0 + p + 1, c0, n);
        for (int64_t i = 0; i < n; i++) dst[i] = first[i].bits | uint32_t{second[i].bits} << 16;
      } else {
        for (int64_t i = 0; i < n; i++) dst[i] = first[i].bits;
      }
      for (int64_t i = n; i < w; i++) dst[i] = 0;
    }
  }

  // The same as a left operand.
  static Left across_left(Scratch& scratch, const Rows<Element>& rows, int64_t p0, int64_t k, int64_t c0, int64_t n) {
    const int64_t w = round_up(n, 16);
    across(scratch, scratch.left_across, w, rows, p0, k, c0, n);
    if constexpr (!Isa::kLeftByRows || !kPairs) return {scratch.left_across, 1, w};
    if constexpr (Isa::kLeftByRows && kPairs) {
      Isa::transpose_lanes(scratch.left, kLeadLanes, scratch.left_across, w, steps(k));
      return {scratch.left, kLeadLanes, 1};
    }
  }

  // The right operand from a weight: n columns, k along the steps.
  static void weight(Scratch& scratch, Lane* dst, int64_t w, const Strided<Element>& from, int64_t n, int64_t k0,
                     int64_t k) {
    const Element* src = from.data + k0 * from.step;
    const int64_t n_stride = from.column, k_stride = from.step;
    if (k_stride == 1) {
      Isa::template transpose<Element>(dst, w, src, n_stride, n, k, steps(k));
    } else if (n_stride == 1) {
      across(scratch, dst, w, {src, k_stride}, 0, k, 0, n);
    } else {
      std::memset(dst, 0, steps(k) * w * sizeof(Lane));
      for (int64_t j = 0; j < k; j++) {
        for (int64_t i = 0; i < n; i++) {
          const Element v = src[i * n_stride + j * k_stride];
          Lane& lane = dst[j / kPerLane * w + i];
          if constexpr (kPairs) {
            lane |= uint32_t{v.bits} << (16 * (j % 2));
          } else {
            lane = bits_of(widen(v));
          }
        }
      }
    }
  }
};

// product [rows][kLead] (+)= left x right, with one right operand of n columns in each group of kColumns.
// pack_left(r0, rows, k0, k) returns the left operand; pack_right(group, dst, w, k0, k) writes a right one.
template <class Isa, class Element, class PackLeft, class PackRight>
void multiply(Scratch& scratch, int64_t rows, int64_t k, int64_t groups, const int64_t* n, bool accumulate,
              PackLeft pack_left, PackRight pack_right) {
  using Pack = Packing<Isa, Element>;
  constexpr int64_t kBlock = kSteps * Pack::kPerLane;
  if (k == 0 && !accumulate) std::memset(scratch.product, 0, rows * kLead * sizeof(float));
  for (int64_t k0 = 0; k0 < k; k0 += kBlock) {
    const int64_t part = smaller(k - k0, kBlock), steps = Pack::steps(part);
    for (int64_t g = 0; g < groups; g++) pack_right(g, scratch.right[g], round_up(n[g], 16), k0, part);
    for (int64_t r0 = 0; r0 < rows; r0 += kRowsPacked) {
      const int64_t count = smaller(rows - r0, kRowsPacked);
      const Left left = pack_left(r0, count, k0, part);
      for (int64_t g = 0; g < groups; g++)
        Isa::template block<Element>(left, scratch.right[g], round_up(n[g], 16),
                                     scratch.product + r0 * kLead + g * kColumns, kLead, count, steps,
                                     accumulate || k0 > 0);
    }
  }
}

// The same with weights on the right, one for each group, n columns of each.
template <class Isa, class Element>
void multiply_weights(Scratch& scratch, const Rows<Element>& rows, int64_t p0, int64_t count, int64_t k, int64_t groups,
                      const Strided<Element>* weights, int64_t n, bool accumulate) {
  using Pack = Packing<Isa, Element>;
  if constexpr (Isa::kDirectRows > 0) {
    const int64_t lead = Pack::steps(k) + 16;
    const bool fits = count <= Isa::kDirectRows && count * lead <= kRowsPacked * kLeadLanes;
    if (fits && k > 0 && !accumulate && weights[0].step == 1 && weights[groups - 1].step == 1) {
      const Left left = Pack::rows(scratch, rows, p0, count, 0, k, lead);
      for (int64_t g = 0; g < groups; g++)
        Isa::template direct<Element>(left, weights[g].data, weights[g].column, n, k, scratch.product + g * kColumns,
                                      kLead, count);
      return;
    }
  }
  const int64_t widths[kGroups] = {n, n};
  multiply<Isa, Element>(
      scratch, count, k, groups, widths, accumulate,
      [&](int64_t r0, int64_t part, int64_t k0, int64_t kc) {
        return Pack::rows(scratch, rows, p0 + r0, part, k0, kc);
      },
      [&](int64_t g, Lane* dst, int64_t w, int64_t k0, int64_t kc) {
        Pack::weight(scratch, dst, w, weights[g], n, k0, kc);
      });
}

}  // namespace
}  // namespace mok
