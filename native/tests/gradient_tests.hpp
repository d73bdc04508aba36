// The gradient kernel: the softmax part, label smoothing's mix, picked entries, and the sums.
#pragma once

#include <memory>

#include "cases.hpp"
#include "twins.hpp"

namespace gradient_tests {

using lmhead::Kernels;
using lmhead::Map;
using lmhead::Pick;

// Which of the optional arguments are given.
struct Options {
  const char* name;
  bool b, mix, picks, sums, broken;
};

constexpr Options kOptions[] = {
    {"a", false, false, false, false, false},    {"a, b", true, false, false, false, false},
    {"a, mix", false, true, false, false, false}, {"a, picks", false, false, true, false, false},
    {"a, sums", false, false, false, true, false}, {"all", true, true, true, true, false},
    {"all, broken", true, true, true, true, true},
};

struct Inputs {
  std::vector<float> z, high, low, a, b, mix, mixed, rows;
  std::vector<Pick> picks;
};

inline Inputs make(Shape shape, const Map& map, const Options& options, Random& random) {
  Inputs in;
  const auto words = static_cast<size_t>(shape.words), tokens = static_cast<size_t>(shape.tokens);
  in.z.resize(words * tokens);
  for (size_t i = 0; i < in.z.size(); ++i) {
    const size_t w = i / tokens, j = i % tokens;
    const bool masked = (w % 9 == 8 && words > 1) || (options.broken && j % 7 == 5);
    in.z[i] = masked ? -HUGE_VALF : static_cast<float>(twin::apply(map, random.normal(5.0)));
    if (options.broken && j % 7 == 3 && w == words / 2) in.z[i] = NAN;
  }
  for (size_t j = 0; j < tokens; ++j) {
    std::vector<float> column;
    for (size_t w = 0; w < words; ++w) column.push_back(in.z[w * tokens + j]);
    const double lse = twin::Softmax(column).lse();
    in.high.push_back(static_cast<float>(lse));
    in.low.push_back(std::isfinite(lse) ? static_cast<float>(lse - in.high[j]) : 0.0f);
    in.a.push_back(random.normal(1.0));
    in.b.push_back(random.normal(1.0));
    in.mixed.push_back(random.normal(1.0));
    in.rows.push_back(random.normal(1.0));
  }
  for (size_t w = 0; w < words; ++w) in.mix.push_back(w % 9 == 8 ? 0.0f : random.normal(0.1));
  if (options.picks) {
    // Every corner, and one entry picked again and again.
    for (int64_t i = 0; i < 5; ++i) {
      in.picks.push_back({0, 0, random.normal(1.0)});
      in.picks.push_back({shape.words - 1, shape.tokens - 1, random.normal(1.0)});
      in.picks.push_back({random.below(shape.words), random.below(shape.tokens), random.normal(1.0)});
    }
  }
  return in;
}

inline void check(const Inputs& in, Shape shape, const Map& map, const Options& options,
                  const Buffer<float>& z, const Buffer<float>& columns, const Buffer<float>& rows,
                  Tally& tally) {
  const auto words = static_cast<size_t>(shape.words), tokens = static_cast<size_t>(shape.tokens);
  std::vector<double> want(words * tokens), bound(words * tokens);
  std::vector<double> column(words), column_bound(words);
  std::vector<double> row(in.rows.begin(), in.rows.end()), row_bound(tokens);
  for (size_t w = 0; w < words; ++w)
    for (size_t j = 0; j < tokens; ++j) {
      const size_t i = w * tokens + j;
      const double lse = static_cast<double>(in.high[j]) + in.low[j];
      const auto g = twin::gradient(map, in.z[i], lse, in.a[j], options.b ? in.b[j] : 0.0);
      want[i] = g.value;
      bound[i] = g.bound;
      column[w] += g.value;
      row[j] += g.value;
      // In float32: each of the additions may round.
      column_bound[w] += g.bound + 1e-6 * std::abs(g.value);
      row_bound[j] += g.bound + 1e-6 * std::abs(g.value) + 6e-8 * std::abs(in.rows[j]);
      if (options.mix) {
        const double extra = static_cast<double>(in.mixed[j]) * in.mix[w];
        want[i] += extra * twin::slope(map, in.z[i]);
        bound[i] += 1e-6 * std::abs(extra * map.scale * map.outer);
      }
    }
  for (const Pick& pick : in.picks) {
    const auto i = static_cast<size_t>(pick.word * shape.tokens + pick.token);
    want[i] += pick.value * twin::slope(map, in.z[i]);
    bound[i] += 1e-6 * std::abs(pick.value * map.scale * map.outer);
  }
  for (size_t i = 0; i < want.size(); ++i)
    tally.expect_near(z[i], want[i], bound[i] + 1e-7 * std::abs(want[i]), "gradient",
                      static_cast<int64_t>(i));
  if (!options.sums) return;
  for (size_t w = 0; w < words; ++w)
    tally.expect_near(columns[w], column[w], column_bound[w], "column", static_cast<int64_t>(w));
  for (size_t j = 0; j < tokens; ++j)
    tally.expect_near(rows[j], row[j], row_bound[j], "row", static_cast<int64_t>(j));
}

inline void run_one(const Kernels& k, Shape shape, const NamedMap& named, const Options& options,
                    Place place, Tally& tally) {
  tally.begin(label(k, "gradient", shape,
                    (std::string(named.name) + ", " + options.name).c_str(), place));
  Random random(static_cast<uint32_t>(shape.words * 13 + shape.tokens));
  const Inputs in = make(shape, named.map, options, random);
  const auto copy = [&](const std::vector<float>& v) {
    return Buffer<float>(v.size(), place, [&](size_t i) { return v[i]; });
  };
  const Buffer<float> high = copy(in.high), low = copy(in.low), a = copy(in.a), b = copy(in.b),
                      mix = copy(in.mix), mixed = copy(in.mixed);
  std::vector<float> first, first_columns, first_rows;
  for (int threads : kThreads) {
    const Buffer<float> z = copy(in.z), rows = copy(in.rows);
    const Buffer<float> columns(in.mix.size(), place);  // they are set, whatever they were
    k.gradient(z.data(), shape.words, shape.tokens, high.data(), low.data(), a.data(),
               options.b ? b.data() : nullptr, options.mix ? mix.data() : nullptr,
               options.mix ? mixed.data() : nullptr, named.map, in.picks,
               options.sums ? columns.data() : nullptr, options.sums ? rows.data() : nullptr,
               threads);
    tally.expect(z.intact() && rows.intact() && columns.intact() && high.intact() &&
                     low.intact() && a.intact() && b.intact() && mix.intact() && mixed.intact(),
                 "wrote outside a buffer");
    if (first.empty()) {
      check(in, shape, named.map, options, z, columns, rows, tally);
      first = z.copy(), first_columns = columns.copy(), first_rows = rows.copy();
    }
    tally.expect(z.same(first) && columns.same(first_columns) && rows.same(first_rows),
                 "differs with " + std::to_string(threads) + " threads");
  }
}

inline void run(const Kernels& k, Tally& tally) {
  tally.begin(std::string(k.name) + " gradient of no tokens, of no words");
  const Buffer<float> none(0, Place::tight), some(5, Place::tight);
  k.gradient(none.data(), 5, 0, none.data(), none.data(), none.data(), nullptr, nullptr, nullptr,
             {}, {}, some.data(), none.data(), 2);
  for (size_t w = 0; w < 5; ++w)
    tally.expect_near(some[w], 0.0, 0.0, "column", static_cast<int64_t>(w));
  k.gradient(none.data(), 0, 5, some.data(), some.data(), some.data(), nullptr, nullptr, nullptr,
             {}, {}, none.data(), some.data(), 2);
  for (Place place : {Place::tight, Place::padded})
    for (Shape shape : shapes())
      for (const NamedMap& map : maps())
        for (const Options& options : kOptions) run_one(k, shape, map, options, place, tally);
}

}  // namespace gradient_tests
