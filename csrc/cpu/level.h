// The table of one instruction set's kernels.
#pragma once

#include "backward.h"
#include "forward.h"

namespace mok {
namespace {

template <class Isa, class Element>
Kernels kernels_of() {
  return {&Isa::enter,
          &Isa::leave,
          &streamed_rows<Isa, Element>,
          &up_tile<Isa, Element>,
          &down_tile<Isa, Element>,
          &dact_tile<Isa, Element>,
          &dinput_tile<Isa, Element>,
          &dmatrix_tile<Isa, Element>,
          &dbias_tile<Element>,
          &dweight_tile<Element>,
          &combine_tile};
}

template <class Isa>
Kernels kernels_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return kernels_of<Isa, F32>();
    case Dtype::kBfloat16:
      return kernels_of<Isa, Bf16>();
    case Dtype::kFloat16:
      return kernels_of<Isa, F16>();
  }
  return {};
}

}  // namespace
}  // namespace mok
