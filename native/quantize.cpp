// Quantization of as many rows at once as a vector has doubles, one row per lane: every step is
// then a plain loop over entries, whatever the sizes.
#include "quantize.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "dot.hpp"
#include "parallel.hpp"

namespace LMHEAD_ISA {
namespace {

using lmhead::Floats;
using lmhead::QuantizedNorms;
using lmhead::QuantizedRows;
using lmhead::QuantizeRows;

constexpr int kTogether = 8;        // sums side by side, so that none waits for its own last term
constexpr int64_t kTask = 512;      // rows of a task of one thread
constexpr int64_t kSumRows = 4096;  // rows of a partial sum of columns

vd largest(vd a, vd b) { return a > b ? a : b; }

vd magnitude(vd a) { return a < 0.0 ? -a : a; }

// The nearest integer of |x| < 2^51.
vd nearest(vd x) {
  const vd magic = vd{} + 6755399441055744.0;
  return (x + magic) - magic;
}

// One float32 scale per lane, 0 where it is too small or not finite; as doubles.
vd scales_of(vd largest, double codes, float tiny) {
  vd scales;
  for (int i = 0; i < kHalf; ++i) {
    const auto scale = static_cast<float>(largest[i] / codes);
    scales[i] = scale >= tiny && std::isfinite(scale) ? scale : 0.0f;
  }
  return scales;
}

vd inverse(vd scales) { return scales > 0.0 ? 1.0 / scales : vd{}; }

vd round_codes(vd x, vd inverse, double most) {
  const vd code = nearest(x * inverse), high = vd{} + most;
  return code > high ? high : (code < -high ? -high : code);
}

float above(double x, float tiny) {
  return std::max(tiny, std::nextafter(static_cast<float>(x), __builtin_inff()));
}

// One group of rows, up to kHalf.
class Group {
 public:
  explicit Group(const QuantizeRows& given)
      : q_(given),
        x_(static_cast<size_t>(given.width)),
        other_(static_cast<size_t>(given.width)),
        c_(static_cast<size_t>(given.leading)) {}

  // `first` is the index of the first row, `rows` their number.
  template <class W>
  void run(const W* weight, int64_t first, int64_t rows, const QuantizedRows& out,
           QuantizedNorms* norms) {
    const vd squares = read(weight, first, rows);
    for (int i = 0; i < rows; ++i) norms->finite &= std::isfinite(squares[i]);
    vd lead_step{}, lead_lost{}, c_squares{}, lead_squares{};
    if (q_.leading > 0) take_leading(&lead_step, &lead_lost, &c_squares, &lead_squares);
    vd r_squares{}, top{};
    for (int64_t i = 0; i < q_.size; ++i) r_squares += x_[i] * x_[i];
    rotate();
    for (int64_t i = 0; i < q_.width; ++i) top = largest(top, magnitude(x_[i]));
    const vd step = scales_of(top, 127.0, q_.tiny), back = inverse(step);
    vd e{}, e_high{}, q_squares{};
    for (int64_t i = 0; i < q_.width; ++i) {
      const vd code = round_codes(x_[i], back, 127.0);
      // The middle of 16 codes: floor(code / 16) · 16 + 7.5.
      const vd middle = nearest(code * 0.0625 - 0.46875) * 16.0 + 7.5;
      const vd off = x_[i] - code * step, off_high = x_[i] - middle * step;
      e += off * off;
      e_high += off_high * off_high;
      q_squares += code * code;
      x_[i] = code;
    }
    for (int64_t lane = 0; lane < rows; ++lane) {
      const int64_t at = first + lane;
      const int l = static_cast<int>(lane);
      const double size = std::sqrt(squares[l]) + q_.mean_norm, lost = q_.lost * size;
      out.scales[at] = static_cast<float>(step[l]);
      out.lead_scales[at] = static_cast<float>(lead_step[l]);
      out.e[at] = above(std::sqrt(e[l]) * q_.up + lost, q_.tiny);
      out.e_high[at] = above(std::sqrt(e_high[l]) * q_.up + lost, q_.tiny);
      double n = std::max(std::sqrt(q_squares[l]) * step[l], std::sqrt(c_squares[l]));
      n = std::max(n, std::sqrt(r_squares[l]));
      n = std::max(n, std::sqrt(lead_lost[l]) * q_.kappa);
      n = std::max(n, q_.share * size);
      out.n[at] = above(n * q_.up + lost, q_.tiny);
      norms->codes = std::max(norms->codes, std::sqrt(q_squares[l]) * q_.up);
      norms->lead = std::max(norms->lead, std::sqrt(lead_squares[l]) * q_.up);
      int8_t* codes = out.codes + at * q_.width;
      const double* entries = reinterpret_cast<const double*>(x_.data()) + l;
      for (int64_t i = 0; i < q_.width; ++i) codes[i] = static_cast<int8_t>(entries[i * kHalf]);
      int16_t* lead = out.lead + at * q_.leading;
      for (int64_t k = 0; k < q_.leading; ++k) lead[k] = static_cast<int16_t>(lead_codes_[k][l]);
    }
  }

