// The product of two float32 matrices on the tile unit of a processor (AMX), which multiplies
// bfloat16 numbers and sums in float32, sixteen times as many per cycle as AVX-512 does in float32.
//
// A float32 number is the sum of three bfloat16 numbers of decreasing size, to the last bit:
// x = x0 + x1 + x2. Six of the nine products of their parts are added; the three left out are
// below 2^-25 of x · y, less than one rounding of float32. Numbers the unit cannot take (NaN,
// infinity, next to the largest number, or so small that their parts would be subnormal, which it
// reads as 0) are found while the parts are copied; those rows and columns are multiplied with
// vectors. Where all numbers of a or of b are bfloat16 numbers, as converted weights are, the
// products with their other parts, which are 0, are left out: three products, or one.
//
// An entry adds its products in the order of the inner index, kStep at a time, in equal parts of at
// most kDepth, and then these parts: it is the same to the last bit on any number of threads.
#include <immintrin.h>

#include <cstring>

#include "kernels.hpp"
#include "parallel.hpp"
#include "product_parts.hpp"

#if defined(__linux__)
#include <sys/syscall.h>
#endif

namespace lmhead {
namespace {

using parts::Buffer, parts::Part, parts::Stored;

constexpr int kTile = 16;         // rows of a tile; each has 64 bytes
constexpr int kSide = 2 * kTile;  // rows and columns of the result in registers: 4 tiles
constexpr int64_t kStep = 32;     // inner index of one tile of a, or of b
constexpr int kParts = 3;         // of a float32 number
constexpr int64_t kTileBytes = kTile * 64;
constexpr int64_t kStepBytes =
    kParts * 2 * kTileBytes;     // a step of kSide rows of a, or columns of b
constexpr int64_t kDepth = 640;  // inner index of one block of b, at most

// Bits of |x|: from 2^126 on a part may be infinite; a row below 2^-100 would lose parts.
constexpr uint32_t kLargest = (126 + 127) << 23, kSmallest = (127 - 100) << 23;

// What the numbers of a row, or of a column per lane, have in common.
struct Seen {
  __m512i largest = _mm512_setzero_si512(), bits = _mm512_setzero_si512();

  void add(__m512 x) {
    const __m512i i = _mm512_castps_si512(x);
    largest = _mm512_max_epu32(largest, _mm512_and_si512(i, _mm512_set1_epi32(0x7fffffff)));
    bits = _mm512_or_si512(bits, i);
  }
  // Whether the numbers can be split; each lane is a column.
  bool columns_fit() const {
    const auto large = _mm512_cmpge_epu32_mask(largest, _mm512_set1_epi32(kLargest));
    const auto small = _mm512_cmplt_epu32_mask(largest, _mm512_set1_epi32(kSmallest));
    return !large && !(small & _mm512_test_epi32_mask(largest, largest));
  }
  bool row_fits() const {
    const uint32_t most = _mm512_reduce_max_epu32(largest);
    return most < kLargest && (most >= kSmallest || most == 0);
  }
  bool has_parts() const { return _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0xffff)); }
};

// Whether copied numbers can be split, and have more than one part.
struct Copied {
  bool fit = true, parts = false;
  void add(const Seen& seen, bool fits) {
    fit = fit && fits;
    parts = parts || seen.has_parts();
  }
};

// The nearest number with the leading 8 bits of x. The last part has no more bits than that.
inline __m512 leading(__m512 x) {
  const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  return _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(~0xffff)));
}

// Write the parts of 16 pairs (first[i], second[i]), kSide rows' tiles apart.
inline void write_parts(__m512 first, __m512 second, char* to) {
  for (int part = 0; part < kParts; ++part, to += 2 * kTileBytes) {
    const bool last = part == kParts - 1;
    const __m512 x = last ? first : leading(first), y = last ? second : leading(second);
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(x), 16);
    _mm512_store_si512(to, _mm512_or_si512(low, _mm512_castps_si512(y)));
    first = _mm512_sub_ps(first, x), second = _mm512_sub_ps(second, y);
  }
}

// The first n of 16 floats; zeros for the others.
inline __m512 load(const float* from, int64_t n) {
  if (n >= kTile) return _mm512_loadu_ps(from);
  return n <= 0 ? _mm512_setzero_ps()
                : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), from);
}

