// Certified decode against its slow references: products of integers, nibbles, selection.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "screen.hpp"
#include "stored.hpp"

namespace screen_tests {

using lmhead::Kernels;
using lmhead::kScreenBlock;
using lmhead::screen_blocks;
using lmhead::ScreenBounds;
using lmhead::ScreenCopy;
using lmhead::ScreenStates;

// Entry j of a row of nibbles.
inline int nibble(const uint8_t* row, int64_t j) {
  const int64_t group = j / 64, k = j % 64 / 16, i = j % 16;
  const int token = row[group * 32 + 2 * i] | row[group * 32 + 2 * i + 1] << 8;
  return token >> 4 * k & 15;
}

struct Case {
  int64_t vocab, width, leading, rows, streams;
  Place place;
  bool nibbles, bias;
  bool high_only = false;  // states of eight bits
};

inline void run_products(const Kernels& k, const Case& c, Tally& tally) {
  tally.begin(label(k, c.nibbles ? "screen nibbles" : "screen products", {c.vocab, c.rows},
                    c.high_only ? "8 bits"
                    : c.bias    ? "bias"
                                : "",
                    c.place));
  Random random(static_cast<uint32_t>(c.vocab * 1000 + c.rows));
  const auto size = [](int64_t a, int64_t b) { return static_cast<size_t>(a * b); };
  const Buffer<int8_t> whole(c.nibbles ? 0 : size(c.vocab, c.width), c.place,
                             [&](size_t) { return static_cast<int8_t>(random.below(255) - 127); });
  const Buffer<uint8_t> nibbles(c.nibbles ? size(c.vocab, c.width / 2) : 0, c.place,
                                [&](size_t) { return static_cast<uint8_t>(random.below(256)); });
  const auto sixteen = [&](size_t) { return static_cast<int16_t>(random.below(2000) - 1000); };
  const Buffer<int16_t> lead(size(c.vocab, c.leading), c.place, sixteen);
  // All 16 bits, the ends among them.
  const Buffer<int16_t> main(size(c.rows, c.width), c.place, [&](size_t i) {
    const int64_t ends[] = {-32768, 32767, -1, 255, -256};
    const auto y = static_cast<int16_t>(i % 3 ? random.below(65536) - 32768 : ends[i / 3 % 5]);
    return c.high_only ? static_cast<int16_t>(y & ~255) : y;
  });
  const Buffer<int16_t> lead_states(size(c.rows, c.leading), c.place, sixteen);
  const auto positive = [&](size_t) { return random.uniform(0.1, 2.0); };
  const auto tokens = static_cast<size_t>(c.vocab), states = static_cast<size_t>(c.rows);
  const Buffer<float> scales(tokens, c.place, positive), lead_scales(tokens, c.place, positive);
  const Buffer<double> bias(c.bias ? tokens : 0, c.place, [&](size_t i) {
    return i ? random.uniform(-1e5, 1e5) : -std::numeric_limits<double>::infinity();
  });
  const Buffer<double> t(states, c.place, positive), lead_t(states, c.place, positive);
  const ScreenCopy copy{c.nibbles ? nullptr : whole.data(),
                        c.nibbles ? nibbles.data() : nullptr,
                        lead.data(),
                        scales.data(),
                        lead_scales.data(),
                        c.bias ? bias.data() : nullptr,
                        c.vocab,
                        c.width,
                        c.leading,
                        c.rows == 1 ? 1024 : 0,
                        c.streams};
  const ScreenStates given{main.data(), lead_states.data(), t.data(), lead_t.data(), c.rows};
  std::vector<double> low;  // what the same nibbles add as low ones
  for (int threads : thread_counts()) {
    const Buffer<float> approx(size(c.rows, c.vocab), c.place);
    const Buffer<float> top(size(c.rows, screen_blocks(c.vocab)), c.place);
    k.screen->products(copy, given, approx.data(), top.data(), threads);
    tally.expect(approx.intact() && top.intact(), "wrote outside a buffer");
    std::vector<float> best(top.size(), -std::numeric_limits<float>::infinity());
    std::vector<int64_t> rows, ids;
    low.clear();
    for (int64_t b = 0; b < c.rows; ++b)
      for (int64_t v = 0; v < c.vocab; ++v) {
        double sum = 0.0, raw = 0.0, heads = 0.0;
        for (int64_t j = 0; j < c.width; ++j) {
          const double y = main[size(b, c.width) + static_cast<size_t>(j)];
          if (c.nibbles) {
            const int u = nibble(nibbles.data() + v * (c.width / 2), j);
            sum += (16.0 * u - 120.5) * y;
            raw += (u - 7.5) * y;
          } else {
            sum += whole[size(v, c.width) + static_cast<size_t>(j)] * y;
          }
        }
        for (int64_t j = 0; j < c.leading; ++j)
          heads += static_cast<double>(lead[size(v, c.leading) + static_cast<size_t>(j)]) *
                   lead_states[size(b, c.leading) + static_cast<size_t>(j)];
        const auto token = static_cast<size_t>(v), state = static_cast<size_t>(b);
        const double main_part = scales[token] * t[state] * sum;
        const double lead_part = lead_scales[token] * lead_t[state] * heads;
        const double want = main_part + lead_part + (c.bias ? bias[token] : 0.0);
        const double room =
            1e-7 * std::abs(want) + 1e-14 * (std::abs(main_part) + std::abs(lead_part) + 1e5);
        const float got = approx[size(b, c.vocab) + token];
        tally.expect_near(got, want, room, "approx", v);
        float& most = best[size(b, screen_blocks(c.vocab)) + static_cast<size_t>(v / kScreenBlock)];
        most = std::max(most, got);
        rows.push_back(b), ids.push_back(v);
        low.push_back(got + scales[token] * t[state] * raw);
      }
    tally.expect(top.same(best), "the largest of a block is another");
    const Buffer<double> out(low.size(), c.place), radius(low.size(), c.place);
    ScreenBounds bounds{};
    bounds.approx = approx.data(), bounds.e = t.data(), bounds.n = lead_t.data();
    bounds.token_e = scales.data(), bounds.token_n = lead_scales.data();
    k.screen->refine(copy, given, bounds, rows.data(), ids.data(), static_cast<int64_t>(ids.size()),
                     out.data(), radius.data(), threads);
    tally.expect(out.intact() && radius.intact(), "wrote outside a buffer");
    for (size_t i = 0; i < low.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      const auto token = static_cast<size_t>(ids[i]), state = static_cast<size_t>(rows[i]);
      const double first = approx[size(rows[i], c.vocab) + token];
      const double slack = std::isinf(first) ? 0.0 : std::abs(first) + std::abs(out[i]);
      const double off = t[state] * scales[token] + lead_t[state] * lead_scales[token];
      tally.expect_near(out[i], low[i], 1e-12 * (1e7 + std::abs(low[i])), "refined", at);
      tally.expect_near(radius[i], off + slack / 4194304.0, 1e-12 * (off + slack), "radius", at);
    }
  }
}

// Tokens that no state allows are not read: their codes may be anything.
inline void run_masked_products(const Kernels& k, int64_t vocab, int64_t rows, bool nibbles,
                                Place place, Tally& tally) {
  tally.begin(label(k, "screen masked products", {vocab, rows}, nibbles ? "nibbles" : "", place));
  constexpr int64_t kWidth = 64;
  const int64_t n_uint32 = (vocab + 31) / 32, blocks = screen_blocks(vocab);
  Random random(static_cast<uint32_t>(vocab * 10 + rows));
  const auto size = [](int64_t a, int64_t b) { return static_cast<size_t>(a * b); };
  const Buffer<uint32_t> allowed(size(rows, n_uint32), place, [&](size_t) {
    const uint32_t bits = static_cast<uint32_t>(random.below(65536)) * 65537u;
    return random.below(3) == 0 ? 0u : random.below(2) == 0 ? ~0u : bits;
  });
  const auto tokens = static_cast<size_t>(vocab);
  const double inf = std::numeric_limits<double>::infinity();
  const Buffer<double> bias(tokens, place, [&](size_t i) { return i % 11 == 5 ? -inf : 0.25; });
  std::vector<bool> needed(tokens);
  int64_t count = 0;
  for (int64_t v = 0; v < vocab; ++v) {
    bool any = false;
    for (int64_t b = 0; b < rows; ++b)
      any = any || (allowed[size(b, n_uint32) + static_cast<size_t>(v / 32)] >> v % 32 & 1);
    needed[static_cast<size_t>(v)] = any && v % 11 != 5;
    count += needed[static_cast<size_t>(v)];
  }
  const Buffer<int8_t> codes(size(vocab, kWidth), place,
                             [&](size_t) { return static_cast<int8_t>(random.below(255) - 127); });
  const Buffer<int16_t> states(size(rows, kWidth), place, [&](size_t) {
    return static_cast<int16_t>(random.below(2000) - 1000);
  });
  const Buffer<float> scales(tokens, place,
                             [&](size_t i) { return needed[i] ? 0.5f : NAN; });  // must not be used
  const Buffer<double> t(size(1, rows), place, [](size_t) { return 2.0; });
  for (int64_t streams : {1, 2, 4})
    for (int threads : thread_counts()) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(codes.data());
      const ScreenCopy copy{nibbles ? nullptr : codes.data(),
                            nibbles ? bytes : nullptr,
                            nullptr,
                            scales.data(),
                            scales.data(),
                            bias.data(),
                            vocab,
                            kWidth,
                            0,
                            1024,
                            streams};
      const ScreenStates given{states.data(), nullptr, t.data(), t.data(), rows, allowed.data()};
      const Buffer<float> approx(size(rows, vocab), place);
      const Buffer<float> top(size(rows, blocks), place);
      tally.expect(k.screen->products(copy, given, approx.data(), top.data(), threads) == count,
                   "another number of tokens was read");
      tally.expect(approx.intact() && top.intact(), "wrote outside a buffer");
      std::vector<float> best(top.size(), -INFINITY);
      for (int64_t b = 0; b < rows; ++b)
        for (int64_t v = 0; v < vocab; ++v) {
          double sum = 0.0;
          for (int64_t j = 0; j < kWidth; ++j) {
            const double y = states[size(b, kWidth) + static_cast<size_t>(j)];
            sum += y * (nibbles ? 16.0 * nibble(bytes + v * (kWidth / 2), j) - 120.5
                                : codes[size(v, kWidth) + static_cast<size_t>(j)]);
          }
          const float got = approx[size(b, vocab) + static_cast<size_t>(v)];
          const double want = needed[static_cast<size_t>(v)] ? sum + 0.25 : -inf;
          tally.expect_near(got, want, 1e-7 * std::abs(sum) + 1e-7, "approx", v);
          float& most = best[size(b, blocks) + static_cast<size_t>(v / kScreenBlock)];
          most = std::max(most, got);
        }
      tally.expect(top.same(best), "the largest of a block is another");
    }
}

