#include "isa_avx2.h"
#include "level.h"

namespace mok {

Kernels kernels_avx2(Dtype dtype) { return kernels_of<Avx2>(dtype); }

}  // namespace mok
