// exp and tanh, seen through the kernels that use them: exp is the gradient with lse = 0 and a = 1,
// tanh the bounded map with every other number 1 or 0.
#pragma once

#include "cases.hpp"
#include "references.hpp"

namespace function_tests {

using lmhead::Kernels;

// Measured over all floats, on all instruction sets; see the comments in simd.hpp.
constexpr double kExpUlp = 1.5;
constexpr double kTanhUlp = 2.5;
// Every kStep-th float is tried; a prime, so that all mantissas occur.
constexpr uint32_t kStep = 251;

constexpr int64_t kTokens = 64, kRows = 1024;

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// Distance in units of the last place of the exact value.
inline double ulps(float got, double want) {
  const int exponent = std::max(std::ilogb(want), -126);
  return std::abs(got - want) / std::ldexp(1.0, exponent - 23);
}

inline std::vector<float> exp_of(const Kernels& k, std::vector<float> x) {
  const std::vector<float> zero(kRows, 0.0f), one(kRows, 1.0f);
  k.gradient(x.data(), kTokens, kRows, zero.data(), zero.data(), one.data(), nullptr, nullptr,
             nullptr, {}, {}, nullptr, nullptr, 2);
  return x;
}

inline std::vector<float> tanh_of(const Kernels& k, std::vector<float> x) {
  std::vector<float> m(kRows);
  std::vector<double> s(kRows);
  k.softmax(x.data(), kTokens, kRows, nullptr, {1.0f, 0.0f, true, 1.0f, 0.0f}, m.data(), s.data(),
            nullptr, 0, nullptr, nullptr, nullptr, 2);
  return x;
}

// All floats around the places where a formula changes, then a dense sample of all there are.
template <class Visit>
void each_batch(const Visit& visit) {
  std::vector<float> batch;
  const auto add = [&](uint32_t bits) {
    batch.push_back(from_bits(bits));
    if (batch.size() == kTokens * kRows) {
      visit(batch);
      batch.clear();
    }
  };
  std::vector<float> edges = {0.0f, 0.625f, 1.0f, 9.01f, 87.336f, 88.72284f, 88.73f, HUGE_VALF};
  for (int n = 0; n <= 128; ++n)  // where the nearest multiple of ln 2 changes
    edges.push_back(static_cast<float>((n + 0.5) * 0.6931471805599453));
  for (float edge : edges)
    for (uint32_t sign : {0u, 0x80000000u})
      for (int32_t near = -2000; near <= 2000; ++near)
        add((to_bits(edge) + static_cast<uint32_t>(near)) ^ sign);
  for (uint64_t bits = 0; bits < 0x100000000; bits += kStep) add(static_cast<uint32_t>(bits));
  while (!batch.empty()) add(0);
}

inline void run_exp(const Kernels& k, Tally& tally) {
  tally.begin(std::string(k.name) + " exp");
  double worst = 0.0;
  each_batch([&](const std::vector<float>& x) {
    const std::vector<float> got = exp_of(k, x);
    for (size_t i = 0; i < x.size(); ++i) {
      const double want = std::exp(static_cast<double>(x[i]));
      if (std::isnan(x[i])) {
        tally.expect(std::isnan(got[i]), "exp(NaN) is a number");
      } else if (x[i] < -87.3365f) {
        tally.expect_near(got[i], 0.0, 0.0, "far below: exp", 0);
      } else if (x[i] < -87.3359f) {  // the last normal results
        tally.expect(got[i] == 0.0f || ulps(got[i], want) <= kExpUlp, "exp is off near -87.336");
      } else if (x[i] > 88.73f) {
        tally.expect_near(got[i], reference::kInf, 0.0, "far above: exp", 0);
      } else if (x[i] > 88.7228f) {  // the last finite results
        tally.expect(got[i] > 3.4e38f, "exp is too small near 88.72");
      } else {
        worst = std::max(worst, std::isfinite(got[i]) ? ulps(got[i], want) : reference::kInf);
      }
    }
  });
  std::printf("%s: exp within %.3f ulp\n", k.name, worst);
  tally.expect(worst <= kExpUlp, "exp is off by " + std::to_string(worst) + " ulp");
  tally.begin(std::string(k.name) + " exp at single points");
  const float points[] = {0.0f, -0.0f, HUGE_VALF, -HUGE_VALF, NAN, -87.3364f, 89.0f};
  const double results[] = {1.0, 1.0, reference::kInf, 0.0, NAN, 0.0, reference::kInf};
  std::vector<float> x(kTokens * kRows);
  for (size_t i = 0; i < 7; ++i) x[i] = points[i];
  const std::vector<float> got = exp_of(k, x);
  for (size_t i = 0; i < 7; ++i)
    tally.expect_near(got[i], results[i], 0.0, "exp of point", static_cast<int64_t>(i));
}

inline void run_tanh(const Kernels& k, Tally& tally) {
  tally.begin(std::string(k.name) + " tanh");
  double worst = 0.0;
  each_batch([&](const std::vector<float>& x) {
    std::vector<float> mirrored = x;
    for (float& v : mirrored) v = v == HUGE_VALF ? v : -v;  // -inf is a masked token, see below
    const std::vector<float> got = tanh_of(k, x), other = tanh_of(k, mirrored);
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::isnan(x[i])) {
        tally.expect(std::isnan(got[i]), "tanh(NaN) is a number");
      } else if (x[i] == -HUGE_VALF) {
        tally.expect_near(got[i], -reference::kInf, 0.0, "a masked token", 0);
      } else {
        const double want = std::tanh(static_cast<double>(x[i]));
        tally.expect(std::abs(got[i]) <= 1.0f, "|tanh| is above 1");
        if (std::isfinite(x[i])) tally.expect(got[i] == -other[i], "tanh is not odd");
        if (want != 0.0) worst = std::max(worst, ulps(got[i], want));
      }
    }
  });
  std::printf("%s: tanh within %.3f ulp\n", k.name, worst);
  tally.expect(worst <= kTanhUlp, "tanh is off by " + std::to_string(worst) + " ulp");
}

inline void run(const Kernels& k, Tally& tally) {
  run_exp(k, tally);
  run_tanh(k, tally);
}

}  // namespace function_tests
