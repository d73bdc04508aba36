#include "decode.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <type_traits>
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

// Blocks: a vector has four 32-bit integers of codes of each of several rows, and Σ (d c + m) x is
// d Σ (c - 8) x + (m + 8 d) Σ x in q4_1, d Σ (c - 8) x in q4_0, d Σ c x in q8_0.
constexpr int kInts = 4;
constexpr int64_t kBlockRows = 8, kBlockStates = 4;  // of a tile
constexpr int kRowsOfVector = kLanes / kInts, kVectors = kBlockRows / kRowsOfVector;
constexpr int kCodes = kBlockEntries / kInts;         // vectors of the codes of a block
constexpr int64_t kArranged = (kCodes + 1) * kLanes;  // numbers for a block, see `arrange`

// Each block of x in the order of its codes, once per row of a vector: entries i, i + 4, i + 8 and
// i + 12 of its first half for i from 0 to 3, then of its second; then four sums, together Σ x.
void arrange(const float* x, int64_t blocks, float* out) {
  for (int64_t b = 0; b < blocks; ++b, x += kBlockEntries) {
    float sums[kInts] = {};
    const auto repeat = [&](const float* four) {
      for (int r = 0; r < kRowsOfVector; ++r, out += kInts) std::copy_n(four, kInts, out);
    };
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < 4; ++i) {
        float four[kInts];
        for (int k = 0; k < kInts; ++k) sums[k] += four[k] = x[16 * half + 4 * k + i];
        repeat(four);
      }
    repeat(sums);
  }
}

// Four integers from each row.
vi load_codes(const uint8_t* const* rows, int64_t from) {
#if defined(__AVX512F__) && !defined(LMHEAD_LANES)
  const auto at = [&](int r) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + from));
  };
  __m512i all = _mm512_inserti32x4(_mm512_castsi128_si512(at(0)), at(1), 1);
  all = _mm512_inserti32x4(all, at(2), 2);
  return (vi)_mm512_inserti32x4(all, at(3), 3);
#elif defined(__AVX2__) && !defined(LMHEAD_LANES)
  const auto at = [&](int r) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + from));
  };
  return (vi)_mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(1), 1);
#else
  vi all;
  for (int r = 0; r < kRowsOfVector; ++r)
    std::memcpy(reinterpret_cast<char*>(&all) + 16 * r, rows[r] + from, 16);
  return all;
#endif
}

// d of each row in its lanes, and what follows it (m in q4_1).
void scales(const uint8_t* const* rows, vf* d, vf* m) {
#if defined(__AVX2__) && !defined(LMHEAD_LANES)
  const auto at = [&](int r) {
    int32_t both;
    std::memcpy(&both, rows[r], 4);
    return both;
  };
#endif
#if defined(__AVX512F__) && !defined(LMHEAD_LANES)
  const __m512 all =
      _mm512_castps256_ps512(_mm256_cvtph_ps(_mm_setr_epi32(at(0), at(1), at(2), at(3))));
  const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
  *d = (vf)_mm512_permutexvar_ps(first, all);
  *m = (vf)_mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(1)), all);
#elif defined(__AVX2__) && !defined(LMHEAD_LANES)
  const __m256 all = _mm256_castps128_ps256(_mm_cvtph_ps(_mm_setr_epi32(at(0), at(1), 0, 0)));
  const __m256i first = _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2);
  *d = (vf)_mm256_permutevar8x32_ps(all, first);
  *m = (vf)_mm256_permutevar8x32_ps(all, _mm256_add_epi32(first, _mm256_set1_epi32(1)));
#else
  for (int i = 0; i < kLanes; ++i) {
    F16 both[2];
    std::memcpy(both, rows[i / kInts], 4);
    (*d)[i] = value(both[0]);
    (*m)[i] = value(both[1]);
  }
#endif
}

// The codes of a block of each row, as `arrange` orders x; of q4_0 and q4_1 less 8.
template <Stored kType>
void decode(const uint8_t* const* rows, vf (&codes)[kCodes]) {
  if constexpr (kType == Stored::q8_0) {
    for (int half = 0; half < 2; ++half) {
      const vi w = load_codes(rows, 2 + 16 * half);
      for (int i = 0; i < 4; ++i)
        codes[4 * half + i] = __builtin_convertvector((w << (24 - 8 * i)) >> 24, vf);
    }
  } else {
    const vi w = load_codes(rows, kType == Stored::q4_1 ? 4 : 2);
#if defined(__AVX512F__) && !defined(LMHEAD_LANES)
    // Looked up by the lowest four bits of each lane.
    const __m512 less = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < 4; ++i)
        codes[4 * half + i] = (vf)_mm512_permutexvar_ps((__m512i)(w >> (4 * half + 8 * i)), less);
#else
    // With its highest bit turned, a code of four bits with a sign is the code less 8.
    const vi turned = w ^ static_cast<int32_t>(0x88888888u);
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < 4; ++i)
        codes[4 * half + i] =
            __builtin_convertvector((turned << (28 - 4 * half - 8 * i)) >> 28, vf);
#endif
  }
}

