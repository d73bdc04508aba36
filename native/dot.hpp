// Dot products in float64 of rows stored as float32 or bfloat16, always added in the same order.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.hpp"

namespace LMHEAD_ISA {

inline float value(float x) { return x; }

inline float value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

inline vd load_half(const float* p) {
  vf_half v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, vd);
}

inline vd load_half(const uint16_t* p) {
  vf_half v;
  for (int i = 0; i < kHalf; ++i) v[i] = value(p[i]);
  return __builtin_convertvector(v, vd);
}

template <class T>
inline double dot(const T* x, const T* y, int64_t d) {
  vd sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kHalf <= d; i += 4 * kHalf)
    for (int k = 0; k < 4; ++k)
      sums[k] += load_half(x + i + k * kHalf) * load_half(y + i + k * kHalf);
  const vd together = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double total = 0.0;
  for (int k = 0; k < kHalf; ++k) total += together[k];
  for (; i < d; ++i) total += static_cast<double>(value(x[i])) * value(y[i]);
  return total;
}

}  // namespace LMHEAD_ISA
