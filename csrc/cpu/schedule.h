// The slots sorted by expert: a stable counting sort.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "threads.h"

namespace mok {

// Fills order [S] and offsets [E] (see Block). Slots whose id lies outside [0, E) go last, in ascending order.
template <class Id>
void sort_slots(Team& team, const char* ids, int64_t S, int64_t E, int32_t* order, int32_t* offsets) {
  // Each part counts its slots, then writes them after those of the parts before it: the result does not depend on the
  // number of parts.
  const int64_t parts = S < 16384 ? 1 : team.threads(), size = (S + parts - 1) / parts;
  std::vector<int32_t> position((E + 1) * parts, 0);
  const auto expert = [&](int64_t slot) {
    Id id;
    std::memcpy(&id, ids + slot * sizeof(Id), sizeof(Id));  // ids may lie at any byte
    return id >= 0 && static_cast<int64_t>(id) < E ? static_cast<int64_t>(id) : E;
  };
  const auto each_part = [&](const auto& body) {
    torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; part++)
        for (int64_t slot = part * size; slot < std::min(S, (part + 1) * size); slot++)
          body(slot, position[part * (E + 1) + expert(slot)]);
    });
  };
  each_part([](int64_t, int32_t& count) { count++; });
  int32_t total = 0;
  for (int64_t e = 0; e <= E; e++) {
    for (int64_t part = 0; part < parts; part++) {
      int32_t& p = position[part * (E + 1) + e];
      const int32_t count = p;
      p = total;
      total += count;
    }
    if (e < E) offsets[e] = total;
  }
  each_part([&](int64_t slot, int32_t& p) { order[p++] = static_cast<int32_t>(slot); });
}

}  // namespace mok
