#include "dispatch.h"

#if defined(MOK_X86)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace mok {

#if defined(MOK_X86)

namespace {

bool may_use_tiles() {
#if defined(MOK_EMULATE_AMX)
  return true;
#elif defined(__linux__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool has_tiles = d >> 24 & 1, has_bf16 = d >> 22 & 1;
  // A process has to ask Linux for the tile registers' state (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
  return has_tiles && has_bf16 && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

Level detect() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!avx2) return Level::kScalar;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx512) return Level::kAvx2;
  if (!__builtin_cpu_supports("avx512bf16")) return Level::kAvx512;
  return may_use_tiles() ? Level::kAmx : Level::kAvx512Bf16;
}

}  // namespace

Level best_level() {
  static const Level level = detect();
  return level;
}

Kernels kernels(Level level, Dtype dtype) {
  switch (level) {
    case Level::kAvx2:
      return kernels_avx2(dtype);
    case Level::kAvx512:
      return kernels_avx512(dtype);
    case Level::kAvx512Bf16:
      return kernels_avx512bf16(dtype);
    case Level::kAmx:
      return kernels_amx(dtype);
    default:
      return kernels_scalar(dtype);
  }
}

#else

Level best_level() { return Level::kScalar; }
Kernels kernels(Level, Dtype dtype) { return kernels_scalar(dtype); }

#endif

}  // namespace mok
