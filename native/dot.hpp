// Dot products in float64 of stored floats, always added in the same order: that of one pair, of
// many pairs and of all rows of a weight, on every instruction set.
//
// Entry i goes to lane i mod 8. A lane adds its products in the order of i; a product of two
// float32 numbers is exact in float64, so fused or not makes no difference. At the end lane
// i + 4 is added to lane i, then lane i + 2, then lane i + 1.
#pragma once

#include <cstdint>
#include <cstring>

#include "floats.hpp"
#include "simd.hpp"

namespace LMHEAD_ISA {

using lmhead::Bf16;
using lmhead::F16;

inline constexpr int kDotLanes = 8;
// Vectors of doubles that hold the lanes.
inline constexpr int kDotVectors = kDotLanes / kHalf;

inline double value(double x) { return x; }

inline float value(float x) { return x; }

inline float value(Bf16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &wide, 4);
  return y;
}

inline float value(F16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest < 0x400) {  // a denormal or 0
    const float y = static_cast<float>(rest) * 0x1p-24f;
    return sign ? -y : y;
  }
  const uint32_t wide =
      sign | (rest >= 0x7c00 ? 0x7f800000u | rest << 13 : (rest << 13) + 0x38000000u);
  float y;
  std::memcpy(&y, &wide, 4);
  return y;
}

// kHalf entries as doubles.
inline vd load_half(const double* p) {
  vd v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline vd load_half(const float* p) {
  vf_half v;
  std::memcpy(&v, p, sizeof v);
  return to_double(v);
}

inline vd load_half(const Bf16* p) {
#if defined(__AVX2__) && !defined(LMHEAD_LANES)
  const auto* at = reinterpret_cast<const __m128i*>(p);
#if defined(__AVX512F__)
  return to_double((vf_half)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), 16));
#else
  return to_double((vf_half)_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64(at)), 16));
#endif
#else
  vd v;
  for (int i = 0; i < kHalf; ++i) v[i] = value(p[i]);
  return v;
#endif
}

inline vd load_half(const F16* p) {
#if defined(__F16C__) && !defined(LMHEAD_LANES)
  const auto* at = reinterpret_cast<const __m128i*>(p);
#if defined(__AVX512F__)
  return to_double((vf_half)_mm256_cvtph_ps(_mm_loadu_si128(at)));
#else
  return to_double((vf_half)_mm_cvtph_ps(_mm_loadl_epi64(at)));
#endif
#else
  vd v;
  for (int i = 0; i < kHalf; ++i) v[i] = value(p[i]);
  return v;
#endif
}

// The eight lanes of a sum.
struct DotLanes {
  vd part[kDotVectors] = {};

  template <class X, class Y>
  void add(const X* x, const Y* y) {
    for (int k = 0; k < kDotVectors; ++k)
      part[k] += load_half(x + k * kHalf) * load_half(y + k * kHalf);
  }

  // The last entries, fewer than eight.
  template <class X, class Y>
  void add(const X* x, const Y* y, int64_t n) {
    double lanes[kDotLanes];
    std::memcpy(lanes, part, sizeof lanes);
    for (int64_t i = 0; i < n; ++i) lanes[i] += static_cast<double>(value(x[i])) * value(y[i]);
    std::memcpy(part, lanes, sizeof lanes);
  }

  double total() const {
#if defined(__AVX2__) && !defined(LMHEAD_LANES)
#if defined(__AVX512F__)
    const auto all = (__m512d)part[0];
    const __m256d four = _mm512_castpd512_pd256(all) + _mm512_extractf64x4_pd(all, 1);
#else
    const auto four = (__m256d)(part[0] + part[1]);
#endif
    const __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
    return two[0] + two[1];
#else
    double lanes[kDotLanes];
    std::memcpy(lanes, part, sizeof lanes);
    for (int half = kDotLanes / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
#endif
  }
};

// N dot products side by side, so that none waits for its own last sum: out[i] = x[i] · y[i].
template <int N, class X, class Y>
inline void dots(const X* const (&x)[N], const Y* const (&y)[N], int64_t d, double* out) {
  DotLanes sums[N];
  int64_t j = 0;
  for (; j + kDotLanes <= d; j += kDotLanes)
    for (int i = 0; i < N; ++i) sums[i].add(x[i] + j, y[i] + j);
  for (int i = 0; i < N; ++i) {
    if (j < d) sums[i].add(x[i] + j, y[i] + j, d - j);
    out[i] = sums[i].total();
  }
}

template <class X, class Y>
inline double dot(const X* x, const Y* y, int64_t d) {
  double out;
  dots<1>({x}, {y}, d, &out);
  return out;
}

}  // namespace LMHEAD_ISA