// Tokens on both sides of the limit and exactly on it, masked ones, and a NaN, which must stay.
inline void run_selection(const Kernels& k, int64_t vocab, int64_t rows, Place place,
                          Tally& tally) {
  tally.begin(label(k, "screen selection", {vocab, rows}, "", place));
  Random random(static_cast<uint32_t>(vocab + rows));
  const int64_t blocks = screen_blocks(vocab);
  const auto size = [](int64_t a, int64_t b) { return static_cast<size_t>(a * b); };
  const float inf = std::numeric_limits<float>::infinity();
  const Buffer<float> approx(size(rows, vocab), place, [&](size_t i) {
    return i % 7 == 3 ? -inf : static_cast<float>(random.below(64)) - 32.0f;
  });
  const Buffer<float> token_e(size(1, vocab), place, [&](size_t) { return random.below(3); });
  const Buffer<float> token_n(size(1, vocab), place, [&](size_t) { return random.below(2); });
  const Buffer<float> top(size(rows, blocks), place, [](size_t) { return -INFINITY; });
  const Buffer<float> block_e(size(1, blocks), place, [](size_t) { return 0.0f; });
  const Buffer<float> block_n(size(1, blocks), place, [](size_t) { return 0.0f; });
  for (int64_t v = 0; v < vocab; ++v) {
    const auto at = static_cast<size_t>(v / kScreenBlock), token = static_cast<size_t>(v);
    block_e[at] = std::max(block_e[at], token_e[token]);
    block_n[at] = std::max(block_n[at], token_n[token]);
    for (int64_t b = 0; b < rows; ++b) {
      float& most = top[size(b, blocks) + at];
      most = std::max(most, approx[size(b, vocab) + token]);
    }
  }
  const Buffer<double> e(size(1, rows), place, [&](size_t) { return random.uniform(0.0, 3.0); });
  const Buffer<double> n(size(1, rows), place, [&](size_t) { return random.uniform(0.0, 1.0); });
  const Buffer<double> limits(size(1, rows), place, [&](size_t b) {
    const double choices[] = {20.0, 1e9, -1e9, -inf, std::nan("")};
    return choices[b % 5];
  });
  const ScreenBounds bounds{approx.data(),  top.data(),     token_e.data(), token_n.data(),
                            block_e.data(), block_n.data(), e.data(),       n.data(),
                            limits.data(),  rows,           vocab};
  std::vector<int64_t> want;
  for (int64_t b = 0; b < rows; ++b)
    for (int64_t v = 0; v < vocab; ++v) {
      const auto token = static_cast<size_t>(v), state = static_cast<size_t>(b);
      const double x = approx[size(b, vocab) + token];
      const double slack = std::isinf(x) ? 0.0 : std::abs(x) / 4194304.0;
      const double upper = x + e[state] * token_e[token] + n[state] * token_n[token] + slack;
      if (!(upper < limits[state])) want.push_back(v);
    }
  for (int threads : thread_counts()) {
    const Buffer<int32_t> counts(size(rows, blocks), place);
    k.screen->count(bounds, counts.data(), threads);
    std::vector<int64_t> starts;
    int64_t all = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      starts.push_back(all);
      all += counts[i];
    }
    tally.expect(counts.intact() && all == static_cast<int64_t>(want.size()), "wrong count");
    if (all != static_cast<int64_t>(want.size())) return;
    const Buffer<int64_t> ids(want.size(), place);
    k.screen->fill(bounds, counts.data(), starts.data(), ids.data(), threads);
    tally.expect(ids.same(want) && ids.intact(), "other tokens than those in reach");
  }
}

