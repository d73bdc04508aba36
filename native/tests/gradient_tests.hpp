// The gradient kernel: the softmax part, label smoothing's mix, picked entries, and the sums.
#pragma once

#include <memory>

#include "cases.hpp"
#include "references.hpp"

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
    {"a", false, false, false, false, false},      {"a, b", true, false, false, false, false},
    {"a, mix", false, true, false, false, false},  {"a, picks", false, false, true, false, false},
    {"a, sums", false, false, false, true, false}, {"all", true, true, true, true, false},
    {"all, broken", true, true, true, true, true},
};

struct Inputs {
  std::vector<float> z, high, low, a, b, mix, mixed, row_sums;
  std::vector<Pick> picks;
};

inline Inputs make(Shape shape, const Map& map, const Options& options, Random& random) {
  Inputs in;
  const auto tokens = static_cast<size_t>(shape.tokens), rows = static_cast<size_t>(shape.rows);
  in.z.resize(tokens * rows);
  for (size_t i = 0; i < in.z.size(); ++i) {
    const size_t w = i / rows, j = i % rows;
    const bool masked = (w % 9 == 8 && tokens > 1) || (options.broken && j % 7 == 5);
    in.z[i] = masked ? -HUGE_VALF : static_cast<float>(reference::apply(map, random.normal(5.0)));
    if (options.broken && j % 7 == 3 && w == tokens / 2) in.z[i] = NAN;
  }
  for (size_t j = 0; j < rows; ++j) {
    std::vector<float> column;
    for (size_t w = 0; w < tokens; ++w) column.push_back(in.z[w * rows + j]);
    const double lse = reference::Softmax(column).lse();
    in.high.push_back(static_cast<float>(lse));
    in.low.push_back(std::isfinite(lse) ? static_cast<float>(lse - in.high[j]) : 0.0f);
    in.a.push_back(random.normal(1.0));
    in.b.push_back(random.normal(1.0));
    in.mixed.push_back(random.normal(1.0));
    in.row_sums.push_back(random.normal(1.0));
  }
  for (size_t w = 0; w < tokens; ++w) in.mix.push_back(w % 9 == 8 ? 0.0f : random.normal(0.1));
  if (options.picks) {
    // Every corner, and one entry picked again and again.
    for (int64_t i = 0; i < 5; ++i) {
      in.picks.push_back({0, 0, random.normal(1.0)});
      in.picks.push_back({shape.tokens - 1, shape.rows - 1, random.normal(1.0)});
      in.picks.push_back(
          {random.below(shape.tokens), random.below(shape.rows), random.normal(1.0)});
    }
  }
  return in;
}

inline void check(const Inputs& in, Shape shape, const Map& map, const Options& options,
                  const Buffer<float>& z, const Buffer<float>& token_sums,
                  const Buffer<float>& row_sums, Tally& tally) {
  const auto tokens = static_cast<size_t>(shape.tokens), rows = static_cast<size_t>(shape.rows);
  std::vector<double> want(tokens * rows), bound(tokens * rows);
  std::vector<double> column(tokens), column_bound(tokens);
  std::vector<double> want_rows(in.row_sums.begin(), in.row_sums.end()), row_bound(rows);
  for (size_t w = 0; w < tokens; ++w)
    for (size_t j = 0; j < rows; ++j) {
      const size_t i = w * rows + j;
      const double lse = static_cast<double>(in.high[j]) + in.low[j];
      const auto g = reference::gradient(map, in.z[i], lse, in.a[j], options.b ? in.b[j] : 0.0);
      want[i] = g.value;
      bound[i] = g.bound;
      column[w] += g.value;
      want_rows[j] += g.value;
      // In float32: each of the additions may round.
      column_bound[w] += g.bound + 1e-6 * std::abs(g.value);
      row_bound[j] += g.bound + 1e-6 * std::abs(g.value) + 6e-8 * std::abs(in.row_sums[j]);
      if (options.mix) {
        const double extra = static_cast<double>(in.mixed[j]) * in.mix[w];
        want[i] += extra * reference::slope(map, in.z[i]);
        bound[i] += 1e-6 * std::abs(extra * map.scale * map.outer);
      }
    }
  for (const Pick& pick : in.picks) {
    const auto i = static_cast<size_t>(pick.token * shape.rows + pick.row);
    want[i] += pick.value * reference::slope(map, in.z[i]);
    bound[i] += 1e-6 * std::abs(pick.value * map.scale * map.outer);
  }
  for (size_t i = 0; i < want.size(); ++i)
    tally.expect_near(z[i], want[i], bound[i] + 1e-7 * std::abs(want[i]), "gradient",
                      static_cast<int64_t>(i));
  if (!options.sums) return;
  for (size_t w = 0; w < tokens; ++w)
    tally.expect_near(token_sums[w], column[w], column_bound[w], "column", static_cast<int64_t>(w));
  for (size_t j = 0; j < rows; ++j)
    tally.expect_near(row_sums[j], want_rows[j], row_bound[j], "row sum", static_cast<int64_t>(j));
}

inline void run_one(const Kernels& k, Shape shape, const NamedMap& named, const Options& options,
                    Place place, Tally& tally) {
  tally.begin(
      label(k, "gradient", shape, (std::string(named.name) + ", " + options.name).c_str(), place));
  Random random(static_cast<uint32_t>(shape.tokens * 13 + shape.rows));
  const Inputs in = make(shape, named.map, options, random);
  const auto copy = [&](const std::vector<float>& v) {
    return Buffer<float>(v.size(), place, [&](size_t i) { return v[i]; });
  };
  const Buffer<float> high = copy(in.high), low = copy(in.low), a = copy(in.a), b = copy(in.b),
                      mix = copy(in.mix), mixed = copy(in.mixed);
  std::vector<float> first, first_token_sums, first_row_sums;
  for (int threads : thread_counts()) {
    const Buffer<float> z = copy(in.z), row_sums = copy(in.row_sums);
    const Buffer<float> token_sums(in.mix.size(), place);  // they are set, whatever they were
    k.gradient(z.data(), shape.tokens, shape.rows, high.data(), low.data(), a.data(),
               options.b ? b.data() : nullptr, options.mix ? mix.data() : nullptr,
               options.mix ? mixed.data() : nullptr, named.map, in.picks,
               options.sums ? token_sums.data() : nullptr, options.sums ? row_sums.data() : nullptr,
               threads);
    tally.expect(z.intact() && row_sums.intact() && token_sums.intact() && high.intact() &&
                     low.intact() && a.intact() && b.intact() && mix.intact() && mixed.intact(),
                 "wrote outside a buffer");
    if (first.empty()) {
      check(in, shape, named.map, options, z, token_sums, row_sums, tally);
      first = z.copy(), first_token_sums = token_sums.copy(), first_row_sums = row_sums.copy();
    }
    tally.expect(
        z.same(first) && token_sums.same(first_token_sums) && row_sums.same(first_row_sums),
        "differs with " + std::to_string(threads) + " threads");
  }
}

inline void run(const Kernels& k, Tally& tally) {
  tally.begin(std::string(k.name) + " gradient of no rows, of no tokens");
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
