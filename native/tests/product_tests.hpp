// The product of two matrices: as precise as its sums allow, the same bits on any number of
// threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cases.hpp"

namespace product_tests {

using lmhead::Kernels;

inline void run_one(const Kernels& k, int64_t m, int64_t n, int64_t inner, Place place,
                    Tally& tally) {
  Random random(static_cast<uint32_t>(m * 10007 + n * 101 + inner));
  const auto normal = [&](size_t) { return random.normal(1.0); };
  const Buffer<float> a(static_cast<size_t>(m * inner), place, normal);
  const Buffer<float> b(static_cast<size_t>(inner * n), place, normal);
  for (bool transposed : {false, true})
    for (bool add : {false, true}) {
      std::vector<double> want, size;
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
          double sum = add ? 0.5 : 0.0, sizes = sum;
          for (int64_t p = 0; p < inner; ++p) {
            const auto at = static_cast<size_t>(transposed ? p * m + i : i * inner + p);
            const double term = static_cast<double>(a[at]) * b[static_cast<size_t>(p * n + j)];
            sum += term, sizes += std::abs(term);
          }
          want.push_back(sum), size.push_back(sizes);
        }
      std::vector<float> first;
      for (int threads : thread_counts()) {
        const Buffer<float> out(want.size(), place, [](size_t) { return 0.5f; });
        k.product(a.data(), transposed, b.data(), out.data(), m, n, inner, add, nullptr, threads);
        tally.expect(out.intact(), "wrote outside a buffer");
        for (size_t i = 0; i < want.size(); ++i)
          tally.expect_near(out[i], want[i], size[i] * 0x1p-20, "product", static_cast<int64_t>(i));
        if (first.empty()) first.assign(out.data(), out.data() + out.size());
        tally.expect(out.same(first), "other bits on another number of threads");
      }
    }
}

// Every other row of a as it is stored, last one first: the bits of the product of their copies.
inline void run_rows(const Kernels& k, int64_t m, int64_t n, int64_t inner, bool transposed,
                     Place place, Tally& tally) {
  Random random(static_cast<uint32_t>(m * 10007 + n * 101 + inner));
  const auto normal = [&](size_t) { return random.normal(1.0); };
  const int64_t used = transposed ? inner : m, width = transposed ? m : inner;
  const int64_t outputs = transposed ? m : 2 * m;
  const Buffer<float> a(static_cast<size_t>(2 * used * width), place, normal);
  const Buffer<float> b(static_cast<size_t>((transposed ? 2 : 1) * inner * n), place, normal);
  std::vector<int64_t> ids;
  std::vector<float> few_a, few_b;
  for (int64_t i = used - 1; i >= 0; --i) {
    ids.push_back(2 * i + 1);
    const auto copy = [&](const Buffer<float>& from, int64_t size, std::vector<float>& to) {
      to.insert(to.end(), from.data() + ids.back() * size, from.data() + (ids.back() + 1) * size);
    };
    copy(a, width, few_a);
    if (transposed) copy(b, n, few_b);
  }
  const auto half = [](size_t) { return 0.5f; };
  for (bool add : {false, true}) {
    std::vector<float> product(static_cast<size_t>(m * n), 0.5f);
    k.product(few_a.data(), transposed, transposed ? few_b.data() : b.data(), product.data(), m, n,
              inner, add, nullptr, 1);
    std::vector<float> want(static_cast<size_t>(outputs * n), 0.5f);
    for (int64_t i = 0; i < m; ++i)
      std::copy_n(product.begin() + i * n, n,
                  want.begin() + (transposed ? i : ids[static_cast<size_t>(i)]) * n);
    for (int threads : thread_counts()) {
      const Buffer<float> out(want.size(), place, half);
      k.product(a.data(), transposed, b.data(), out.data(), m, n, inner, add, ids.data(), threads);
      tally.expect(out.intact(), "wrote outside a buffer");
      tally.expect(out.same(want), "other bits than the product of copies");
    }
  }
}

