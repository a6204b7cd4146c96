// Memory that the system has promised but not given yet.
#pragma once

#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace mok {
namespace {

// Asks for all pages of a buffer that is about to be written. A fresh gradient is a hundred thousand pages, and a fault
// for each costs more than the products: one call for many saves a third of that, and the pages are still in the cache
// when they are written. Only a hint: whatever goes wrong, a write gets its page.
inline void make_present(void* begin, int64_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  static const uintptr_t page = sysconf(_SC_PAGESIZE);
  if (bytes < int64_t{1} << 16) return;
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / page * page;
  madvise(reinterpret_cast<void*>(first), reinterpret_cast<uintptr_t>(begin) + bytes - first, MADV_POPULATE_WRITE);
#endif
}

}  // namespace
}  // namespace mok
