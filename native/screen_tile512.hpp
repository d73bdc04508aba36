// A tile of four tokens and four hidden states of eight bits, with 512-bit vectors throughout: the
// products of a batch, where they and not memory are the limit. For screen.cpp alone, compiled with
// it. The values are those of `tile` there.
#pragma once

#include "screen_dot.hpp"

#if defined(__AVX512VNNI__) && !defined(LMHEAD_NARROW) && !defined(LMHEAD_LANES)
#define LMHEAD_TILE512

#include "screen.hpp"

namespace LMHEAD_ISA {
namespace {

constexpr int64_t kSide = 4;  // tokens, and states

// sums[t][r] of sixteen entries each, added up: entry 4 t + r.
inline __m512i added_up(const __m512i (&sums)[kSide][kSide]) {
  __m512i s[kSide];
#pragma GCC unroll 4
  for (int t = 0; t < kSide; ++t) {
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(sums[t][0], sums[t][1]),
                                       _mm512_unpackhi_epi32(sums[t][0], sums[t][1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(sums[t][2], sums[t][3]),
                                       _mm512_unpackhi_epi32(sums[t][2], sums[t][3]));
    s[t] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  const __m512i first = _mm512_add_epi32(_mm512_shuffle_i32x4(s[0], s[1], 0x44),
                                         _mm512_shuffle_i32x4(s[0], s[1], 0xee));
  const __m512i last = _mm512_add_epi32(_mm512_shuffle_i32x4(s[2], s[3], 0x44),
                                        _mm512_shuffle_i32x4(s[2], s[3], 0xee));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(first, last, 0x88),
                          _mm512_shuffle_i32x4(first, last, 0xdd));
}

// The leading parts: x[r] · y[t], entry 4 t + r.
inline __m512i lead_products(const int16_t* x, const int16_t* y, int64_t leading) {
  __m512i sums[kSide][2] = {};  // of each state: tokens 0 and 1, tokens 2 and 3
  for (int64_t k = 0; k < leading; k += 16) {
    const auto pair = [&](int64_t r) {
      return _mm512_inserti64x4(_mm512_castsi256_si512(load16(x + r * leading + k)),
                                load16(x + (r + 1) * leading + k), 1);
    };
    const __m512i low = pair(0), high = pair(2);
#pragma GCC unroll 4
    for (int t = 0; t < kSide; ++t) {
      const __m512i state = _mm512_broadcast_i64x4(load16(y + t * leading + k));
      sums[t][0] = _mm512_dpwssd_epi32(sums[t][0], low, state);
      sums[t][1] = _mm512_dpwssd_epi32(sums[t][1], high, state);
    }
  }
  __m512i s[kSide];
#pragma GCC unroll 4
  for (int t = 0; t < kSide; ++t)
    s[t] = _mm512_add_epi32(_mm512_unpacklo_epi32(sums[t][0], sums[t][1]),
                            _mm512_unpackhi_epi32(sums[t][0], sums[t][1]));
  const __m512i first =
      _mm512_add_epi32(_mm512_unpacklo_epi64(s[0], s[1]), _mm512_unpackhi_epi64(s[0], s[1]));
  const __m512i last =
      _mm512_add_epi32(_mm512_unpacklo_epi64(s[2], s[3]), _mm512_unpackhi_epi64(s[2], s[3]));
  const __m512i all = _mm512_add_epi32(_mm512_shuffle_i32x4(first, last, 0x88),
                                       _mm512_shuffle_i32x4(first, last, 0xdd));
  // Now tokens 0 and 2 of states 0 and 1, tokens 1 and 3 of them, and so on.
  const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  return _mm512_permutexvar_epi32(order, all);
}

// Four tokens' numbers, twice, and two states' numbers, each four times.
inline __m512d of_tokens(const float* x) {
  return _mm512_broadcast_f64x4(_mm256_cvtps_pd(_mm_loadu_ps(x)));
}

inline __m512d of_states(const double* x) {
  const __m512i each = _mm512_setr_epi64(0, 0, 0, 0, 1, 1, 1, 1);
  return _mm512_permutexvar_pd(each, _mm512_castpd128_pd512(_mm_loadu_pd(x)));
}

// The tokens from `v` on and the states from `b` on; `top`: the largest so far of each state, in
// four parts. Lines cache lines from `next` on are prefetched with each vector.
template <int Lines>
void tile512(const lmhead::ScreenCopy& copy, const lmhead::ScreenStates& states,
             const Planes<Whole>& y, int64_t v, int64_t b, const char* next, float* approx,
             __m128 (&top)[kSide]) {
  const int8_t* w = copy.whole + v * copy.width;
  const uint8_t* first = y.bytes(b);
  const int64_t width = copy.width, apart = y.bytes(b + 1) - first;
  __m512i sums[kSide][kSide] = {};
  for (int64_t i = 0; i < width; i += 64) {
#pragma GCC unroll 4
    for (int line = 0; line < Lines; ++line) __builtin_prefetch(next + i * Lines + 64 * line);
    __m512i u[kSide];
#pragma GCC unroll 4
    for (int r = 0; r < kSide; ++r) u[r] = Dot::flip(Dot::load(w + r * width + i));
#pragma GCC unroll 4
    for (int t = 0; t < kSide; ++t) {
      const __m512i state = Dot::load(first + t * apart + i);
#pragma GCC unroll 4
      for (int r = 0; r < kSide; ++r) Dot::add_products(sums[t][r], u[r], state);
    }
  }
  const __m512i offsets =
      _mm512_setr_epi32(y.offset32(b), y.offset32(b), y.offset32(b), y.offset32(b),
                        y.offset32(b + 1), y.offset32(b + 1), y.offset32(b + 1), y.offset32(b + 1),
                        y.offset32(b + 2), y.offset32(b + 2), y.offset32(b + 2), y.offset32(b + 2),
                        y.offset32(b + 3), y.offset32(b + 3), y.offset32(b + 3), y.offset32(b + 3));
  const __m512i main = _mm512_sub_epi32(_mm512_slli_epi32(added_up(sums), 8), offsets);
  const int64_t leading = copy.leading;
  const __m512i lead =
      leading > 0 ? lead_products(copy.lead + v * leading, states.lead + b * leading, leading)
                  : _mm512_setzero_si512();
  const __m512d scales = of_tokens(copy.scales + v), lead_scales = of_tokens(copy.lead_scales + v);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const auto doubles = [&](__m512i x) {
      return _mm512_cvtepi32_pd(half ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x));
    };
    const int64_t at = b + 2 * half;
    __m512d a = scales * of_states(states.scales + at) * doubles(main);
    if (leading > 0) a += lead_scales * of_states(states.lead_scales + at) * doubles(lead);
    if (copy.bias) a += _mm512_broadcast_f64x4(_mm256_loadu_pd(copy.bias + v));
    const __m256 rounded = _mm512_cvtpd_ps(a);
    const __m128 values[2] = {_mm256_castps256_ps128(rounded), _mm256_extractf128_ps(rounded, 1)};
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      _mm_storeu_ps(approx + (at + i) * copy.vocab + v, values[i]);
      top[2 * half + i] = _mm_max_ps(top[2 * half + i], values[i]);
    }
  }
}

// `strip` of screen.cpp for four states from `b` on; the tokens are a multiple of four.
template <int Lines>
void strip512(const lmhead::ScreenCopy& copy, const lmhead::ScreenStates& states,
              const Planes<Whole>& y, int64_t lo, int64_t hi, int64_t b, const char* next,
              float* approx, float* top) {
  __m128 best[kSide];
  for (int t = 0; t < kSide; ++t) best[t] = _mm_set1_ps(top[t]);
  for (int64_t v = lo; v < hi; v += kSide, next += Lines * copy.width)
    tile512<Lines>(copy, states, y, v, b, next, approx, best);
  for (int t = 0; t < kSide; ++t) {
    float four[kSide];
    _mm_storeu_ps(four, best[t]);
    top[t] = *std::max_element(four, four + kSide);
  }
}

}  // namespace
}  // namespace LMHEAD_ISA

#endif
