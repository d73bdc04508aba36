// Philox 4x32-10: random numbers that are a function of a key and a counter, with no state.
//
// Counter: (id / 2, position low, position high, stream). A block of four 32-bit numbers serves two
// ids, two each: 53 of these 64 bits make a uniform number in (0, 1).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "rows.hpp"

namespace lmhead {

inline constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;
inline constexpr uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;
inline constexpr int kPhiloxRounds = 10;

struct RandomBits {
  uint32_t high, low;
};

// (bits + 1/2) 2^-53 of 53 bits: never 0, and never 1, to which the largest would be rounded.
inline double to_uniform(RandomBits w) {
  const uint64_t bits = (static_cast<uint64_t>(w.high) << 32 | w.low) >> 11;
  return std::min((static_cast<double>(bits) + 0.5) * 0x1p-53, 1.0 - 0x1p-53);
}

inline double to_gumbel(RandomBits w) { return -std::log(-std::log(to_uniform(w))); }

inline RandomBits philox(Key key, uint32_t stream, uint64_t id) {
  uint32_t c[4] = {static_cast<uint32_t>(id >> 1), static_cast<uint32_t>(key.position),
                   static_cast<uint32_t>(key.position >> 32), stream};
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(c[0]) * kPhiloxM0;
    const uint64_t p1 = static_cast<uint64_t>(c[2]) * kPhiloxM1;
    const uint32_t next[4] = {
        static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
        static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    for (int i = 0; i < 4; ++i) c[i] = next[i];
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return id & 1 ? RandomBits{c[2], c[3]} : RandomBits{c[0], c[1]};
}

}  // namespace lmhead