inline void store(float* to, __m512 x, int64_t n) {
  if (n >= kTile)
    _mm512_storeu_ps(to, x);
  else
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << n) - 1), x);
}

// Columns of b in strips of kSide, each (depth, kSide): inner index k is paired with k + 16, as in
// a.
Copied copy_b(const Stored& b, int64_t first, int64_t depth, int64_t column, int64_t columns,
              char* to) {
  Copied copied;
  for (int64_t j = 0; j < columns; j += kSide) {
    Seen seen[2];
    for (int64_t k = 0; k < depth; k += kStep, to += kStepBytes)
      for (int64_t row = 0; row < kTile; ++row)
        for (int half = 0; half < 2; ++half) {
          const int64_t at = j + half * kTile, n = columns - at;
          __m512 pair[2];
          for (int i = 0; i < 2; ++i) {
            const int64_t inner = k + row + i * kTile;
            if (inner < depth) {
              const float* from = b.row(first + inner) + column + at;
              pair[i] = load(from, n);
              __builtin_prefetch(from + kSide);  // of the next strip
            } else {
              pair[i] = _mm512_setzero_ps();
            }
            seen[half].add(pair[i]);
          }
          write_parts(pair[0], pair[1], to + half * kTileBytes + row * 64);
        }
    for (const Seen& half : seen) copied.add(half, half.columns_fit());
  }
  return copied;
}

// (16, 16) floats, transposed in registers.
inline void transpose(__m512 (&x)[kTile]) {
  __m512 y[kTile];
  for (int i = 0; i < kTile; i += 2) {
    y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  const auto pd = [](__m512 v) { return _mm512_castps_pd(v); };
  const auto ps = [](__m512d v) { return _mm512_castpd_ps(v); };
  for (int i = 0; i < kTile; i += 4)
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = ps(_mm512_unpacklo_pd(pd(y[i + j]), pd(y[i + j + 2])));
      x[i + 2 * j + 1] = ps(_mm512_unpackhi_pd(pd(y[i + j]), pd(y[i + j + 2])));
    }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      y[i + 8 * j] = _mm512_shuffle_f32x4(x[i + 8 * j], x[i + 8 * j + 4], 0x88);
      y[i + 8 * j + 4] = _mm512_shuffle_f32x4(x[i + 8 * j], x[i + 8 * j + 4], 0xdd);
    }
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_shuffle_f32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_f32x4(y[i], y[i + 8], 0xdd);
  }
}

// Copies kSide rows of a, zeros beyond the last, a few units at a time: the tile unit multiplies
// meanwhile.
class PanelCopier {
 public:
  PanelCopier() = default;
  PanelCopier(const Stored& a, bool transposed, int64_t first, int64_t depth, int64_t row,
              int64_t rows, char* to)
      : a_(a),
        transposed_(transposed),
        first_(first),
        depth_(depth),
        row_(row),
        rows_(rows),
        steps_((depth + kStep - 1) / kStep),
        to_(to),
        units_(steps_ * (transposed ? 2 : kSide)) {}

  int64_t units() const { return units_; }

  void copy(int64_t units) {
    const int64_t end = std::min(next_ + units, units_);
    for (; next_ < end; ++next_) {
      const int64_t line = next_ / steps_, k = next_ % steps_ * kStep;
      char* step = to_ + next_ % steps_ * kStepBytes;
      if (transposed_)
        copy_columns(line * kTile, k, step);
      else
        copy_row(line, k, step);
    }
  }

  // Copies the rest.
  Copied finish() {
    copy(units_);
    return copied_;
  }

 private:
  void copy_row(int64_t i, int64_t k, char* step) {
    const bool inside = i < rows_;
    const float* from = inside ? a_.row(row_ + i) + first_ + k : nullptr;
    const __m512 x = load(from, inside ? depth_ - k : 0);
    const __m512 y = load(from + kTile, inside ? depth_ - k - kTile : 0);
    seen_.add(x), seen_.add(y);
    write_parts(x, y, step + i / kTile * kTileBytes + i % kTile * 64);
    if (k + kStep >= depth_) end(seen_.row_fits());
  }

