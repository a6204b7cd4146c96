#include "isa_amx.h"
#include "level.h"

namespace mok {

Kernels kernels_amx(Dtype dtype) { return kernels_of<Amx>(dtype); }

}  // namespace mok
