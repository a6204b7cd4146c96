// The few AMX instructions that are needed. With MOK_EMULATE_AMX they run in plain C++, so that the code around them
// can be tested on machines without them.
#pragma once

#include <cstdint>
#include <cstring>

#include "convert.h"

namespace mok {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#if defined(MOK_EMULATE_AMX)

struct TileRegister {
  uint32_t lane[16][16];
};
inline thread_local TileRegister tile_registers[8];

inline void tiles_configure() {}
inline void tiles_release() {}

template <int kTile>
void tile_zero() {
  std::memset(&tile_registers[kTile], 0, sizeof(TileRegister));
}
template <int kTile>
void tile_load(const void* src, int64_t bytes) {
  for (int r = 0; r < 16; r++)
    std::memcpy(tile_registers[kTile].lane[r], static_cast<const char*>(src) + r * bytes, 64);
}
template <int kTile>
void tile_store(void* dst, int64_t bytes) {
  for (int r = 0; r < 16; r++) std::memcpy(static_cast<char*>(dst) + r * bytes, tile_registers[kTile].lane[r], 64);
}
template <int kSum, int kLeft, int kRight>
void tile_multiply_add() {
  for (int m = 0; m < 16; m++) {
    for (int n = 0; n < 16; n++) {
      float sum = float_of(tile_registers[kSum].lane[m][n]);
      for (int s = 0; s < 16; s++) {
        const uint32_t a = tile_registers[kLeft].lane[m][s], b = tile_registers[kRight].lane[s][n];
        sum += float_of(a << 16) * float_of(b << 16);
        sum += float_of(a & 0xffff0000) * float_of(b & 0xffff0000);
      }
      tile_registers[kSum].lane[m][n] = bits_of(sum);
    }
  }
}

#else

// Not by intrinsics: gcc's _tile_loadconfig tells the compiler of the first 8 bytes only, so that the rest of the
// configuration may never reach memory; and the others are macros that want literal tile numbers.
inline void tiles_configure() {
  static constexpr TileConfig config;
  asm volatile("ldtilecfg %0" ::"m"(config));
}
inline void tiles_release() { asm volatile("tilerelease"); }

template <int kTile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
inline void tile_load(const void* src, int64_t bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(src), "r"(bytes), "i"(kTile) : "memory");
}
template <int kTile>
inline void tile_store(void* dst, int64_t bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(dst), "r"(bytes), "i"(kTile) : "memory");
}
template <int kSum, int kLeft, int kRight>
inline void tile_multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}

#endif

}  // namespace
}  // namespace mok
