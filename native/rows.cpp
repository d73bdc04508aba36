// One instruction set's kernels on rows; compiled as kernels.cpp is.
#include "rows.hpp"

#include <algorithm>
#include <vector>

#include "gumbel_draw.hpp"
#include "nucleus.hpp"
#include "row_pieces.hpp"

namespace LMHEAD_ISA {
namespace {

// Histogram bins; the last one counts everything beyond.
constexpr int64_t kBins = 4096;
// Histograms at a time: as many as fit in a cache, however many rows there are.
constexpr int64_t kHistograms = 64;

// Two numbers per piece of a row, added (or otherwise put together) in the order of the pieces.
struct TwoSums {
  double first, second;
};

template <class Body, class Join>
void by_pieces(int64_t rows, int64_t vocab, int threads, double* first, double* second,
               TwoSums start, const Body& body, const Join& join) {
  const int64_t per_row = pieces(vocab);
  std::vector<TwoSums> parts(static_cast<size_t>(rows * per_row));
  each_piece(rows, vocab, threads, [&](int64_t row, int64_t piece, int64_t lo, int64_t hi) {
    parts[row * per_row + piece] = body(row, lo, hi);
  });
  for (int64_t row = 0; row < rows; ++row) {
    TwoSums sum = start;
    for (int64_t i = 0; i < per_row; ++i) sum = join(sum, parts[row * per_row + i]);
    first[row] = sum.first;
    second[row] = sum.second;
  }
}

TwoSums add(TwoSums a, TwoSums b) { return {a.first + b.first, a.second + b.second}; }

void max_and_count(const float* z, int64_t rows, int64_t vocab, double* max_out, double* n_out,
                   int threads) {
  const auto body = [&](int64_t row, int64_t lo, int64_t hi) -> TwoSums {
    const float* logits = z + row * vocab;
    vf best = splat(-kInf);
    vi odd{}, real{};
    for (int64_t i = lo; i < hi; i += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, hi - i));
      const vf v = n == kLanes ? load(logits + i) : load(logits + i, n, -kInf);
      odd |= ~(v == v);
      real -= v > -kInf;
      best = max(best, v);
    }
    float largest = -kInf;
    double count = 0.0;
    for (int i = 0; i < kLanes; ++i) {
      largest = std::max(largest, best[i]);
      count += real[i];
    }
    return {any(odd) ? std::numeric_limits<double>::quiet_NaN() : largest, count};
  };
  // A NaN is kept.
  const auto join = [](TwoSums a, TwoSums b) -> TwoSums {
    return {b.first <= a.first ? a.first : (a.first != a.first ? a.first : b.first),
            a.second + b.second};
  };
  by_pieces(rows, vocab, threads, max_out, n_out, {-kFar, 0.0}, body, join);
}

// Σ exp(x) and Σ x exp(x) of tokens [lo, hi), x = b (z - m).
TwoSums mass_of(const float* z, double b, double m, int64_t lo, int64_t hi) {
  vd sum[2] = {}, weighted[2] = {};
  for (int64_t i = lo; i < hi; i += kLanes) {
    const Two two = widen(z + i, static_cast<int>(std::min<int64_t>(kLanes, hi - i)));
    for (int k = 0; k < 2; ++k) {
      // A masked token counts as one of negligible mass: 1e-308.
      vd far = ((k ? two.high : two.low) - m) * b;
      far = far < -708.0 ? vd{} - 708.0 : far;
      const vd e = exp_within(far);
      sum[k] += e;
      weighted[k] += e * far;
    }
  }
  return {total(sum[0] + sum[1]), total(weighted[0] + weighted[1])};
}

void softmax_sums(const float* z, int64_t rows, int64_t vocab, const double* betas, int64_t count,
                  const double* max, double* mass_out, double* weighted_out, int threads) {
  const int64_t per_row = pieces(vocab);
  std::vector<TwoSums> parts(static_cast<size_t>(rows * per_row * count));
  each_piece(rows, vocab, threads, [&](int64_t row, int64_t piece, int64_t lo, int64_t hi) {
    for (int64_t b = 0; b < count; ++b)  // a piece stays in the cache
      parts[(b * rows + row) * per_row + piece] =
          mass_of(z + row * vocab, betas[b * rows + row], max[row], lo, hi);
  });
  for (int64_t i = 0; i < rows * count; ++i) {
    TwoSums sum = {0.0, 0.0};
    for (int64_t piece = 0; piece < per_row; ++piece) sum = add(sum, parts[i * per_row + piece]);
    mass_out[i] = sum.first;
    weighted_out[i] = sum.second;
  }
}

