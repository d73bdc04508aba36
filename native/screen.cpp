// One instruction set's kernels of certified decode; compiled as kernels.cpp is.
#include "screen.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "parallel.hpp"
#include "screen_decide.hpp"
#include "screen_dot.hpp"
#include "screen_prepare.hpp"
#include "screen_tile512.hpp"

namespace LMHEAD_ISA {
namespace {

using lmhead::kScreenBlock;
using lmhead::parallel_for;
using lmhead::screen_blocks;
using lmhead::ScreenBounds;
using lmhead::ScreenCopy;
using lmhead::ScreenStates;

template <class Kind>
int64_t row_bytes(const ScreenCopy& copy) {
  return std::is_same_v<Kind, Nibbles> ? copy.width / 2 : copy.width;
}

double sum_of(const int16_t* y, int64_t n) {
  int64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += y[i];
  return static_cast<double>(sum);
}

// Hidden states in the form that each product takes.
template <class Kind>
struct Operands {
  Operands(const ScreenCopy& copy, const ScreenStates& states)
      : main(states.main, states.rows, copy.width),
        lead(states.lead, states.rows, copy.leading),
        centres(static_cast<size_t>(states.rows)) {
    if (std::is_same_v<Kind, Nibbles>)
      for (int64_t b = 0; b < states.rows; ++b)
        centres[static_cast<size_t>(b)] = 120.5 * sum_of(states.main + b * copy.width, copy.width);
  }

