// One product of tiles: packing both operands into lanes and running the instruction set's inner loop over them.
#pragma once

#include "convert.h"
#include "isa_scalar.h"

namespace mok {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

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
  static constexpr int64_t kPerLane = Isa::template kPerLane<Element>;
  static constexpr bool kPairs = kPerLane == 2;

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

  // Rows p0 .. p0 + n, columns k0 .. k0 + k, as rows of `count` lanes that lie `lead` lanes apart.
  static void rows_to(Lane* dst, Scratch& scratch, const Rows<Element>& rows, int64_t p0, int64_t n, int64_t k0,
                      int64_t k, int64_t count, int64_t lead) {
    const int64_t set = kPairs ? k * sizeof(Element) : k * sizeof(Lane);
    for (int64_t r = 0; r < n; r++, dst += lead) {
      const Element* src = scaled(scratch, 0, rows, p0 + r, k0, k);
      if constexpr (kPairs) {
        std::memcpy(dst, src, set);
      } else {
        widen_row(src, reinterpret_cast<float*>(dst), k);
      }
      std::memset(reinterpret_cast<char*>(dst) + set, 0, count * sizeof(Lane) - set);
    }
  }

  // The same as a left operand.
  static Left rows(Scratch& scratch, const Rows<Element>& rows, int64_t p0, int64_t n, int64_t k0, int64_t k) {
    const int64_t count = steps(k);
    rows_to(scratch.left, scratch, rows, p0, n, k0, k, count, kLeadLanes);
    for (int64_t r = n; r < round_up(n, Isa::kRowMultiple); r++)
      std::memset(scratch.left + r * kLeadLanes, 0, count * sizeof(Lane));
    return {scratch.left, kLeadLanes, 1};
  }

  // Columns c0 .. c0 + n of rows p0 .. p0 + k, the rows along the steps: panels of kColumns columns.
  static void across(Scratch& scratch, Lane* dst, const Rows<Element>& rows, int64_t p0, int64_t k, int64_t c0,
                     int64_t n) {
    const int64_t count = steps(k);
    for (int64_t s = 0; s < count; s++) {
      const int64_t p = s * kPerLane;
      // Short pieces of distant rows: the hardware's prefetcher does not see them coming. Into the second level: rows
      // that lie a power of two apart would push each other out of the first.
      for (int64_t ahead = kAhead; ahead < kAhead + kPerLane && p + ahead < k; ahead++)
        for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(rows[p0 + p + ahead] + c0 + i, 0, 2);
      for (int64_t c = 0; c < n; c += kColumns) {
        const int64_t m = smaller(n - c, kColumns), w = round_up(m, 16);
        Lane* to = dst + c * count + s * w;
        if (p >= k) {
          std::memset(to, 0, w * sizeof(Lane));
          continue;
        }
        const Element* first = scaled(scratch, 0, rows, p0 + p, c0 + c, m);
        if constexpr (!kPairs) {
          widen_row(first, reinterpret_cast<float*>(to), m);
        } else if (p + 1 < k) {
          const Element* second = scaled(scratch, 1, rows, p0 + p + 1, c0 + c, m);
          Isa::interleave(to, first, second, m);
        } else {
          for (int64_t i = 0; i < m; i++) to[i] = first[i].bits;
        }
        for (int64_t i = m; i < w; i++) to[i] = 0;
      }
    }
  }

  // The same as a left operand.
  static Left across_left(Scratch& scratch, const Rows<Element>& rows, int64_t p0, int64_t k, int64_t c0, int64_t n) {
    const int64_t w = round_up(n, 16);
    across(scratch, scratch.left_across, rows, p0, k, c0, n);
    if constexpr (Isa::template kInTiles<Element>) {
      Isa::transpose_lanes(scratch.left, kLeadLanes, scratch.left_across, w, w, steps(k));
      return {scratch.left, kLeadLanes, 1};
    } else {
      return {scratch.left_across, 1, w};
    }
  }

  // The right operand from a weight: n columns, k along the steps.
  static void weight(Scratch& scratch, Lane* dst, const Strided<Element>& from, int64_t n, int64_t k0, int64_t k) {
    const Element* src = from.data + k0 * from.step;
    if (from.column == 1 && from.step != 1) return across(scratch, dst, {src, from.step}, 0, k, 0, n);
    for (int64_t c = 0; c < n; c += kColumns)
      panel(dst + c * steps(k), {src + c * from.column, from.column, from.step}, smaller(n - c, kColumns), k);
  }

  // What packing that reads.
  static Ahead reads(const Strided<Element>& from, int64_t n, int64_t k0, int64_t k) {
    constexpr int64_t kBytes = sizeof(Element);
    const uintptr_t src = reinterpret_cast<uintptr_t>(from.data) + k0 * from.step * kBytes;
    if (from.step == 1) return {src, from.column * kBytes, k * kBytes, n};
    if (from.column == 1) return {src, from.step * kBytes, n * kBytes, k};
    return {};
  }