  void copy_columns(int64_t i, int64_t k, char* step) {
    __m512 x[2][kTile];
    for (int half = 0; half < 2; ++half) {
      for (int64_t j = 0; j < kTile; ++j) {
        const int64_t inner = k + half * kTile + j;
        x[half][j] = inner < depth_ ? load(a_.row(first_ + inner) + row_ + i, rows_ - i)
                                    : _mm512_setzero_ps();
        seen_.add(x[half][j]);
      }
      transpose(x[half]);
    }
    for (int64_t j = 0; j < kTile; ++j)
      write_parts(x[0][j], x[1][j], step + i / kTile * kTileBytes + j * 64);
    if (k + kStep >= depth_) end(seen_.columns_fit());
  }

  void end(bool fits) {
    copied_.add(seen_, fits);
    seen_ = {};
  }

  Stored a_{};
  bool transposed_ = false;
  int64_t first_ = 0, depth_ = 0, row_ = 0, rows_ = 0, steps_ = 0;
  char* to_ = nullptr;
  int64_t units_ = 0, next_ = 0;
  Seen seen_;
  Copied copied_;
};

// Fetches what a PanelCopier will copy from a transposed a: two lines of the cache from each of its
// rows, which no hardware foresees.
class PanelFetcher {
 public:
  PanelFetcher() = default;
  PanelFetcher(const Stored& a, int64_t first, int64_t depth, int64_t column)
      : a_(a), next_(first), end_(first + depth), column_(column) {}

  int64_t left() const { return end_ - next_; }

  void fetch(int64_t rows) {
    for (const int64_t end = std::min(next_ + rows, end_); next_ < end; ++next_) {
      __builtin_prefetch(a_.row(next_) + column_, 0, 2);
      __builtin_prefetch(a_.row(next_) + column_ + kTile, 0, 2);
    }
  }

 private:
  Stored a_{};
  int64_t next_ = 0, end_ = 0, column_ = 0;
};

// Tile registers: 0 to 3 are sums, 4 and 5 of a, 6 and 7 of b.
inline void load_a(const char* step, int part) {
  _tile_loadd(4, step + part * 2 * kTileBytes, 64);
  _tile_loadd(5, step + part * 2 * kTileBytes + kTileBytes, 64);
}

inline void load_b(const char* step, int part) {
  _tile_loadd(6, step + part * 2 * kTileBytes, 64);
  _tile_loadd(7, step + part * 2 * kTileBytes + kTileBytes, 64);
}

inline void multiply_tiles() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Work that is done during the products of a square: in each step `units` of the next rows of a are
// copied and `rows` of those after them are fetched, and the next square of the result.
struct Beside {
  PanelCopier& copier;
  PanelFetcher& fetcher;
  int64_t units, rows;
  const float* next;
};

// (kSide, kSide) of the result, `stride` floats between its rows. Without AParts, all but the first
// part of a is 0.
template <bool AParts, bool BParts>
void micro(const char* a, const char* b, int64_t steps, float* out, int64_t stride,
           const Beside& beside) {
  const int64_t bytes = stride * 4;
  float* const below = out + kTile * stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  // Each pair of parts once, with as few loads as there are changes from one pair to the next.
  const float* next = beside.next;
  for (int64_t step = 0; step < steps; ++step, a += kStepBytes, b += kStepBytes) {
    load_a(a, 0);
    if constexpr (BParts) {
      load_b(b, 2);
      multiply_tiles();
      load_b(b, 1);
      multiply_tiles();
    }
    beside.copier.copy(beside.units);
    beside.fetcher.fetch(beside.rows);
    if constexpr (AParts && BParts) {
      load_a(a, 1);
      multiply_tiles();
    }
    load_b(b, 0);
    multiply_tiles();
    if constexpr (AParts) {
      load_a(a, 2);
      multiply_tiles();
      load_a(a, BParts ? 0 : 1);
      multiply_tiles();
    }
    if (next && step < kSide / 2)
      for (int row = 0; row < 2; ++row, next += stride) {
        __builtin_prefetch(next, 1);
        __builtin_prefetch(next + kTile, 1);
      }
  }
  asm volatile("" ::: "memory");
  _tile_stored(0, out, bytes);
  _tile_stored(1, out + kTile, bytes);
  _tile_stored(2, below, bytes);
  _tile_stored(3, below + kTile, bytes);
}

struct Problem {
  Stored a, b;
  bool transposed;
  float* out;
  int64_t m, n, inner;
  bool add;

