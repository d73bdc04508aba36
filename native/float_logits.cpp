// One instruction set's products of hidden states with the weight in float32; compiled as
// kernels.cpp is.
//
// The sum of a pair is defined, so that it is the same to the last bit in any batch, on any number
// of threads and on every instruction set: entry i goes to lane i mod 16, and a lane takes its
// products in the order of i by fused multiply-adds. After 1024 entries, and at the end, lane
// i + 8 is added to lane i, then i + 4, i + 2 and i + 1. Such parts are added in float64, and the
// sum is rounded. No chain is longer than 64: the error is never more than 2^-17 |w| |h|, and
// usually half that of a plain product in float32.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "dot.hpp"
#include "kernels.hpp"
#include "parallel.hpp"

namespace LMHEAD_ISA {
namespace {

using lmhead::Floats;
using lmhead::parallel_for;

constexpr int kChains = 16;                 // lanes
constexpr int kVectors = kChains / kLanes;  // that hold them
constexpr int64_t kPart = 1024;             // entries before the lanes are added

#if defined(__FP_FAST_FMAF) || defined(__AVX2__)
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// The product is exact in float64, the sum is rounded to odd: rounding that to float32 gives what
// one rounding would.
inline float fused(float a, float b, float c) {
  const double product = static_cast<double>(a) * b;
  double sum = product + c;
  const double added = sum - product;
  const double error = (product - (sum - added)) + (c - added);
  int64_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  if (error != 0.0 && error == error && bits % 2 == 0) {
    bits += (error > 0.0) == (sum > 0.0) ? 1 : -1;
    std::memcpy(&sum, &bits, sizeof sum);
  }
  return static_cast<float>(sum);
}
#endif

inline vf fused(vf a, vf b, vf c) {
#if defined(LMHEAD_LANES) || !defined(__AVX2__)
  for (int i = 0; i < kLanes; ++i) c[i] = fused(a[i], b[i], c[i]);
  return c;
#elif defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

inline vf load_floats(const float* p) { return load(p); }

inline vf load_floats(const Bf16* p) {
#if defined(__AVX512F__) && !defined(LMHEAD_LANES)
  const auto wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return (vf)_mm512_slli_epi32(wide, 16);
#elif defined(__AVX2__) && !defined(LMHEAD_LANES)
  const auto wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (vf)_mm256_slli_epi32(wide, 16);
#else
  vf v;
  for (int i = 0; i < kLanes; ++i) v[i] = value(p[i]);
  return v;
#endif
}

inline vf load_floats(const F16* p) {
#if defined(__AVX512F__) && !defined(LMHEAD_LANES)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && !defined(LMHEAD_LANES)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vf v;
  for (int i = 0; i < kLanes; ++i) v[i] = value(p[i]);
  return v;
#endif
}

struct Lanes {
  vf part[kVectors] = {};
};

inline float total(const Lanes& lanes) {
#if defined(__AVX2__) && !defined(LMHEAD_LANES)
#if defined(__AVX512F__)
  const auto all = (__m512)lanes.part[0];
  const __m256 eight = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
#else
  const auto eight = (__m256)(lanes.part[0] + lanes.part[1]);
#endif
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
#else
  float all[kChains];
  std::memcpy(all, &lanes, sizeof all);
  for (int half = kChains / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) all[i] += all[i + half];
  return all[0];
#endif
}

template <int T>
inline void totals(const Lanes (&sums)[T], float* out) {
#if defined(__AVX512F__) && !defined(LMHEAD_LANES)
  if constexpr (T == 8) {  // the same four steps for all of them at once
    __m512 two[4], four[2];
    for (int i = 0; i < 4; ++i) {
      const auto a = (__m512)sums[2 * i].part[0], b = (__m512)sums[2 * i + 1].part[0];
      two[i] = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
    }
    for (int i = 0; i < 2; ++i)
      four[i] = _mm512_shuffle_f32x4(two[2 * i], two[2 * i + 1], 0x88) +
                _mm512_shuffle_f32x4(two[2 * i], two[2 * i + 1], 0xdd);
    const __m512 eight =
        _mm512_shuffle_ps(four[0], four[1], 0x44) + _mm512_shuffle_ps(four[0], four[1], 0xee);
    const __m512 all = eight + _mm512_permute_ps(eight, 0xb1);
    const __m512i order = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 14, 10, 6, 2, 12, 8, 4, 0);
    _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, all)));
    return;
  }
#endif
  for (int t = 0; t < T; ++t) out[t] = total(sums[t]);
}

