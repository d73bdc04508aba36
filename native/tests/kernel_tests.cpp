// Every kernel of every instruction set this machine can run, against its slow twin.
//
// A plain program: it says what failed, ends with "N passed, N failed", and returns 1 if any did.
// `make sanitize` runs it under AddressSanitizer and UndefinedBehaviorSanitizer.
#include <cstdio>

#include "function_tests.hpp"
#include "gradient_tests.hpp"
#include "loss_tests.hpp"
#include "rows_tests.hpp"
#include "screen_tests.hpp"
#include "softmax_tests.hpp"
#include "tree_tests.hpp"

namespace lmhead {
extern const Kernels kernels_wide;
}

namespace {

using lmhead::Kernels;

// Dot products: right, and the same to the last bit wherever the pair stands and however aligned.
template <class T, class Make, class Value>
void run_pairs(const Kernels& k, const char* what, const Make& make, const Value& value,
               Tally& tally, void (*product)(const T*, const T*, int64_t, const int64_t*,
                                             const int64_t*, int64_t, double*, int)) {
  for (Place place : {Place::tight, Place::padded})
    for (int64_t d : {1, 7, 31, 33, 64, 577})
      for (int64_t n : {0, 1, 63, 65, 300}) {
        tally.begin(label(k, what, {n, d}, "", place));
        Random random(static_cast<uint32_t>(d * 1000 + n));
        const int64_t words = 9, tokens = 5;
        const auto width = static_cast<size_t>(d), count = static_cast<size_t>(n);
        const Buffer<T> hidden(tokens * width, place, [&](size_t) { return make(random); });
        const Buffer<T> weight(words * width, place, [&](size_t) { return make(random); });
        for (size_t i = 0; i < width; ++i) weight[8 * width + i] = weight[3 * width + i];
        const Buffer<int64_t> rows(count, place, [&](size_t i) { return i ? random.below(5) : 4; });
        const Buffer<int64_t> ids(count, place, [&](size_t i) { return i ? random.below(9) : 8; });
        std::vector<double> first;
        for (int threads : kThreads) {
          const Buffer<double> out(count, place);
          product(hidden.data(), weight.data(), d, rows.data(), ids.data(), n, out.data(), threads);
          tally.expect(out.intact(), "wrote outside a buffer");
          if (first.empty()) first = out.copy();
          tally.expect(out.same(first), "differs with " + std::to_string(threads) + " threads");
          for (size_t i = 0; i < count; ++i) {
            double sum = 0.0, size = 0.0;
            for (size_t e = 0; e < width; ++e) {
              const double term = static_cast<double>(value(hidden[rows[i] * width + e])) *
                                  value(weight[ids[i] * width + e]);
              sum += term;
              size += std::abs(term);
            }
            tally.expect_near(out[i], sum, 1e-14 * size, "product", static_cast<int64_t>(i));
            for (size_t j = 0; j < i; ++j) {
              const bool twins = ids[i] == ids[j] || ids[i] + ids[j] == 11;  // 3 and 8 are equal
              if (rows[i] == rows[j] && twins && (ids[i] % 5 == 3 || ids[i] == ids[j]))
                tally.expect(out[i] == out[j], "equal rows do not tie");
            }
          }
        }
      }
}

void run_scatter_add(const Kernels& k, Tally& tally) {
  for (Place place : {Place::tight, Place::padded})
    for (int64_t d : {1, 7, 31, 33, 257})
      for (int64_t n : {0, 1, 65, 200}) {
        tally.begin(label(k, "scatter_add", {n, d}, "", place));
        Random random(static_cast<uint32_t>(d * 1000 + n));
        const auto width = static_cast<size_t>(d), count = static_cast<size_t>(n);
        const size_t words = count + 5;
        std::vector<float> before(words * width);
        for (float& v : before) v = random.normal(1.0);
        const Buffer<float> from(count * width, place, [&](size_t) { return random.normal(1.0); });
        // Distinct ids in no order, first and last among them.
        std::vector<int64_t> shuffled(words);
        for (size_t i = 0; i < words; ++i) shuffled[i] = static_cast<int64_t>(i);
        for (size_t i = words - 1; i > 0; --i)
          std::swap(shuffled[i], shuffled[static_cast<size_t>(random.below(static_cast<int64_t>(i) + 1))]);
        const Buffer<int64_t> ids(count, place, [&](size_t i) { return shuffled[i]; });
        std::vector<float> want = before;
        for (size_t i = 0; i < count; ++i)
          for (size_t e = 0; e < width; ++e)
            want[static_cast<size_t>(ids[i]) * width + e] += from[i * width + e];
        for (int threads : kThreads) {
          const Buffer<float> into(before.size(), place, [&](size_t i) { return before[i]; });
          k.scatter_add(into.data(), d, ids.data(), n, from.data(), threads);
          tally.expect(into.same(want), "a sum is wrong, or a row that was not named has changed");
          tally.expect(into.intact() && from.intact(), "wrote outside a buffer");
        }
      }
}

// Whole multiples of 2^-20: all sums are exact, and so is the threshold.
void run_tail_threshold(Tally& tally) {
  for (Place place : {Place::tight, Place::padded})
    for (int64_t n : {0, 1, 31, 33, 1000, 5000})
      for (double share : {0.0, 1e-4, 0.02, 0.5, 0.98, 1.0, 2.0})
        for (int kind : {0, 1, 2, 3}) {
          tally.begin("tail_threshold of " + std::to_string(n) + ", share " +
                      std::to_string(share) + ", kind " + std::to_string(kind));
          Random random(static_cast<uint32_t>(n + kind));
          const Buffer<float> x(static_cast<size_t>(n), place, [&](size_t i) {
            const double peaked = std::exp(random.normal(3.0)) * 1e-3;
            const double values[] = {peaked, random.below(4) * 0.25, 0.0, i ? peaked * 1e-3 : 1.0};
            return static_cast<float>(std::round(values[kind] * 1048576.0) / 1048576.0);
          });
          double total = 0.0;
          for (float v : x.copy()) total += v;
          const double mass = share * total;
          const float want = twin::tail_threshold(x.copy(), mass);
          tally.expect_near(lmhead::tail_threshold(x.data(), n, mass), want, 0.0, "threshold", n);
          tally.expect(x.intact(), "wrote outside a buffer");
        }
  tally.begin("tail_threshold of very small and very large numbers");
  const std::vector<float> x = {0.0f, 1e-45f, 1e-40f, 1e-30f, 1.0f, 3e38f};
  for (size_t i = 0; i + 1 < x.size(); ++i) {
    double mass = 0.0;
    for (size_t j = 0; j <= i; ++j) mass += x[j];
    tally.expect_near(lmhead::tail_threshold(x.data(), 6, mass), x[i + 1], 0.0, "threshold",
                      static_cast<int64_t>(i));
  }
}

void run_dispatch(Tally& tally) {
  tally.begin("the kernels that can run have names, best first; others are null");
  const auto names = lmhead::kernel_names();
  tally.expect(!names.empty() && lmhead::best_kernels() == lmhead::kernels_named(names[0]),
               "the best kernels are not the first named");
  tally.expect(names.back() == std::string("baseline"), "the baseline is not the last resort");
  tally.expect(lmhead::kernels_named("abacus") == nullptr, "found kernels for no machine");
}

}  // namespace

int main() {
  Tally tally;
  run_dispatch(tally);
  run_tail_threshold(tally);
  std::vector<const Kernels*> all = {&lmhead::kernels_wide};
  for (const char* name : lmhead::kernel_names()) all.push_back(lmhead::kernels_named(name));
  for (const Kernels* each : all) {
    const Kernels& k = *each;
    std::printf("%s ...\n", k.name);
    softmax_tests::run(k, tally);
    gradient_tests::run(k, tally);
    loss_tests::run(k, tally);
    screen_tests::run(k, tally);
    rows_tests::run(k, tally);
    tree_tests::run(k, tally);
    run_pairs<float>(k, "pairs_f32", [](Random& r) { return r.normal(1.0); },
                     [](float x) { return x; }, tally, k.pairs_f32);
    run_pairs<uint16_t>(
        k, "pairs_bf16",
        [](Random& r) {
          return static_cast<uint16_t>(function_tests::to_bits(r.normal(1.0)) >> 16);
        },
        twin::from_bf16, tally, k.pairs_bf16);
    run_scatter_add(k, tally);
    function_tests::run(k, tally);
  }
  return tally.end() ? 0 : 1;
}
