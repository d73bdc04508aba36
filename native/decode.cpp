#include "decode.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>

#include "dot.hpp"
#include "parallel.hpp"

namespace LMHEAD_ISA {
namespace {

using lmhead::block_bytes;
using lmhead::DecodeCache;
using lmhead::DecodeLayer;
using lmhead::DecodeModel;
using lmhead::kBlockEntries;
using lmhead::Stored;
using lmhead::StoredMatrix;

constexpr int64_t kRows = 4;  // of a matrix side by side, so that no sum waits for its last term
constexpr int kStates = kLanes / kRows;  // vectors that a tile of rows meets: sums fill registers
constexpr int64_t kTask = 64;            // rows of a task of one thread

float half_at(const uint8_t* p) {
  F16 bits;
  std::memcpy(&bits.bits, p, 2);
  return value(bits);
}

float total(vf v) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define LMHEAD_SHUFFLE
#endif
#endif

#if defined(LMHEAD_SHUFFLE)
// s and t are groups of W lanes; of each group, the second half is added to the first.
template <int W, int... I>
vf fold(vf s, vf t, std::integer_sequence<int, I...>) {
  constexpr int kHalfGroup = W / 2;
  return __builtin_shufflevector(s, t, (I / kHalfGroup * W + I % kHalfGroup)...) +
         __builtin_shufflevector(s, t, (I / kHalfGroup * W + I % kHalfGroup + kHalfGroup)...);
}

// Of N vectors of groups of W lanes: those of groups of one lane, one after the other.
template <int W, int N>
void fold_all(vf (&v)[N]) {
  if constexpr (W > 1) {
    constexpr auto kOrder = std::make_integer_sequence<int, kLanes>{};
    constexpr int kLeft = (N + 1) / 2;
    vf folded[kLeft];
    for (int i = 0; i < kLeft; ++i)
      folded[i] = fold<W>(v[2 * i], v[2 * i + 1 < N ? 2 * i + 1 : 2 * i], kOrder);
    fold_all<W / 2>(folded);
    for (int i = 0; i < kLeft; ++i) v[i] = folded[i];
  }
}
#endif

// out[i] = total(sums[i]), in the same order of additions.
template <int N>
void totals(vf (&sums)[N], float* out) {
#if defined(LMHEAD_SHUFFLE)
  if constexpr (N > 1) {
    fold_all<kLanes>(sums);
    std::memcpy(out, sums, N * sizeof(float));
    return;
  }
#endif
  for (int i = 0; i < N; ++i) out[i] = total(sums[i]);
}

#if defined(__AVX512F__) && !defined(LMHEAD_LANES)
#define LMHEAD_TABLES
#endif

// The two halves of a block, 16 entries each, as vectors.
struct Halves {
  static constexpr int kParts = 16 / kLanes;
  vf part[2][kParts];
};

template <Stored kType>
Halves entries(const uint8_t* block) {
  Halves out;
#if defined(LMHEAD_TABLES)
  if constexpr (kType == Stored::q8_0) {
    const __m512 d = _mm512_set1_ps(_cvtsh_ss(*reinterpret_cast<const uint16_t*>(block)));
    for (int half = 0; half < 2; ++half) {
      const auto* at = reinterpret_cast<const __m128i*>(block + 2 + 16 * half);
      out.part[half][0] =
          (vf)_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at))), d);
    }
  } else {
    // The 16 numbers that a code can mean, looked up by the lowest four bits of each lane.
    int32_t both;
    std::memcpy(&both, block, 4);
    const __m128 scales = _mm_cvtph_ps(_mm_cvtsi32_si128(both));
    const __m512 d = _mm512_broadcastss_ps(scales);
    __m512 table;
    if constexpr (kType == Stored::q4_1) {
      const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      table = _mm512_fmadd_ps(d, codes, _mm512_broadcastss_ps(_mm_movehdup_ps(scales)));
    } else {
      const __m512 codes = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
      table = _mm512_mul_ps(d, codes);
    }
    const uint8_t* from = block + (kType == Stored::q4_1 ? 4 : 2);
    const __m512i codes =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    out.part[0][0] = (vf)_mm512_permutexvar_ps(codes, table);
    out.part[1][0] = (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), table);
  }