 private:
  // The rows less the mean; returned are the squares of their norms.
  template <class W>
  vd read(const W* weight, int64_t first, int64_t rows) {
    double* to = reinterpret_cast<double*>(x_.data());
    for (int lane = 0; lane < kHalf; ++lane) {
      const W* row = weight + (first + std::min<int64_t>(lane, rows - 1)) * q_.size;
      for (int64_t i = 0; i < q_.size; ++i) to[i * kHalf + lane] = value(row[i]);
    }
    vd squares{};
    for (int64_t i = 0; i < q_.size; ++i) {
      squares += x_[i] * x_[i];
      x_[i] -= q_.mean[i];
    }
    std::fill(x_.begin() + q_.size, x_.end(), vd{});
    return squares;
  }

  // Rounds what lies along the leading directions, and takes it away.
  void take_leading(vd* step, vd* lost, vd* c_squares, vd* codes_squares) {
    const int64_t size = q_.size;
    vd top{};
    for (int64_t k = 0; k < q_.leading; k += kTogether) {
      vd sums[kTogether] = {};
      const double* basis = q_.basis + k * size;
      for (int64_t i = 0; i < size; ++i)
        for (int j = 0; j < kTogether; ++j) sums[j] += basis[j * size + i] * x_[i];
      for (int j = 0; j < kTogether; ++j) {
        c_[k + j] = sums[j];
        top = largest(top, magnitude(sums[j]));
      }
    }
    *step = scales_of(top, 32767.0, q_.tiny);
    const vd back = inverse(*step);
    lead_codes_.resize(c_.size());
    for (int64_t k = 0; k < q_.leading; ++k) {
      const vd code = round_codes(c_[k], back, 32767.0), c = code * *step;
      lead_codes_[k] = code;
      const vd off = c_[k] - c;
      *lost += off * off;
      *c_squares += c * c;
      *codes_squares += code * code;
      c_[k] = c;
    }
    int64_t i = 0;
    for (; i + kTogether <= size; i += kTogether) {
      vd sums[kTogether];
      for (int j = 0; j < kTogether; ++j) sums[j] = x_[i + j];
      for (int64_t k = 0; k < q_.leading; ++k)
        for (int j = 0; j < kTogether; ++j) sums[j] -= q_.basis[k * size + i + j] * c_[k];
      for (int j = 0; j < kTogether; ++j) x_[i + j] = sums[j];
    }
    for (; i < size; ++i)
      for (int64_t k = 0; k < q_.leading; ++k) x_[i] -= q_.basis[k * size + i] * c_[k];
  }

  // As screen_prepare.hpp: signs, then one factor after the other, x as (count, f) to (f, count).
  void rotate() {
    for (int64_t i = 0; i < q_.width; ++i) x_[i] *= static_cast<double>(q_.signs[i]);
    const double* factor = q_.factors;
    for (int64_t n = 0; n < q_.n_factors; ++n) {
      const int64_t f = q_.sizes[n], count = q_.width / f;
      for (int64_t i = 0; i < count; ++i) {
        if ((f & (f - 1)) == 0)
          hadamard(&x_[i * f], f, factor[0], &other_[i], count);
        else
          multiply(factor, &x_[i * f], f, &other_[i], count);
      }
      factor += f * f;
      x_.swap(other_);
    }
  }

  static void hadamard(vd* x, int64_t f, double scale, vd* out, int64_t stride) {
    for (int64_t half = 1; half < f; half *= 2)
      for (int64_t i = 0; i < f; i += 2 * half)
        for (int64_t j = i; j < i + half; ++j) {
          const vd a = x[j], b = x[j + half];
          x[j] = a + b, x[j + half] = a - b;
        }
    for (int64_t j = 0; j < f; ++j) out[j * stride] = x[j] * scale;
  }

  static void multiply(const double* factor, const vd* x, int64_t f, vd* out, int64_t stride) {
    int64_t j = 0;
    for (; j + kTogether <= f; j += kTogether) {
      vd sums[kTogether] = {};
      for (int64_t l = 0; l < f; ++l)
        for (int k = 0; k < kTogether; ++k) sums[k] += factor[(j + k) * f + l] * x[l];
      for (int k = 0; k < kTogether; ++k) out[(j + k) * stride] = sums[k];
    }
    for (; j < f; ++j) {
      vd sum{};
      for (int64_t l = 0; l < f; ++l) sum += factor[j * f + l] * x[l];
      out[j * stride] = sum;
    }
  }