  static void panel(Lane* dst, const Strided<Element>& from, int64_t n, int64_t k) {
    const int64_t w = round_up(n, 16);
    std::memset(dst, 0, steps(k) * w * sizeof(Lane));
    for (int64_t j = 0; j < k; j++) {
      for (int64_t i = 0; i < n; i++) {
        const Element v = from.data[i * from.column + j * from.step];
        Lane& lane = dst[j / kPerLane * w + i];
        if constexpr (kPairs) {
          lane |= uint32_t{v.bits} << (16 * (j % 2));
        } else {
          lane = bits_of(widen(v));
        }
      }
    }
  }
};

// How many rows of k inputs fit into `right` where weights are streamed.
template <class Isa, class Element>
int64_t streamed_rows(int64_t k) {
  const int64_t steps = streamed_steps(k, Packing<Isa, Element>::kPerLane);
  const int64_t some = std::clamp<int64_t>(steps, 16, Isa::template kStreamedSteps<Element>);
  return kRight / Isa::template lanes_streamed<Element>(some) / 16 * 16;
}

// Rows p0 .. p0 + count, columns k0 .. k0 + k, as stream_weights wants them. They stay in scratch.right, for the next
// tile of the same rows.
template <class Isa, class Element>
void pack_inputs(Scratch& scratch, const Rows<Element>& rows, int64_t p0, int64_t count, int64_t k0, int64_t k) {
  using Pack = Packing<Isa, Element>;
  const Inputs wanted{rows.base, rows.index, rows.scale, p0, count, k0, k};
  if (scratch.packed == wanted) return;
  scratch.packed = wanted;
  if constexpr (Isa::template kInTiles<Element>) {
    // Right operands of tile registers: [sixteen rows][step][row].
    const int64_t steps = streamed_steps(k, Pack::kPerLane);
    const int64_t block = kSteps * Pack::kPerLane;
    for (int64_t r0 = 0; r0 < count; r0 += kRowsPacked) {
      const int64_t some = smaller(count - r0, kRowsPacked);
      for (int64_t c = 0; c < k; c += block) {
        const int64_t part = smaller(k - c, block);
        const Left left = Pack::rows(scratch, rows, p0 + r0, some, k0 + c, part);
        for (int64_t r = 0; r < some; r += 16)
          Isa::transpose_lanes(scratch.right + ((r0 + r) * steps + c / Pack::kPerLane * 16), 16,
                               left.data + r * left.row, left.row, Pack::steps(part), 16);
      }
    }
  } else {
    constexpr int64_t kBlock = Isa::template kStreamedSteps<Element> * Pack::kPerLane;
    Lane* dst = scratch.right;
    for (int64_t c = 0; c < k; c += kBlock, dst += kRight) {
      const int64_t part = smaller(k - c, kBlock), steps = streamed_steps(part, Pack::kPerLane);
      Pack::rows_to(dst, scratch, rows, p0, count, k0 + c, part, steps, Isa::template lanes_streamed<Element>(steps));
    }
  }
}

// The columns of weights that lie contiguous along the steps: they are read as they are, each number once for all
// rows that are packed. While one panel of columns is multiplied, the next one is asked for.
template <class Isa, class Element>
void stream_weights(Scratch& scratch, float* product, const Rows<Element>& rows, int64_t p0, int64_t count, int64_t k,
                    int64_t matrices, const Strided<Element>* weights, const Strided<Element>* next, int64_t n,
                    bool accumulate) {
  using Pack = Packing<Isa, Element>;
  constexpr int64_t kPanel = Isa::template kPanel<Element>,
                    kBlock = Isa::template kStreamedSteps<Element> * Pack::kPerLane;
  const bool whole = k <= (Isa::template kInTiles<Element> ? 1 : kKept) * kBlock;
  const int64_t room = streamed_rows<Isa, Element>(k);
  for (int64_t r0 = 0; r0 < count; r0 += room) {
    const int64_t some = smaller(count - r0, room);
    if (whole) pack_inputs<Isa>(scratch, rows, p0 + r0, some, 0, k);
    for (int64_t k0 = 0; k0 < k; k0 += kBlock) {
      const int64_t part = smaller(k - k0, kBlock);
      if (!whole) pack_inputs<Isa>(scratch, rows, p0 + r0, some, k0, part);
      const Lane* inputs = scratch.right + (whole ? k0 / kBlock * kRight : 0);
      for (int64_t i = 0; i < matrices; i++) {
        for (int64_t c = 0; c < n; c += kPanel) {
          const Element* weight = weights[i].data + c * weights[i].column + k0;
          const Strided<Element>* after = c + kPanel < n ? &weights[i] : i + 1 < matrices ? &weights[i + 1] : next;
          Ahead ahead;
          if (after) ahead = Pack::reads(*after, kPanel, k0, part);
          if (after == &weights[i]) ahead.row += (c + kPanel) * weights[i].column * sizeof(Element);
          float* out = product + r0 * kLead + i * kColumns + c;
          const int64_t columns = smaller(n - c, kPanel);
          if constexpr (Isa::template kInTiles<Element>) {
            Isa::stream(weight, weights[i].column, columns, part, inputs, some, out, kLead, accumulate || k0 > 0,
                        ahead);
          } else {
            stream_dots<Isa>(weight, weights[i].column, columns, part, inputs, some, out, kLead, accumulate || k0 > 0,
                             ahead);
          }
        }
      }
    }
  }
}

