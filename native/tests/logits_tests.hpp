// Dot products of single pairs and of all rows: to the last bit those of the reference, on every
// instruction set, for every batch, thread count and alignment.
#pragma once

#include "cases.hpp"
#include "stored.hpp"

namespace logits_tests {

using lmhead::Bf16;
using lmhead::F16;
using lmhead::Kernels;

// Entry i goes to lane i mod 8; the lanes are added in halves.
template <class X, class Y>
double dot(const X* x, const Y* y, size_t d) {
  double lanes[8] = {};
  for (size_t i = 0; i < d; ++i) lanes[i % 8] += stored::value(x[i]) * stored::value(y[i]);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// Entry i goes to lane i mod 16 by fused multiply-adds; parts of 1024 entries are added.
template <class Y>
float float_dot(const float* x, const Y* y, size_t d) {
  double sum = 0.0;
  for (size_t first = 0; first < d; first += 1024) {
    float lanes[16] = {};
    for (size_t i = first; i < std::min(d, first + 1024); ++i)
      lanes[i % 16] = std::fma(x[i], static_cast<float>(stored::value(y[i])), lanes[i % 16]);
    for (size_t half = 8; half > 0; half /= 2)
      for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    sum += lanes[0];
  }
  return static_cast<float>(sum);
}

template <class T>
Buffer<T> random_buffer(size_t size, Place place, Random& random) {
  return Buffer<T>(size, place, [&](size_t i) {
    // Some are so small that float16 stores them as denormals.
    return stored::rounded<T>(random.normal(i % 11 ? 1.0 : 1e-6));
  });
}

template <class H, class W>
void run_pairs(const Kernels& k, Tally& tally) {
  for (Place place : {Place::tight, Place::padded})
    for (int64_t d : sizes({1, 7, 8, 31, 33, 64, 577}))
      for (int64_t n : sizes({0, 1, 63, 65, 300})) {
        tally.begin(label(k, "pairs", {n, d}, stored::type_name<W>(), place));
        Random random(static_cast<uint32_t>(d * 1000 + n));
        const auto width = static_cast<size_t>(d), count = static_cast<size_t>(n);
        const auto hidden = random_buffer<H>(5 * width, place, random);
        const auto weight = random_buffer<W>(9 * width, place, random);
        const Buffer<int64_t> rows(count, place, [&](size_t i) { return i ? random.below(5) : 4; });
        const Buffer<int64_t> ids(count, place, [&](size_t i) { return i ? random.below(9) : 8; });
        for (int threads : thread_counts()) {
          const Buffer<double> out(count, place);
          k.pairs(stored::floats(hidden), stored::floats(weight), d, rows.data(), ids.data(), n,
                  out.data(), threads);
          tally.expect(out.intact(), "wrote outside a buffer");
          for (size_t i = 0; i < count; ++i)
            tally.expect_near(
                out[i], dot(hidden.data() + rows[i] * width, weight.data() + ids[i] * width, width),
                0.0, "product", static_cast<int64_t>(i));
        }
      }
}

template <class W>
void run_row_logits(const Kernels& k, Tally& tally) {
  for (Place place : {Place::tight, Place::padded})
    for (int64_t d : sizes({1, 7, 8, 33, 64, 1041}))
      for (int64_t vocab : sizes({0, 1, 11, 12, 13, 239, 245}))
        for (int64_t rows : sizes({0, 1, 2, 3, 5, 8, 9, 17})) {
          tally.begin(label(k, "row_logits", {vocab, rows}, stored::type_name<W>(), place));
          Random random(static_cast<uint32_t>(d * 1000 + vocab * 10 + rows));
          const auto width = static_cast<size_t>(d);
          const auto hidden = random_buffer<float>(static_cast<size_t>(rows * d), place, random);
          const auto weight = random_buffer<W>(static_cast<size_t>(vocab * d), place, random);
          for (int threads : {1, 3}) {
            const Buffer<double> exact(static_cast<size_t>(rows * vocab), place);
            const Buffer<float> fast(static_cast<size_t>(rows * vocab), place);
            k.row_logits(hidden.data(), rows, stored::floats(weight), vocab, d, exact.data(),
                         threads);
            double square = -1.0, largest = 0.0;
            k.float_logits(hidden.data(), rows, stored::floats(weight), vocab, d, fast.data(),
                           threads == 1 ? nullptr : &square, threads);
            for (size_t v = 0; v < static_cast<size_t>(vocab) && rows > 0; ++v) {
              const W* token = weight.data() + v * width;
              largest = std::max(largest, dot(token, token, width));
            }
            if (threads > 1)
              tally.expect_near(square, largest, largest * 0x1p-17, "largest square", 0);
            tally.expect(exact.intact() && fast.intact(), "wrote outside a buffer");
            for (size_t i = 0; i < exact.size(); ++i) {
              const size_t row = i / static_cast<size_t>(vocab), v = i % static_cast<size_t>(vocab);
              const double want =
                  dot(hidden.data() + row * width, weight.data() + v * width, width);
              tally.expect_near(exact[i], want, 0.0, "logit", static_cast<int64_t>(i));
              const float sum =
                  float_dot(hidden.data() + row * width, weight.data() + v * width, width);
              tally.expect_near(fast[i], sum, 0.0, "float logit", static_cast<int64_t>(i));
            }
          }
        }
}

// Every float16 there is, times one.
inline void run_float16(const Kernels& k, Tally& tally) {
  tally.begin(label(k, "every float16", {65536, 1}, "", Place::tight));
  const Buffer<F16> weight(65536, Place::tight,
                           [](size_t i) { return F16{static_cast<uint16_t>(i)}; });
  const Buffer<float> hidden(8, Place::tight, [](size_t i) { return i == 3 ? 1.0f : 0.0f; });
  const Buffer<double> out(65536 / 8, Place::tight);
  for (size_t lane = 0; lane < 8; ++lane) {
    for (size_t i = 0; i < 8; ++i) hidden[i] = i == lane ? 1.0f : 0.0f;
    k.row_logits(hidden.data(), 1, stored::floats(weight), 65536 / 8, 8, out.data(), 1);
    for (size_t v = 0; v < out.size(); ++v) {
      bool finite = true;  // 0 times infinity is a NaN
      for (size_t i = 0; i < 8; ++i)
        finite = finite && std::isfinite(stored::value(weight[v * 8 + i]));
      const double want = stored::value(weight[v * 8 + lane]);
      tally.expect_near(out[v], finite ? want : NAN, 0.0, "value", static_cast<int64_t>(v));
    }
  }
}

inline void run(const Kernels& k, Tally& tally) {
  run_pairs<float, float>(k, tally);
  run_pairs<Bf16, Bf16>(k, tally);
  run_pairs<F16, F16>(k, tally);
  run_pairs<float, Bf16>(k, tally);
  run_pairs<float, F16>(k, tally);
  run_row_logits<float>(k, tally);
  run_row_logits<Bf16>(k, tally);
  run_row_logits<F16>(k, tally);
  run_float16(k, tally);
}

}  // namespace logits_tests