// The largest number of hidden states whose sums are held in registers at a time, and how many
// tokens are multiplied with T of them at a time.
#if defined(__AVX512F__) || defined(LMHEAD_LANES)
constexpr int kStates = 8;
constexpr int tokens_with(int t) { return t == 8 ? 3 : t == 4 ? 4 : t; }
#elif defined(__AVX2__)
constexpr int kStates = 4;
constexpr int tokens_with(int) { return 1; }
#else
constexpr int kStates = 2;
constexpr int tokens_with(int) { return 1; }
#endif
// Tokens per task of a thread, and per group that several blocks of states are multiplied with
// while it stays in the nearest caches: multiples of the numbers of tokens above.
constexpr int64_t kPiece = 240, kGroup = 12;
// The hardware does not prefetch the weight while states are loaded in between. Measured on
// Zen 4: prefetching to the second-level cache, at least 8 KiB ahead, hides all latency; to the
// first-level cache, or of the next tile, hides almost none.
constexpr int64_t kAhead = 16384;

// Up to kStates hidden states, 16 entries of each in turn. Zeros pad the entries, and the number of
// states to a power of two.
struct Sixteen {
  alignas(64) float entries[kChains];
};

struct Block {
  std::vector<Sixteen> data;
  int64_t first;  // of the states
  int n, padded;  // how many, without and with zeros
};

Block pack(const float* hidden, int64_t first, int64_t rows, int64_t d) {
  Block block{{}, first, static_cast<int>(std::min<int64_t>(kStates, rows - first)), 1};
  while (block.padded < block.n) block.padded *= 2;
  block.data.resize(static_cast<size_t>((d + kChains - 1) / kChains * block.padded));
  for (int t = 0; t < block.n; ++t)
    for (int64_t i = 0; i < d; ++i)
      block.data[static_cast<size_t>(i / kChains * block.padded + t)].entries[i % kChains] =
          hidden[(first + t) * d + i];
  return block;
}

// Sixteen entries of R tokens with T states, and with themselves.
template <int R, int T, bool Norms, class W>
inline void step(const W* const (&weight)[R], const Sixteen* states, Lanes (&sums)[R][T],
                 Lanes (&squares)[R]) {
#pragma GCC unroll 4
  for (int k = 0; k < kVectors; ++k) {
    vf tokens[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) tokens[r] = load_floats(weight[r] + k * kLanes);
    if constexpr (Norms)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        squares[r].part[k] = fused(tokens[r], tokens[r], squares[r].part[k]);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      vf state = load(states[t].entries + k * kLanes);
#if defined(__AVX512F__) && !defined(LMHEAD_LANES)
      // Loaded once: GCC would load it for each token, and loads are what limits this.
      if constexpr (R > 1) asm("" : "+v"(state));
#endif
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][t].part[k] = fused(tokens[r], state, sums[r][t].part[k]);
    }
  }
}

// The products of R tokens, which follow each other, with T states; `largest` takes in |w|².
template <int R, int T, bool Norms, class W>
void tile(const W* weight, int64_t d, const Sixteen* states, float (*out)[T], double& largest) {
  const char* ahead = reinterpret_cast<const char*>(weight) + kAhead;
  constexpr int64_t kStep = R * kChains * sizeof(W);
  double before[R][T] = {}, norms[R] = {};  // of earlier parts
  for (int64_t j = 0;;) {
    const bool first = j == 0;
    Lanes sums[R][T], squares[R];
    const int64_t end = std::min(d, j + kPart);
#if defined(__AVX512F__) && !defined(LMHEAD_LANES)
    // One state is limited by memory, and Zen 4 reads it 15 % faster in vectors of 256 bits.
    if constexpr (R * T == 1 && !Norms && std::is_same_v<W, float>) {
      __m256 low = _mm256_setzero_ps(), high = low;
      for (; j + kChains <= end; j += kChains, ++states) {
        const float *token = weight + j, *state = states->entries;
        low = _mm256_fmadd_ps(_mm256_loadu_ps(token), _mm256_load_ps(state), low);
        high = _mm256_fmadd_ps(_mm256_loadu_ps(token + 8), _mm256_load_ps(state + 8), high);
      }
      sums[0][0].part[0] = (vf)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
    }
#endif
    for (; j + kChains <= end; j += kChains, states += T) {
      if constexpr (T > 1) {
        for (int64_t line = 0; line < kStep; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        ahead += kStep;
      }
      const W* at[R];
      for (int r = 0; r < R; ++r) at[r] = weight + r * d + j;
      step<R, T, Norms>(at, states, sums, squares);
    }
    if (j < end) {
      W last[R][kChains] = {};
      const W* at[R];
      for (int r = 0; r < R; ++r) {
        std::copy(weight + r * d + j, weight + r * d + d, last[r]);
        at[r] = last[r];
      }
      step<R, T, Norms>(at, states, sums, squares);
      j = d;
    }
    for (int r = 0; r < R; ++r) totals(sums[r], out[r]);
    if constexpr (Norms)
      for (int r = 0; r < R; ++r) {
        norms[r] += total(squares[r]);
        if (j >= d && !(norms[r] <= largest)) largest = norms[r];
      }
    if (first && j >= d) return;
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) {
        before[r][t] += out[r][t];
        out[r][t] = static_cast<float>(before[r][t]);
      }
    if (j >= d) return;
  }
}