#else
  float numbers[kBlockEntries];
  const float d = half_at(block);
  if constexpr (kType == Stored::q8_0) {
    for (int i = 0; i < 32; ++i)
      numbers[i] = d * static_cast<float>(static_cast<int8_t>(block[2 + i]));
  } else {
    const float m = kType == Stored::q4_1 ? half_at(block + 2) : 0.0f;
    const int less = kType == Stored::q4_1 ? 0 : 8;
    const uint8_t* from = block + (kType == Stored::q4_1 ? 4 : 2);
    for (int i = 0; i < 16; ++i) {
      numbers[i] = d * static_cast<float>((from[i] & 15) - less) + m;
      numbers[16 + i] = d * static_cast<float>((from[i] >> 4) - less) + m;
    }
  }
  for (int half = 0; half < 2; ++half)
    for (int k = 0; k < Halves::kParts; ++k)
      out.part[half][k] = load(numbers + 16 * half + k * kLanes);
#endif
  return out;
}

// N rows of blocks times x.
template <Stored kType, int N>
void block_dots(const uint8_t* rows, int64_t columns, const float* x, float* out) {
  constexpr int64_t kBytes = block_bytes(kType);
  const int64_t blocks = columns / kBlockEntries, stride = blocks * kBytes;
  vf sums[N] = {};
  for (int64_t b = 0; b < blocks; ++b)
    for (int r = 0; r < N; ++r) {
      const Halves w = entries<kType>(rows + r * stride + b * kBytes);
      for (int half = 0; half < 2; ++half)
        for (int k = 0; k < Halves::kParts; ++k)
          sums[r] += w.part[half][k] * load(x + b * kBlockEntries + 16 * half + k * kLanes);
    }
  totals(sums, out);
}

template <int N>
void float_dots(const float* rows, int64_t columns, const float* x, float* out) {
  vf sums[N] = {};
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) {
    const vf entries = load(x + i);
    for (int r = 0; r < N; ++r) sums[r] += load(rows + r * columns + i) * entries;
  }
  if (i < columns) {
    const int left = static_cast<int>(columns - i);
    const vf entries = load(x + i, left, 0.0f);
    for (int r = 0; r < N; ++r) sums[r] += load(rows + r * columns + i, left, 0.0f) * entries;
  }
  totals(sums, out);
}

const uint8_t* blocks_of(const StoredMatrix& m, int64_t row) {
  return static_cast<const uint8_t*>(m.data) +
         row * (m.columns / kBlockEntries) * block_bytes(m.type);
}

// N rows from `row` on times one vector x.
template <int N>
void some_rows(const StoredMatrix& m, int64_t row, const float* x, float* out) {
  if (m.type == Stored::f32)
    return float_dots<N>(static_cast<const float*>(m.data) + row * m.columns, m.columns, x, out);
  const uint8_t* at = blocks_of(m, row);
  if (m.type == Stored::q4_0) return block_dots<Stored::q4_0, N>(at, m.columns, x, out);
  if (m.type == Stored::q4_1) return block_dots<Stored::q4_1, N>(at, m.columns, x, out);
  return block_dots<Stored::q8_0, N>(at, m.columns, x, out);
}

template <Stored kType>
void dequantize_blocks(const uint8_t* row, int64_t columns, float* out) {
  for (int64_t b = 0; b < columns / kBlockEntries; ++b) {
    const Halves w = entries<kType>(row + b * block_bytes(kType));
    std::memcpy(out + b * kBlockEntries, w.part, sizeof w.part);
  }
}

void dequantize_row(const StoredMatrix& m, int64_t row, float* out) {
  if (m.type == Stored::f32) {
    std::copy_n(static_cast<const float*>(m.data) + row * m.columns, m.columns, out);
    return;
  }
  const uint8_t* at = blocks_of(m, row);
  if (m.type == Stored::q4_0) dequantize_blocks<Stored::q4_0>(at, m.columns, out);
  if (m.type == Stored::q4_1) dequantize_blocks<Stored::q4_1>(at, m.columns, out);
  if (m.type == Stored::q8_0) dequantize_blocks<Stored::q8_0>(at, m.columns, out);
}

