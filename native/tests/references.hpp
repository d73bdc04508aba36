// The slow references: what each kernel computes, written plainly in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.hpp"

namespace reference {

constexpr double kInf = std::numeric_limits<double>::infinity();

inline double apply(const lmhead::Map& map, double x) {
  const double inner = x * map.scale + map.shift;
  if (!map.bounded) return inner;
  return x == -kInf ? -kInf : std::tanh(inner) * map.outer + map.outer_shift;
}

inline double slope(const lmhead::Map& map, double z) {
  if (!map.bounded) return map.scale;
  const double t = (z - map.outer_shift) / map.outer;
  return std::max(0.0, 1.0 - t * t) * map.scale * map.outer;
}

// The softmax of one row, from all its logits at once.
struct Softmax {
  double m = -kInf, s = 0.0, t = 0.0;

  explicit Softmax(const std::vector<float>& z) {
    for (float v : z) m = std::isnan(v) || v > m ? v : m;
    if (m == -kInf) return;
    for (float v : z) {
      const double centred = v - m, e = std::exp(centred);
      s += e;
      t += e == 0.0 ? 0.0 : e * centred;
    }
  }

  double lse() const { return m + std::log(s); }
};

// Logits above `mine` by more than the margin, those too close to tell, and those for which the
// rounding of the comparison itself decides.
struct Rank {
  int64_t above = 0;
  std::vector<int64_t> close, either;

  Rank(const std::vector<float>& z, double mine, double slack, double per_norm,
       const std::vector<float>& norms) {
    for (size_t w = 0; w < z.size(); ++w) {
      const double ahead = z[w] - mine, margin = per_norm * norms[w] + slack;
      const double rounding = 2e-7 * margin;
      const auto id = static_cast<int64_t>(w);
      if (rounding > 0.0 && std::abs(std::abs(ahead) - margin) <= rounding)
        either.push_back(id);
      else if (ahead > margin)
        ++above;
      else if (!(ahead < -margin))
        close.push_back(id);
    }
  }
};

// A result and how far a float may be from it.
struct Bounded {
  double value, bound;
};

// One entry of the softmax part of the gradient.
inline Bounded gradient(const lmhead::Map& map, double z, double lse, double a, double b) {
  const double u = 6e-8;  // one rounding
  const double log_p = z - lse, p = std::exp(log_p), steep = slope(map, z);
  if (p == 0.0) return {0.0, 0.0};
  const double factor = a + b * log_p, size = p * (std::abs(a) + std::abs(b * log_p));
  // exp turns an absolute error of log p into a relative one; 1 - tanh² loses what cancels.
  double bound = size * std::abs(steep) * u * (10.0 + 2.0 * std::abs(log_p));
  if (map.bounded) bound += size * std::abs(map.scale * map.outer) * 10.0 * u;
  bound += 2e-38 * (std::abs(a) + 100.0 * std::abs(b));  // results this small become 0
  return {p * factor * steep, bound};
}

// The threshold by sorting: the first value at which the running sum exceeds the mass, at most the
// largest.
inline float tail_threshold(std::vector<float> x, double mass) {
  std::sort(x.begin(), x.end());
  double below = 0.0;
  for (size_t i = 0; i < x.size();) {
    double group = 0.0;
    size_t j = i;
    for (; j < x.size() && x[j] == x[i]; ++j) group += x[j];
    if (below + group > mass) return x[i];
    below += group;
    i = j;
  }
  return x.empty() ? 0.0f : x.back();
}

}  // namespace reference