template <int R, int T, bool Norms, class W>
void put_tile(const W* weight, int64_t d, const Block& block, int64_t v, int64_t vocab, float* out,
              double& largest) {
  float z[R][T];
  tile<R, T, Norms>(weight + v * d, d, block.data.data(), z, largest);
  for (int t = 0; t < block.n; ++t)
    for (int r = 0; r < R; ++r) out[(block.first + t) * vocab + v + r] = z[r][t];
}

// Tokens [lo, hi) with one block of states.
template <int T, bool Norms, class W>
void strip(const W* weight, int64_t d, const Block& block, int64_t lo, int64_t hi, int64_t vocab,
           float* out, double& largest) {
  if constexpr (T > 1)
    if (block.padded < T) return strip<T / 2, Norms>(weight, d, block, lo, hi, vocab, out, largest);
  constexpr int R = tokens_with(T);
  int64_t v = lo;
  for (; v + R <= hi; v += R) put_tile<R, T, Norms>(weight, d, block, v, vocab, out, largest);
  for (; v < hi; ++v) put_tile<1, T, Norms>(weight, d, block, v, vocab, out, largest);
}

template <class W>
void products(const float* hidden, int64_t rows, const W* weight, int64_t vocab, int64_t d,
              float* out, double* square, int threads) {
  std::vector<Block> blocks;
  for (int64_t first = 0; first < rows; first += kStates)
    blocks.push_back(pack(hidden, first, rows, d));
  const int64_t group = blocks.size() == 1 ? kPiece : kGroup, n = (vocab + kPiece - 1) / kPiece;
  std::vector<double> largest(static_cast<size_t>(n));
  parallel_for(n, threads, [&](int64_t piece) {
    const int64_t end = std::min(vocab, (piece + 1) * kPiece);
    double& mine = largest[static_cast<size_t>(piece)];
    for (int64_t lo = piece * kPiece; lo < end; lo += group)
      for (const Block& block : blocks) {
        const int64_t hi = std::min(end, lo + group);
        if (square && block.first == 0)
          strip<kStates, true>(weight, d, block, lo, hi, vocab, out, mine);
        else
          strip<kStates, false>(weight, d, block, lo, hi, vocab, out, mine);
      }
  });
  if (!square) return;
  *square = 0.0;
  for (double each : largest)
    if (!(each <= *square)) *square = each;  // a NaN stays, or an infinite logit tells of it
}

}  // namespace

void float_logits(const float* hidden, int64_t rows, const Floats& weight, int64_t vocab, int64_t d,
                  float* out, double* square, int threads) {
  lmhead::with_type(weight,
                    [&](auto* w) { products(hidden, rows, w, vocab, d, out, square, threads); });
}

// Single tokens of one hidden state: out[i] = hidden · weight[ids[i]], the same bits as above.
void float_pairs(const float* hidden, const Floats& weight, int64_t d, const int64_t* ids,
                 int64_t n, float* out) {
  const Block block = pack(hidden, 0, 1, d);
  double largest = 0.0;
  lmhead::with_type(weight, [&](auto* w) {
    for (int64_t i = 0; i < n; ++i) {
      // Prefetch the next row: the hardware cannot predict it.
      if (i + 1 < n)
        for (int64_t at = 0; at < d; at += 64 / static_cast<int64_t>(sizeof *w))
          __builtin_prefetch(w + ids[i + 1] * d + at);
      float z[1][1];
      tile<1, 1, false>(w + ids[i] * d, d, block.data.data(), z, largest);
      out[i] = z[0][0];
    }
  });
}

}  // namespace LMHEAD_ISA
