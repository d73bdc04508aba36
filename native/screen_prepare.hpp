// Hidden states as integers, and their error: docs/certified.md. For screen.cpp
// alone, compiled with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel.hpp"
#include "screen.hpp"

namespace LMHEAD_ISA {
namespace {

using vd = double __attribute__((vector_size(32)));

double product(const double* x, const double* y, int64_t n) {
  vd sums[2] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int c = 0; c < 2; ++c) {
      vd a, b;
      std::memcpy(&a, x + i + 4 * c, sizeof a);
      std::memcpy(&b, y + i + 4 * c, sizeof b);
      sums[c] += a * b;
    }
  const vd both = sums[0] + sums[1];
  double sum = (both[0] + both[1]) + (both[2] + both[3]);
  for (; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

double norm(const double* x, int64_t n) { return std::sqrt(product(x, x, n)); }

// x as 16-bit numbers, multiples of `unit`, times a scale; x becomes the remainder.
double round_to(double* x, int64_t n, double room, double unit, int16_t* codes) {
  const double most = std::floor(32767.0 / unit) * unit;
  double largest = 0.0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  const double scale = std::max(largest / most, norm(x, n) / room * (1.0 + 0x1p-30));
  for (int64_t i = 0; i < n; ++i) {
    const double whole = scale > 0.0 ? unit * std::nearbyint(x[i] / (scale * unit)) : 0.0;
    const double code = std::min(most, std::max(-most, whole));
    codes[i] = static_cast<int16_t>(code);
    x[i] -= code * scale;
  }
  return scale;
}

// One factor of the rotation: x as (count, f) becomes factor · xᵀ, (f, count).
void apply_factor(const double* factor, int64_t f, int64_t count, double* x,
                  std::vector<double>* room) {
  constexpr int64_t kColumns = 8;
  const int64_t padded = (count + kColumns - 1) / kColumns * kColumns;
  room->assign(static_cast<size_t>(f * padded), 0.0);
  double* transposed = room->data();
  for (int64_t i = 0; i < count; ++i)
    for (int64_t l = 0; l < f; ++l) transposed[l * padded + i] = x[i * f + l];
  for (int64_t j = 0; j < f; ++j)
    for (int64_t i = 0; i < count; i += kColumns) {
      vd sums[2] = {};
      for (int64_t l = 0; l < f; ++l)
        for (int c = 0; c < 2; ++c) {
          vd column;
          std::memcpy(&column, transposed + l * padded + i + 4 * c, sizeof column);
          sums[c] += factor[j * f + l] * column;
        }
      std::memcpy(x + j * count + i, sums,
                  static_cast<size_t>(std::min(kColumns, count - i)) * sizeof(double));
    }
}

void prepare(const lmhead::ScreenBasis& s, const double* hidden, int64_t rows,
             const lmhead::ScreenPrepared& out, int threads) {
  lmhead::parallel_for(rows, threads, [&](int64_t b) {
    const double* h = hidden + b * s.size;
    std::vector<double> padded(static_cast<size_t>(s.width), 0.0), room;
    double* rest = padded.data();
    std::copy_n(h, s.size, rest);
    out.base[b] = product(s.mean, h, s.size);
    const double size = norm(h, s.size);
    double lead_norm = 0.0, along = 0.0;
    out.lead_scales[b] = 0.0;
    if (s.leading > 0) {
      std::vector<double> coefficients(static_cast<size_t>(s.leading));
      double* g = coefficients.data();
      for (int64_t k = 0; k < s.leading; ++k) g[k] = product(s.basis + k * s.size, h, s.size);
      int16_t* codes = out.lead + b * s.leading;
      const double scale = round_to(g, s.leading, s.lead_room, 1.0, codes);
      out.lead_scales[b] = scale;
      for (int64_t k = 0; k < s.leading; ++k) {
        const double value = codes[k] * scale;
        lead_norm += value * value;
        for (int64_t i = 0; i < s.size; ++i) rest[i] -= value * s.basis[k * s.size + i];
      }
      for (int64_t k = 0; k < s.leading; ++k) {
        const double value = product(s.basis + k * s.size, rest, s.size);
        along += value * value;
      }
    }
    for (int64_t i = 0; i < s.width; ++i) rest[i] *= s.signs[i];
    const double* factor = s.factors;
    for (int64_t i = 0; i < s.n_factors; ++i) {
      apply_factor(factor, s.sizes[i], s.width / s.sizes[i], rest, &room);
      factor += s.sizes[i] * s.sizes[i];
    }
    const double y = norm(rest, s.width);
    out.scales[b] = round_to(rest, s.width, s.room, s.unit, out.main + b * s.width);
    const double delta = norm(rest, s.width);
    constexpr double kUp = 1.0 + 0x1p-30;
    out.e[b] = (y + s.small_e * size) * kUp;
    const double lead_part = std::sqrt(lead_norm) * s.per_lead + std::sqrt(along);
    out.n[b] = (lead_part + delta + s.small_n * size) * kUp;
  });
}

}  // namespace
}  // namespace LMHEAD_ISA
