// Vectors of floats, as wide as the instruction set this file is compiled for.
//
// GCC's vector extensions (Clang has them too): arithmetic, comparison and selection are operators,
// and the compiler picks the instructions. The same source is compiled for AVX-512, AVX2, SSE2 and
// NEON.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace LMHEAD_ISA {

#if defined(LMHEAD_LANES)  // the kernel tests: any width on any machine
inline constexpr int kLanes = LMHEAD_LANES;
#elif defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

using vf = float __attribute__((vector_size(kLanes * 4)));
using vi = int32_t __attribute__((vector_size(kLanes * 4)));

// Half as many numbers of twice the size.
inline constexpr int kHalf = kLanes / 2;
using vf_half = float __attribute__((vector_size(kHalf * 4)));
using vd = double __attribute__((vector_size(kHalf * 8)));
using vl = int64_t __attribute__((vector_size(kHalf * 8)));
using vu = uint64_t __attribute__((vector_size(kHalf * 8)));

// GCC makes two conversions of four floats each and joins them; this is one instruction.
inline vd to_double(vf_half v) {
#if defined(__AVX512F__) && !defined(LMHEAD_LANES)
  return (vd)_mm512_cvtps_pd((__m256)v);
#else
  return __builtin_convertvector(v, vd);
#endif
}

inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The first n lanes; the others are `fill`, and nothing beyond n is read.
inline vf load(const float* p, int n, float fill) {
  vf v = fill - vf{};
  std::memcpy(&v, p, static_cast<size_t>(n) * 4);
  return v;
}

inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

inline void store(float* p, vf v, int n) { std::memcpy(p, &v, static_cast<size_t>(n) * 4); }

inline vf splat(float x) { return x - vf{}; }

inline vf max(vf a, vf b) { return a > b ? a : b; }

inline vf abs(vf a) { return a < 0.0f ? -a : a; }

// Whether a comparison holds in any lane.
inline bool any(vi mask) {
  int64_t parts[kLanes / 2];
  std::memcpy(parts, &mask, sizeof mask);
  int64_t all = 0;
  for (int64_t part : parts) all |= part;
  return all != 0;
}

inline float sum(vf v) {
  float total = 0.0f;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

// exp(r) of exp(x) = 2^n exp(r), |r| <= ln 2 / 2, to about 1 ulp. For -87.34 <= x <= 88.73.
inline vf exp_rest(vf x, vf& n) {
  // Adding and subtracting 1.5 · 2^23 rounds to the nearest integer.
  const vf magic = splat(12582912.0f);
  n = (x * 1.44269504f + magic) - magic;
  const vf r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + r + 1.0f;
}

// exp(x) to about 1 ulp for x <= 0. Below -87.3 the result is 0. NaN stays NaN.
inline vf exp_down(vf x) {
  vf n, power;
  const vf p = exp_rest(x < -87.336f ? splat(-87.336f) : x, n);
  const vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
  std::memcpy(&power, &exponent, sizeof power);
  return x < -87.336f ? splat(0.0f) : p * power;
}

// exp(x) to about 1 ulp. Below -87.3 the result is 0 (no denormals), above 88.7 it is inf. NaN
// stays NaN.
inline vf exp(vf x) {
  vf n;
  vf p = exp_rest(x < -87.336f ? splat(-87.336f) : (x > 88.73f ? splat(88.73f) : x), n);
  // 2^n in two steps, since n reaches 128.
  const vi whole = __builtin_convertvector(n, vi);
  const vi half = whole >> 1;
  const vi first = (half + 127) << 23;
  const vi second = (whole - half + 127) << 23;
  vf low, high;
  std::memcpy(&low, &first, sizeof low);
  std::memcpy(&high, &second, sizeof high);
  p = p * low * high;
  p = x < -87.336f ? splat(0.0f) : p;
  p = x > 88.72284f ? splat(__builtin_inff()) : p;
  return x == x ? p : x;
}

// exp(x) in float64 to about 1 ulp for -708 <= x <= 709, by the same steps.
inline vd exp_within(vd x) {
  // Adding 1.5 · 2^52 rounds to the nearest integer, and leaves it in the lowest bits.
  const vd magic = vd{} + 6755399441055744.0;
  const vd shifted = x * 1.4426950408889634 + magic;
  const vd n = shifted - magic;
  const vd r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  // Taylor's polynomial of degree 12 in pairs of terms: short chains of operations.
  const vd r2 = r * r, r4 = r2 * r2;
  const vd a = r * (1.0 / 6.0) + 0.5, b = r * (1.0 / 120.0) + 1.0 / 24.0;
  const vd c = r * (1.0 / 5040.0) + 1.0 / 720.0, d = r * (1.0 / 362880.0) + 1.0 / 40320.0;
  const vd e = r * (1.0 / 39916800.0) + 1.0 / 3628800.0;
  const vd low = a + r2 * b, high = c + r2 * d;
  const vd rest = low + r4 * (high + r4 * (e + r2 * (1.0 / 479001600.0)));
  vl bits, origin;
  std::memcpy(&bits, &shifted, sizeof bits);
  std::memcpy(&origin, &magic, sizeof origin);
  const vl power = (bits - origin + 1023) << 52;
  vd scale;
  std::memcpy(&scale, &power, sizeof scale);
  return (r2 * rest + r + 1.0) * scale;
}

// The same for any x: below -708 the result is 0 (no denormals), above 709 it is inf. NaN stays
// NaN.
inline vd exp(vd x) {
  vd p = exp_within(x < -708.0 ? vd{} - 708.0 : (x > 709.0 ? vd{} + 709.0 : x));
  p = x < -708.0 ? vd{} : p;
  p = x > 709.0 ? vd{} + __builtin_inf() : p;
  return x == x ? p : x;
}

// tanh(x) to about 2 ulp: a polynomial near 0, where 1 - 2 / (exp(2x) + 1) would cancel.
inline vf tanh(vf x) {
  const vf a = abs(x);
  const vf s = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = p * s + 2.06390887954e-2f;
  p = p * s + -5.37397155531e-2f;
  p = p * s + 1.33314422036e-1f;
  p = p * s + -3.33332819422e-1f;
  const vf small = x + x * s * p;
  const vf large = 1.0f - 2.0f / (exp(2.0f * a) + 1.0f);
  const vf signed_large = x < 0.0f ? -large : large;
  return a < 0.625f ? small : signed_large;
}

}  // namespace LMHEAD_ISA