// R rows times kStates vectors x: out[state * stride + row].
template <int R>
void float_tile(const float* rows, int64_t columns, const float* x, float* out, int64_t stride) {
  vf sums[kStates * R] = {};
  const auto add = [&](int64_t i, auto... left) {
    vf w[R];
    for (int r = 0; r < R; ++r) w[r] = load(rows + r * columns + i, left...);
    for (int t = 0; t < kStates; ++t) {
      const vf entries = load(x + t * columns + i, left...);
      for (int r = 0; r < R; ++r) sums[t * R + r] += w[r] * entries;
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) add(i);
  if (i < columns) add(i, static_cast<int>(columns - i), 0.0f);
  float found[kStates * R];
  totals(sums, found);
  for (int t = 0; t < kStates; ++t) std::copy_n(found + t * R, R, out + t * stride);
}

// N rows from `row` on times `count` vectors x; entries: room for the rows as floats.
template <int N>
void some_rows(const StoredMatrix& m, int64_t row, const float* x, int64_t count, float* out,
               float* entries) {
  if (count == 1) return some_rows<N>(m, row, x, out);
  const auto* floats = static_cast<const float*>(m.data) + row * m.columns;
  if (m.type != Stored::f32) {
    for (int r = 0; r < N; ++r) dequantize_row(m, row + r, entries + r * m.columns);
    floats = entries;
  }
  int64_t t = 0;
  for (; t + kStates <= count; t += kStates)
    float_tile<N>(floats, m.columns, x + t * m.columns, out + t * m.rows, m.rows);
  for (; t < count; ++t) float_dots<N>(floats, m.columns, x + t * m.columns, out + t * m.rows);
}

// out[t * rows + row] of rows [first, last).
void multiply_rows(const StoredMatrix& m, int64_t first, int64_t last, const float* x,
                   int64_t count, float* out) {
  std::vector<float> entries(
      count > 1 && m.type != Stored::f32 ? static_cast<size_t>(kRows * m.columns) : 0);
  int64_t row = first;
  for (; row + kRows <= last; row += kRows)
    some_rows<kRows>(m, row, x, count, out + row, entries.data());
  for (; row < last; ++row) some_rows<1>(m, row, x, count, out + row, entries.data());
}

int64_t tasks_of(int64_t rows) { return (rows + kTask - 1) / kTask; }

void multiply(const StoredMatrix& m, const float* x, int64_t count, float* out, int threads) {
  lmhead::parallel_for(tasks_of(m.rows), threads, [&](int64_t i) {
    multiply_rows(m, i * kTask, std::min(m.rows, (i + 1) * kTask), x, count, out);
  });
}

void dequantize(const StoredMatrix& m, float* out, int threads) {
  lmhead::parallel_for(tasks_of(m.rows), threads, [&](int64_t i) {
    for (int64_t row = i * kTask; row < std::min(m.rows, (i + 1) * kTask); ++row)
      dequantize_row(m, row, out + row * m.columns);
  });
}

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  float squares;
  float_dots<1>(x, n, x, &squares);
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

// up · gate / (1 + exp(-gate)), in place of up.
void silu_times(const float* gate, int64_t n, float* up) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int left = static_cast<int>(std::min<int64_t>(kLanes, n - i));
    const vf g = load(gate + i, left, 0.0f);
    store(up + i, load(up + i, left, 0.0f) * (g / (1.0f + exp(-g))), left);
  }
}

// Rotates each pair of coordinates (a, b) of one head: (a cos - b sin, a sin + b cos).
void rotate(float* x, int64_t d, const float* cos, const float* sin, bool interleaved) {
  const int64_t step = interleaved ? 1 : d / 2, stride = interleaved ? 2 : 1;
  for (int64_t i = 0; i < d / 2; ++i) {
    float &a = x[i * stride], &b = x[i * stride + step];
    const float turned = a * cos[i] - b * sin[i];
    b = a * sin[i] + b * cos[i];
    a = turned;
  }
}

// Attention of one query (d,) over n keys and values (n, d): out (d,). weights: scratch of n.
void attend(const float* query, const float* keys, const float* values, int64_t n, int64_t d,
            float* weights, float* out) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  int64_t t = 0;
  for (; t + kRows <= n; t += kRows) float_dots<kRows>(keys + t * d, d, query, weights + t);
  for (; t < n; ++t) float_dots<1>(keys + t * d, d, query, weights + t);
  float top = -__builtin_inff();
  for (t = 0; t < n; ++t) top = std::max(top, weights[t] *= scale);
  float sum = 0.0f;
  for (t = 0; t < n; t += kLanes) {
    const int left = static_cast<int>(std::min<int64_t>(kLanes, n - t));
    const vf p = exp(load(weights + t, left, -__builtin_inff()) - top);
    store(weights + t, p, left);
    sum += total(p);
  }
  std::fill_n(out, d, 0.0f);
  for (t = 0; t < n; ++t) {
    const float weight = weights[t] / sum;
    const float* value = values + t * d;
    for (int64_t i = 0; i < d; ++i) out[i] += weight * value[i];
  }
}