void moments(const float* z, int64_t rows, int64_t vocab, const double* max, double* shift_out,
             double* square_out, int threads) {
  const auto body = [&](int64_t row, int64_t lo, int64_t hi) -> TwoSums {
    const float* logits = z + row * vocab;
    vd shift{}, square{};
    for (int64_t i = lo; i < hi; i += kLanes) {
      const Two two = widen(logits + i, static_cast<int>(std::min<int64_t>(kLanes, hi - i)));
      for (const vd& v : {two.low, two.high}) {
        const vd far = v == -kFar ? vd{} : v - max[row];
        shift += far;
        square += far * far;
      }
    }
    return {total(shift), total(square)};
  };
  by_pieces(rows, vocab, threads, shift_out, square_out, {0.0, 0.0}, body, add);
}

// The k largest of a row in a heap, smallest first; a vector of tokens is skipped with one
// comparison where none of them is above that.
float kth_of(const float* z, int64_t vocab, int64_t k) {
  std::vector<float> heap;
  heap.reserve(static_cast<size_t>(k));
  const auto larger = [](float a, float b) { return a > b; };
  float least = -kInf;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, vocab - i));
    const vf v = n == kLanes ? load(z + i) : load(z + i, n, -kInf);
    if (!any(v > least)) continue;
    for (int j = 0; j < n; ++j) {
      if (!(v[j] > least)) continue;
      if (static_cast<int64_t>(heap.size()) == k) {
        std::pop_heap(heap.begin(), heap.end(), larger);
        heap.back() = v[j];
      } else {
        heap.push_back(v[j]);
      }
      std::push_heap(heap.begin(), heap.end(), larger);
      if (static_cast<int64_t>(heap.size()) == k) least = heap.front();
    }
  }
  return least;
}

void kth_largest(const float* z, int64_t rows, int64_t vocab, const int64_t* k, float* value,
                 int threads) {
  parallel_for(rows, threads,
               [&](int64_t row) { value[row] = kth_of(z + row * vocab, vocab, k[row]); });
}

// mass_radius of a few rows; `bins` holds the histograms of their pieces.
void mass_radius_of(const float* z, int64_t rows, int64_t vocab, const double* beta,
                    const double* max, const double* centre, const double* width,
                    const double* limit, double* radius, std::vector<double>& bins, int threads) {
  const int64_t per_row = pieces(vocab);
  std::fill(bins.begin(), bins.begin() + rows * per_row * kBins, 0.0);
  each_piece(rows, vocab, threads, [&](int64_t row, int64_t piece, int64_t lo, int64_t hi) {
    double* mine = bins.data() + (row * per_row + piece) * kBins;
    const float* logits = z + row * vocab;
    const double per_step = beta[row] / width[row], b = beta[row];
    for (int64_t i = lo; i < hi; i += kLanes) {
      const Two two = widen(logits + i, static_cast<int>(std::min<int64_t>(kLanes, hi - i)));
      for (const vd& v : {two.low, two.high}) {
        const vd off = v - centre[row];
        vd step = (off < 0.0 ? -off : off) * per_step;
        step = step < kBins - 1.0 ? step : vd{} + (kBins - 1.0);  // a NaN too
        const vd mass = exp((v - max[row]) * b);
        for (int k = 0; k < kHalf; ++k) mine[static_cast<int64_t>(step[k])] += mass[k];
      }
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    double before = 0.0;
    radius[row] = kFar;
    for (int64_t bin = 0; bin < kBins - 1; ++bin) {
      for (int64_t i = 0; i < per_row; ++i) before += bins[(row * per_row + i) * kBins + bin];
      if (before >= limit[row]) {
        radius[row] = (static_cast<double>(bin) + 1.0) * (1.0 + 1e-9) * width[row] / beta[row];
        break;
      }
    }
  }
}

void mass_radius(const float* z, int64_t rows, int64_t vocab, const double* beta, const double* max,
                 const double* centre, const double* width, const double* limit, double* radius,
                 int threads) {
  const int64_t per_row = pieces(vocab);
  const int64_t some =
      std::min(rows, std::max<int64_t>(1, kHistograms / std::max<int64_t>(1, per_row)));
  std::vector<double> bins(static_cast<size_t>(some * per_row * kBins));
  for (int64_t row = 0; row < rows; row += some)
    mass_radius_of(z + row * vocab, std::min(some, rows - row), vocab, beta + row, max + row,
                   centre + row, width + row, limit + row, radius + row, bins, threads);
}

}  // namespace
}  // namespace LMHEAD_ISA

namespace lmhead {

extern const RowKernels LMHEAD_ROWS;
const RowKernels LMHEAD_ROWS = {
    LMHEAD_ISA::max_and_count, LMHEAD_ISA::softmax_sums,  LMHEAD_ISA::moments,
    LMHEAD_ISA::kth_largest,   LMHEAD_ISA::mass_radius,   LMHEAD_ISA::in_range,
    LMHEAD_ISA::nucleus,       LMHEAD_ISA::gumbel_argmax, LMHEAD_ISA::draw,
};

}  // namespace lmhead
