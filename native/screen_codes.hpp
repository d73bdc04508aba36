// Products of whole numbers: rows of the copy, of three kinds, with hidden states of 16 bits. For
// screen.cpp alone, compiled with it.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <type_traits>

namespace LMHEAD_ISA {
namespace {

// How far ahead of its use memory is asked for, in bytes.
constexpr int64_t kAhead = 1024;

// The three kinds of entries. Each gives products<R, T>: out[r][t] = Σ_j w[r][j] · y[t][j] for R
// words `stride` apart and T states `width` apart.
#if defined(__AVX2__)

using Sums = __m256i;

inline int32_t total(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
  return _mm_cvtsi128_si32(s);
}

inline __m256i plus(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }

inline __m256i load16(const int16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

struct Whole {
  using Entry = int8_t;
  static constexpr int64_t kStep = 16, kPerEntry = 1;
  template <int R, int T>
  static void step(const int8_t* w, int64_t stride, const int16_t* y, int64_t width,
                   Sums (*sums)[T]) {
    __m256i words[R];
    for (int r = 0; r < R; ++r)
      words[r] = _mm256_cvtepi8_epi16(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + r * stride)));
    for (int t = 0; t < T; ++t) {
      const __m256i state = load16(y + t * width);
      for (int r = 0; r < R; ++r)
        sums[r][t] = _mm256_add_epi32(sums[r][t], _mm256_madd_epi16(words[r], state));
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
          __m256i words = packed[r];
          if constexpr (k > 0) words = _mm256_srli_epi16(words, 4 * k);
          if constexpr (k < 3) words = _mm256_and_si256(words, mask);
          sums[r][t] = _mm256_add_epi32(sums[r][t], _mm256_madd_epi16(words, state));
        }
      }
    };
    part(std::integral_constant<int, 0>());
    part(std::integral_constant<int, 1>());
    part(std::integral_constant<int, 2>());
    part(std::integral_constant<int, 3>());
  }
};

struct Lead {
  using Entry = int16_t;
  static constexpr int64_t kStep = 16, kPerEntry = 1;
  template <int R, int T>
  static void step(const int16_t* w, int64_t stride, const int16_t* y, int64_t width,
                   Sums (*sums)[T]) {
    for (int t = 0; t < T; ++t) {
      const __m256i state = load16(y + t * width);
      for (int r = 0; r < R; ++r)
        sums[r][t] = _mm256_add_epi32(sums[r][t], _mm256_madd_epi16(load16(w + r * stride), state));
    }
  }
};

#else

using Sums = int32_t;

inline int32_t total(int32_t v) { return v; }

inline int32_t plus(int32_t a, int32_t b) { return a + b; }

template <class T>
struct Plain {
  using Entry = T;
  static constexpr int64_t kStep = 16, kPerEntry = 1;
  template <int R, int S>
  static void step(const T* w, int64_t stride, const int16_t* y, int64_t width,
                   Sums (*sums)[S]) {
    for (int r = 0; r < R; ++r)
      for (int s = 0; s < S; ++s) {
        int32_t sum = 0;
        for (int j = 0; j < kStep; ++j)
          sum += static_cast<int32_t>(w[r * stride + j]) * y[s * width + j];
        sums[r][s] += sum;
      }
  }
};

using Whole = Plain<int8_t>;
using Lead = Plain<int16_t>;

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
          const int32_t word = w[r * stride + 2 * i] | w[r * stride + 2 * i + 1] << 8;
          for (int k = 0; k < 4; ++k) sum += (word >> 4 * k & 15) * y[s * width + 16 * k + i];
        }
        sums[r][s] += sum;
      }
  }
};

#endif

// Several sums side by side where there is one word and one state, so that they need not wait for
// each other. One word after the other is how a machine reads memory fastest.
template <class Kind, int R, int T>
void dot(const typename Kind::Entry* w, const int16_t* y, int64_t width, double (*out)[T]) {
  constexpr int kChains = R * T == 1 ? 4 : 1;
  constexpr bool kStreams = R * T == 1 && sizeof(typename Kind::Entry) == 1;
  Sums sums[kChains][R][T] = {};
  const int64_t stride = width / Kind::kPerEntry;
  int64_t j = 0;
  for (; j + kChains * Kind::kStep <= width; j += kChains * Kind::kStep) {
    const auto* at = w + j / Kind::kPerEntry;
    if constexpr (kStreams)
      for (int64_t line = 0; line < kChains * Kind::kStep / Kind::kPerEntry; line += 64)
        __builtin_prefetch(at + line + kAhead, 0, 0);
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c)
      Kind::template step<R, T>(at + c * Kind::kStep / Kind::kPerEntry, stride,
                                y + j + c * Kind::kStep, width, sums[c]);
  }
  for (; j < width; j += Kind::kStep)
    Kind::template step<R, T>(w + j / Kind::kPerEntry, stride, y + j, width, sums[0]);
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) {
      Sums sum = sums[0][r][t];
      for (int c = 1; c < kChains; ++c) sum = plus(sum, sums[c][r][t]);
      out[r][t] = total(sum);
    }
}

}  // namespace
}  // namespace LMHEAD_ISA