// The best tokens in one call are those of all exact values; a state that does not belong to the
// bounds is noticed.
inline void run_decide(const Kernels& k, int64_t vocab, int64_t tokens, Place place, Tally& tally) {
  tally.begin(label(k, "screen decide", {vocab, tokens}, "", place));
  Random random(static_cast<uint32_t>(vocab + tokens));
  const int64_t width = 37, blocks = lmhead::screen_blocks(vocab);
  const auto some = [&](size_t) { return random.uniform(-1.0, 1.0); };
  const auto n_tokens = static_cast<size_t>(vocab), n_best = static_cast<size_t>(tokens);
  const Buffer<float> hidden(static_cast<size_t>(width), place, some);
  const Buffer<float> weight(n_tokens * static_cast<size_t>(width), place, some);
  const Buffer<double> bias(n_tokens, place, some);
  const double base = 0.5, zero = 0.0, one = 1.0;
  std::vector<std::pair<double, int64_t>> all;
  for (size_t v = 0; v < n_tokens; ++v) {
    double x = 0.0;
    for (size_t i = 0; i < static_cast<size_t>(width); ++i)
      x += static_cast<double>(hidden[i]) * weight[v * static_cast<size_t>(width) + i];
    all.emplace_back(x + bias[v], -static_cast<int64_t>(v));
  }
  const Buffer<float> approx(n_tokens, place, [&](size_t v) {
    return static_cast<float>(all[v].first - base + random.uniform(-0.09, 0.09));
  });
  const Buffer<float> off(n_tokens, place, [](size_t) { return 0.1f; });
  const Buffer<float> block_off(static_cast<size_t>(blocks), place, [](size_t) { return 0.1f; });
  const Buffer<float> top(static_cast<size_t>(blocks), place, [&](size_t block) {
    const size_t first = block * lmhead::kScreenBlock;
    const size_t last = std::min(n_tokens, first + lmhead::kScreenBlock);
    return *std::max_element(approx.data() + first, approx.data() + last);
  });
  const ScreenBounds bounds{
      approx.data(), top.data(), off.data(), off.data(), block_off.data(), block_off.data(), &one,
      &zero,         nullptr,    1,          vocab};
  lmhead::ScreenExact exact{stored::floats(hidden), stored::floats(weight), bias.data(), base,
                            width};
  std::sort(all.begin(), all.end(), std::greater<>());
  for (int threads : thread_counts()) {
    const Buffer<double> values(n_best, place);
    const Buffer<int64_t> ids(n_best, place);
    const auto decide = [&](int64_t most) {
      return k.screen->decide(bounds, exact, tokens, most, values.data(), ids.data(), threads);
    };
    const auto done = decide(vocab);
    tally.expect(done.decided && done.sound && done.scored >= tokens, "the bounds do not decide");
    tally.expect(values.intact() && ids.intact(), "decide wrote outside a buffer");
    for (size_t i = 0; i < n_best; ++i)
      tally.expect(ids[i] == -all[i].second && std::abs(values[i] - all[i].first) < 1e-12,
                   "another token than the best");
    const auto few = decide(tokens - 1);
    tally.expect(!few.decided && few.sound, "more tokens than allowed were scored");
  }
  exact.base = 3.0;
  const Buffer<double> values(n_best, place);
  const Buffer<int64_t> ids(n_best, place);
  tally.expect(!k.screen->decide(bounds, exact, tokens, vocab, values.data(), ids.data(), 1).sound,
               "a value outside its bounds was not noticed");
}

