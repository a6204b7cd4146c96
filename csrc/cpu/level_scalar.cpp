#include "isa_scalar.h"
#include "level.h"

namespace mok {

Kernels kernels_scalar(Dtype dtype) { return kernels_of<Scalar>(dtype); }

}  // namespace mok
