// Kernels on whole rows of logits: sums, the k-th, reach, bands, races; and the noise of these.
#pragma once

#include <algorithm>
#include <functional>
#include <string>

#include "cases.hpp"
#include "philox.hpp"
#include "references.hpp"

namespace rows_tests {

using lmhead::Kernels;
using lmhead::Key;

// All that is summed of a row, in double.
struct RowSums {
  double max, mass, weighted, count, shift, square;
};

// What a row may hold. Broken: a NaN, an inf or nothing at all in some of the rows.
enum class Content { plain, masked, equal, broken };

inline const char* name(Content content) {
  const char* names[] = {"plain", "masked", "equal", "broken"};
  return names[static_cast<int>(content)];
}

inline Buffer<float> logits(Shape shape, Content content, Place place) {
  Random random(static_cast<uint32_t>(shape.tokens * 31 + shape.rows));
  const int64_t vocab = shape.tokens;
  return Buffer<float>(static_cast<size_t>(vocab * shape.rows), place, [&](size_t i) {
    const int64_t row = static_cast<int64_t>(i) / vocab, token = static_cast<int64_t>(i) % vocab;
    float z = random.normal(3.0);
    if (content == Content::equal) z = std::round(z);
    if (content == Content::plain || content == Content::equal) return z;
    if (token > 0 && random.below(3) == 0) z = -HUGE_VALF;
    if (content == Content::masked) return z;
    if (row % 4 == 1 && token == vocab / 3) z = NAN;
    if (row % 4 == 2 && token == vocab - 1) z = HUGE_VALF;
    return row % 4 == 3 ? -HUGE_VALF : z;
  });
}

inline std::vector<float> row_of(const Buffer<float>& z, int64_t vocab, int64_t row) {
  return {z.data() + row * vocab, z.data() + (row + 1) * vocab};
}

inline RowSums reference_sums(const std::vector<float>& z, double beta) {
  RowSums s = {-reference::kInf, 0, 0, 0, 0, 0};
  for (float v : z)
    if (std::isnan(v)) s.max = v;
  if (std::isnan(s.max)) return s;
  for (float v : z) s.max = std::max<double>(s.max, v);
  if (std::isinf(s.max)) return s;
  for (float v : z) {
    if (v == -HUGE_VALF) continue;
    const double far = v - s.max, e = std::exp(beta * far);
    s.mass += e;
    s.weighted += e * beta * far;
    s.count += 1;
    s.shift += far;
    s.square += far * far;
  }
  return s;
}

inline void check_sums(const Kernels& k, Shape shape, const Buffer<float>& z,
                       const Buffer<double>& beta, Place place, Tally& tally) {
  const auto rows = static_cast<size_t>(shape.rows);
  std::vector<std::vector<double>> first;
  for (int threads : thread_counts()) {
    const Buffer<double> max(rows, place), n(rows, place), mass(rows, place), weighted(rows, place),
        shift(rows, place), square(rows, place);
    const Buffer<double>* all[] = {&max, &n, &mass, &weighted, &shift, &square};
    k.rows->max_and_count(z.data(), shape.rows, shape.tokens, max.data(), n.data(), threads);
    k.rows->softmax_sums(z.data(), shape.rows, shape.tokens, beta.data(), 1, max.data(),
                         mass.data(), weighted.data(), threads);
    const Buffer<double> betas(2 * rows, place,
                               [&](size_t i) { return i < rows ? 1.0 : beta[i - rows]; });
    const Buffer<double> both(2 * rows, place), ignored(2 * rows, place);
    k.rows->softmax_sums(z.data(), shape.rows, shape.tokens, betas.data(), 2, max.data(),
                         both.data(), ignored.data(), threads);
    tally.expect(both.intact() && ignored.intact(), "masses wrote outside a buffer");
    for (size_t row = 0; row < rows; ++row)
      tally.expect(both[rows + row] == mass[row] || std::isnan(mass[row]), "masses differ");
    k.rows->moments(z.data(), shape.rows, shape.tokens, max.data(), shift.data(), square.data(),
                    threads);
    if (first.empty())
      for (const auto* one : all) first.push_back(one->copy());
    for (size_t i = 0; i < 6; ++i) {
      tally.expect(all[i]->intact(), "sums wrote outside a buffer");
      for (size_t row = 0; row < rows; ++row)  // sums of a broken row mean nothing
        if (i == 0 || std::isfinite(first[0][row]))
          tally.expect(std::memcmp(&(*all[i])[row], &first[i][row], sizeof(double)) == 0,
                       "sums differ with " + std::to_string(threads) + " threads");
    }
  }
  for (size_t i = 0; i < rows; ++i) {
    const auto row = static_cast<int64_t>(i);
    const RowSums want = reference_sums(row_of(z, shape.tokens, row), beta[i]);
    const double bound = 1e-12 * (want.count + want.square);
    tally.expect_near(first[0][i], want.max, 0.0, "max", row);
    if (!std::isfinite(want.max)) continue;
    tally.expect_near(first[1][i], want.count, 0.0, "count", row);
    tally.expect_near(first[2][i], want.mass, bound, "mass", row);
    tally.expect_near(first[3][i], want.weighted, bound, "weighted", row);
    tally.expect_near(first[4][i], want.shift, bound, "shift", row);
    tally.expect_near(first[5][i], want.square, bound, "square", row);
  }
}

inline void check_kth(const Kernels& k, Shape shape, const Buffer<float>& z, Place place,
                      Tally& tally) {
  const auto rows = static_cast<size_t>(shape.rows);
  for (int64_t kth : {1, 2, 7, 64}) {
    const Buffer<int64_t> ks(rows, place,
                             [&](size_t i) { return kth + static_cast<int64_t>(i % 2); });
    const Buffer<float> value(rows, place);
    k.rows->kth_largest(z.data(), shape.rows, shape.tokens, ks.data(), value.data(), 2);
    tally.expect(value.intact(), "kth wrote outside a buffer");
    for (size_t i = 0; i < rows; ++i) {
      auto row = row_of(z, shape.tokens, static_cast<int64_t>(i));
      std::sort(row.begin(), row.end(), std::greater<float>());
      const auto at = static_cast<size_t>(ks[i]) - 1;
      tally.expect_near(value[i], at < row.size() ? row[at] : -HUGE_VALF, 0.0, "kth",
                        static_cast<int64_t>(i));
    }
  }
}

// Enough within the radius, and not enough two steps nearer.
inline void check_reach(const Kernels& k, Shape shape, const Buffer<float>& z,
                        const Buffer<double>& beta, Place place, Tally& tally) {
  const auto rows = static_cast<size_t>(shape.rows);
  const double step = 1.0 / 64;
  const Buffer<double> width(rows, place, [&](size_t) { return step; });
  std::vector<RowSums> sums;
  for (size_t i = 0; i < rows; ++i)
    sums.push_back(reference_sums(row_of(z, shape.tokens, static_cast<int64_t>(i)), beta[i]));
  const Buffer<double> max(rows, place, [&](size_t i) { return sums[i].max; });
  const Buffer<double> centre(rows, place, [&](size_t i) { return sums[i].max - i % 3; });
  for (double share : {0.0, 0.4, 0.999, 1.5}) {
    const Buffer<double> limit(rows, place, [&](size_t i) { return share * sums[i].mass; });
    const Buffer<double> radius(rows, place);
    k.rows->mass_radius(z.data(), shape.rows, shape.tokens, beta.data(), max.data(), centre.data(),
                        width.data(), limit.data(), radius.data(), 2);
    tally.expect(radius.intact(), "reach wrote outside a buffer");
    for (size_t i = 0; i < rows; ++i) {
      if (!std::isfinite(sums[i].max)) continue;
      double inside = 0.0, nearer = 0.0;
      for (float v : row_of(z, shape.tokens, static_cast<int64_t>(i))) {
        if (v == -HUGE_VALF) continue;
        const double mass = std::exp(beta[i] * (v - sums[i].max));
        const double far = std::abs(v - centre[i]);
        if (far <= radius[i]) inside += mass;
        if (far <= radius[i] - 2.1 * step / beta[i]) nearer += mass;
      }
      const auto row = std::to_string(i);
      if (share > 1.0) tally.expect(std::isinf(radius[i]), "reach found too much, row " + row);
      if (std::isinf(radius[i])) continue;  // or the tokens are out of sight
      tally.expect(inside >= limit[i] * (1 - 1e-12), "reach is too short, row " + row);
      if (share > 0.0) tally.expect(nearer < limit[i], "reach is too far, row " + row);
    }
  }
}

// The tokens of a band, best first: minus the logit, and the id.
inline std::vector<std::pair<double, int64_t>> in_band(const Buffer<float>& z, Shape shape,
                                                       size_t row, float low, float high) {
  std::vector<std::pair<double, int64_t>> found;
  const auto logits = row_of(z, shape.tokens, static_cast<int64_t>(row));
  for (int64_t w = 0; w < shape.tokens; ++w) {
    const float v = logits[static_cast<size_t>(w)];
    if (v >= low && v <= high && v > -HUGE_VALF) found.emplace_back(-static_cast<double>(v), w);
  }
  std::sort(found.begin(), found.end());
  return found;
}

inline void check_band(const Kernels& k, Shape shape, const Buffer<float>& z, Place place,
                       Tally& tally) {
  const auto rows = static_cast<size_t>(shape.rows);
  const float inf = HUGE_VALF;
  for (auto [low, high] : {std::pair<float, float>{-inf, inf}, {-1.0f, 2.0f}, {2.0f, 1.0f}}) {
    const Buffer<float> lo(rows, place, [&, l = low](size_t) { return l; });
    const Buffer<float> hi(rows, place, [&, h = high](size_t) { return h; });
    for (bool room : {true, false}) {  // for all, and for some
      int64_t most = 0;
      for (size_t i = 0; i < rows; ++i)
        most = std::max(most, static_cast<int64_t>(in_band(z, shape, i, low, high).size()));
      const int64_t width = room ? most : most / 2;
      const Buffer<int64_t> counts(rows, place), ids(rows * static_cast<size_t>(width), place);
      const Buffer<double> values(ids.size(), place);
      k.rows->in_range(z.data(), shape.rows, shape.tokens, lo.data(), hi.data(), width,
                       counts.data(), ids.data(), values.data(), 2);
      tally.expect(counts.intact() && ids.intact() && values.intact(), "band wrote outside");
      for (size_t i = 0; i < rows; ++i) {
        const auto want = in_band(z, shape, i, low, high);
        const auto n = static_cast<int64_t>(want.size());
        tally.expect(counts[i] == n, "the size of a band is wrong");
        if (n > width) continue;
        for (size_t at = 0; at < want.size(); ++at) {
          const size_t here = i * static_cast<size_t>(width) + at;
          tally.expect(ids[here] == want[at].second && values[here] == -want[at].first,
                       "a token is not the same");
        }
      }
    }
  }
}

// Around the best token, and around a worse one: by sorting all tokens by their distance.
inline void check_nucleus(const Kernels& k, Shape shape, const Buffer<float>& z,
                          const Buffer<double>& beta, Place place, Tally& tally) {
  const auto rows = static_cast<size_t>(shape.rows), vocab = static_cast<size_t>(shape.tokens);
  std::vector<RowSums> sums;
  for (size_t i = 0; i < rows; ++i)
    sums.push_back(reference_sums(row_of(z, shape.tokens, static_cast<int64_t>(i)), beta[i]));
  for (auto [below, share, least] : {std::tuple<double, double, int64_t>{0.0, 0.5, 1},
                                     {0.0, 0.9, 3},
                                     {1.25, 0.3, 1},
                                     {1.25, 0.0, 2}}) {
    const Buffer<double> max(rows, place, [&](size_t i) { return sums[i].max; });
    const Buffer<double> centre(rows, place, [&, b = below](size_t i) { return sums[i].max - b; });
    const Buffer<double> limit(rows, place, [&, s = share](size_t i) { return s * sums[i].mass; });
    const Buffer<int64_t> counts(rows, place), ids(rows * vocab, place);
    const Buffer<double> values(ids.size(), place);
    k.rows->nucleus(z.data(), shape.rows, shape.tokens, beta.data(), max.data(), centre.data(),
                    limit.data(), least, shape.tokens, counts.data(), ids.data(), values.data(), 2);
    tally.expect(counts.intact() && ids.intact() && values.intact(), "nucleus wrote outside");
    for (size_t row = 0; row < rows; ++row) {
      if (!std::isfinite(sums[row].max)) continue;
      auto tokens = in_band(z, shape, row, -HUGE_VALF, HUGE_VALF);
      std::stable_sort(tokens.begin(), tokens.end(), [&](const auto& a, const auto& b) {
        return std::abs(-a.first - centre[row]) < std::abs(-b.first - centre[row]);
      });
      double before = 0.0;
      size_t n = 0;
      while (n < tokens.size() && (before < limit[row] || static_cast<int64_t>(n) < least))
        before += std::exp(beta[row] * (-tokens[n++].first - sums[row].max));
      const bool found = n > 0 && static_cast<int64_t>(n) >= least && before >= limit[row] &&
                         std::abs(-tokens[n - 1].first - centre[row]) <= 6.0 / beta[row];
      tokens.resize(found ? n : 0);
      std::sort(tokens.begin(), tokens.end());
      tally.expect(counts[row] == static_cast<int64_t>(tokens.size()), "another number of tokens");
      if (counts[row] != static_cast<int64_t>(tokens.size())) continue;
      for (size_t i = 0; i < tokens.size(); ++i) {
        tally.expect(ids[row * vocab + i] == tokens[i].second, "another token is near");
        tally.expect(values[row * vocab + i] == beta[row] * -tokens[i].first, "another logit");
      }
    }
  }
}

inline void check_race(const Kernels& k, Shape shape, const Buffer<float>& z,
                       const Buffer<double>& beta, Place place, Tally& tally) {
  const auto rows = static_cast<size_t>(shape.rows);
  const Buffer<Key> keys(rows, place, [](size_t i) {
    return Key{~uint64_t{0} - 77 * i, (uint64_t{1} << 33) * i + 3};
  });
  for (int threads : thread_counts()) {
    const Buffer<int64_t> winners(rows, place);
    k.rows->gumbel_argmax(z.data(), shape.rows, shape.tokens, beta.data(), keys.data(),
                          winners.data(), threads);
    tally.expect(winners.intact(), "race wrote outside a buffer");
    for (size_t i = 0; i < rows; ++i) {
      int64_t best = -1;
      double score = -reference::kInf, top = -reference::kInf;
      const auto row = row_of(z, shape.tokens, static_cast<int64_t>(i));
      for (float v : row) top = std::max<double>(top, v);
      for (int64_t w = 0; w < shape.tokens; ++w) {
        const double noise =
            lmhead::to_gumbel(lmhead::philox(keys[i], 0, static_cast<uint64_t>(w)));
        const double mine = beta[i] * (row[static_cast<size_t>(w)] - top) + noise;
        if (mine > score) {
          score = mine;
          best = w;
        }
      }
      tally.expect(winners[i] == (top == -reference::kInf ? -1 : best), "another token won");
    }
  }
}

// Every third token of a row, at twice its logit, some of them struck out.
inline void check_settle(const Kernels& k, Shape shape, const Buffer<float>& z, Place place,
                         Tally& tally) {
  const auto rows = static_cast<size_t>(shape.rows), vocab = static_cast<size_t>(shape.tokens);
  const size_t width = (vocab + 2) / 3;
  const Buffer<Key> keys(rows, place, [](size_t i) { return Key{7 * i, i}; });
  const Buffer<double> lse(rows, place, [](size_t) { return 20.0; });
  const Buffer<int64_t> ids(rows * width, place,
                            [&](size_t i) { return static_cast<int64_t>(i % width * 3); });
  const Buffer<double> logits(rows * width, place, [&](size_t i) {
    const float v = z[i / width * vocab + i % width * 3];
    return i % 5 == 4 ? -HUGE_VAL : 2.0 * v;
  });
  const Buffer<int64_t> token(rows, place);
  const Buffer<double> log_prob(rows, place), raw(rows, place), mass(rows, place);
  k.rows->draw(z.data(), shape.rows, shape.tokens, lse.data(), ids.data(), logits.data(),
               static_cast<int64_t>(width), keys.data(), token.data(), log_prob.data(), raw.data(),
               mass.data(), 2);
  tally.expect(token.intact() && log_prob.intact() && raw.intact() && mass.intact(),
               "settle wrote outside a buffer");
  for (size_t row = 0; row < rows; ++row) {
    double best = -HUGE_VAL, sum = 0.0, kept = 0.0;
    size_t winner = 0;
    for (size_t i = 0; i < width; ++i) {
      const double x = logits[row * width + i];
      if (x == -HUGE_VAL) continue;
      const auto id = static_cast<uint64_t>(ids[i]);
      const double score = x + lmhead::to_gumbel(lmhead::philox(keys[row], 0, id));
      sum += std::exp(x);
      kept += std::exp(x / 2.0 - lse[row]);
      if (score > best) best = score, winner = i;
    }
    if (best == -HUGE_VAL) continue;
    const auto at = static_cast<int64_t>(row);
    const double x = logits[row * width + winner];
    tally.expect(token[row] == ids[winner], "another token won");
    tally.expect_near(log_prob[row], x - std::log(sum), 1e-12 * (1 + std::abs(x)), "log_prob", at);
    tally.expect_near(raw[row], x / 2.0 - lse[row], 1e-12 * lse[row], "raw_log_prob", at);
    tally.expect_near(mass[row], std::log(kept), 1e-12 * lse[row], "kept mass", at);
  }
}

// The bits that the authors of Philox give, and numbers that are never 0 nor 1.
inline void run_noise(Tally& tally) {
  tally.begin("philox");
  const lmhead::RandomBits even = lmhead::philox({0, 0}, 0, 0), odd = lmhead::philox({0, 0}, 0, 1);
  tally.expect(even.high == 0x6627e8d5 && even.low == 0xe169c58d, "bits of id 0");
  tally.expect(odd.high == 0xbc57ac4c && odd.low == 0x9b00dbd8, "bits of id 1");
  const double least = lmhead::to_uniform({0, 0});
  const double most = lmhead::to_uniform({0xffffffff, 0xffffffff});
  tally.expect(least > 0.0 && most < 1.0, "a number is 0 or 1");
  tally.expect(std::isfinite(lmhead::to_gumbel({0, 0})), "no noise for the least number");
  tally.expect(std::isfinite(lmhead::to_gumbel({~0u, ~0u})), "no noise for the largest number");
}

inline void run(const Kernels& k, Tally& tally) {
  run_noise(tally);
  // Around the widths of vectors, a chunk of noise (512), a piece of a row (32768).
  const Shape shapes[] = {{1, 1}, {7, 5}, {33, 70}, {513, 4}, {1000, 8}, {32769, 4}, {65600, 2}};
  for (Place place : {Place::tight, Place::padded})
    for (Shape shape : shapes)
      for (Content content : {Content::plain, Content::masked, Content::equal, Content::broken}) {
        tally.begin(label(k, "rows", shape, name(content), place));
        const Buffer<float> z = logits(shape, content, place);
        const Buffer<double> beta(static_cast<size_t>(shape.rows), place,
                                  [](size_t i) { return 0.3 + 0.4 * static_cast<double>(i % 5); });
        check_sums(k, shape, z, beta, place, tally);
        check_reach(k, shape, z, beta, place, tally);
        check_band(k, shape, z, place, tally);
        if (content != Content::broken) {
          check_nucleus(k, shape, z, beta, place, tally);
          check_kth(k, shape, z, place, tally);
          check_race(k, shape, z, beta, place, tally);
          check_settle(k, shape, z, place, tally);
        }
        tally.expect(z.intact() && beta.intact(), "wrote outside a buffer");
      }
}

}  // namespace rows_tests
