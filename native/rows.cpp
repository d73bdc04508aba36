// One instruction set's kernels on rows; compiled as kernels.cpp is.
#include "rows.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <limits>
#include <vector>

#include "parallel.hpp"
#include "philox.hpp"
#include "simd.hpp"

namespace LMHEAD_ISA {
namespace {

using lmhead::Key;
using lmhead::parallel_for;

constexpr float kInf = __builtin_inff();
constexpr double kFar = std::numeric_limits<double>::infinity();
// Words per piece of a row. Pieces are added in order, so that neither the number of threads nor
// the batch around a row changes its result.
constexpr int64_t kPiece = 1 << 15;
// Histogram bins; the last takes everything that is further off.
constexpr int64_t kBins = 4096;
// Histograms at a time: as many as fit in a cache, however many rows there are.
constexpr int64_t kHistograms = 64;

int64_t pieces(int64_t vocab) { return (vocab + kPiece - 1) / kPiece; }

// body(row, piece, first word, last word) for all pieces of all rows.
template <class Body>
void each_piece(int64_t rows, int64_t vocab, int threads, const Body& body) {
  const int64_t per_row = pieces(vocab);
  // Small rows are handed out many at a time.
  const int64_t batch = std::max<int64_t>(1, kPiece / std::max<int64_t>(vocab, 1) / 4);
  const int64_t all = rows * per_row;
  parallel_for((all + batch - 1) / batch, threads, [&](int64_t number) {
    for (int64_t i = number * batch; i < std::min(all, (number + 1) * batch); ++i) {
      const int64_t row = i / per_row, piece = i % per_row;
      body(row, piece, piece * kPiece, std::min(vocab, (piece + 1) * kPiece));
    }
  });
}

// kLanes words as two vectors of doubles; missing ones are masked.
struct Two {
  vd low, high;
};

Two widen(const float* z, int n) {
  const vf v = n == kLanes ? load(z) : load(z, n, -kInf);
  vf_half low, high;
  std::memcpy(&low, &v, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
  return {__builtin_convertvector(low, vd), __builtin_convertvector(high, vd)};
}

double total(vd v) {
  double sum = 0.0;
  for (int i = 0; i < kHalf; ++i) sum += v[i];
  return sum;
}

// Two numbers per piece of a row, added (or otherwise put together) in the order of the pieces.
struct Twin {
  double first, second;
};

template <class Body, class Join>
void by_pieces(int64_t rows, int64_t vocab, int threads, double* first, double* second, Twin start,
               const Body& body, const Join& join) {
  const int64_t per_row = pieces(vocab);
  std::vector<Twin> parts(static_cast<size_t>(rows * per_row));
  each_piece(rows, vocab, threads, [&](int64_t row, int64_t piece, int64_t lo, int64_t hi) {
    parts[row * per_row + piece] = body(row, lo, hi);
  });
  for (int64_t row = 0; row < rows; ++row) {
    Twin sum = start;
    for (int64_t i = 0; i < per_row; ++i) sum = join(sum, parts[row * per_row + i]);
    first[row] = sum.first;
    second[row] = sum.second;
  }
}

Twin add(Twin a, Twin b) { return {a.first + b.first, a.second + b.second}; }

void top(const float* z, int64_t rows, int64_t vocab, double* max_out, double* n_out,
         int threads) {
  const auto body = [&](int64_t row, int64_t lo, int64_t hi) -> Twin {
    const float* words = z + row * vocab;
    vf best = splat(-kInf);
    vi odd{}, real{};
    for (int64_t i = lo; i < hi; i += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, hi - i));
      const vf v = n == kLanes ? load(words + i) : load(words + i, n, -kInf);
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
  // A NaN comes through, and stays.
  const auto join = [](Twin a, Twin b) -> Twin {
    return {b.first <= a.first ? a.first : (a.first != a.first ? a.first : b.first),
            a.second + b.second};
  };
  by_pieces(rows, vocab, threads, max_out, n_out, {-kFar, 0.0}, body, join);
}

void mass(const float* z, int64_t rows, int64_t vocab, const double* beta, const double* max,
          double* mass_out, double* weighted_out, int threads) {
  const auto body = [&](int64_t row, int64_t lo, int64_t hi) -> Twin {
    const float* words = z + row * vocab;
    const double b = beta[row], m = max[row];
    vd sum[2] = {}, weighted[2] = {};
    for (int64_t i = lo; i < hi; i += kLanes) {
      const Two two = widen(words + i, static_cast<int>(std::min<int64_t>(kLanes, hi - i)));
      for (int k = 0; k < 2; ++k) {
        // A masked word is as far off as one that adds nothing: 1e-308.
        vd far = ((k ? two.high : two.low) - m) * b;
        far = far < -708.0 ? vd{} - 708.0 : far;
        const vd e = exp_within(far);
        sum[k] += e;
        weighted[k] += e * far;
      }
    }
    return {total(sum[0] + sum[1]), total(weighted[0] + weighted[1])};
  };
  by_pieces(rows, vocab, threads, mass_out, weighted_out, {0.0, 0.0}, body, add);
}

void moments(const float* z, int64_t rows, int64_t vocab, const double* max, double* shift_out,
             double* square_out, int threads) {
  const auto body = [&](int64_t row, int64_t lo, int64_t hi) -> Twin {
    const float* words = z + row * vocab;
    vd shift{}, square{};
    for (int64_t i = lo; i < hi; i += kLanes) {
      const Two two = widen(words + i, static_cast<int>(std::min<int64_t>(kLanes, hi - i)));
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

// The k largest of a row in a heap, smallest first; a vector of words is passed over with one
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

void kth(const float* z, int64_t rows, int64_t vocab, const int64_t* k, float* value,
         int threads) {
  parallel_for(rows, threads, [&](int64_t row) {
    value[row] = kth_of(z + row * vocab, vocab, k[row]);
  });
}

// reach of a few rows; `bins` has room for the histograms of their pieces.
void reach_some(const float* z, int64_t rows, int64_t vocab, const double* beta, const double* max,
                const double* centre, const double* width, const double* limit, bool count,
                double* radius, std::vector<double>& bins, int threads) {
  const int64_t per_row = pieces(vocab);
  std::fill(bins.begin(), bins.begin() + rows * per_row * kBins, 0.0);
  each_piece(rows, vocab, threads, [&](int64_t row, int64_t piece, int64_t lo, int64_t hi) {
    double* mine = bins.data() + (row * per_row + piece) * kBins;
    const float* words = z + row * vocab;
    const double per_step = beta[row] / width[row], b = beta[row];
    for (int64_t i = lo; i < hi; i += kLanes) {
      const Two two = widen(words + i, static_cast<int>(std::min<int64_t>(kLanes, hi - i)));
      for (const vd& v : {two.low, two.high}) {
        const vd off = v - centre[row];
        vd step = (off < 0.0 ? -off : off) * per_step;
        step = step < kBins - 1.0 ? step : vd{} + (kBins - 1.0);  // a NaN too
        const vd far = (v - max[row]) * b;
        const vd mass = count ? (v == -kFar ? vd{} : vd{} + 1.0) : exp(far);
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

void reach(const float* z, int64_t rows, int64_t vocab, const double* beta, const double* max,
           const double* centre, const double* width, const double* limit, bool count,
           double* radius, int threads) {
  const int64_t per_row = pieces(vocab);
  const int64_t some = std::min(rows, std::max<int64_t>(1, kHistograms / std::max<int64_t>(1, per_row)));
  std::vector<double> bins(static_cast<size_t>(some * per_row * kBins));
  for (int64_t row = 0; row < rows; row += some)
    reach_some(z + row * vocab, std::min(some, rows - row), vocab, beta + row, max + row,
               centre + row, width + row, limit + row, count, radius + row, bins, threads);
}

// found(word) for each word of the band, in order. Eight vectors are passed over at a time where
// none of them has such a word.
template <class Found>
void scan(const float* z, int64_t vocab, float lo, float hi, const Found& found) {
  const auto inside = [&](vf v) { return (v >= lo) & (v <= hi) & (v > -kInf); };
  const auto look = [&](int64_t i) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, vocab - i));
    const vi here = inside(n == kLanes ? load(z + i) : load(z + i, n, -kInf));
    if (!any(here)) return;
    for (int k = 0; k < n; ++k)
      if (here[k]) found(i + k);
  };
  constexpr int64_t kStride = 8 * kLanes;
  int64_t i = 0;
  for (; i + kStride <= vocab; i += kStride) {
    vi hit{};
    for (int64_t j = 0; j < kStride; j += kLanes) hit |= inside(load(z + i + j));
    if (!any(hit)) continue;
    for (int64_t j = 0; j < kStride; j += kLanes) look(i + j);
  }
  for (; i < vocab; i += kLanes) look(i);
}

void band_count(const float* z, int64_t rows, int64_t vocab, const float* lo, const float* hi,
                int64_t* counts, int threads) {
  parallel_for(rows, threads, [&](int64_t row) {
    int64_t n = 0;
    scan(z + row * vocab, vocab, lo[row], hi[row], [&](int64_t) { ++n; });
    counts[row] = n;
  });
}

void band_fill(const float* z, int64_t rows, int64_t vocab, const float* lo, const float* hi,
               int64_t width, int64_t* ids, float* values, int threads) {
  parallel_for(rows, threads, [&](int64_t row) {
    const float* words = z + row * vocab;
    int64_t n = 0;
    scan(words, vocab, lo[row], hi[row], [&](int64_t word) {
      if (n == width) return;
      ids[row * width + n] = word;
      values[row * width + n] = words[word];
      ++n;
    });
  });
}

// The high and low products of 32-bit numbers in 64-bit lanes.
inline vu mul32(vu a, uint32_t b) {
#if defined(__AVX512F__) && !defined(LMHEAD_LANES)
  return (vu)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__) && !defined(LMHEAD_LANES)
  return (vu)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
  return a * static_cast<uint64_t>(b);
#endif
}

constexpr int kChunk = 512;

// The random words of ids [first, first + kChunk), first being even: see philox.hpp.
void random_words(Key key, int64_t first, uint32_t* high, uint32_t* low) {
  const uint64_t mask = 0xffffffff;
  for (int at = 0; at < kChunk; at += 2 * kHalf) {
    vu c0, c1 = vu{} + (key.position & mask), c2 = vu{} + (key.position >> 32), c3{};
    for (int k = 0; k < kHalf; ++k) c0[k] = static_cast<uint64_t>((first + at) / 2 + k) & mask;
    uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
    for (int round = 0; round < lmhead::kPhiloxRounds; ++round) {
      const vu p0 = mul32(c0, lmhead::kPhiloxM0), p1 = mul32(c2, lmhead::kPhiloxM1);
      c0 = (p1 >> 32) ^ c1 ^ static_cast<uint64_t>(k0);
      c2 = (p0 >> 32) ^ c3 ^ static_cast<uint64_t>(k1);
      c1 = p1 & mask;
      c3 = p0 & mask;
      k0 += lmhead::kPhiloxW0;
      k1 += lmhead::kPhiloxW1;
    }
    for (int k = 0; k < kHalf; ++k) {
      high[at + 2 * k] = static_cast<uint32_t>(c0[k]);
      low[at + 2 * k] = static_cast<uint32_t>(c1[k]);
      high[at + 2 * k + 1] = static_cast<uint32_t>(c2[k]);
      low[at + 2 * k + 1] = static_cast<uint32_t>(c3[k]);
    }
  }
}

struct Best {
  double score = -kFar;
  int64_t id = -1;

  void take(double other, int64_t other_id) {
    if (other > score || (other == score && other_id < id)) {
      score = other;
      id = other_id;
    }
  }
};

// meet(word, score) for every word of [lo, hi), lo being even, whose score β (z - max) + noise is at
// least `least()`, and for few others. The noise is -log E with E = -log u >= 1 - u, so such a word
// has 1 - u <= exp(β (z - max) - least): a comparison in float32 with a margin, and nearly all words
// are out without a logarithm.
template <class Least, class Meet>
void each_contender(const float* z, int64_t lo, int64_t hi, double beta, double max, Key key,
                    const Least& least, const Meet& meet) {
  uint32_t high[kChunk], low[kChunk];
  const float b = static_cast<float>(beta), top = static_cast<float>(max);
  for (int64_t first = lo; first < hi; first += kChunk) {
    random_words(key, first, high, low);
    const int64_t end = std::min(hi, first + kChunk);
    for (int64_t i = first; i < end; i += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, end - i));
      const vf v = n == kLanes ? load(z + i) : load(z + i, n, -kInf);
      vi bits;
      std::memcpy(&bits, high + (i - first), sizeof bits);
      // 1 - u is at least (2^32 - 1 - high) 2^-32; the top 31 bits of it are plenty.
      const vf left = __builtin_convertvector((~bits >> 1) & 0x7fffffff, vf) * 0x1p-31f;
      const vf may = exp((v - top) * b - static_cast<float>(least())) * 1.01f + 1e-9f;
      const vi hit = (left * 0.999f < may) & (v > -kInf);
      if (!any(hit)) continue;
      for (int k = 0; k < n; ++k)
        if (hit[k])
          meet(i + k, beta * (static_cast<double>(z[i + k]) - max) +
                          lmhead::to_gumbel({high[i + k - first], low[i + k - first]}));
    }
  }
}

void contenders(const float* z, int64_t rows, int64_t vocab, const double* beta, const Key* keys,
                const double* least, int64_t width, int64_t* counts, int64_t* ids, int threads) {
  parallel_for(rows, threads, [&](int64_t row) {
    const float* words = z + row * vocab;
    const double max = *std::max_element(words, words + vocab);
    counts[row] = 0;
    if (max == -kFar) return;
    const double bound = least[row] - beta[row] * max;
    each_contender(
        words, 0, vocab, beta[row], max, keys[row], [&] { return bound; },
        [&](int64_t word, double score) {
          if (!(score >= bound)) return;
          if (counts[row] < width) ids[row * width + counts[row]] = word;
          ++counts[row];
        });
  });
}

void race(const float* z, int64_t rows, int64_t vocab, const double* beta, const Key* keys,
          int64_t* winners, int threads) {
  const int64_t per_row = pieces(vocab);
  std::vector<Best> parts(static_cast<size_t>(rows * per_row));
  each_piece(rows, vocab, threads, [&](int64_t row, int64_t piece, int64_t lo, int64_t hi) {
    const float* words = z + row * vocab;
    const int64_t favourite = std::max_element(words + lo, words + hi) - words;
    const double max = words[favourite];
    if (max == -kFar) return;
    Best best;
    best.take(lmhead::to_gumbel(lmhead::philox(keys[row], 0, favourite)), favourite);
    each_contender(
        words, lo, hi, beta[row], max, keys[row], [&] { return best.score; },
        [&](int64_t word, double score) { best.take(score, word); });
    parts[row * per_row + piece] = {best.score + beta[row] * max, best.id};
  });
  for (int64_t row = 0; row < rows; ++row) {
    Best best;
    for (int64_t i = 0; i < per_row; ++i) {
      const Best& part = parts[row * per_row + i];
      if (part.id >= 0) best.take(part.score, part.id);
    }
    winners[row] = best.id;
  }
}

}  // namespace
}  // namespace LMHEAD_ISA

namespace lmhead {

extern const RowKernels LMHEAD_ROWS;
const RowKernels LMHEAD_ROWS = {
    LMHEAD_ISA::top,   LMHEAD_ISA::mass,       LMHEAD_ISA::moments,   LMHEAD_ISA::kth,
    LMHEAD_ISA::reach, LMHEAD_ISA::band_count, LMHEAD_ISA::band_fill,
    LMHEAD_ISA::contenders, LMHEAD_ISA::race,
};

}  // namespace lmhead