// A prepared state equals the state: its integers are those of a naive rotation.
inline void run_prepare(const Kernels& k, int64_t size, const std::vector<int64_t>& sizes,
                        int64_t leading, double unit, Place place, Tally& tally) {
  tally.begin(label(k, "screen prepare", {size, leading}, unit > 1.0 ? "8 bits" : "", place));
  Random random(static_cast<uint32_t>(size + leading));
  const auto count = [](int64_t a, int64_t b) { return static_cast<size_t>(a * b); };
  const auto some = [&](size_t) { return random.uniform(-1.0, 1.0); };
  int64_t width = 1, entries = 0;
  for (int64_t n : sizes) width *= n, entries += n * n;
  const int64_t rows = 3;
  const Buffer<double> mean(count(size, 1), place, some), basis(count(leading, size), place, some);
  const Buffer<double> factors(count(entries, 1), place, some);
  const Buffer<double> hidden(count(rows, size), place, some);
  const Buffer<int8_t> signs(count(width, 1), place, [](size_t i) { return i % 3 ? 1 : -1; });
  const lmhead::ScreenBasis given{mean.data(),  basis.data(),
                                  signs.data(), factors.data(),
                                  sizes.data(), static_cast<int64_t>(sizes.size()),
                                  size,         width,
                                  leading,      unit,
                                  1e6,          1e5,
                                  0.5,          0.25,
                                  0.125};
  for (int threads : thread_counts()) {
    const Buffer<int16_t> main(count(rows, width), place), lead(count(rows, leading), place);
    const Buffer<double> numbers(count(5, rows), place);
    double* to = numbers.data();
    k.screen->prepare(
        given, hidden.data(), rows,
        {main.data(), lead.data(), to, to + rows, to + 2 * rows, to + 3 * rows, to + 4 * rows},
        threads);
    tally.expect(main.intact() && lead.intact() && numbers.intact(), "wrote outside a buffer");
    for (int64_t b = 0; b < rows; ++b) {
      const double* h = hidden.data() + b * size;
      const double scale = to[b], lead_scale = to[rows + b];
      double base = 0.0;
      std::vector<double> x(count(width, 1), 0.0);
      for (int64_t i = 0; i < size; ++i) base += mean[static_cast<size_t>(i)] * h[i];
      for (int64_t i = 0; i < size; ++i) {
        double rest = h[i];
        for (int64_t j = 0; j < leading; ++j)
          rest -= lead[count(b, leading) + static_cast<size_t>(j)] * lead_scale *
                  basis[count(j, size) + static_cast<size_t>(i)];
        x[static_cast<size_t>(i)] = rest * signs[static_cast<size_t>(i)];
      }
      const double* f = factors.data();
      for (int64_t n : sizes) {
        const int64_t others = width / n;
        std::vector<double> y(x.size());
        for (int64_t i = 0; i < others; ++i)
          for (int64_t j = 0; j < n; ++j) {
            double sum = 0.0;
            for (int64_t l = 0; l < n; ++l) sum += f[j * n + l] * x[static_cast<size_t>(i * n + l)];
            y[static_cast<size_t>(j * others + i)] = sum;
          }
        x = y;
        f += n * n;
      }
      tally.expect_near(to[2 * rows + b], base, 1e-12 * static_cast<double>(size), "base", b);
      for (int64_t i = 0; i < width; ++i)
        tally.expect_near(main[count(b, width) + static_cast<size_t>(i)] * scale,
                          x[static_cast<size_t>(i)], 0.5001 * unit * scale, "state", i);
    }
  }
}