// product [rows][kLead] (+)= left x right, for a right operand of `panels` panels of kColumns columns, of which n[i]
// are there. pack_left(r0, rows, k0, k) returns the left operand, pack_right(dst, k0, k) writes the right one: the
// panels one after the other, each [step][its width]. ahead(i) is what to ask for while panel i is multiplied.
template <class Isa, class Element, class PackLeft, class PackRight, class AheadOf>
void multiply(Scratch& scratch, float* product, int64_t rows, int64_t k, int64_t panels, const int64_t* n,
              bool accumulate, int64_t most_steps, PackLeft pack_left, PackRight pack_right, AheadOf ahead) {
  using Pack = Packing<Isa, Element>;
  const int64_t block = most_steps * Pack::kPerLane;
  scratch.packed = {};
  if (k == 0 && !accumulate) std::memset(product, 0, rows * kLead * sizeof(float));
  for (int64_t k0 = 0; k0 < k; k0 += block) {
    const int64_t part = smaller(k - k0, block), steps = Pack::steps(part);
    pack_right(scratch.right, k0, part);
    for (int64_t r0 = 0; r0 < rows; r0 += kRowsPacked) {
      const int64_t count = smaller(rows - r0, kRowsPacked);
      Left left = pack_left(r0, count, k0, part);
      for (int64_t i = 0; i < panels; i++) {
        left.ahead = ahead(i);
        Isa::template block<Element>(left, scratch.right + i * kColumns * steps, round_up(n[i], 16),
                                     product + r0 * kLead + i * kColumns, kLead, count, steps, accumulate || k0 > 0);
      }
    }
  }
}

// product [rows][kLead] (+)= rows x weights: n columns of one, or n <= kColumns of each of two, kColumns apart, where
// n * most_steps <= kRight. `next`, if any, are the weights of the product after this one.
template <class Isa, class Element>
void multiply_weights(Scratch& scratch, float* product, const Rows<Element>& rows, int64_t p0, int64_t count, int64_t k,
                      int64_t matrices, const Strided<Element>* weights, const Strided<Element>* next, int64_t n,
                      bool accumulate, int64_t most_steps = kSteps) {
  using Pack = Packing<Isa, Element>;
  const bool along = k > 0 && weights[0].step == 1;
  if (matrices == 2 && along != (k > 0 && weights[1].step == 1)) {
    for (int64_t i = 0; i < matrices; i++)
      multiply_weights<Isa, Element>(scratch, product + i * kColumns, rows, p0, count, k, 1, weights + i,
                                     next ? next + i : nullptr, n, accumulate, most_steps);
    return;
  }
  if (along) return stream_weights<Isa>(scratch, product, rows, p0, count, k, matrices, weights, next, n, accumulate);
  int64_t widths[kGroups] = {n, n}, panels = matrices;
  if (matrices == 1) {
    panels = 0;
    for (int64_t c = 0; c < n; c += kColumns) widths[panels++] = smaller(n - c, kColumns);
  }
  const int64_t block = most_steps * Pack::kPerLane;
  Ahead ahead[2];
  multiply<Isa, Element>(
      scratch, product, count, k, panels, widths, accumulate, most_steps,
      [&](int64_t r0, int64_t part, int64_t k0, int64_t kc) {
        return Pack::rows(scratch, rows, p0 + r0, part, k0, kc);
      },
      [&](Lane* dst, int64_t k0, int64_t kc) {
        for (int64_t i = 0; i < matrices; i++, dst += kColumns * Pack::steps(kc))
          Pack::weight(scratch, dst, weights[i], n, k0, kc);
        const int64_t after = k0 + block;
        for (int64_t i = 0; i < matrices; i++) {
          ahead[i] = {};
          if (!next) continue;
          ahead[i] = after < k ? Pack::reads(weights[i], n, after, smaller(k - after, block))
                               : Pack::reads(next[i], n, 0, smaller(k, block));
        }
      },
      [&](int64_t i) { return &ahead[matrices == 1 ? 0 : i]; });
}

}  // namespace
}  // namespace mok