// kBlockRows rows of blocks times N arranged vectors: out[state * kBlockRows + row].
template <Stored kType, int N>
void block_dots(const uint8_t* const* rows, int64_t blocks, const float* x, float* out) {
  constexpr int64_t kTile = kBlockRows * block_bytes(kType);
  vf sums[kVectors][N] = {};
  const uint8_t* at[kBlockRows];
  std::copy_n(rows, kBlockRows, at);
  const uint8_t* next = rows[0] + blocks * kTile;  // the next rows
  for (int64_t b = 0; b < blocks; ++b, next += kTile) {
    for (int64_t i = 0; i < kTile; i += 64) __builtin_prefetch(next + i);
    for (int v = 0; v < kVectors; ++v) {
      const uint8_t* const* here = at + v * kRowsOfVector;
      vf codes[kCodes], d, m;
      decode<kType>(here, codes);
      scales(here, &d, &m);
      for (int t = 0; t < N; ++t) {
        const float* entries = x + (t * blocks + b) * kArranged;
        vf part[2] = {};  // two chains of additions
        for (int i = 0; i < kCodes; ++i) part[i % 2] += codes[i] * load(entries + kLanes * i);
        sums[v][t] += (part[0] + part[1]) * d;
        if constexpr (kType == Stored::q4_1)
          sums[v][t] += (m + 8.0f * d) * load(entries + kLanes * kCodes);
      }
    }
    for (const uint8_t*& row : at) row += block_bytes(kType);
  }
  for (int t = 0; t < N; ++t)
    for (int r = 0; r < kBlockRows; ++r) {
      const vf& all = sums[r / kRowsOfVector][t];
      const int i = r % kRowsOfVector * kInts;
      out[t * kBlockRows + r] = (all[i] + all[i + 2]) + (all[i + 1] + all[i + 3]);
    }
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

// Vectors x (count, columns), as they are and arranged for blocks.
struct Inputs {
  const float* x;
  int64_t count;
  std::vector<float> arranged;  // empty if no matrix needs it

  Inputs(const float* x, int64_t count, int64_t columns, bool has_blocks) : x(x), count(count) {
    const int64_t blocks = has_blocks ? count * columns / kBlockEntries : 0;
    arranged.resize(static_cast<size_t>(blocks * kArranged));
    arrange(x, blocks, arranged.data());
  }
};

// Rows [first, last) of blocks times the vectors: out[t * rows + row].
template <Stored kType>
void block_rows(const StoredMatrix& m, int64_t first, int64_t last, const Inputs& in, float* out) {
  const int64_t blocks = m.columns / kBlockEntries, stride = blocks * block_bytes(kType);
  const auto* data = static_cast<const uint8_t*>(m.data);
  for (int64_t row = first; row < last; row += kBlockRows) {
    const uint8_t* rows[kBlockRows];
    for (int64_t r = 0; r < kBlockRows; ++r) rows[r] = data + std::min(row + r, last - 1) * stride;
    const auto product = [&](int64_t t, auto states) {
      float found[states * kBlockRows];
      block_dots<kType, states>(rows, blocks, in.arranged.data() + t * blocks * kArranged, found);
      for (int64_t i = 0; i < states; ++i)
        std::copy_n(found + i * kBlockRows, std::min(kBlockRows, last - row),
                    out + (t + i) * m.rows + row);
    };
    int64_t t = 0;
    for (; t + kBlockStates <= in.count; t += kBlockStates)
      product(t, std::integral_constant<int, kBlockStates>());
    for (; t < in.count; ++t) product(t, std::integral_constant<int, 1>());
  }
}

template <int N>
void float_rows(const StoredMatrix& m, int64_t row, const Inputs& in, float* out) {
  const auto* floats = static_cast<const float*>(m.data) + row * m.columns;
  int64_t t = 0;
  for (; t + kStates <= in.count; t += kStates)
    float_tile<N>(floats, m.columns, in.x + t * m.columns, out + t * m.rows + row, m.rows);
  for (; t < in.count; ++t)
    float_dots<N>(floats, m.columns, in.x + t * m.columns, out + t * m.rows + row);
}

// out[t * rows + row] of rows [first, last).
void multiply_rows(const StoredMatrix& m, int64_t first, int64_t last, const Inputs& in,
                   float* out) {
  if (m.type == Stored::q4_0) return block_rows<Stored::q4_0>(m, first, last, in, out);
  if (m.type == Stored::q4_1) return block_rows<Stored::q4_1>(m, first, last, in, out);
  if (m.type == Stored::q8_0) return block_rows<Stored::q8_0>(m, first, last, in, out);
  int64_t row = first;
  for (; row + kRows <= last; row += kRows) float_rows<kRows>(m, row, in, out);
  for (; row < last; ++row) float_rows<1>(m, row, in, out);
}

int64_t tasks_of(int64_t rows) { return (rows + kTask - 1) / kTask; }

void multiply(const StoredMatrix& m, const float* x, int64_t count, float* out, int threads) {
  const Inputs in(x, count, m.columns, m.type != Stored::f32);
  lmhead::parallel_for(tasks_of(m.rows), threads, [&](int64_t i) {
    multiply_rows(m, i * kTask, std::min(m.rows, (i + 1) * kTask), in, out);
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
        bool has_blocks = false;
        for (const auto& product : products) {
          tasks += tasks_of(product.first->rows);
          has_blocks |= product.first->type != Stored::f32;
        }
        const Inputs in(normed.data(), count, m.size, has_blocks);
        lmhead::parallel_for(tasks, threads, [&](int64_t i) {
          for (const auto& [matrix, out] : products) {
            if (i < tasks_of(matrix->rows))
              return multiply_rows(*matrix, i * kTask, std::min(matrix->rows, (i + 1) * kTask), in,
                                   out);
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
const DecodeKernels LMHEAD_DECODE = {LMHEAD_ISA::step, LMHEAD_ISA::multiply};

}  // namespace lmhead
