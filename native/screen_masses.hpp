// Bounds of sums of exponentials over tokens that are known within bounds. For screen.cpp alone,
// compiled with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.hpp"
#include "screen.hpp"
#include "simd.hpp"

namespace LMHEAD_ISA {
namespace {

// Tokens per piece; pieces are added in order, whatever the number of threads.
constexpr int64_t kMassPiece = 1 << 13;
// Vectors that are added in float32 before they are added in float64.
constexpr int64_t kTogether = 8 * kLanes;
// More than the roundings of an exponent, relative to its parts: it is moved outwards by that.
constexpr float kOutwards = 0x1p-19f;
// More than the errors of exp, of what it is multiplied by and of a sum of eight in float32,
// relative to it; and what exp sets to 0 at most, times that.
constexpr double kSumError = 0x1p-19, kLost = 2.2e-38;
// Up to kSeries, exp(x) <= 1 + x + x^2 / 2 + kThird x^3, since the rest by x^3 grows with x, and
// exp(-x) >= 1 - x + x^2 / 2 - x^3 / 6 + kFourth x^4, since the rest by x^4 falls.
constexpr float kSeries = 0.5f, kThird = 0.18978f, kFourth = 0.0378f;

struct MassBounds {
  double lower[lmhead::kMassFactors] = {}, upper[lmhead::kMassFactors] = {};
};

// The tokens [lo, hi) of a row.
MassBounds masses_of(const lmhead::ScreenBounds& bounds, const float* approx, float e, float n,
                     float top, const double* factors, int count, int64_t lo, int64_t hi) {
  MassBounds sums;
  for (int64_t first = lo; first < hi; first += kTogether) {
    vf lower[lmhead::kMassFactors] = {}, upper[lmhead::kMassFactors] = {};
    for (int64_t i = first; i < std::min(hi, first + kTogether); i += kLanes) {
      const int here = static_cast<int>(std::min<int64_t>(kLanes, hi - i));
      const bool full = here == kLanes;
      const vf a = full ? load(approx + i) : load(approx + i, here, -__builtin_inff());
      const vf token_e = full ? load(bounds.token_e + i) : load(bounds.token_e + i, here, 0.0f);
      const vf token_n = full ? load(bounds.token_n + i) : load(bounds.token_n + i, here, 0.0f);
      const vi masked = a == -__builtin_inff();
      const vf off = a - top;
      const vf radius = masked ? vf{}
                               : (token_e * e + token_n * n) * (1.0f + kOutwards) +
                                     (abs(a) + abs(off)) * kOutwards + 0x1p-100f;
      for (int f = 0; f < count; ++f) {
        const float factor = static_cast<float>(factors[f]);
        const vf x = radius * factor;
        if (any(x > kSeries)) {
          lower[f] += masked ? vf{} : exp((off - radius) * factor);
          upper[f] += masked ? vf{} : exp((off + radius) * factor);
          continue;
        }
        // exp(-x) and exp(x) by their series, which bound them: one exp serves both.
        const vf middle = masked ? vf{} : exp_down(off * factor), square = x * x;
        const vf even = 1.0f + 0.5f * square, cube = square * x;
        lower[f] += middle * ((even - x) + cube * (kFourth * x - 1.0f / 6.0f));
        upper[f] += middle * ((even + x) + cube * kThird);
      }
    }
    for (int f = 0; f < count; ++f) {
      sums.lower[f] += sum(lower[f]);
      sums.upper[f] += sum(upper[f]);
    }
  }
  return sums;
}

void masses(const lmhead::ScreenBounds& bounds, const float* top, const double* factors, int count,
            double* lower, double* upper, int threads) {
  const int64_t pieces = (bounds.vocab + kMassPiece - 1) / kMassPiece;
  std::vector<MassBounds> parts(static_cast<size_t>(bounds.rows * pieces));
  lmhead::parallel_for(bounds.rows * pieces, threads, [&](int64_t i) {
    const int64_t row = i / pieces, lo = i % pieces * kMassPiece;
    const float e = std::nextafter(static_cast<float>(bounds.e[row]), __builtin_inff());
    const float n = std::nextafter(static_cast<float>(bounds.n[row]), __builtin_inff());
    parts[static_cast<size_t>(i)] =
        masses_of(bounds, bounds.approx + row * bounds.vocab, e, n, top[row], factors, count, lo,
                  std::min(bounds.vocab, lo + kMassPiece));
  });
  for (int64_t row = 0; row < bounds.rows; ++row)
    for (int f = 0; f < count; ++f) {
      double low = 0.0, high = 0.0;
      for (int64_t i = row * pieces; i < (row + 1) * pieces; ++i) {
        low += parts[static_cast<size_t>(i)].lower[f];
        high += parts[static_cast<size_t>(i)].upper[f];
      }
      lower[row * count + f] = low * (1.0 - kSumError);
      upper[row * count + f] = high * (1.0 + kSumError) + static_cast<double>(bounds.vocab) * kLost;
    }
}

}  // namespace
}  // namespace LMHEAD_ISA