  float* row(int64_t i) const { return out + (a.ids && !transposed ? a.ids[i] : i) * n; }
  float left(int64_t i, int64_t k) const { return transposed ? a.row(k)[i] : a.row(i)[k]; }
};

// A part of the result by vectors, for numbers that cannot be split.
void multiply_by_vectors(const Problem& p, const Part& part, int64_t first, int64_t depth,
                         bool add) {
  for (int64_t i = part.row; i < part.row + part.rows; ++i)
    for (int64_t j = 0; j < part.columns; j += 4 * kTile) {
      __m512 sums[4];
      float* to = p.row(i) + part.column + j;
      const int64_t n = part.columns - j;
      for (int v = 0; v < 4; ++v)
        sums[v] = add ? load(to + v * kTile, n - v * kTile) : _mm512_setzero_ps();
      for (int64_t k = first; k < first + depth; ++k) {
        const float* from = p.b.row(k) + part.column + j;
        const __m512 x = _mm512_set1_ps(p.left(i, k));
        for (int v = 0; v < 4; ++v)
          sums[v] = _mm512_fmadd_ps(x, load(from + v * kTile, n - v * kTile), sums[v]);
      }
      for (int v = 0; v < 4 && n > v * kTile; ++v) store(to + v * kTile, sums[v], n - v * kTile);
    }
}

// The sums of kSide rows and a block of columns: straight into the result where nothing is added to
// it, its rows follow each other and the part is whole, else via `square`. Copies the next rows
// meanwhile.
void multiply_panel(const Problem& p, const Part& part, const char* a, bool a_parts, const char* b,
                    bool b_parts, int64_t depth, bool add, float* square, PanelCopier& copier,
                    PanelFetcher& fetcher) {
  const auto multiply_square = a_parts   ? b_parts ? micro<true, true> : micro<true, false>
                               : b_parts ? micro<false, true>
                                         : micro<false, false>;
  const int64_t steps = (depth + kStep - 1) / kStep;
  const bool scattered = part.rows < kSide || (p.a.ids && !p.transposed);
  const int64_t strips = (part.columns + kSide - 1) / kSide;
  const int64_t units = (copier.units() + strips * steps - 1) / (strips * steps);
  const int64_t rows = (fetcher.left() + strips * steps - 1) / (strips * steps);
  for (int64_t strip = 0; strip < strips; ++strip, b += steps * kStepBytes) {
    const int64_t j = part.column + strip * kSide;
    const int64_t columns = std::min<int64_t>(kSide, part.column + part.columns - j);
    if (!scattered && !add && columns == kSide) {
      const bool last = strip == strips - 1;
      float* to = p.row(part.row) + j;
      multiply_square(a, b, steps, to, p.n,
                      {copier, fetcher, units, rows, last ? nullptr : to + kSide});
      continue;
    }
    for (int64_t i = 0; i < part.rows; ++i) {
      __builtin_prefetch(p.row(part.row + i) + j, 1);
      __builtin_prefetch(p.row(part.row + i) + j + kTile, 1);
    }
    multiply_square(a, b, steps, square, kSide, {copier, fetcher, units, rows, nullptr});
    for (int64_t i = 0; i < part.rows; ++i)
      for (int64_t v = 0; v < columns; v += kTile) {
        const __m512 sum = load(square + i * kSide + v, kTile);
        float* to = p.row(part.row + i) + j + v;
        store(to, add ? _mm512_add_ps(load(to, columns - v), sum) : sum, columns - v);
      }
  }
}

// All eight tiles of 16 rows of 64 bytes, for as long as this lives.
class TileConfiguration {
 public:
  TileConfiguration() {
    alignas(64) uint8_t configuration[64] = {1};
    for (int tile = 0; tile < 8; ++tile) {
      configuration[16 + 2 * tile] = 64;
      configuration[48 + tile] = kTile;
    }
    asm volatile("" ::"r"(configuration) : "memory");
    _tile_loadconfig(configuration);
  }
  TileConfiguration(const TileConfiguration&) = delete;
  TileConfiguration& operator=(const TileConfiguration&) = delete;
  ~TileConfiguration() { _tile_release(); }
};

