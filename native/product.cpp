// One instruction set's product of two matrices in float32; compiled as kernels.cpp is.
//
// The blocked algorithm of Goto and van de Geijn. A block of b that fits the second-level cache is
// copied in strips of kColumns; kRows rows of a at a time are copied too, and run over all strips
// with their sums in registers. So every read of the innermost loop is contiguous.
//
// With `ids`, rows ids[0], ids[1], ... of a as it is stored are used, without a copy of them: with
// the same rows of b if a is transposed, else for the same rows of the result.
//
// An entry adds its products in the order of the inner index, in equal parts of at most kDepth, and
// then these parts: it is the same to the last bit on any number of threads.
#include "kernels.hpp"
#include "parallel.hpp"
#include "product_parts.hpp"
#include "simd.hpp"

namespace LMHEAD_ISA {
namespace {

using lmhead::parallel_for;
using lmhead::parts::Buffer, lmhead::parts::Part, lmhead::parts::Stored, lmhead::parts::split;

// kRows x 2 sums, 2 vectors of b and one of a must fit the registers.
#if defined(__AVX512F__) || (defined(LMHEAD_LANES) && LMHEAD_LANES == 16)
constexpr int kRows = 14;
#elif defined(__AVX2__)
constexpr int kRows = 6;
#else
constexpr int kRows = 4;
#endif
constexpr int kColumns = 2 * kLanes;
constexpr int64_t kDepth = 320;    // at most
constexpr int64_t kShallow = 256;  // more columns are copied at once only while it is this deep
// Copied rows of a are this far apart: not a power of two, which would map them to the same lines
// of the first-level cache.
constexpr int64_t kStride = kDepth + 16;
// Copied columns of a: kRows of them fit one vector.
static_assert(kRows <= kLanes || kLanes == 4);
constexpr int kPanel = (kRows + kLanes - 1) / kLanes * kLanes;

// Floats of b that are copied at once: six sevenths of the second-level cache.
int64_t block_size() { return lmhead::parts::second_level_cache() * 6 / 7 / 4; }

// Strips (depth, kColumns) of b (depth, columns) from row k and column j on, zeros beyond its last
// column.
void copy_b(const Stored& b, int64_t first, int64_t column, int64_t depth, int64_t columns,
            float* to) {
  for (int64_t j = 0; j < columns; j += kColumns) {
    const int64_t n = std::min<int64_t>(kColumns, columns - j);
    for (int64_t k = 0; k < depth; ++k, to += kColumns) {
      const float* from = b.row(first + k) + column + j;
      if (n == kColumns) {
        store(to, load(from));
        store(to + kLanes, load(from + kLanes));
      } else {
        std::fill(std::copy(from, from + n, to), to + kColumns, 0.0f);
      }
    }
  }
}

// Rows of a, kStride apart; or its columns, kPanel apart, if a is transposed. What the next call
// copies is prefetched: a comes from memory, in pieces too short for the hardware to foresee.
template <bool Transposed>
void copy_a(const Stored& a, int64_t k0, int64_t depth, int64_t row, int64_t rows, int64_t m,
            float* to) {
  if constexpr (Transposed) {
    // Whole vectors where they lie within the row of a: what is beyond `rows` is not used.
    const bool whole = rows == kRows && row + kPanel <= a.stride;
    for (int64_t k = 0; k < depth; ++k, to += kPanel) {
      const float* from = a.row(k0 + k) + row;
      __builtin_prefetch(from + kRows + kPanel - 1, 0, 2);
      if (whole)
        for (int i = 0; i < kPanel; i += kLanes) store(to + i, load(from + i));
      else
        std::copy(from, from + rows, to);
    }
  } else {
    for (int64_t i = 0; i < rows; ++i) {
      const float* from = a.row(row + i) + k0;
      if (row + i + kRows < m) {
        const float* next = a.row(row + i + kRows) + k0;
        for (int64_t k = 0; k < depth; k += 16) __builtin_prefetch(next + k, 0, 2);
      }
      std::copy(from, from + depth, to + i * kStride);
    }
  }
}

// R rows of a with one strip of b: (R, columns) of the result, from `column` on in its rows.
template <int R, bool Transposed>
void micro(const float* a, const float* b, int64_t depth, float* const* out, int64_t column,
           int64_t columns, bool add) {
  constexpr int64_t kRow = Transposed ? 1 : kStride, kStep = Transposed ? kPanel : 1;
  vf sums[R][2] = {};
#pragma GCC unroll 14
  for (int i = 0; i < R; ++i) {
    __builtin_prefetch(out[i] + column, 1);
    __builtin_prefetch(out[i] + column + kLanes, 1);
  }
  for (int64_t k = 0; k < depth; ++k, a += kStep, b += kColumns) {
    const vf low = load(b), high = load(b + kLanes);
#pragma GCC unroll 14
    for (int i = 0; i < R; ++i) {
      const vf x = splat(a[i * kRow]);
      sums[i][0] += x * low;
      sums[i][1] += x * high;
    }
  }
  if (columns == kColumns) {
#pragma GCC unroll 14
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        float* to = out[i] + column + half * kLanes;
        store(to, add ? load(to) + sums[i][half] : sums[i][half]);
      }
    return;
  }
  float rest[R][kColumns];
  std::memcpy(rest, sums, sizeof rest);
  for (int i = 0; i < R; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      float& to = out[i][column + j];
      to = add ? to + rest[i][j] : rest[i][j];
    }
}

template <int R, bool Transposed>
void micro_of(int64_t rows, const float* a, const float* b, int64_t depth, float* const* out,
              int64_t column, int64_t columns, bool add) {
  if constexpr (R > 1)
    if (rows < R) return micro_of<R - 1, Transposed>(rows, a, b, depth, out, column, columns, add);
  micro<R, Transposed>(a, b, depth, out, column, columns, add);
}

// One part of the result.
template <bool Transposed>
void multiply(const Stored& a, const Stored& b, float* out, int64_t m, int64_t n, int64_t inner,
              const Part& part, bool add) {
  // Few blocks, since each copies all rows of a, and of equal size: none has a few columns only.
  const int64_t strips = (part.columns + kColumns - 1) / kColumns * kColumns;
  const int64_t blocks = (strips * kShallow + block_size() - 1) / block_size();
  const int64_t step = split(strips, blocks, kColumns).step;
  const int64_t deepest = std::clamp<int64_t>(block_size() / step, 1, kDepth);
  const int64_t most = split(inner, (inner + deepest - 1) / deepest, 1).step;
  const Buffer strip(most * step), panel(std::max(kRows * kStride, most * kPanel));
  for (int64_t j = 0; j < part.columns; j += step)
    for (int64_t k = 0; k < inner; k += most) {
      const int64_t columns = std::min(step, part.columns - j), column = part.column + j;
      const int64_t depth = std::min(most, inner - k);
      copy_b(b, k, column, depth, columns, strip.get());
      for (int64_t i = 0; i < part.rows; i += kRows) {
        const int64_t rows = std::min<int64_t>(kRows, part.rows - i), row = part.row + i;
        copy_a<Transposed>(a, k, depth, row, rows, m, panel.get());
        float* to[kRows];
        for (int64_t r = 0; r < rows; ++r)
          to[r] = out + (a.ids && !Transposed ? a.ids[row + r] : row + r) * n;
        for (int64_t s = 0; s < columns; s += kColumns)
          micro_of<kRows, Transposed>(rows, panel.get(), strip.get() + s * depth, depth, to,
                                      column + s, std::min<int64_t>(kColumns, columns - s),
                                      add || k > 0);
      }
    }
}

}  // namespace

void product(const float* a, bool transposed, const float* b, float* out, int64_t m, int64_t n,
             int64_t inner, bool add, const int64_t* ids, int threads) {
  if (m == 0 || n == 0) return;
  if (inner == 0) {
    for (int64_t i = 0; i < m && !add; ++i)
      std::fill_n(out + (ids && !transposed ? ids[i] : i) * n, n, 0.0f);
    return;
  }
  const Stored stored_a{a, transposed ? m : inner, ids}, stored_b{b, n, transposed ? ids : nullptr};
  const lmhead::parts::Grid grid(m, n, threads, kRows, kColumns);
  parallel_for(grid.size(), threads, [&](int64_t task) {
    const Part part = grid.part(task, m, n);
    if (transposed)
      multiply<true>(stored_a, stored_b, out, m, n, inner, part, add);
    else
      multiply<false>(stored_a, stored_b, out, m, n, inner, part, add);
  });
}

}  // namespace LMHEAD_ISA
