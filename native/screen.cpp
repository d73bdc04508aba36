// One instruction set's kernels of certified decode; compiled as kernels.cpp is.
#include "screen.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "parallel.hpp"

namespace LMHEAD_ISA {
namespace {

using lmhead::kScreenBlock;
using lmhead::parallel_for;
using lmhead::ScreenBounds;
using lmhead::ScreenCopy;
using lmhead::screen_blocks;
using lmhead::ScreenStates;

// Words handled together, so that a vector of the hidden state is loaded once for all of them.
constexpr int kWords = 4;
constexpr int kStates = 2;
// How far ahead of its use memory is asked for, in bytes.
constexpr int64_t kAhead = 1024;

// The three kinds of entries. Each gives products<R, T>: out[r][t] = Σ_j w[r][j] · y[t][j] for R
// words `stride` apart and T states `width` apart.
#if defined(__AVX2__)

using Sums = __m256i;

inline int32_t total(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
  return _mm_cvtsi128_si32(s);
}

inline __m256i plus(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }

inline __m256i load16(const int16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

struct Whole {
  using Entry = int8_t;
  static constexpr int64_t kStep = 16, kPerEntry = 1;
  template <int R, int T>
  static void step(const int8_t* w, int64_t stride, const int16_t* y, int64_t width, Sums (*sums)[T]) {
    __m256i words[R];
    for (int r = 0; r < R; ++r)
      words[r] = _mm256_cvtepi8_epi16(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + r * stride)));
    for (int t = 0; t < T; ++t) {
      const __m256i state = load16(y + t * width);
      for (int r = 0; r < R; ++r)
        sums[r][t] = _mm256_add_epi32(sums[r][t], _mm256_madd_epi16(words[r], state));
    }
  }
};

struct Nibbles {
  using Entry = uint8_t;
  static constexpr int64_t kStep = 64, kPerEntry = 2;
  template <int R, int T>
  static void step(const uint8_t* w, int64_t stride, const int16_t* y, int64_t width, Sums (*sums)[T]) {
    const __m256i mask = _mm256_set1_epi16(15);
    __m256i packed[R];
    for (int r = 0; r < R; ++r)
      packed[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + r * stride));
    const auto part = [&](auto k) {
      for (int t = 0; t < T; ++t) {
        const __m256i state = load16(y + t * width + 16 * k);
        for (int r = 0; r < R; ++r) {
          __m256i words = packed[r];
          if constexpr (k > 0) words = _mm256_srli_epi16(words, 4 * k);
          if constexpr (k < 3) words = _mm256_and_si256(words, mask);
          sums[r][t] = _mm256_add_epi32(sums[r][t], _mm256_madd_epi16(words, state));
        }
      }
    };
    part(std::integral_constant<int, 0>());
    part(std::integral_constant<int, 1>());
    part(std::integral_constant<int, 2>());
    part(std::integral_constant<int, 3>());
  }
};

struct Lead {
  using Entry = int16_t;
  static constexpr int64_t kStep = 16, kPerEntry = 1;
  template <int R, int T>
  static void step(const int16_t* w, int64_t stride, const int16_t* y, int64_t width, Sums (*sums)[T]) {
    for (int t = 0; t < T; ++t) {
      const __m256i state = load16(y + t * width);
      for (int r = 0; r < R; ++r)
        sums[r][t] = _mm256_add_epi32(sums[r][t], _mm256_madd_epi16(load16(w + r * stride), state));
    }
  }
};

#else

using Sums = int32_t;

inline int32_t total(int32_t v) { return v; }

inline int32_t plus(int32_t a, int32_t b) { return a + b; }

template <class T>
struct Plain {
  using Entry = T;
  static constexpr int64_t kStep = 16, kPerEntry = 1;
  template <int R, int S>
  static void step(const T* w, int64_t stride, const int16_t* y, int64_t width, Sums (*sums)[S]) {
    for (int r = 0; r < R; ++r)
      for (int s = 0; s < S; ++s) {
        int32_t sum = 0;
        for (int j = 0; j < kStep; ++j)
          sum += static_cast<int32_t>(w[r * stride + j]) * y[s * width + j];
        sums[r][s] += sum;
      }
  }
};