  const QuantizeRows& q_;
  std::vector<vd> x_, other_, c_, lead_codes_;
};

QuantizedNorms quantize(const QuantizeRows& given, const QuantizedRows& out, int threads) {
  const int64_t tasks = (given.rows + kTask - 1) / kTask;
  std::vector<QuantizedNorms> each(static_cast<size_t>(tasks), {0.0, 0.0, true});
  lmhead::parallel_for(tasks, threads, [&](int64_t task) {
    lmhead::with_type(given.weight, [&](auto* weight) {
      Group group(given);
      const int64_t end = std::min(given.rows, (task + 1) * kTask);
      for (int64_t first = task * kTask; first < end; first += kHalf)
        group.run(weight, first, std::min<int64_t>(kHalf, end - first), out, &each[task]);
    });
  });
  QuantizedNorms all{0.0, 0.0, true};
  for (const QuantizedNorms& one : each) {
    all.codes = std::max(all.codes, one.codes);
    all.lead = std::max(all.lead, one.lead);
    all.finite &= one.finite;
  }
  return all;
}

void column_sums(const Floats& weight, int64_t rows, int64_t size, double* sums, int threads) {
  const int64_t tasks = (rows + kSumRows - 1) / kSumRows;
  std::vector<double> each(static_cast<size_t>(tasks * size), 0.0);
  lmhead::parallel_for(tasks, threads, [&](int64_t task) {
    lmhead::with_type(weight, [&](auto* all) {
      double* to = each.data() + task * size;
      const int64_t end = std::min(rows, (task + 1) * kSumRows);
      for (int64_t row = task * kSumRows; row < end; ++row) {
        const auto* from = all + row * size;
        int64_t i = 0;
        for (; i + kHalf <= size; i += kHalf) {
          const vd sum = load_half(to + i) + load_half(from + i);
          std::memcpy(to + i, &sum, sizeof sum);
        }
        for (; i < size; ++i) to[i] += value(from[i]);
      }
    });
  });
  std::fill_n(sums, size, 0.0);
  for (int64_t task = 0; task < tasks; ++task)
    for (int64_t i = 0; i < size; ++i) sums[i] += each[task * size + i];
}

// One sum of products of a block: see hash.cpp. The order of additions modulo 2^64 is free.
uint64_t products_of(const uint8_t* block, const uint32_t* keys) {
  uint64_t sum = 0;
#if defined(__AVX512F__) && !defined(LMHEAD_LANES)
  __m512i sums = _mm512_setzero_si512();
  for (int64_t i = 0; i < lmhead::kHashBlock; i += 64) {
    const __m512i entries =
        _mm512_add_epi32(_mm512_loadu_si512(block + i), _mm512_loadu_si512(keys + i / 4));
    sums = _mm512_add_epi64(sums, _mm512_mul_epu32(entries, _mm512_srli_epi64(entries, 32)));
  }
  uint64_t lanes[8];  // the intrinsic that adds them is signed, and may not wrap
  _mm512_storeu_si512(lanes, sums);
  sum = 0;
  for (const uint64_t lane : lanes) sum += lane;
#elif defined(__AVX2__) && !defined(LMHEAD_LANES)
  __m256i sums = _mm256_setzero_si256();
  for (int64_t i = 0; i < lmhead::kHashBlock; i += 32) {
    const auto* at = reinterpret_cast<const __m256i*>(block + i);
    const auto* key = reinterpret_cast<const __m256i*>(keys + i / 4);
    const __m256i entries = _mm256_add_epi32(_mm256_loadu_si256(at), _mm256_loadu_si256(key));
    sums = _mm256_add_epi64(sums, _mm256_mul_epu32(entries, _mm256_srli_epi64(entries, 32)));
  }
  uint64_t parts[4];
  std::memcpy(parts, &sums, sizeof parts);
  for (uint64_t part : parts) sum += part;
#else
  for (int64_t i = 0; i < lmhead::kHashBlock / 4; i += 2) {
    uint32_t entries[2];
    std::memcpy(entries, block + 4 * i, 8);
    sum += static_cast<uint64_t>(entries[0] + keys[i]) *
           static_cast<uint64_t>(static_cast<uint32_t>(entries[1] + keys[i + 1]));
  }
#endif
  return sum;
}

void hash_blocks(const uint8_t* bytes, int64_t blocks, const uint32_t* keys, uint64_t* sums,
                 int threads) {
  constexpr int64_t kBlocks = 1024;  // of a task
  lmhead::parallel_for((blocks + kBlocks - 1) / kBlocks, threads, [&](int64_t task) {
    for (int64_t b = task * kBlocks; b < std::min(blocks, (task + 1) * kBlocks); ++b)
      for (int set = 0; set < 2; ++set)
        sums[2 * b + set] =
            products_of(bytes + b * lmhead::kHashBlock, keys + set * lmhead::kHashKeys / 2);
  });
}

}  // namespace
}  // namespace LMHEAD_ISA

namespace lmhead {

extern const QuantizeKernels LMHEAD_QUANTIZE;
const QuantizeKernels LMHEAD_QUANTIZE = {LMHEAD_ISA::quantize, LMHEAD_ISA::column_sums,
                                         LMHEAD_ISA::hash_blocks};

}  // namespace lmhead