  Operand<Kind> main;
  States16 lead;
  std::vector<double> centres;  // 120.5 · Σ y with nibbles
};

const int8_t* codes_of(const ScreenCopy& copy, const Whole&) { return copy.whole; }
const uint8_t* codes_of(const ScreenCopy& copy, const Nibbles&) { return copy.nibbles; }

using Doubles4 = double __attribute__((vector_size(32)));
using Floats4 = float __attribute__((vector_size(16)));
using Integers4 = int32_t __attribute__((vector_size(16)));

// Four neighbours, as doubles.
template <class Vector, class X>
Doubles4 four(const X* x) {
  Vector v;
  std::memcpy(&v, x, sizeof v);
  return __builtin_convertvector(v, Doubles4);
}

using Neighbours = std::integral_constant<int64_t, 1>;

// R tokens from `v` on, `apart` tokens apart, and T states from `b` on. The type of `apart` is
// int64_t or Neighbours.
template <class Kind, int R, int T, class Apart>
void tile(const ScreenCopy& copy, const ScreenStates& states, const Operands<Kind>& operands,
          int64_t v, Apart apart, int64_t b, float* approx, float (&top)[T]) {
  const int64_t stride = row_bytes<Kind>(copy), leading = copy.leading;
  int32_t main[T][R], lead[T][R] = {};
  dot<Kind, R, T>(codes_of(copy, Kind()) + v * stride, apart * stride, operands.main, b,
                  T == 1 ? copy.ahead : 0, main);
  if (leading > 0)
    dot<Lead, R, T>(copy.lead + v * leading, apart * leading, operands.lead, b, 0, lead);
  for (int t = 0; t < T; ++t) {
    const double scale = states.scales[b + t], lead_scale = states.lead_scales[b + t];
    const double centre = operands.centres[static_cast<size_t>(b + t)];
    float* to = approx + (b + t) * copy.vocab + v;
    float values[R];
    if constexpr (R == 4 && std::is_same_v<Apart, Neighbours>) {
      Doubles4 whole = four<Integers4>(main[t]);
      if constexpr (std::is_same_v<Kind, Nibbles>) whole = 16.0 * whole - centre;
      Doubles4 a = four<Floats4>(copy.scales + v) * scale * whole;
      if (leading > 0)
        a += four<Floats4>(copy.lead_scales + v) * lead_scale * four<Integers4>(lead[t]);
      if (copy.bias) a += four<Doubles4>(copy.bias + v);
      const Floats4 rounded = __builtin_convertvector(a, Floats4);
      std::memcpy(values, &rounded, sizeof values);
      std::memcpy(to, values, sizeof values);
    } else {
      for (int r = 0; r < R; ++r) {
        const int64_t token = v + r * apart;
        double whole = main[t][r];
        if constexpr (std::is_same_v<Kind, Nibbles>) whole = 16.0 * whole - centre;
        double a = copy.scales[token] * scale * whole;
        a += copy.lead_scales[token] * lead_scale * lead[t][r];
        if (copy.bias) a += copy.bias[token];
        values[r] = static_cast<float>(a);
      }
      for (int r = 0; r < R; ++r) to[r * apart] = values[r];
    }
    for (int r = 0; r < R; ++r) top[t] = std::max(top[t], values[r]);
  }
}

// The tokens from `lo` to `hi`, R at a time: neighbours, or (`streams`) one of each of R parts,
// which are then read side by side, each in the order of memory.
template <class Kind, int R, int T>
void strip(const ScreenCopy& copy, const ScreenStates& states, const Operands<Kind>& operands,
           int64_t lo, int64_t hi, bool streams, int64_t b, float* approx, float* top) {
  float best[T];
  for (int t = 0; t < T; ++t) best[t] = top[t];
  const int64_t part = (hi - lo) / R;
  if (streams)
    for (int64_t v = lo; v < lo + part; ++v)
      tile<Kind, R, T>(copy, states, operands, v, part, b, approx, best);
  else
    for (int64_t v = lo; v < lo + part * R; v += R)
      tile<Kind, R, T>(copy, states, operands, v, Neighbours(), b, approx, best);
  for (int64_t v = lo + part * R; v < hi; ++v)
    tile<Kind, 1, T>(copy, states, operands, v, Neighbours(), b, approx, best);
  for (int t = 0; t < T; ++t) top[t] = best[t];
}

// Which of the 32 tokens from 32 · group on at least one state allows: a bit each.
uint32_t needed(const ScreenCopy& copy, const ScreenStates& states, int64_t group) {
  const int64_t n_uint32 = (copy.vocab + 31) / 32, lo = 32 * group;
  const int64_t n = std::min<int64_t>(32, copy.vocab - lo);
  uint32_t bits = states.allowed ? 0 : ~0u;
  if (states.allowed)
    for (int64_t b = 0; b < states.rows; ++b) bits |= states.allowed[b * n_uint32 + group];
  if (copy.bias)
    for (int64_t i = 0; i < n; ++i)
      bits &= ~(static_cast<uint32_t>(copy.bias[lo + i] == -__builtin_inf()) << i);
  return n < 32 ? bits & ((1u << n) - 1) : bits;
}

// run(lo, hi) for each run of needed tokens of a block; returns how many they are.
template <class Run>
int64_t each_run(const ScreenCopy& copy, const ScreenStates& states, int64_t block,
                 const Run& run) {
  const int64_t lo = block * kScreenBlock, hi = std::min(copy.vocab, lo + kScreenBlock);
  int64_t start = -1, count = 0;  // start of the run so far, -1 outside of one
  for (int64_t v = lo; v < hi; v += 32) {
    const uint32_t bits = needed(copy, states, v / 32);
    const int64_t end = std::min(hi, v + 32);
    for (int64_t u = v; u < end; ++u) {
      const bool here = bits >> (u - v) & 1;
      if (here == (start >= 0)) continue;
      if (!here) run(start, u), count += u - start;
      start = here ? u : -1;
    }
  }
  if (start >= 0) run(start, hi), count += hi - start;
  return count;
}

// Tokens that stay in the first-level cache while all states are multiplied with them.
constexpr int64_t kNear = 8;

// Multiplies these tokens with the states in groups of four; returns the number of states.
// Meanwhile memory from `next` on is prefetched, as much as these tokens take; null for none.
template <class Kind>
int64_t by_fours(const ScreenCopy& copy, const ScreenStates& states, const Operands<Kind>& operands,
                 int64_t lo, int64_t hi, const char* next, float* approx, float* top) {
  int64_t b = 0;
#if defined(LMHEAD_TILE512)
  if constexpr (std::is_same_v<Kind, Whole>) {
    if (!operands.main.high_only || (hi - lo) % kSide != 0) return 0;
    const int64_t fours = states.rows / kSide;
    // Each of the first fours prefetches a part.
    const int64_t parts = !next ? 0 : fours < 2 ? 1 : fours < 4 ? 2 : 4;
    const auto first = parts == 1 ? strip512<4> : parts == 2 ? strip512<2> : strip512<1>;
    const int64_t part = parts ? (hi - lo) * copy.width / parts : 0;
    for (; b < fours * kSide; b += kSide) {
      const int64_t i = b / kSide;
      const auto run = i < parts ? first : strip512<0>;
      run(copy, states, operands.main, lo, hi, b, next + i * part, approx, top + b);
    }
  }
#endif
  return b;
}

template <class Kind>
int64_t products_of(const ScreenCopy& copy, const ScreenStates& states, float* approx,
                    float* block_max, int threads) {
  const int64_t blocks = screen_blocks(copy.vocab), rows = states.rows;
  const Operands<Kind> operands(copy, states);
  const auto* codes = reinterpret_cast<const char*>(codes_of(copy, Kind()));
  const int64_t bytes = row_bytes<Kind>(copy);
  // One hidden state: memory is the limit.
  const auto one = copy.streams == 4   ? strip<Kind, 4, 1>
                   : copy.streams == 2 ? strip<Kind, 2, 1>
                                       : strip<Kind, 1, 1>;
  // The tokens from `lo` to `hi`, and the largest product of each state; nothing is prefetched from
  // `stop` on.
  const auto tokens = [&](const ScreenCopy& from, int64_t lo, int64_t hi, int64_t stop,
                          float* top) {
    if (rows == 1) {
      one(from, states, operands, lo, hi, true, 0, approx, top);
      return;
    }
    for (int64_t v = lo; v < hi; v += kNear) {
      const int64_t end = std::min(hi, v + kNear);
      int64_t next = end * bytes;
      const int64_t far = std::min(stop * bytes, next + kNear * bytes);
      int64_t b = by_fours(from, states, operands, v, end, next < far ? codes + next : nullptr,
                           approx, top);
      if (b > 0) next = far;
      // Prefetch a part of the next tokens while some states are multiplied with these.
      const int64_t part = (kNear * bytes * kStates / rows + 63) / 64 * 64;
      for (; b < rows; b += kStates) {
        for (const int64_t last = std::min(far, next + part); next < last; next += 64)
          __builtin_prefetch(codes + next);
        const auto some =
            b + kStates <= rows ? strip<Kind, kTokens, kStates> : strip<Kind, kTokens, 1>;
        some(from, states, operands, v, end, false, b, approx, top + b);
      }
    }
  };
  const bool all = !states.allowed && !copy.bias;
  ScreenCopy without_prefetch = copy;
  without_prefetch.ahead = 0;
  std::atomic<int64_t> read{0};
  parallel_for(blocks, threads, [&](int64_t block) {
    const int64_t lo = block * kScreenBlock, hi = std::min(copy.vocab, lo + kScreenBlock);
    // Not in `block_max`, where another thread writes to the same lines of the cache.
    std::vector<float> top(static_cast<size_t>(rows), -__builtin_inff());
    int64_t count = hi - lo;
    if (!all) count = each_run(copy, states, block, [](int64_t, int64_t) {});
    read += count;
    if (count == hi - lo) {
      tokens(copy, lo, hi, copy.vocab, top.data());
    } else {
      for (int64_t b = 0; b < rows; ++b)
        std::fill_n(approx + b * copy.vocab + lo, hi - lo, -__builtin_inff());
      each_run(copy, states, block, [&](int64_t from, int64_t to) {
        tokens(without_prefetch, from, to, to, top.data());
      });
    }
    for (int64_t b = 0; b < rows; ++b) block_max[b * blocks + block] = top[static_cast<size_t>(b)];
  });
  return read;
}

int64_t products(const ScreenCopy& copy, const ScreenStates& states, float* approx,
                 float* block_max, int threads) {
  const auto run = copy.whole ? products_of<Whole> : products_of<Nibbles>;
  return run(copy, states, approx, block_max, threads);
}

void refine(const ScreenCopy& low, const ScreenStates& states, const ScreenBounds& bounds,
            const int64_t* rows, const int64_t* ids, int64_t n, double* out, double* radius,
            int threads) {
  std::vector<double> sums(static_cast<size_t>(states.rows));
  double* centres = sums.data();
  for (int64_t b = 0; b < states.rows && low.nibbles; ++b)
    centres[b] = 7.5 * sum_of(states.main + b * low.width, low.width);
  // Not used, and not to be prepared, where there are no low nibbles.
  const Operand<Nibbles> main(states.main, low.nibbles ? states.rows : 0, low.width);
  constexpr int64_t kPairs = 256;
  parallel_for((n + kPairs - 1) / kPairs, threads, [&](int64_t piece) {
    for (int64_t i = piece * kPairs; i < std::min(n, (piece + 1) * kPairs); ++i) {
      const int64_t b = rows[i], v = ids[i];
      const double first = bounds.approx[b * low.vocab + v];
      double both = first;
      int32_t sum[1][1];
      if (low.nibbles) {
        // Prefetch the row after the next: the hardware cannot predict it.
        if (i + 2 < n)
          for (int64_t line = 0; line < low.width / 2; line += 64)
            __builtin_prefetch(low.nibbles + ids[i + 2] * (low.width / 2) + line, 0, 0);
        dot<Nibbles, 1, 1>(low.nibbles + v * (low.width / 2), 0, main, b, 0, sum);
        both += low.scales[v] * states.scales[b] * (sum[0][0] - centres[b]);
      }
      const double slack = first < -3.4e38 ? 0.0 : (std::fabs(first) + std::fabs(both)) * 0x1p-22;
      out[i] = both;
      radius[i] =
          bounds.e[b] * bounds.token_e[v] + bounds.n[b] * bounds.token_n[v] + slack + 0x1p-120;
    }
  });
}

// Keeps a NaN. A masked token, at -inf, has no slack.
inline bool out_of_reach(float a, double e, float entry_e, double n, float entry_n, double limit) {
  const double x = a, slack = a == -__builtin_inff() ? 0.0 : std::fabs(x) * 0x1p-22;
  return x + e * entry_e + n * entry_n + slack + 0x1p-120 < limit;
}

// The tokens of a block that stay, into `kept`; how many. Never inlined: `count` and `fill` must
// agree to the last bit.
__attribute__((noinline)) int32_t keep(const ScreenBounds& s, int64_t b, int64_t block,
                                       int64_t* kept) {
  const int64_t blocks = screen_blocks(s.vocab);
  const double e = s.e[b], n = s.n[b], limit = s.limits[b];
  // x + |x| / 2^22 grows with x: the largest of each bounds all.
  const float top = s.block_max[b * blocks + block];
  if (out_of_reach(top, e, s.block_e[block], n, s.block_n[block], limit)) return 0;
  int32_t found = 0;
  const int64_t lo = block * kScreenBlock, hi = std::min(s.vocab, lo + kScreenBlock);
  const float* approx = s.approx + b * s.vocab;
  for (int64_t v = lo; v < hi; ++v) {
    kept[found] = v;  // overwritten unless v stays: no branch to be guessed
    found += !out_of_reach(approx[v], e, s.token_e[v], n, s.token_n[v], limit);
  }
  return found;
}

// body(row, block) for all, many blocks at a time.
template <class Body>
void each_block(const ScreenBounds& s, int threads, const Body& body) {
  // Enough work for a thread: most blocks are skipped by one comparison.
  constexpr int64_t kTogether = 128;
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

lmhead::ScreenDecided decide_one(const ScreenBounds& bounds, const lmhead::ScreenExact& exact,
                                 int64_t k, int64_t most, double* values, int64_t* ids,
                                 int threads) {
  return decide(bounds, exact, k, most, values, ids, threads, [&](double limit) {
    ScreenBounds with = bounds;
    with.limits = &limit;
    const int64_t blocks = screen_blocks(bounds.vocab);
    std::vector<int32_t> counts(static_cast<size_t>(blocks));
    count(with, counts.data(), threads);
    std::vector<int64_t> starts(static_cast<size_t>(blocks));
    int64_t total = 0;
    for (int64_t i = 0; i < blocks; ++i) {
      starts[static_cast<size_t>(i)] = total;
      total += counts[static_cast<size_t>(i)];
    }
    std::vector<int64_t> tokens(static_cast<size_t>(total));
    fill(with, counts.data(), starts.data(), tokens.data(), threads);
    return tokens;
  });
}

}  // namespace
}  // namespace LMHEAD_ISA

namespace lmhead {

extern const ScreenKernels LMHEAD_SCREEN;
const ScreenKernels LMHEAD_SCREEN = {
    LMHEAD_ISA::prepare, LMHEAD_ISA::products, LMHEAD_ISA::refine,     LMHEAD_ISA::count,
    LMHEAD_ISA::fill,    LMHEAD_ISA::best,     LMHEAD_ISA::decide_one,
};

}  // namespace lmhead