using Whole = Plain<int8_t>;
using Lead = Plain<int16_t>;

struct Nibbles {
  using Entry = uint8_t;
  static constexpr int64_t kStep = 64, kPerEntry = 2;
  template <int R, int S>
  static void step(const uint8_t* w, int64_t stride, const int16_t* y, int64_t width, Sums (*sums)[S]) {
    for (int r = 0; r < R; ++r)
      for (int s = 0; s < S; ++s) {
        int32_t sum = 0;
        for (int i = 0; i < 16; ++i) {
          const int32_t word = w[r * stride + 2 * i] | w[r * stride + 2 * i + 1] << 8;
          for (int k = 0; k < 4; ++k) sum += (word >> 4 * k & 15) * y[s * width + 16 * k + i];
        }
        sums[r][s] += sum;
      }
  }
};

#endif

// Several sums side by side where there is one word and one state, so that they need not wait for
// each other. One word after the other is how a machine reads memory fastest.
template <class Kind, int R, int T>
void dot(const typename Kind::Entry* w, const int16_t* y, int64_t width, double (*out)[T]) {
  constexpr int kChains = R * T == 1 ? 4 : 1;
  constexpr bool kStreams = R * T == 1 && sizeof(typename Kind::Entry) == 1;
  Sums sums[kChains][R][T] = {};
  const int64_t stride = width / Kind::kPerEntry;
  int64_t j = 0;
  for (; j + kChains * Kind::kStep <= width; j += kChains * Kind::kStep) {
    const auto* at = w + j / Kind::kPerEntry;
    if constexpr (kStreams)
      for (int64_t line = 0; line < kChains * Kind::kStep / Kind::kPerEntry; line += 64)
        __builtin_prefetch(at + line + kAhead, 0, 0);
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c)
      Kind::template step<R, T>(at + c * Kind::kStep / Kind::kPerEntry, stride,
                                y + j + c * Kind::kStep, width, sums[c]);
  }
  for (; j < width; j += Kind::kStep)
    Kind::template step<R, T>(w + j / Kind::kPerEntry, stride, y + j, width, sums[0]);
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) {
      Sums sum = sums[0][r][t];
      for (int c = 1; c < kChains; ++c) sum = plus(sum, sums[c][r][t]);
      out[r][t] = total(sum);
    }
}

using vd = double __attribute__((vector_size(32)));

