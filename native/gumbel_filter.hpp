// Noise of many tokens at a time, and which of them can win a draw. Compiled with the files that
// use it, once per instruction set.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>

#include "philox.hpp"
#include "simd.hpp"

namespace LMHEAD_ISA {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pairs of numbers are stored as one");

using lmhead::Key;

// The high and low products of 32-bit numbers in 64-bit lanes.
inline vu mul32(vu a, uint32_t b) {
#if defined(__AVX512F__) && !defined(LMHEAD_LANES)
  return (vu)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__) && !defined(LMHEAD_LANES)
  return (vu)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
  return a * static_cast<uint64_t>(b);
#endif
}

constexpr int kChunk = 512;

// The random bits of ids [first, first + kChunk), first being even: see philox.hpp.
inline void random_bits(Key key, int64_t first, uint32_t* high, uint32_t* low) {
  const uint64_t mask = 0xffffffff;
  for (int at = 0; at < kChunk; at += 2 * kHalf) {
    vu c0, c1 = vu{} + (key.position & mask), c2 = vu{} + (key.position >> 32), c3{};
    for (int k = 0; k < kHalf; ++k) c0[k] = static_cast<uint64_t>((first + at) / 2 + k) & mask;
    uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
    for (int round = 0; round < lmhead::kPhiloxRounds; ++round) {
      const vu p0 = mul32(c0, lmhead::kPhiloxM0), p1 = mul32(c2, lmhead::kPhiloxM1);
      c0 = (p1 >> 32) ^ c1 ^ static_cast<uint64_t>(k0);
      c2 = (p0 >> 32) ^ c3 ^ static_cast<uint64_t>(k1);
      c1 = p1 & mask;
      c3 = p0 & mask;
      k0 += lmhead::kPhiloxW0;
      k1 += lmhead::kPhiloxW1;
    }
    // Of each pair of ids the first has c0 and c1, the second c2 and c3.
    const vu both = c0 | c2 << 32, lower = c1 | c3 << 32;
    std::memcpy(high + at, &both, sizeof both);
    std::memcpy(low + at, &lower, sizeof lower);
  }
}

struct Best {
  double score = -__builtin_inf();
  int64_t id = -1;

  void take(double other, int64_t other_id) {
    if (other > score || (other == score && other_id < id)) {
      score = other;
      id = other_id;
    }
  }
};

// Calls meet(token, score) for every token of [lo, hi), lo being even, whose score β (z - max) +
// noise is at least `least()`, and for few others. The noise is -log E with E = -log u >= 1 - u, so
// such a token has 1 - u <= exp(β (z - max) - least): a comparison in float32 with a margin
// excludes nearly all tokens without a logarithm.
template <class Least, class Meet>
void each_contender(const float* z, int64_t lo, int64_t hi, double beta, double max, Key key,
                    const Least& least, const Meet& meet) {
  uint32_t high[kChunk], low[kChunk];
  const float b = static_cast<float>(beta), top = static_cast<float>(max);
  for (int64_t first = lo; first < hi; first += kChunk) {
    random_bits(key, first, high, low);
    const int64_t end = std::min(hi, first + kChunk);
    for (int64_t i = first; i < end; i += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, end - i));
      const vf v = n == kLanes ? load(z + i) : load(z + i, n, -__builtin_inff());
      vi bits;
      std::memcpy(&bits, high + (i - first), sizeof bits);
      // 1 - u is at least (2^32 - 1 - high) 2^-32; the top 31 bits of it are plenty.
      const vf left = __builtin_convertvector((~bits >> 1) & 0x7fffffff, vf) * 0x1p-31f;
      const vf may = exp((v - top) * b - static_cast<float>(least())) * 1.01f + 1e-9f;
      const vi hit = (left * 0.999f < may) & (v > -__builtin_inff());
      if (!any(hit)) continue;
      for (int k = 0; k < n; ++k)
        if (hit[k])
          meet(i + k, beta * (static_cast<double>(z[i + k]) - max) +
                          lmhead::to_gumbel({high[i + k - first], low[i + k - first]}));
    }
  }
}

}  // namespace
}  // namespace LMHEAD_ISA
