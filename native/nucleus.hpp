// Part of rows.cpp: the tokens within bounds, and the fewest that hold a share of the mass.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "row_pieces.hpp"

namespace LMHEAD_ISA {
namespace {

// Calls found(token) for each token with lo <= z <= hi, in order. Eight vectors are skipped at a
// time where none of them has such a token.
template <class Found>
void scan(const float* z, int64_t vocab, float lo, float hi, const Found& found) {
  const auto inside = [&](vf v) { return (v >= lo) & (v <= hi) & (v > -kInf); };
  const auto look = [&](int64_t i) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, vocab - i));
    const vi here = inside(n == kLanes ? load(z + i) : load(z + i, n, -kInf));
    if (!any(here)) return;
    for (int k = 0; k < n; ++k)
      if (here[k]) found(i + k);
  };
  constexpr int64_t kStride = 8 * kLanes;
  int64_t i = 0;
  for (; i + kStride <= vocab; i += kStride) {
    vi hit{};
    for (int64_t j = 0; j < kStride; j += kLanes) hit |= inside(load(z + i + j));
    if (!any(hit)) continue;
    for (int64_t j = 0; j < kStride; j += kLanes) look(i + j);
  }
  for (; i < vocab; i += kLanes) look(i);
}

// Best first, lowest id first among equals.
struct BestFirst {
  const float* z;
  bool operator()(int64_t a, int64_t b) const { return z[a] > z[b] || (z[a] == z[b] && a < b); }
};

void in_range(const float* z, int64_t rows, int64_t vocab, const float* lo, const float* hi,
              int64_t width, int64_t* counts, int64_t* ids, double* values, int threads) {
  parallel_for(rows, threads, [&](int64_t row) {
    const float* logits = z + row * vocab;
    int64_t* mine = ids + row * width;
    int64_t n = 0;
    scan(logits, vocab, lo[row], hi[row], [&](int64_t token) {
      if (n < width) mine[n] = token;
      ++n;
    });
    counts[row] = n;
    if (n > width) return;
    std::sort(mine, mine + n, BestFirst{logits});
    for (int64_t i = 0; i < n; ++i) values[row * width + i] = logits[mine[i]];
  });
}

// A token that may be among the nearest: its distance and its mass.
struct Near {
  double distance, mass;
  int64_t id;
};

// Tokens up to this distance are considered, in units of β z: those further off have little mass in
// a distribution with a peak.
constexpr double kNear = 6.0;

// The tokens of the row around `centre`, nearest first, until they have `limit`, and at least
// `least` of them; nothing if that takes one that is further off than `near`.
std::vector<int64_t> nearest(const float* z, int64_t vocab, double beta, double max, double centre,
                             double limit, int64_t least) {
  const double near = kNear / beta;
  // Rounded outwards: none may be lost.
  const float lo = std::nextafter(static_cast<float>(centre - near), -kInf);
  const float hi = std::nextafter(static_cast<float>(centre + near), kInf);
  std::vector<int64_t> ids;
  scan(z, vocab, lo, hi, [&](int64_t token) { ids.push_back(token); });
  std::sort(ids.begin(), ids.end(), BestFirst{z});
  std::vector<Near> tokens;
  tokens.reserve(ids.size());
  for (int64_t id : ids)
    tokens.push_back({std::abs(z[id] - centre), std::exp(beta * (z[id] - max)), id});
  if (centre != max)
    std::stable_sort(tokens.begin(), tokens.end(),
                     [](const Near& a, const Near& b) { return a.distance < b.distance; });
  double before = 0.0;
  size_t n = 0;
  while (n < tokens.size() && (before < limit || static_cast<int64_t>(n) < least))
    before += tokens[n++].mass;
  // Where these tokens do not reach `limit`, tokens further off are needed.
  const bool enough = before >= limit && static_cast<int64_t>(n) >= least;
  if (!enough || n == 0 || tokens[n - 1].distance > near) return {};
  ids.resize(n);
  for (size_t i = 0; i < n; ++i) ids[i] = tokens[i].id;
  if (centre != max) std::sort(ids.begin(), ids.end(), BestFirst{z});
  return ids;
}

void nucleus(const float* z, int64_t rows, int64_t vocab, const double* beta, const double* max,
             const double* centre, const double* limit, int64_t least, int64_t width,
             int64_t* counts, int64_t* ids, double* values, int threads) {
  parallel_for(rows, threads, [&](int64_t row) {
    const float* logits = z + row * vocab;
    const std::vector<int64_t> found =
        nearest(logits, vocab, beta[row], max[row], centre[row], limit[row], least);
    counts[row] = static_cast<int64_t>(found.size());
    if (counts[row] > width) return;
    for (size_t i = 0; i < found.size(); ++i) {
      ids[row * width + static_cast<int64_t>(i)] = found[i];
      values[row * width + static_cast<int64_t>(i)] = beta[row] * logits[found[i]];
    }
  });
}

}  // namespace
}  // namespace LMHEAD_ISA