void multiply(const Problem& p, const Part& part) {
  // Blocks of b that fit the second-level cache with the rows of a and of the result: few blocks
  // of columns, each of which copies all of a, where that costs most. The depth, which decides the
  // roundings, is the same for every part.
  const int64_t bytes = parts::second_level_cache() * 5 / 8;
  const int64_t fitting = bytes / (parts::split(p.n, 1, kSide).step * kParts * 2);
  const int64_t deepest = p.transposed ? std::clamp<int64_t>(fitting, 256, kDepth) : kDepth;
  const int64_t depths = (p.inner + deepest - 1) / deepest;
  const int64_t most = parts::split(p.inner, depths, kStep).step;
  const int64_t strip = most / kStep * kStepBytes;
  const int64_t blocks =
      (parts::split(part.columns, 1, kSide).step / kSide * strip + bytes - 1) / bytes;
  const int64_t step = parts::split(part.columns, blocks, kSide).step;
  const Buffer block(step / kSide * strip / 4), panels(2 * strip / 4), square(kSide * kSide);
  char* const b = reinterpret_cast<char*>(block.get());
  char* const a = reinterpret_cast<char*>(panels.get());
  std::fill_n(square.get(), kSide * kSide, 0.0f);
  const TileConfiguration configuration;
  for (int64_t j = 0; j < part.columns; j += step)
    for (int64_t k = 0; k < p.inner; k += most) {
      const int64_t columns = std::min(step, part.columns - j), column = part.column + j;
      const int64_t depth = std::min(most, p.inner - k);
      const bool add = p.add || k > 0;
      const Copied of_b = copy_b(p.b, k, depth, column, columns, b);
      const auto panel_of = [&](int64_t i) { return a + i / kSide % 2 * strip; };
      const auto copier_of = [&](int64_t i) {
        const int64_t rows = std::min<int64_t>(kSide, part.rows - i);
        return rows > 0 && of_b.fit
                   ? PanelCopier(p.a, p.transposed, k, depth, part.row + i, rows, panel_of(i))
                   : PanelCopier();
      };
      const auto fetcher_of = [&](int64_t first, int64_t i) {
        if (i >= part.rows) first += most, i = std::max<int64_t>(0, i - part.rows) / kSide * kSide;
        const int64_t rows = std::min(most, p.inner - first);
        return p.transposed && rows > 0 && i < part.rows
                   ? PanelFetcher(p.a, first, rows, part.row + i)
                   : PanelFetcher();
      };
      PanelCopier copier = copier_of(0);
      for (int64_t i = 0; i < part.rows; i += kSide) {
        const Part some{part.row + i, std::min<int64_t>(kSide, part.rows - i), column, columns};
        const Copied of_a = copier.finish();
        copier = copier_of(i + kSide);
        PanelFetcher fetcher = fetcher_of(k, i + 2 * kSide);
        asm volatile("" ::: "memory");  // the tile loads read what was copied
        if (of_a.fit && of_b.fit)
          multiply_panel(p, some, panel_of(i), of_a.parts, b, of_b.parts, depth, add, square.get(),
                         copier, fetcher);
        else
          multiply_by_vectors(p, some, k, depth, add);
      }
    }
}

}  // namespace

// Fewer products than this per entry have less roundings as they are.
constexpr int64_t kFewest = 32;

void product_amx(const float* a, bool transposed, const float* b, float* out, int64_t m, int64_t n,
                 int64_t inner, bool add, const int64_t* ids, int threads) {
  if (m == 0 || n == 0) return;
  const Problem problem{{a, transposed ? m : inner, ids},
                        {b, n, transposed ? ids : nullptr},
                        transposed,
                        out,
                        m,
                        n,
                        inner,
                        add};
  const parts::Grid grid(m, n, threads, kSide, kSide);
  parallel_for(grid.size(), threads, [&](int64_t task) {
    const Part part = grid.part(task, m, n);
    if (inner < kFewest)
      multiply_by_vectors(problem, part, 0, inner, add);
    else
      multiply(problem, part);
  });
}

// Whether the processor has the tile unit, and the system lets this process use it.
bool has_amx() {
#if defined(__linux__)
  uint32_t eax = 7, ebx, ecx = 0, edx;
  asm volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  const bool tiles = (edx >> 24 & 1) && (edx >> 22 & 1);  // AMX-TILE, AMX-BF16
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace lmhead
