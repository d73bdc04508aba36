// Draws from bounds against the definition: all logits, all noise, the cut written out.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "cases.hpp"
#include "philox.hpp"
#include "screen_sample.hpp"

namespace sample_tests {

using lmhead::Kernels;

struct Case {
  int64_t vocab, rows;
  int64_t kind;  // of the only cut; -1 for none
  double value;
  bool masks, edits;
};

// The token of one row of logits.
inline int64_t drawn(const std::vector<double>& z, const Case& c, double beta, lmhead::Key key) {
  std::vector<int64_t> order;
  for (int64_t v = 0; v < c.vocab; ++v)
    if (!std::isinf(z[static_cast<size_t>(v)])) order.push_back(v);
  const auto at = [&](int64_t v) { return z[static_cast<size_t>(v)]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return at(a) > at(b); });
  const auto weight = [&](int64_t v) { return std::exp(beta * (at(v) - at(order[0]))); };
  double total = 0.0, before = 0.0, best = -INFINITY;
  for (int64_t v : order) total += weight(v);
  int64_t token = -1, place = 0;
  for (int64_t v : order) {
    const bool kept = c.kind == lmhead::kTopK      ? place < c.value
                      : c.kind == lmhead::kTopP    ? before < c.value * total
                      : c.kind == lmhead::kMinP    ? weight(v) >= c.value
                      : c.kind == lmhead::kEpsilon ? weight(v) >= c.value * total
                                                   : true;
    if (!kept && place > 0) break;
    before += weight(v), ++place;
    const double score =
        beta * at(v) + lmhead::to_gumbel(lmhead::philox(key, 0, static_cast<uint64_t>(v)));
    if (score > best) best = score, token = v;
  }
  return token;
}