double product(const double* x, const double* y, int64_t n) {
  vd sums[2] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int c = 0; c < 2; ++c) {
      vd a, b;
      std::memcpy(&a, x + i + 4 * c, sizeof a);
      std::memcpy(&b, y + i + 4 * c, sizeof b);
      sums[c] += a * b;
    }
  const vd both = sums[0] + sums[1];
  double sum = (both[0] + both[1]) + (both[2] + both[3]);
  for (; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

double norm(const double* x, int64_t n) { return std::sqrt(product(x, x, n)); }

// x as 16-bit numbers times a scale; x becomes what is left.
double round_to(double* x, int64_t n, double room, int16_t* codes) {
  double largest = 0.0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  const double scale = std::max(largest / 32767.0, norm(x, n) / room * (1.0 + 0x1p-30));
  for (int64_t i = 0; i < n; ++i) {
    const double code =
        scale > 0.0 ? std::min(32767.0, std::max(-32767.0, std::nearbyint(x[i] / scale))) : 0.0;
    codes[i] = static_cast<int16_t>(code);
    x[i] -= code * scale;
  }
  return scale;
}

// One factor of the rotation: x as (count, f) becomes factor · xᵀ, (f, count).
void turn(const double* factor, int64_t f, int64_t count, double* x, std::vector<double>* room) {
  constexpr int64_t kColumns = 8;
  const int64_t padded = (count + kColumns - 1) / kColumns * kColumns;
  room->assign(static_cast<size_t>(f * padded), 0.0);
  double* turned = room->data();
  for (int64_t i = 0; i < count; ++i)
    for (int64_t l = 0; l < f; ++l) turned[l * padded + i] = x[i * f + l];
  for (int64_t j = 0; j < f; ++j)
    for (int64_t i = 0; i < count; i += kColumns) {
      vd sums[2] = {};
      for (int64_t l = 0; l < f; ++l)
        for (int c = 0; c < 2; ++c) {
          vd column;
          std::memcpy(&column, turned + l * padded + i + 4 * c, sizeof column);
          sums[c] += factor[j * f + l] * column;
        }
      std::memcpy(x + j * count + i, sums,
                  static_cast<size_t>(std::min(kColumns, count - i)) * sizeof(double));
    }
}

void prepare(const lmhead::ScreenBasis& s, const double* hidden, int64_t rows,
             const lmhead::ScreenPrepared& out, int threads) {
  parallel_for(rows, threads, [&](int64_t b) {
    const double* h = hidden + b * s.size;
    std::vector<double> rest(static_cast<size_t>(s.width), 0.0), room;
    std::copy_n(h, s.size, rest.data());
    out.base[b] = product(s.mean, h, s.size);
    const double size = norm(h, s.size);
    double lead_norm = 0.0, along = 0.0;
    out.lead_scales[b] = 0.0;
    if (s.leading > 0) {
      std::vector<double> g(static_cast<size_t>(s.leading));
      for (int64_t k = 0; k < s.leading; ++k) g[static_cast<size_t>(k)] = product(s.basis + k * s.size, h, s.size);
      int16_t* codes = out.lead + b * s.leading;
      const double scale = round_to(g.data(), s.leading, s.lead_room, codes);
      out.lead_scales[b] = scale;
      for (int64_t k = 0; k < s.leading; ++k) {
        const double value = codes[k] * scale;
        lead_norm += value * value;
        for (int64_t i = 0; i < s.size; ++i) rest[static_cast<size_t>(i)] -= value * s.basis[k * s.size + i];
      }
      for (int64_t k = 0; k < s.leading; ++k) {
        const double value = product(s.basis + k * s.size, rest.data(), s.size);
        along += value * value;
      }
    }
    for (int64_t i = 0; i < s.width; ++i) rest[static_cast<size_t>(i)] *= s.signs[i];
    const double* factor = s.factors;
    for (int64_t i = 0; i < s.n_factors; ++i) {
      turn(factor, s.sizes[i], s.width / s.sizes[i], rest.data(), &room);
      factor += s.sizes[i] * s.sizes[i];
    }
    const double y = norm(rest.data(), s.width);
    out.scales[b] = round_to(rest.data(), s.width, s.room, out.main + b * s.width);
    const double delta = norm(rest.data(), s.width);
    constexpr double kUp = 1.0 + 0x1p-30;
    out.e[b] = (y + s.small_e * size) * kUp;
    out.n[b] = (std::sqrt(lead_norm) * s.per_lead + std::sqrt(along) + delta + s.small_n * size) * kUp;
  });
}

double sum_of(const int16_t* y, int64_t n) {
  int64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += y[i];
  return static_cast<double>(sum);
}

// R words from `v` on, T states from `b` on.
template <class Kind, int R, int T>
void tile(const ScreenCopy& copy, const ScreenStates& states, const double* centres, int64_t v,
          int64_t b, float* approx, float (&top)[T]) {
  const int64_t width = copy.width, leading = copy.leading;
  double main[R][T], lead[R][T] = {};
  if constexpr (std::is_same_v<Kind, Whole>)
    dot<Kind, R, T>(copy.whole + v * width, states.main + b * width, width, main);
  else
    dot<Kind, R, T>(copy.nibbles + v * (width / 2), states.main + b * width, width, main);
  if (leading > 0)
    dot<Lead, R, T>(copy.lead + v * leading, states.lead + b * leading, leading, lead);
  for (int t = 0; t < T; ++t) {
    const double scale = states.scales[b + t], lead_scale = states.lead_scales[b + t];
    float values[R];
    for (int r = 0; r < R; ++r) {
      const double whole = std::is_same_v<Kind, Whole> ? main[r][t] : 16.0 * main[r][t] - centres[b + t];
      double a = copy.scales[v + r] * scale * whole + copy.lead_scales[v + r] * lead_scale * lead[r][t];
      if (copy.bias) a += copy.bias[v + r];
      values[r] = static_cast<float>(a);
    }
    std::memcpy(approx + (b + t) * copy.vocab + v, values, sizeof values);
    for (int r = 0; r < R; ++r) top[t] = std::max(top[t], values[r]);
  }
}

template <class Kind, int R, int T>
void strip(const ScreenCopy& copy, const ScreenStates& states, const double* centres, int64_t lo,
           int64_t hi, int64_t b, float* approx, float* top, int64_t apart) {
  float best[T];
  for (int t = 0; t < T; ++t) best[t] = top[t * apart];
  int64_t v = lo;
  for (; v + R <= hi; v += R) tile<Kind, R, T>(copy, states, centres, v, b, approx, best);
  for (; v < hi; ++v) tile<Kind, 1, T>(copy, states, centres, v, b, approx, best);
  for (int t = 0; t < T; ++t) top[t * apart] = best[t];
}

// Words that stay in the nearest cache while all states pass over them.
constexpr int64_t kNear = 8;

template <class Kind>
void products_of(const ScreenCopy& copy, const ScreenStates& states, float* approx,
                 float* block_max, int threads) {
  const int64_t blocks = screen_blocks(copy.vocab), rows = states.rows;
  std::vector<double> sums(static_cast<size_t>(rows));
  if (std::is_same_v<Kind, Nibbles>)
    for (int64_t b = 0; b < rows; ++b)
      sums[static_cast<size_t>(b)] = 120.5 * sum_of(states.main + b * copy.width, copy.width);
  const double* centres = sums.data();
  const char* codes = copy.whole ? reinterpret_cast<const char*>(copy.whole)
                                 : reinterpret_cast<const char*>(copy.nibbles);
  const int64_t row_bytes = copy.width / Kind::kPerEntry, all_bytes = copy.vocab * row_bytes;
  parallel_for(blocks, threads, [&](int64_t block) {
    const int64_t lo = block * kScreenBlock, hi = std::min(copy.vocab, lo + kScreenBlock);
    float* top = block_max + block;
    for (int64_t b = 0; b < rows; ++b) top[b * blocks] = -__builtin_inff();
    if (rows == 1) {
      strip<Kind, 1, 1>(copy, states, centres, lo, hi, 0, approx, top, blocks);
      return;
    }
    for (int64_t v = lo; v < hi; v += kNear) {
      const int64_t end = std::min(hi, v + kNear);
      // While some states pass over these words, ask for a part of the next ones.
      int64_t next = end * row_bytes;
      const int64_t far = std::min(all_bytes, next + kNear * row_bytes);
      const int64_t part = (kNear * row_bytes * kStates / rows + 63) / 64 * 64;
      for (int64_t b = 0; b < rows; b += kStates) {
        for (const int64_t stop = std::min(far, next + part); next < stop; next += 64)
          __builtin_prefetch(codes + next);
        if (b + kStates <= rows)
          strip<Kind, kWords, kStates>(copy, states, centres, v, end, b, approx, top + b * blocks,
                                       blocks);
        else
          for (int64_t last = b; last < rows; ++last)
            strip<Kind, kWords, 1>(copy, states, centres, v, end, last, approx, top + last * blocks,
                                   blocks);
      }
    }
  });
}

void products(const ScreenCopy& copy, const ScreenStates& states, float* approx, float* block_max,
              int threads) {
  (copy.whole ? products_of<Whole> : products_of<Nibbles>)(copy, states, approx, block_max, threads);
}

void refine(const ScreenCopy& low, const ScreenStates& states, const float* approx,
            const int64_t* rows, const int64_t* ids, int64_t n, double* out, int threads) {
  std::vector<double> centres(static_cast<size_t>(states.rows));
  for (int64_t b = 0; b < states.rows; ++b)
    centres[static_cast<size_t>(b)] = 7.5 * sum_of(states.main + b * low.width, low.width);
  constexpr int64_t kPairs = 64;
  parallel_for((n + kPairs - 1) / kPairs, threads, [&](int64_t piece) {
    for (int64_t i = piece * kPairs; i < std::min(n, (piece + 1) * kPairs); ++i) {
      const int64_t b = rows[i], v = ids[i];
      double sum[1][1];
      dot<Nibbles, 1, 1>(low.nibbles + v * (low.width / 2), states.main + b * low.width, low.width,
                         sum);
      out[i] = approx[b * low.vocab + v] +
               low.scales[v] * states.scales[b] * (sum[0][0] - centres[static_cast<size_t>(b)]);
    }
  });
}

// Written so that a NaN stays. A masked word, at -inf, has no slack.
inline bool out_of_reach(float a, double e, float word_e, double n, float word_n, double limit) {
  const double x = a, slack = a == -__builtin_inff() ? 0.0 : std::fabs(x) * 0x1p-22;
  return x + e * word_e + n * word_n + slack + 0x1p-120 < limit;
}

// The words of a block that stay, into `kept`; how many. Never inlined: `count` and `fill` must agree
// to the last bit.
__attribute__((noinline)) int32_t keep(const ScreenBounds& s, int64_t b, int64_t block,
                                       int64_t* kept) {
  const int64_t blocks = screen_blocks(s.vocab);
  const double e = s.e[b], n = s.n[b], limit = s.limits[b];
  // x + |x| / 2^22 grows with x: the largest of each stands for all.
  if (out_of_reach(s.block_max[b * blocks + block], e, s.block_e[block], n, s.block_n[block], limit))
    return 0;
  int32_t found = 0;
  const int64_t lo = block * kScreenBlock, hi = std::min(s.vocab, lo + kScreenBlock);
  for (int64_t v = lo; v < hi; ++v)
    if (!out_of_reach(s.approx[b * s.vocab + v], e, s.words_e[v], n, s.words_n[v], limit))
      kept[found++] = v;
  return found;
}

// body(row, block) for all, many blocks at a time.
template <class Body>
void each_block(const ScreenBounds& s, int threads, const Body& body) {
  // Enough for a thread to be worth waking: most blocks are passed over at a glance.
  constexpr int64_t kTogether = 4096;
  const int64_t all = s.rows * screen_blocks(s.vocab);
  parallel_for((all + kTogether - 1) / kTogether, threads, [&](int64_t piece) {
    for (int64_t i = piece * kTogether; i < std::min(all, (piece + 1) * kTogether); ++i)
      body(i / screen_blocks(s.vocab), i % screen_blocks(s.vocab));
  });
}

void count(const ScreenBounds& bounds, int32_t* counts, int threads) {
  each_block(bounds, threads, [&](int64_t b, int64_t block) {
    int64_t kept[kScreenBlock];
    counts[b * screen_blocks(bounds.vocab) + block] = keep(bounds, b, block, kept);
  });
}

void fill(const ScreenBounds& bounds, const int32_t* counts, const int64_t* starts, int64_t* ids,
          int threads) {
  each_block(bounds, threads, [&](int64_t b, int64_t block) {
    const int64_t at = b * screen_blocks(bounds.vocab) + block;
    if (counts[at] == 0) return;
    int64_t kept[kScreenBlock];
    std::copy_n(kept, std::min(counts[at], keep(bounds, b, block, kept)), ids + starts[at]);
  });
}

}  // namespace
}  // namespace LMHEAD_ISA

namespace lmhead {

extern const ScreenKernels LMHEAD_SCREEN;
const ScreenKernels LMHEAD_SCREEN = {
    LMHEAD_ISA::prepare,
    LMHEAD_ISA::products,
    LMHEAD_ISA::refine,
    LMHEAD_ISA::count,
    LMHEAD_ISA::fill,
};

}  // namespace lmhead
