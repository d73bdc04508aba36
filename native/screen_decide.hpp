// The best tokens of one hidden state, from bounds to exact values. For screen.cpp alone, compiled
// with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <numeric>
#include <utility>
#include <vector>

#include "dot.hpp"
#include "parallel.hpp"
#include "screen.hpp"

namespace LMHEAD_ISA {
namespace {

// At least k tokens reach the k-th largest block maximum: only those are compared.
void best_of(const lmhead::ScreenBounds& bounds, int64_t row, int64_t k, int64_t* ids) {
  const int64_t blocks = lmhead::screen_blocks(bounds.vocab);
  const float* top = bounds.block_max + row * blocks;
  const float* approx = bounds.approx + row * bounds.vocab;
  std::vector<float> order(top, top + blocks);
  std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<>());
  const float limit = order[static_cast<size_t>(k - 1)];
  std::vector<std::pair<float, int64_t>> found;  // the larger, the better
  for (int64_t block = 0; block < blocks; ++block) {
    if (top[block] < limit) continue;
    const int64_t hi = std::min(bounds.vocab, (block + 1) * lmhead::kScreenBlock);
    for (int64_t v = block * lmhead::kScreenBlock; v < hi; ++v)
      if (approx[v] >= limit) found.emplace_back(approx[v], -v);
  }
  if (static_cast<int64_t>(found.size()) < k) {  // NaN, or maxima of other values: any k will do
    std::iota(ids, ids + k, 0);
    return;
  }
  std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<>());
  for (int64_t i = 0; i < k; ++i) ids[i] = -found[static_cast<size_t>(i)].second;
  std::sort(ids, ids + k);
}

void best(const lmhead::ScreenBounds& bounds, int64_t k, int64_t* ids, int threads) {
  lmhead::parallel_for(bounds.rows, threads,
                       [&](int64_t row) { best_of(bounds, row, k, ids + row * k); });
}

std::vector<double> scores(const lmhead::ScreenExact& exact, const std::vector<int64_t>& ids,
                           int threads) {
  constexpr int64_t kPiece = 16;
  const auto n = static_cast<int64_t>(ids.size());
  std::vector<double> x(ids.size());
  lmhead::with_types(exact.hidden, exact.weight, [&](auto* hidden, auto* weight) {
    lmhead::parallel_for((n + kPiece - 1) / kPiece, threads, [&](int64_t piece) {
      for (int64_t i = piece * kPiece; i < std::min(n, (piece + 1) * kPiece); ++i) {
        const auto at = static_cast<size_t>(i);
        x[at] = LMHEAD_ISA::dot(hidden, weight + ids[at] * exact.size, exact.size);
        if (exact.bias) x[at] += exact.bias[ids[at]];
      }
    });
  });
  return x;
}

// Whether an exact value is within its bounds. An infinity is within itself.
bool lies_within(const lmhead::ScreenBounds& s, double base, int64_t v, double x) {
  const double approx = s.approx[v];
  const double slack = approx < -3.4e38 ? 0.0 : std::fabs(approx) * 0x1p-21;
  const double radius = s.e[0] * s.token_e[v] + s.n[0] * s.token_n[v] + slack + 0x1p-120;
  return x == approx ||
         std::fabs(x - base - approx) <= radius + 0x1p-48 * (std::fabs(x) + std::fabs(base));
}

// `reaching(limit)` gives the tokens of the row whose upper bound reaches a limit, ids ascending.
template <class Reaching>
lmhead::ScreenDecided decide(const lmhead::ScreenBounds& bounds, const lmhead::ScreenExact& exact,
                             int64_t k, int64_t most, double* values, int64_t* ids, int threads,
                             const Reaching& reaching) {
  constexpr double kUnit = 0x1p-53;
  std::vector<int64_t> pivots(static_cast<size_t>(k));
  best_of(bounds, 0, k, pivots.data());
  const std::vector<double> known = scores(exact, pivots, threads);
  const double least = *std::min_element(known.begin(), known.end());
  // If masked tokens are among the best k, no block can be skipped.
  if (!(least > -__builtin_inf())) return {k, false, true};
  const double limit =
      (least - exact.base) - 4 * kUnit * (std::fabs(least) + std::fabs(exact.base));
  const std::vector<int64_t> tokens = reaching(limit);
  const auto count = static_cast<int64_t>(tokens.size());
  if (count < k || count > most) return {count, false, true};

  std::vector<int64_t> others;
  std::set_difference(tokens.begin(), tokens.end(), pivots.begin(), pivots.end(),
                      std::back_inserter(others));
  const std::vector<double> more = scores(exact, others, threads);
  std::vector<std::pair<double, int64_t>> scored;
  for (size_t i = 0; i < pivots.size(); ++i) scored.emplace_back(known[i], -pivots[i]);
  for (size_t i = 0; i < others.size(); ++i) scored.emplace_back(more[i], -others[i]);
  for (const auto& [x, v] : scored)
    if (!lies_within(bounds, exact.base, -v, x)) return {count, false, false};
  std::partial_sort(scored.begin(), scored.begin() + k, scored.end(), std::greater<>());
  for (int64_t i = 0; i < k; ++i) {
    values[i] = scored[static_cast<size_t>(i)].first;
    ids[i] = -scored[static_cast<size_t>(i)].second;
  }
  return {static_cast<int64_t>(scored.size()), true, true};
}

}  // namespace
}  // namespace LMHEAD_ISA