// Numbers of every kind: bfloat16 ones in a, in b or in both, and rows of a and columns of b that
// are tiny, next to the largest number, infinite or NaN, and leave the others as they are.
inline void run_numbers(const Kernels& k, Place place, Tally& tally) {
  constexpr int64_t kM = 40, kN = 70, kInner = 100;
  const auto rounded = [](float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits &= 0xffff0000u;
    std::memcpy(&x, &bits, 4);
    return x;
  };
  for (int kind = 0; kind < 8; ++kind)
    for (bool transposed : {false, true}) {
      Random random(static_cast<uint32_t>(kind));
      const auto number = [&](bool short_one, float scale) {
        const float x = random.normal(1.0) * scale;
        return short_one ? rounded(x) : x;
      };
      const float tiny = kind == 4 ? 0x1p-120f : kind == 5 ? 0x1p-140f : 1.0f;
      const Buffer<float> a(kM * kInner, place, [&](size_t i) {
        const int64_t at = static_cast<int64_t>(i), row = transposed ? at % kM : at / kInner;
        const int64_t inner = transposed ? at / kM : at % kInner;
        const float x = number(kind == 1 || kind == 3, row == 5 ? tiny : 1.0f);
        if (row != 5 || kind < 6) return x;
        if (kind == 6) return inner ? 0.0f : 0x1p126f;
        return inner % 2 ? NAN : INFINITY;
      });
      const Buffer<float> b(kInner * kN, place, [&](size_t i) {
        const bool column = static_cast<int64_t>(i) % kN == 7;
        return number(kind == 2 || kind == 3, kind == 6 ? 0.25f : column ? tiny : 1.0f);
      });
      const Buffer<float> out(kM * kN, place, [](size_t) { return 0.0f; });
      k.product(a.data(), transposed, b.data(), out.data(), kM, kN, kInner, false, nullptr, 1);
      tally.expect(out.intact(), "wrote outside a buffer");
      for (int64_t i = 0; i < kM; ++i)
        for (int64_t j = 0; j < kN; ++j) {
          double sum = 0.0, sizes = 0.0;
          for (int64_t p = 0; p < kInner; ++p) {
            const double term =
                static_cast<double>(
                    a[static_cast<size_t>(transposed ? p * kM + i : i * kInner + p)]) *
                b[static_cast<size_t>(p * kN + j)];
            sum += term, sizes += std::abs(term);
          }
          const float got = out[static_cast<size_t>(i * kN + j)];
          if (kind == 7 && i == 5)
            tally.expect(!std::isfinite(got), "a number that is not finite was lost");
          else  // what is below the smallest normal number may be 0
            tally.expect_near(got, sum, sizes * 0x1p-20 + kInner * 0x1p-125, "numbers", i);
        }
    }
}

// Around rows in registers (14, 6, 4), two vectors of columns (32, 16, 8) and a part of 320.
inline void run(const Kernels& k, Tally& tally) {
  for (Place place : {Place::tight, Place::padded})
    for (int64_t m : sizes({0, 1, 14, 33}))
      for (int64_t n : sizes({0, 1, 31, 70}))
        for (int64_t inner : sizes({0, 1, 17, 645})) {
          tally.begin(label(k, "product", {m, n}, std::to_string(inner).c_str(), place));
          run_one(k, m, n, inner, place, tally);
          for (bool transposed : {false, true}) run_rows(k, m, n, inner, transposed, place, tally);
        }
  tally.begin(label(k, "product", {40, 700}, "1300", Place::tight));
  run_one(k, 40, 700, 1300, Place::tight,
          tally);  // several blocks of columns and of the inner index
  for (Place place : {Place::tight, Place::padded}) {
    tally.begin(label(k, "product", {40, 70}, "numbers", place));
    run_numbers(k, place, tally);
  }
}

}  // namespace product_tests
