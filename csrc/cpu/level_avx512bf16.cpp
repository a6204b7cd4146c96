#include "isa_avx512.h"
#include "level.h"

namespace mok {

Kernels kernels_avx512bf16(Dtype dtype) { return kernels_of<Avx512Bf16>(dtype); }

}  // namespace mok
