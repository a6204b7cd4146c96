// Which instruction sets this machine has, and their kernels.
#pragma once

#include "block.h"

#if defined(__x86_64__)
#define MOK_X86
#endif

namespace mok {

Level best_level();
Kernels kernels(Level level, Dtype dtype);

}  // namespace mok
