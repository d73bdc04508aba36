// Every kernel of every instruction set this machine can run, against its slow reference.
//
// A plain program: it says what failed, ends with "N passed, N failed", and returns 1 if any did.
//
//   kernel_tests                      the sizes as listed
//   kernel_tests --fuzz ROUNDS SEED   sizes and thread counts drawn at random, ROUNDS times
//   kernel_tests --best ROUNDS SEED   the same for the best instruction set alone
//
// `make sanitize` runs it under AddressSanitizer with UndefinedBehaviorSanitizer, and under
// ThreadSanitizer.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <stdexcept>

#include "function_tests.hpp"
#include "gradient_tests.hpp"
#include "logits_tests.hpp"
#include "parallel.hpp"
#include "product_tests.hpp"
#include "rows_tests.hpp"
#include "sample_tests.hpp"
#include "screen_tests.hpp"
#include "softmax_tests.hpp"
#include "tree_tests.hpp"

namespace lmhead {
extern const Kernels kernels_wide;
#if defined(LMHEAD_NARROW_VNNI)
extern const ScreenKernels screen_narrow_vnni;
#endif
}  // namespace lmhead

namespace {

using lmhead::Kernels;

void run_scatter_add(const Kernels& k, Tally& tally) {
  for (Place place : {Place::tight, Place::padded})
    for (int64_t d : sizes({1, 7, 31, 33, 257}))
      for (int64_t n : sizes({0, 1, 65, 200})) {
        tally.begin(label(k, "scatter_add", {n, d}, "", place));
        Random random(static_cast<uint32_t>(d * 1000 + n));
        const auto width = static_cast<size_t>(d), count = static_cast<size_t>(n);
        const size_t tokens = count + 5;
        std::vector<float> before(tokens * width);
        for (float& v : before) v = random.normal(1.0);
        const Buffer<float> from(count * width, place, [&](size_t) { return random.normal(1.0); });
        // Distinct ids in no order, first and last among them.
        std::vector<int64_t> shuffled(tokens);
        for (size_t i = 0; i < tokens; ++i) shuffled[i] = static_cast<int64_t>(i);
        for (size_t i = tokens - 1; i > 0; --i)
          std::swap(shuffled[i],
                    shuffled[static_cast<size_t>(random.below(static_cast<int64_t>(i) + 1))]);
        const Buffer<int64_t> ids(count, place, [&](size_t i) { return shuffled[i]; });
        std::vector<float> want = before;
        for (size_t i = 0; i < count; ++i)
          for (size_t e = 0; e < width; ++e)
            want[static_cast<size_t>(ids[i]) * width + e] += from[i * width + e];
        for (int threads : thread_counts()) {
          const Buffer<float> into(before.size(), place, [&](size_t i) { return before[i]; });
          k.scatter_add(into.data(), d, ids.data(), n, from.data(), threads);
          tally.expect(into.same(want), "a sum is wrong, or a row that was not named has changed");
          tally.expect(into.intact() && from.intact(), "wrote outside a buffer");
        }
      }
}

// Integer multiples of 2^-20: all sums are exact, and so is the threshold.
void run_tail_threshold(Tally& tally) {
  for (Place place : {Place::tight, Place::padded})
    for (int64_t n : sizes({0, 1, 31, 33, 1000, 5000}))
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
          const float want = reference::tail_threshold(x.copy(), mass);
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

// Every item once, whatever the number of threads; an exception comes out, once all have stopped.
void run_parallel(Tally& tally) {
  for (int threads : {1, 2, 8, 1000000}) {
    tally.begin("parallel_for with " + std::to_string(threads) + " threads");
    std::vector<int> met(1000, 0);
    lmhead::parallel_for(1000, threads, [&](int64_t i) { ++met[static_cast<size_t>(i)]; });
    for (int count : met) tally.expect(count == 1, "an item is missing, or there twice");
    bool caught = false;
    try {
      lmhead::parallel_for(1000, threads, [](int64_t i) {
        if (i % 10 == 7) throw std::runtime_error("seven");
      });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    tally.expect(caught, "an exception was lost");
  }
}

std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> all = {&lmhead::kernels_wide};
  for (const char* name : lmhead::kernel_names()) all.push_back(lmhead::kernels_named(name));
#if defined(LMHEAD_NARROW_VNNI)
  // The kernels of AVX-VNNI by the instructions of AVX-512: few machines have the former.
  static Kernels narrow;
  if (const Kernels* vnni = lmhead::kernels_named("avx512_vnni")) {
    narrow = *vnni;
    narrow.name = "narrow_vnni", narrow.screen = &lmhead::screen_narrow_vnni;
    all.push_back(&narrow);
  }
#endif
  return all;
}

// Tables share kernels: each kernel is run once.
void run_all(const std::vector<const Kernels*>& all, Tally& tally) {
  run_tail_threshold(tally);
  std::set<const void*> met;
  const auto is_new = [&](auto kernel) {
    return met.insert(reinterpret_cast<const void*>(kernel)).second;
  };
  for (const Kernels* each : all) {
    const Kernels& k = *each;
    if (!fuzz_random()) std::printf("%s ...\n", k.name);
    if (is_new(k.softmax)) softmax_tests::run(k, tally);
    if (is_new(k.gradient)) gradient_tests::run(k, tally);
    if (is_new(k.screen)) {
      screen_tests::run(k, tally);
      sample_tests::run(k, tally);
    }
    if (is_new(k.rows)) rows_tests::run(k, tally);
    if (is_new(k.tree)) tree_tests::run(k, tally);
    if (is_new(k.row_logits)) logits_tests::run(k, tally);
    if (is_new(k.product)) product_tests::run(k, tally);
    if (is_new(k.scatter_add)) {
      run_scatter_add(k, tally);
      if (!fuzz_random()) function_tests::run(k, tally);
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  Tally tally;
  run_dispatch(tally);
  run_parallel(tally);
  const std::string how = count > 1 ? arguments[1] : "";
  if (count == 1) {
    run_all(all_kernels(), tally);
  } else if (count == 4 && (how == "--fuzz" || how == "--best")) {
    Random random(static_cast<uint32_t>(std::strtoul(arguments[3], nullptr, 10)));
    fuzz_random() = &random;
    const auto chosen = how == "--best" ? std::vector{lmhead::best_kernels()} : all_kernels();
    for (long round = std::strtol(arguments[2], nullptr, 10); round > 0; --round)
      run_all(chosen, tally);
  } else {
    std::fprintf(stderr, "usage: kernel_tests [--fuzz ROUNDS SEED | --best ROUNDS SEED]\n");
    return 2;
  }
  return tally.end() ? 0 : 1;
}
