// Part of rows.cpp: rows cut into pieces, and their tokens as doubles.
#pragma once

#include <algorithm>
#include <limits>

#include "parallel.hpp"
#include "simd.hpp"

namespace LMHEAD_ISA {
namespace {

using lmhead::parallel_for;

constexpr float kInf = __builtin_inff();
constexpr double kFar = std::numeric_limits<double>::infinity();
// Tokens per piece of a row. Pieces are added in order, so that neither the number of threads nor
// the batch around a row changes its result.
constexpr int64_t kPiece = 1 << 15;

int64_t pieces(int64_t vocab) { return (vocab + kPiece - 1) / kPiece; }

// body(row, piece, first token, last token) for all pieces of all rows.
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

// kLanes tokens as two vectors of doubles; missing ones are masked.
struct Two {
  vd low, high;
};

Two widen(const float* z, int n) {
  const vf v = n == kLanes ? load(z) : load(z, n, -kInf);
  vf_half low, high;
  std::memcpy(&low, &v, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
  return {to_double(low), to_double(high)};
}

double total(vd v) {
  double sum = 0.0;
  for (int i = 0; i < kHalf; ++i) sum += v[i];
  return sum;
}

}  // namespace
}  // namespace LMHEAD_ISA
