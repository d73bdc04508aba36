// The product of two matrices: as precise as its sums allow, the same bits on any number of
// threads.
#pragma once

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
        k.product(a.data(), transposed, b.data(), out.data(), m, n, inner, add, threads);
        tally.expect(out.intact(), "wrote outside a buffer");
        for (size_t i = 0; i < want.size(); ++i)
          tally.expect_near(out[i], want[i], size[i] * 0x1p-20, "product", static_cast<int64_t>(i));
        if (first.empty()) first.assign(out.data(), out.data() + out.size());
        tally.expect(out.same(first), "other bits on another number of threads");
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
        }
}

}  // namespace product_tests