inline void run(const Kernels& k, Tally& tally) {
  for (Place place : {Place::tight, Place::padded})
    for (int64_t leading : {0, 16})
      for (double unit : {1.0, 256.0}) {
        run_prepare(k, 1, {64}, leading, unit, place, tally);
        run_prepare(k, 64, {64}, leading, unit, place, tally);
        run_prepare(k, 150, {64, 3}, leading, unit, place, tally);
        run_prepare(k, 577, {64, 2, 5}, leading, unit, place, tally);
      }
  for (Place place : {Place::tight, Place::padded}) {
    for (int64_t vocab : sizes({1, 7, 256, 270}))
      for (int64_t rows : sizes({1, 2, 5}))
        for (bool nibbles : {false, true})
          for (int64_t leading : {0, 16, 48}) {
            const int64_t width = leading ? 192 : 64, streams = leading > 16 ? 4 : leading ? 2 : 1;
            run_products(k, {vocab, width, leading, rows, streams, place, nibbles, leading == 16},
                         tally);
          }
    for (int64_t vocab : sizes({1, 7, 256, 270}))
      for (int64_t rows : sizes({1, 3, 4, 10, 17}))
        for (bool nibbles : {false, true})
          for (int64_t leading : {0, 16, 48})
            run_products(
                k,
                {vocab, 192, leading, rows, 2, place, nibbles, leading == 16, /*high_only=*/true},
                tally);
    for (int64_t vocab : sizes({1, 255, 257, 1000}))
      for (int64_t rows : sizes({1, 5})) {
        run_selection(k, vocab, rows, place, tally);
        for (bool nibbles : {false, true})
          run_masked_products(k, vocab, rows, nibbles, place, tally);
        run_decide(k, vocab, std::min<int64_t>(rows, lmhead::screen_blocks(vocab)), place, tally);
      }
  }
}

}  // namespace screen_tests