void step(const DecodeModel& m, const DecodeCache* caches, int64_t count, const float* cos,
          const float* sin, float* x, int threads) {
  const int64_t d = m.head_size, share = m.heads / m.key_heads;
  const int64_t wide = m.heads * d, narrow = m.key_heads * d;
  const auto room = [&](int64_t each) {
    return std::vector<float>(static_cast<size_t>(count * each));
  };
  std::vector<float> normed = room(m.size), change = room(m.size), attended = room(wide);
  std::vector<float> query = room(wide), key = room(narrow), value = room(narrow);
  std::vector<float> gate = room(m.inner), up = room(m.inner);
  int64_t longest = 0, positions = 0;
  for (int64_t t = 0; t < count; ++t) {
    longest = std::max(longest, caches[t].length + 1);
    positions += caches[t].length + 1;
  }
  std::vector<float> weights = room(m.heads * longest);
  const auto norm = [&](const float* weight, float* out) {
    for (int64_t t = 0; t < count; ++t)
      rms_norm(x + t * m.size, weight, m.size, m.eps, out + t * m.size);
  };
  // The rows of several matrices, one after the other, as the tasks of one loop.
  const auto together =
      [&](std::initializer_list<std::pair<const StoredMatrix*, float*>> products) {
        int64_t tasks = 0;
        for (const auto& product : products) tasks += tasks_of(product.first->rows);
        lmhead::parallel_for(tasks, threads, [&](int64_t i) {
          for (const auto& [matrix, out] : products) {
            if (i < tasks_of(matrix->rows))
              return multiply_rows(*matrix, i * kTask, std::min(matrix->rows, (i + 1) * kTask),
                                   normed.data(), count, out);
            i -= tasks_of(matrix->rows);
          }
        });
      };
  const auto add = [&](const StoredMatrix& matrix, const float* from) {
    multiply(matrix, from, count, change.data(), threads);
    for (int64_t i = 0; i < count * m.size; ++i) x[i] += change[static_cast<size_t>(i)];
  };
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const DecodeLayer& layer = m.layers[l];
    norm(layer.attention_norm, normed.data());
    together(
        {{&layer.query, query.data()}, {&layer.key, key.data()}, {&layer.value, value.data()}});
    // The first key, and the first value, of a head of this layer in a cache.
    const auto place = [&](const DecodeCache& cache, int64_t g) {
      return (static_cast<int64_t>(l) * m.key_heads + g) * cache.room * d;
    };
    for (int64_t t = 0; t < count; ++t) {
      const float *c = cos + t * (d / 2), *s = sin + t * (d / 2);
      for (int64_t h = 0; h < m.heads; ++h)
        rotate(query.data() + t * wide + h * d, d, c, s, m.interleaved);
      for (int64_t g = 0; g < m.key_heads; ++g) {
        const int64_t from = t * narrow + g * d, to = place(caches[t], g) + caches[t].length * d;
        rotate(key.data() + from, d, c, s, m.interleaved);
        std::copy_n(key.data() + from, d, caches[t].keys + to);
        std::copy_n(value.data() + from, d, caches[t].values + to);
      }
    }
    lmhead::parallel_for(count * m.heads, positions >= 64 ? threads : 1, [&](int64_t i) {
      const DecodeCache& cache = caches[i / m.heads];
      const int64_t from = place(cache, i % m.heads / share);
      attend(query.data() + i * d, cache.keys + from, cache.values + from, cache.length + 1, d,
             weights.data() + i * longest, attended.data() + i * d);
    });
    add(layer.output, attended.data());
    norm(layer.feed_forward_norm, normed.data());
    together({{&layer.gate, gate.data()}, {&layer.up, up.data()}});
    for (int64_t t = 0; t < count; ++t)
      silu_times(gate.data() + t * m.inner, m.inner, up.data() + t * m.inner);
    add(layer.down, up.data());
  }
  norm(m.norm, x);
}

}  // namespace
}  // namespace LMHEAD_ISA

namespace lmhead {

extern const DecodeKernels LMHEAD_DECODE;
const DecodeKernels LMHEAD_DECODE = {LMHEAD_ISA::step, LMHEAD_ISA::dequantize,
                                     LMHEAD_ISA::multiply};

}  // namespace lmhead
