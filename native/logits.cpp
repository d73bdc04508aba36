// One instruction set's products of hidden states with the weight in float64; compiled as
// kernels.cpp is.
#include <algorithm>
#include <vector>

#include "dot.hpp"
#include "kernels.hpp"
#include "parallel.hpp"

namespace LMHEAD_ISA {
namespace {

using lmhead::Floats;
using lmhead::parallel_for;

// The largest number of hidden states whose sums are held in registers at a time; the type in which
// they are loaded; and how many tokens are multiplied with T of them at a time. Memory is read
// fastest one token after the other, but each state is then loaded once per token.
#if defined(__AVX512F__) || defined(LMHEAD_LANES)
constexpr int kStates = 8;
using State = float;
constexpr int tokens_with(int t) { return t == 8 ? 3 : t == 4 ? 4 : t; }
#elif defined(__AVX2__)
constexpr int kStates = 2;
using State = double;
constexpr int tokens_with(int t) { return t; }
#else
constexpr int kStates = 2;
using State = double;
constexpr int tokens_with(int) { return 1; }
#endif
// Tokens per task of a thread, and per group that several blocks of states are multiplied with
// while it stays in the first-level cache: multiples of the numbers of tokens above.
constexpr int64_t kPiece = 240, kGroup = 12;

// Up to kStates hidden states, eight entries of each in turn. Zeros pad the entries, and the
// number of states to a power of two.
struct Eight {
  alignas(kDotLanes * sizeof(State)) State entries[kDotLanes];
};

struct Block {
  std::vector<Eight> data;
  int64_t first;  // of the states
  int n, padded;  // how many, without and with zeros
};

Block pack(const float* hidden, int64_t first, int64_t rows, int64_t d) {
  Block block{{}, first, static_cast<int>(std::min<int64_t>(kStates, rows - first)), 1};
  while (block.padded < block.n) block.padded *= 2;
  const int64_t steps = (d + kDotLanes - 1) / kDotLanes;
  block.data.resize(static_cast<size_t>(steps * block.padded));
  for (int t = 0; t < block.n; ++t)
    for (int64_t i = 0; i < d; ++i)
      block.data[static_cast<size_t>(i / kDotLanes * block.padded + t)].entries[i % kDotLanes] =
          hidden[(first + t) * d + i];
  return block;
}

// The products of R tokens, which follow each other, with T states.
template <int R, int T, class W>
void tile(const W* weight, int64_t d, const Eight* states, double (*out)[T]) {
  DotLanes sums[R][T];
  // The hardware does not prefetch several streams at a time, one per token: prefetch the
  // next tile, in the order of its bytes.
  const char* next = reinterpret_cast<const char*>(weight + R * d);
  constexpr int64_t kStep = R * kDotLanes * sizeof(W);
  int64_t j = 0;
  for (; j + kDotLanes <= d; j += kDotLanes, states += T) {
    if constexpr (R > 1) {
      const int64_t at = j / kDotLanes * kStep;
      for (int64_t line = (at + 63) / 64 * 64; line < at + kStep; line += 64)
        __builtin_prefetch(next + line);
    }
#pragma GCC unroll 4
    for (int k = 0; k < kDotVectors; ++k) {
      vd tokens[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) tokens[r] = load_half(weight + r * d + j + k * kHalf);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const vd state = load_half(states[t].entries + k * kHalf);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][t].part[k] += tokens[r] * state;
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) {
      if (j < d) sums[r][t].add(states[t].entries, weight + r * d + j, d - j);
      out[r][t] = sums[r][t].total();
    }
}

// R tokens from v on with one block of states.
template <int R, int T, class W>
void put_tile(const W* weight, int64_t d, const Block& block, int64_t v, int64_t vocab,
              double* out) {
  double z[R][T];
  tile<R, T>(weight + v * d, d, block.data.data(), z);
  for (int t = 0; t < block.n; ++t)
    for (int r = 0; r < R; ++r) out[(block.first + t) * vocab + v + r] = z[r][t];
}

// Tokens [lo, hi) with one block of states.
template <int T, class W>
void strip(const W* weight, int64_t d, const Block& block, int64_t lo, int64_t hi, int64_t vocab,
           double* out) {
  if constexpr (T > 1)
    if (block.padded < T) return strip<T / 2>(weight, d, block, lo, hi, vocab, out);
  constexpr int R = tokens_with(T);
  int64_t v = lo;
  for (; v + R <= hi; v += R) put_tile<R, T>(weight, d, block, v, vocab, out);
  for (; v < hi; ++v) put_tile<1, T>(weight, d, block, v, vocab, out);
}

template <class W>
void products(const float* hidden, int64_t rows, const W* weight, int64_t vocab, int64_t d,
              double* out, int threads) {
  std::vector<Block> blocks;
  for (int64_t first = 0; first < rows; first += kStates)
    blocks.push_back(pack(hidden, first, rows, d));
  const int64_t group = blocks.size() == 1 ? kPiece : kGroup;
  parallel_for((vocab + kPiece - 1) / kPiece, threads, [&](int64_t piece) {
    const int64_t end = std::min(vocab, (piece + 1) * kPiece);
    for (int64_t lo = piece * kPiece; lo < end; lo += group)
      for (const Block& block : blocks)
        strip<kStates>(weight, d, block, lo, std::min(end, lo + group), vocab, out);
  });
}

}  // namespace

void row_logits(const float* hidden, int64_t rows, const Floats& weight, int64_t vocab, int64_t d,
                double* out, int threads) {
  lmhead::with_type(weight, [&](auto* w) { products(hidden, rows, w, vocab, d, out, threads); });
}

}  // namespace LMHEAD_ISA
