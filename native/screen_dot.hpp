// Products of integers: rows of the copy, of three kinds, with hidden states of 16 bits, by
// products of 16-bit numbers. For screen.cpp alone, compiled with it. Where there are instructions
// for products of bytes, screen_bytes.hpp has two of the kinds.
#pragma once

#include "screen_bytes.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <type_traits>

namespace LMHEAD_ISA {
namespace {

// The three kinds of entries. Each has a step<R, T>: sums[r][t] += Σ_j w[r][j] · y[t][j] for R
// tokens `stride` apart and T states `width` apart, over kStep entries.
#if defined(__AVX2__)

using Sums = __m256i;

inline int32_t total(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
  return _mm_cvtsi128_si32(s);
}

inline void totals(__m256i a, __m256i b, __m256i c, __m256i d, int32_t* out) {
  const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}

inline __m256i plus(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }

// sum += the products of 16-bit numbers, in pairs.
inline void add_products(__m256i& sum, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__)
  sum = _mm256_dpwssd_epi32(sum, a, b);
#elif defined(__AVXVNNI__)
  sum = _mm256_dpwssd_avx_epi32(sum, a, b);
#else
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}

inline __m256i load16(const int16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

#if !defined(LMHEAD_BYTES)

struct Whole {
  using Entry = int8_t;
  static constexpr int64_t kStep = 16, kPerEntry = 1;
  template <int R, int T>
  static void step(const int8_t* w, int64_t stride, const int16_t* y, int64_t width,
                   Sums (*sums)[T]) {
    __m256i tokens[R];
    for (int r = 0; r < R; ++r)
      tokens[r] =
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + r * stride)));
    for (int t = 0; t < T; ++t) {
      const __m256i state = load16(y + t * width);
      for (int r = 0; r < R; ++r) add_products(sums[r][t], tokens[r], state);
    }
  }
};

struct Nibbles {
  using Entry = uint8_t;
  static constexpr int64_t kStep = 64, kPerEntry = 2;
  template <int R, int T>
  static void step(const uint8_t* w, int64_t stride, const int16_t* y, int64_t width,
                   Sums (*sums)[T]) {
    const __m256i mask = _mm256_set1_epi16(15);
    __m256i packed[R];
    for (int r = 0; r < R; ++r)
      packed[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + r * stride));
    const auto part = [&](auto k) {
      for (int t = 0; t < T; ++t) {
        const __m256i state = load16(y + t * width + 16 * k);
        for (int r = 0; r < R; ++r) {
          __m256i tokens = packed[r];
          if constexpr (k > 0) tokens = _mm256_srli_epi16(tokens, 4 * k);
          if constexpr (k < 3) tokens = _mm256_and_si256(tokens, mask);
          add_products(sums[r][t], tokens, state);
        }
      }
    };
    part(std::integral_constant<int, 0>());
    part(std::integral_constant<int, 1>());
    part(std::integral_constant<int, 2>());
    part(std::integral_constant<int, 3>());
  }
};

#endif

struct Lead {
  using Entry = int16_t;
  static constexpr int64_t kStep = 16, kPerEntry = 1;
  template <int R, int T>
  static void step(const int16_t* w, int64_t stride, const int16_t* y, int64_t width,
                   Sums (*sums)[T]) {
    for (int t = 0; t < T; ++t) {
      const __m256i state = load16(y + t * width);
      for (int r = 0; r < R; ++r) add_products(sums[r][t], load16(w + r * stride), state);
    }
  }
};

#else

using Sums = int32_t;

inline int32_t total(int32_t v) { return v; }

inline void totals(int32_t a, int32_t b, int32_t c, int32_t d, int32_t* out) {
  out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

inline int32_t plus(int32_t a, int32_t b) { return a + b; }

template <class T>
struct Plain {
  using Entry = T;
  static constexpr int64_t kStep = 16, kPerEntry = 1;
  template <int R, int S>
  static void step(const T* w, int64_t stride, const int16_t* y, int64_t width, Sums (*sums)[S]) {
    for (int r = 0; r < R; ++r)
      for (int s = 0; s < S; ++s) {
        int32_t sum = 0;
        for (int j = 0; j < kStep; ++j)
          sum += static_cast<int32_t>(w[r * stride + j]) * y[s * width + j];
        sums[r][s] += sum;
      }
  }
};

using Lead = Plain<int16_t>;

#if !defined(LMHEAD_BYTES)

using Whole = Plain<int8_t>;

struct Nibbles {
  using Entry = uint8_t;
  static constexpr int64_t kStep = 64, kPerEntry = 2;
  template <int R, int S>
  static void step(const uint8_t* w, int64_t stride, const int16_t* y, int64_t width,
                   Sums (*sums)[S]) {
    for (int r = 0; r < R; ++r)
      for (int s = 0; s < S; ++s) {
        int32_t sum = 0;
        for (int i = 0; i < 16; ++i) {
          const int32_t token = w[r * stride + 2 * i] | w[r * stride + 2 * i + 1] << 8;
          for (int k = 0; k < 4; ++k) sum += (token >> 4 * k & 15) * y[s * width + 16 * k + i];
        }
        sums[r][s] += sum;
      }
  }
};

#endif

#endif

// Hidden states as they are.
struct States16 {
  States16(const int16_t* y, int64_t, int64_t width) : y(y), width(width) {}

  const int16_t* y;
  int64_t width;
};

#if defined(LMHEAD_BYTES)
template <class Kind>
using Operand = Planes<Kind>;
constexpr int kTokens = Dot::kTokens, kStates = Dot::kStates;
#else
template <class Kind>
using Operand = States16;
constexpr int kTokens = 4, kStates = 2;
#endif

// out[t][r] = Σ w · y for R rows of the copy, `stride` entries apart, and T states from `b` on.
// Where there are few sums, several chains of each, so that additions overlap.
//
// `ahead`: how far ahead of its use memory is prefetched, in bytes; 0 for not at all.
template <class Kind, int R, int T>
void dot(const typename Kind::Entry* w, int64_t stride, const States16& states, int64_t b,
         int64_t ahead, int32_t (*out)[R]) {
  constexpr int kChains = R * T == 1 ? 4 : R * T == 2 ? 2 : 1;
  const int64_t width = states.width;
  const int16_t* y = states.y + b * width;
  Sums sums[kChains][R][T] = {};
  int64_t j = 0;
  for (; j + kChains * Kind::kStep <= width; j += kChains * Kind::kStep) {
    const auto* at = w + j / Kind::kPerEntry;
    if (ahead > 0 && j / Kind::kPerEntry % 64 == 0)
      for (int r = 0; r < R; ++r)
        for (int64_t line = 0; line < kChains * Kind::kStep / Kind::kPerEntry; line += 64)
          __builtin_prefetch(at + r * stride + line + ahead, 0, 0);
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c)
      Kind::template step<R, T>(at + c * Kind::kStep / Kind::kPerEntry, stride,
                                y + j + c * Kind::kStep, width, sums[c]);
  }
  for (; j < width; j += Kind::kStep)
    Kind::template step<R, T>(w + j / Kind::kPerEntry, stride, y + j, width, sums[0]);
  for (int t = 0; t < T; ++t) {
    Sums all[R];
    for (int r = 0; r < R; ++r) {
      all[r] = sums[0][r][t];
      for (int c = 1; c < kChains; ++c) all[r] = plus(all[r], sums[c][r][t]);
      if constexpr (R != 4) out[t][r] = total(all[r]);
    }
    if constexpr (R == 4) totals(all[0], all[1], all[2], all[3], out[t]);
  }
}

}  // namespace
}  // namespace LMHEAD_ISA
