// Part of rows.cpp: draws by noise. The token with the largest β z + noise is a draw from softmax(β
// z).
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "gumbel_filter.hpp"
#include "row_pieces.hpp"

namespace LMHEAD_ISA {
namespace {

void gumbel_argmax(const float* z, int64_t rows, int64_t vocab, const double* beta, const Key* keys,
                   int64_t* winners, int threads) {
  const int64_t per_row = pieces(vocab);
  std::vector<Best> parts(static_cast<size_t>(rows * per_row));
  each_piece(rows, vocab, threads, [&](int64_t row, int64_t piece, int64_t lo, int64_t hi) {
    const float* logits = z + row * vocab;
    const int64_t favourite = std::max_element(logits + lo, logits + hi) - logits;
    const double max = logits[favourite];
    if (max == -kFar) return;
    Best best;
    best.take(lmhead::to_gumbel(lmhead::philox(keys[row], 0, favourite)), favourite);
    each_contender(
        logits, lo, hi, beta[row], max, keys[row], [&] { return best.score; },
        [&](int64_t token, double score) { best.take(score, token); });
    parts[row * per_row + piece] = {best.score + beta[row] * max, best.id};
  });
  for (int64_t row = 0; row < rows; ++row) {
    Best best;
    for (int64_t i = 0; i < per_row; ++i) {
      const Best& part = parts[row * per_row + i];
      if (part.id >= 0) best.take(part.score, part.id);
    }
    winners[row] = best.id;
  }
}

// log Σ exp of n numbers, of which -inf counts for nothing; `e`, with room for n and a vector more,
// gets exp(x - max). -inf if there is no other.
double log_sum(const double* x, int64_t n, double* e, double* max) {
  *max = -kFar;
  for (int64_t i = 0; i < n; ++i) *max = std::max(*max, x[i]);
  if (*max == -kFar) return -kFar;
  vd sum{};
  for (int64_t i = 0; i < n; i += kHalf) {
    vd far = vd{} - 708.0;
    std::memcpy(&far, x + i, sizeof(double) * static_cast<size_t>(std::min<int64_t>(kHalf, n - i)));
    if (i + kHalf <= n)
      far -= *max;
    else
      for (int k = 0; k < n - i; ++k) far[k] -= *max;
    far = far < -708.0 ? vd{} - 708.0 : far;
    const vd here = exp_within(far);
    std::memcpy(e + i, &here, sizeof here);
    sum += here;
  }
  return *max + std::log(total(sum));
}

void draw(const float* z, int64_t rows, int64_t vocab, const double* lse, const int64_t* ids,
          const double* logits, int64_t width, const Key* keys, int64_t* token, double* log_prob,
          double* raw_log_prob, double* kept_mass, int threads) {
  parallel_for(rows, threads, [&](int64_t row) {
    std::vector<double> e(static_cast<size_t>(width + kHalf)), raw(static_cast<size_t>(width));
    const double* x = logits + row * width;
    const int64_t* id = ids + row * width;
    const float* all = z + row * vocab;
    double max;
    for (int64_t i = 0; i < width; ++i) raw[i] = x[i] == -kFar ? -kFar : all[id[i]];
    kept_mass[row] = std::min(0.0, log_sum(raw.data(), width, e.data(), &max) - lse[row]);
    const double mine = log_sum(x, width, e.data(), &max);
    // Noise is -log E with E = -log u >= 1 - u: a token can only win if 1 - u is at most
    // exp(x - best score), which excludes most tokens without a logarithm.
    Best best;
    int64_t place = 0;
    double least = kFar;  // exp(max - best score), with a margin
    for (int64_t i = 0; i < width; ++i) {
      if (x[i] == -kFar) continue;
      const lmhead::RandomBits random = lmhead::philox(keys[row], 0, static_cast<uint64_t>(id[i]));
      if ((1.0 - lmhead::to_uniform(random)) > e[i] * least) continue;
      const double score = x[i] + lmhead::to_gumbel(random);
      if (score > best.score) {
        best = {score, id[i]};
        place = i;
        least = std::exp(max - score) * (1.0 + 1e-6);
      }
    }
    token[row] = best.id;
    log_prob[row] = std::min(0.0, x[place] - mine);
    raw_log_prob[row] = std::min(0.0, raw[place] - lse[row]);
  });
}

}  // namespace
}  // namespace LMHEAD_ISA
