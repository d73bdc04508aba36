// The loss kernel: its value and its gradient, from the linear layer on.
#pragma once

#include "cases.hpp"
#include "references.hpp"

namespace loss_tests {

using lmhead::Kernels;
using lmhead::LossWeights;
using lmhead::Map;

// Which of the optional arguments are given; broken: NaNs, masked targets, rows without tokens.
struct Options {
  const char* name;
  bool bias, mix, squared, broken;
};

constexpr Options kOptions[] = {
    {"plain", false, false, false, false}, {"bias", true, false, false, false},
    {"mix", true, true, false, false},     {"squared", false, false, true, false},
    {"all", true, true, true, false},      {"all, broken", true, true, true, true},
};

struct Inputs {
  std::vector<float> x, bias, mix;
  std::vector<int64_t> targets;
  std::vector<double> lse, picked, mixed, squared;
};

inline Inputs make(Shape shape, const Options& options, Random& random) {
  Inputs in;
  const auto tokens = static_cast<size_t>(shape.tokens), rows = static_cast<size_t>(shape.rows);
  for (size_t w = 0; w < tokens; ++w) {
    const bool masked = options.bias && w % 9 == 8;
    in.bias.push_back(masked ? -HUGE_VALF : random.normal(1.0));
    in.mix.push_back(masked ? 0.0f : random.normal(0.1));
  }
  for (size_t i = 0; i < tokens * rows; ++i) in.x.push_back(random.normal(5.0));
  for (size_t j = 0; j < rows; ++j) {
    int64_t target = j ? random.below(shape.tokens) : shape.tokens - 1;
    if (options.bias && target % 9 == 8 && !options.broken) --target;
    if (options.broken && j % 7 == 3) in.x[tokens / 2 * rows + j] = NAN;
    if (options.broken && j % 7 == 5)
      for (size_t w = 0; w < tokens; ++w) in.x[w * rows + j] = -HUGE_VALF;
    in.targets.push_back(target);
    in.lse.push_back(random.normal(1.0));
    in.picked.push_back(j % 4 == 2 ? 0.0 : random.normal(1.0));
    in.mixed.push_back(random.normal(1.0));
    in.squared.push_back(random.normal(0.1));
  }
  return in;
}

// One row in double: its loss, the gradient of each token, and how far floats may be from them.
inline double row(const Inputs& in, Shape shape, const Map& map, const Options& options, size_t j,
                  std::vector<double>& gradient, std::vector<double>& bound) {
  const auto tokens = static_cast<size_t>(shape.tokens), rows = static_cast<size_t>(shape.rows);
  std::vector<float> z;
  for (size_t w = 0; w < tokens; ++w) {
    // The kernel adds the bias in float; the map follows.
    const float x = in.x[w * rows + j], v = options.bias ? x + in.bias[w] : x;
    z.push_back(static_cast<float>(reference::apply(map, v)));
  }
  const double lse = reference::Softmax(z).lse();
  const auto target = static_cast<size_t>(in.targets[j]);
  double loss = in.lse[j] * lse, a = in.lse[j];
  double parts = std::abs(a);  // of a, which may cancel
  if (in.picked[j] != 0.0) loss -= in.picked[j] * z[target];
  if (options.squared) {
    loss += in.squared[j] * lse * lse;
    a += 2.0 * in.squared[j] * lse;
    parts += std::abs(2.0 * in.squared[j] * lse);
  }
  const double wide = std::abs(map.scale * map.outer);
  for (size_t w = 0; w < tokens; ++w) {
    const double steep = reference::slope(map, z[w]);
    const auto g = reference::gradient(map, z[w], lse, a, 0.0);
    gradient.push_back(g.value);
    // Logits are rounded after bias and map, and the largest is subtracted before exp.
    const double size = std::exp(z[w] - lse) * parts * wide;
    const double far = std::isinf(z[w]) ? 0.0 : std::abs(z[w]);  // a masked token has no size
    bound.push_back(g.bound + size * 6e-7 * (10.0 + far) + 1e-38);
    if (options.mix) {
      if (in.mix[w] != 0.0f) loss -= in.mixed[j] * in.mix[w] * z[w];
      gradient[w] -= in.mixed[j] * in.mix[w] * steep;
      bound[w] += 3e-6 * std::abs(in.mixed[j] * in.mix[w] * wide);
    }
    if (w == target && in.picked[j] != 0.0) {
      gradient[w] -= in.picked[j] * steep;
      bound[w] += 3e-6 * std::abs(in.picked[j] * wide);
    }
  }
  return loss;
}

inline void check(const Inputs& in, Shape shape, const Map& map, const Options& options,
                  const Buffer<float>& z, double total, Tally& tally) {
  const auto tokens = static_cast<size_t>(shape.tokens), rows = static_cast<size_t>(shape.rows);
  double want = 0.0;
  for (size_t j = 0; j < rows; ++j) {
    std::vector<double> gradient, bound;
    const double loss = row(in, shape, map, options, j, gradient, bound);
    want += loss;
    // Without a token to choose there is no gradient: whatever comes is no number.
    const bool lost = std::isnan(loss) || (options.broken && j % 7 == 5);
    for (size_t w = 0; w < tokens; ++w) {
      const double got = z[w * rows + j];
      if (lost)
        tally.expect(std::isnan(got) || got == 0.0 || map.bounded, "a broken row has a gradient");
      else
        tally.expect_near(got, gradient[w], bound[w], "gradient",
                          static_cast<int64_t>(w * rows + j));
    }
  }
  if (!options.broken)
    tally.expect_near(total, want, 1e-5 * static_cast<double>(rows) * 10.0, "loss", 0);
}

inline void run_one(const Kernels& k, Shape shape, const NamedMap& named, const Options& options,
                    Place place, Tally& tally) {
  tally.begin(
      label(k, "loss", shape, (std::string(named.name) + ", " + options.name).c_str(), place));
  Random random(static_cast<uint32_t>(shape.tokens * 17 + shape.rows));
  const Inputs in = make(shape, options, random);
  const auto copy = [&](const auto& v) {
    return Buffer<std::decay_t<decltype(v[0])>>(v.size(), place, [&](size_t i) { return v[i]; });
  };
  const auto bias = copy(in.bias), mix = copy(in.mix);
  const auto targets = copy(in.targets);
  const auto lse = copy(in.lse), picked = copy(in.picked), mixed = copy(in.mixed),
             squared = copy(in.squared);
  const LossWeights weights{lse.data(), picked.data(), options.mix ? mixed.data() : nullptr,
                            options.squared ? squared.data() : nullptr};
  std::vector<float> first;
  double first_total = 0.0;
  for (int threads : thread_counts()) {
    const auto z = copy(in.x);
    const double total =
        k.loss(z.data(), shape.tokens, shape.rows, options.bias ? bias.data() : nullptr, named.map,
               targets.data(), weights, options.mix ? mix.data() : nullptr, threads);
    tally.expect(z.intact() && bias.intact() && mix.intact() && targets.intact() && lse.intact() &&
                     picked.intact() && mixed.intact() && squared.intact(),
                 "wrote outside a buffer");
    if (first.empty()) {
      check(in, shape, named.map, options, z, total, tally);
      first = z.copy(), first_total = total;
    }
    const bool same = total == first_total || (std::isnan(total) && std::isnan(first_total));
    tally.expect(z.same(first) && same, "differs with " + std::to_string(threads) + " threads");
  }
}

inline void run(const Kernels& k, Tally& tally) {
  for (Place place : {Place::tight, Place::padded})
    for (Shape shape : shapes())
      for (const NamedMap& map : maps())
        for (const Options& options : kOptions) run_one(k, shape, map, options, place, tally);
}

}  // namespace loss_tests