inline void run_case(const Kernels& k, const Case& c, Place place, Tally& tally) {
  tally.begin(label(k, "screen sample", {c.vocab, c.rows}, c.masks ? "masks" : "", place));
  Random random(static_cast<uint32_t>(c.vocab * 7 + c.rows + 100 * c.kind));
  const auto size = [](int64_t a, int64_t b) { return static_cast<size_t>(a * b); };
  const int64_t d = 19, blocks = lmhead::screen_blocks(c.vocab), n_uint32 = (c.vocab + 31) / 32;
  const auto normal = [&](size_t) { return random.uniform(-1.0, 1.0); };
  const Buffer<float> weight(size(c.vocab, d), place, normal),
      hidden(size(c.rows, d), place, normal);
  const lmhead::Floats stored{weight.data(), lmhead::FloatType::f32};
  const Buffer<float> logits(size(c.rows, c.vocab), place);
  k.float_logits(hidden.data(), c.rows, stored, c.vocab, d, logits.data(), nullptr, 1);
  // Bounds that hold them, an edit of token 0, a mask of every fifth token but that.
  const Buffer<float> e(size(1, c.vocab), place, [&](size_t) { return random.uniform(0.0, 0.1); });
  const Buffer<float> n(size(1, c.vocab), place, [](size_t) { return 4.0f; });
  const Buffer<float> block_e(size(1, blocks), place, [](size_t) { return 0.1f; });
  const Buffer<float> block_n(size(1, blocks), place, [](size_t) { return 4.0f; });
  const Buffer<double> one(size(1, c.rows), place, [](size_t) { return 1.0; });
  const Buffer<double> none(size(1, c.rows), place, [](size_t) { return 0.0; });
  const Buffer<uint32_t> allowed(size(c.rows, n_uint32), place, [](size_t) { return 0xefefefefu; });
  std::vector<int64_t> starts, ids;
  std::vector<double> before, after;
  for (int64_t b = 0; b <= c.rows; ++b) {
    starts.push_back(static_cast<int64_t>(ids.size()));
    if (!c.edits || b == c.rows) continue;
    ids.push_back(0), before.push_back(logits[size(b, c.vocab)]), after.push_back(1.5);
  }
  const std::vector<int64_t> kinds = {lmhead::kTemperature, c.kind}, least = {1, 1};
  std::vector<double> values(size(2, c.rows), c.value);
  std::fill_n(values.begin(), c.rows, 1.6);
  const std::vector<int64_t> no(static_cast<size_t>(c.rows), 0);
  std::vector<lmhead::Key> keys;
  for (int64_t b = 0; b < c.rows; ++b) keys.push_back({static_cast<uint64_t>(b), 5});
  const lmhead::SampleChain chain{kinds.data(), least.data(), values.data(),     no.data(),
                                  no.data(),    keys.data(),  c.kind < 0 ? 1 : 2};
  const lmhead::SampleSource source{hidden.data(), stored, nullptr, {1.0, 0.0, false, 1.0, 0.0},
                                    none.data(),   0.0,    d};
  for (int threads : thread_counts()) {
    const Buffer<float> approx(size(c.rows, c.vocab), place, [&](size_t i) {
      return logits[i] + e[i % e.size()] * static_cast<float>(random.uniform(-0.9, 0.9));
    });
    const Buffer<float> top(size(c.rows, blocks), place, [](size_t) { return -INFINITY; });
    for (size_t i = 0; i < approx.size(); ++i) {
      const auto row = static_cast<int64_t>(i) / c.vocab, v = static_cast<int64_t>(i) % c.vocab;
      float& most = top[size(row, blocks) + static_cast<size_t>(v / lmhead::kScreenBlock)];
      most = std::max(most, approx[i]);
    }
    lmhead::SampleScreen screen{};
    screen.kernels = k.screen;
    screen.bounds = {approx.data(), top.data(),  e.data(), n.data(), block_e.data(), block_n.data(),
                     one.data(),    none.data(), nullptr,  c.rows,   c.vocab};
    screen.approx = approx.data();
    screen.allowed = c.masks ? allowed.data() : nullptr, screen.n_uint32 = n_uint32;
    const Buffer<int64_t> token(size(1, c.rows), place), scored(size(1, c.rows), place);
    const Buffer<int64_t> state(size(1, c.rows), place);
    const Buffer<double> numbers(size(5, c.rows), place);
    double* to = numbers.data();
    k.sample_screened(screen, source, chain,
                      {starts.data(), ids.data(), before.data(), after.data()},
                      {token.data(), scored.data(), state.data(), to, to + c.rows, to + 2 * c.rows,
                       to + 3 * c.rows, to + 4 * c.rows},
                      threads);
    tally.expect(token.intact() && scored.intact() && state.intact() && numbers.intact(),
                 "sample wrote outside a buffer");
    for (int64_t b = 0; b < c.rows; ++b) {
      const auto row = static_cast<size_t>(b);
      std::vector<double> z;
      for (int64_t v = 0; v < c.vocab; ++v) {
        const bool out = c.masks && !(0xefefefefu >> v % 32 & 1);
        z.push_back(out                 ? -INFINITY
                    : c.edits && v == 0 ? 1.5
                                        : logits[size(b, c.vocab) + size(1, v)]);
      }
      double lse = 0.0;
      for (int64_t v = 0; v < c.vocab; ++v)
        if (!std::isinf(z[size(1, v)]))
          lse += std::exp(double{logits[size(b, c.vocab) + size(1, v)]});
      // Distributions as flat as these may leave a cut open; nothing else may.
      const bool open = c.kind == lmhead::kTopP;
      tally.expect(state[row] == lmhead::kDecided || (open && state[row] == lmhead::kUndecided),
                   "a row was not decided");
      if (state[row] != lmhead::kDecided) continue;
      tally.expect(token[row] == drawn(z, c, 1.6, keys[row]), "another token than by all logits");
      tally.expect(to[3 * c.rows + b] <= std::log(lse) && std::log(lse) <= to[4 * c.rows + b],
                   "a mass is outside its bounds");
    }
  }
}

inline void run(const Kernels& k, Tally& tally) {
  struct Cut {
    int64_t kind;
    double value;
  };
  for (Place place : {Place::tight, Place::padded})
    for (int64_t vocab : sizes({1, 255, 257, 1300}))
      for (int64_t rows : sizes({1, 3}))
        for (const Cut& cut : {Cut{-1, 0.0}, Cut{lmhead::kTopK, 3.0}, Cut{lmhead::kTopP, 0.4},
                               Cut{lmhead::kMinP, 0.2}, Cut{lmhead::kEpsilon, 0.01}})
          for (bool more : {false, true})
            run_case(k, {vocab, rows, cut.kind, cut.value, more, more}, place, tally);
}

}  // namespace sample_tests
