#include "isa_avx512.h"
#include "level.h"

namespace mok {

Kernels kernels_avx512(Dtype dtype) { return kernels_of<Avx512>(dtype); }

}  // namespace mok
