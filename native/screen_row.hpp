// The logits of one hidden state within bounds. For screen_sample.cpp alone, compiled with it.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "dot.hpp"
#include "screen_sample.hpp"
#include "simd.hpp"

namespace LMHEAD_ISA {

// float_logits.cpp: out[i] = hidden · weight[ids[i]], the same bits as those of all tokens.
void float_pairs(const float* hidden, const lmhead::Floats& weight, int64_t d, const int64_t* ids,
                 int64_t n, float* out);

namespace {

using lmhead::kScreenBlock;
using lmhead::screen_blocks;

constexpr double kNone = -__builtin_inf();

struct Range {
  double lo, hi;
};

struct Token {
  double z;    // after edits
  double raw;  // before
  int64_t id;
  bool operator<(const Token& b) const { return z > b.z || (z == b.z && id < b.id); }  // best first
};

// A logit lies in scale · (mid ± radius) + shift ± slack, whether float32 or float64 sums give it.
class BoundedRow {
 public:
  BoundedRow(const lmhead::SampleScreen& screen, const lmhead::SampleSource& source, int64_t row,
             bool wide, const int64_t* edited, int64_t n_edited)
      : screen_(screen),
        source_(source),
        vocab_(screen.bounds.vocab),
        hidden_(source.hidden + row * source.size),
        wide_(wide),
        mid_(screen.approx + row * vocab_),
        e_(screen.bounds.e[row]),
        n_(screen.bounds.n[row]) {
    const double base = source.base[row], size = norm();
    const lmhead::SampleMap& map = source.map;
    // Sums in float32 err by at most 2^-17 |w| |h|, and |w| is at most |mean| + 2 token_n; what
    // float32 cannot hold is lost.
    float_n_ = 1.01 * 0x1p-16 * size;
    const double lost = 4.0 * static_cast<double>(source.size + 4) * FLT_MIN;
    const double float_slack = 1.01 * 0x1p-17 * source.mean_norm * size + lost;
    n_ += float_n_;
    if (screen.allowed) mask_disallowed(screen.allowed + row * screen.n_uint32);
    for (int64_t i = 0; i < n_edited; ++i) mid_[edited[i]] = -__builtin_inff();
    if (screen.low.nibbles) refine(row);
    if (map.bounded) {
      stretch_ = map.scale * map.outer;
      const double parts = 1.0 + std::fabs(map.shift) + std::fabs(map.scale * base);
      slack_ = stretch_ * float_slack + 0x1p-19 * (map.outer * parts + std::fabs(map.outer_shift));
      apply_tanh(base);
    } else {
      scale_ = map.scale;
      shift_ = map.scale * base + map.shift;
      slack_ =
          map.scale * float_slack + 0x1p-21 * (std::fabs(map.scale * base) + std::fabs(map.shift));
    }
    slack_ += 0x1p-140;
    const float* known = screen.bounds.block_max + row * screen_blocks(vocab_);
    const bool stale = screen.allowed || n_edited || map.bounded || screen.low.nibbles;
    find_block_maxima(stale ? nullptr : known);
  }

  float top() const { return top_; }
  bool empty() const { return top_ == -__builtin_inff(); }
  float mid(int64_t v) const { return mid_[v]; }
  const float* mids() const { return mid_; }
  bool coarse() const { return !radii_.empty(); }  // "4+4": wide bounds far from the top
  double scale() const { return scale_; }
  double slack() const { return slack_; }
  double block_radius(int64_t v) const {
    return radii_of_blocks_[static_cast<size_t>(v / kScreenBlock)];
  }
  double centre(int64_t v) const { return scale_ * mid_[v] + shift_; }

  double radius(int64_t v) const {
    if (!radii_.empty()) return radii_[static_cast<size_t>(v)];
    const double x = mid_[v];
    return radius_of(screen_.bounds.token_e[v], screen_.bounds.token_n[v]) * stretch_ +
           std::fabs(x) * 0x1p-20 + 0x1p-100;
  }

  // How far a logit of float32 sums, rounded to float32, may be from that of float64 sums.
  double float_error(const Token& token) const {
    const double sums = scale_ * stretch_ * float_n_ * screen_.bounds.token_n[token.id] + slack_;
    if (wide_) return sums;
    const double raw = std::isfinite(token.raw) ? std::fabs(token.raw) : 0.0;
    return sums + 0x1p-22 * std::max(raw, std::fabs(token.z));
  }

  // How far a score may be from the same computed elsewhere: a map may be rounded in another way.
  double score_error(double z) const {
    const lmhead::SampleMap& map = source_.map;
    if (!map.bounded && map.scale == 1.0 && map.shift == 0.0) return 0.0;
    const double parts =
        std::fabs(z) + std::fabs(map.shift) + (map.bounded ? map.outer * 2.0 : 0.0);
    return (wide_ ? 0x1p-44 : 0x1p-22) * (parts + std::fabs(map.outer_shift));
  }

  // Bounds of the log of Σ exp(β z) over the tokens that are not masked and not among `but`.
  Range log_mass(double beta, const std::vector<Token>& but) const {
    if (empty()) return {kNone, kNone};
    const double factor = beta * scale_;
    std::vector<float> left_out;
    for (const Token& token : but) {
      left_out.push_back(mid_[token.id]);
      mid_[token.id] = -__builtin_inff();
    }
    const Range all = masses(factor);
    for (size_t i = 0; i < but.size(); ++i) mid_[but[i].id] = left_out[i];
    // Exceeds the float32 errors of exponents, exp and sums; exp below 2.2e-38 is 0.
    const double lo = all.lo * (1.0 - 0x1p-14);
    const double hi = all.hi * (1.0 + 0x1p-14) + static_cast<double>(vocab_) * 2.2e-38;
    const double from = factor * top_ + beta * shift_;
    const double off = beta * slack_ + 1e-12 * (1.0 + std::fabs(from));
    return {lo > 0.0 ? from + std::log(lo) - off : kNone, from + std::log(hi) + off};
  }

  // The tokens that may have a logit of z or more; false if there are more than `most`.
  bool reaching(double z, size_t most, std::vector<int64_t>* ids) const {
    double limit = z == kNone ? kNone : (z - shift_ - slack_) / scale_;
    limit -= z == kNone ? 0.0 : 1e-12 * (std::fabs(limit) + std::fabs(shift_) / scale_);
    return scan(limit, most, ids, [&](int64_t v) { return mid_[v] + radius(v) >= limit; });
  }

  // The tokens with mid >= limit, and few others.
  bool above(double limit, size_t most, std::vector<int64_t>* ids) const {
    return scan(limit, most, ids, [&](int64_t v) { return mid_[v] >= limit; });
  }

  // Some k tokens with the largest mid; all that are not masked, if there are not more.
  std::vector<int64_t> best(int64_t k) const {
    std::vector<float> order = tops_;
    if (k > static_cast<int64_t>(order.size())) order.assign(mid_, mid_ + vocab_);
    k = std::min<int64_t>(k, static_cast<int64_t>(order.size()));
    std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<>());
    const float limit = order[static_cast<size_t>(k - 1)];
    std::vector<std::pair<float, int64_t>> found;
    for (size_t block = 0; block < tops_.size(); ++block) {
      if (tops_[block] < limit) continue;
      const int64_t lo = static_cast<int64_t>(block) * kScreenBlock;
      for (int64_t v = lo; v < std::min(vocab_, lo + kScreenBlock); ++v)
        if (mid_[v] >= limit && mid_[v] > -__builtin_inff()) found.emplace_back(mid_[v], v);
    }
    if (k < static_cast<int64_t>(found.size()))
      std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<>());
    std::vector<int64_t> ids;
    for (size_t i = 0; i < found.size() && static_cast<int64_t>(i) < k; ++i)
      ids.push_back(found[i].second);
    return ids;
  }

  // Appends these tokens with their logits; false if a logit is outside its bounds.
  bool score(const std::vector<int64_t>& ids, std::vector<Token>* tokens) const {
    const auto n = static_cast<int64_t>(ids.size());
    std::vector<float> sums(ids.size());
    if (!wide_) float_pairs(hidden_, source_.weight, source_.size, ids.data(), n, sums.data());
    for (size_t i = 0; i < ids.size(); ++i) {
      const int64_t v = ids[i];
      double x = wide_ ? wide_sum(v) : sums[i];
      if (source_.bias) x += source_.bias[v];
      double z = mapped(x);
      if (!wide_) z = static_cast<float>(z);
      const double room = scale_ * radius(v) + slack_ + 0x1p-20 * std::fabs(z);
      if (!(std::fabs(z - centre(v)) <= room)) return false;
      tokens->push_back({z, z, v});
    }
    return true;
  }

 private:
  // Masks the tokens without a bit.
  void mask_disallowed(const uint32_t* allowed) {
    for (int64_t v = 0; v < vocab_; ++v)
      if (!(allowed[v / 32] >> v % 32 & 1)) mid_[v] = -__builtin_inff();
  }

  double norm() const {
    double sum = 0.0;
    for (int64_t i = 0; i < source_.size; ++i) sum += double{hidden_[i]} * hidden_[i];
    return std::sqrt(sum);
  }

  double radius_of(double token_e, double token_n) const {
    return (e_ * token_e + n_ * token_n) * (1.0 + 0x1p-20);
  }

  double wide_sum(int64_t v) const {
    return lmhead::with_type(source_.weight, [&](auto* weight) {
      return LMHEAD_ISA::dot(hidden_, weight + v * source_.size, source_.size);
    });
  }

  double mapped(double x) const {
    const lmhead::SampleMap& map = source_.map;
    const double z = x * map.scale + map.shift;
    return map.bounded ? map.outer * std::tanh(z) + map.outer_shift : z;
  }

  // The low nibbles of tokens near the top.
  void refine(int64_t row) {
    const lmhead::ScreenBounds& bounds = screen_.bounds;
    radii_.resize(static_cast<size_t>(vocab_));
    float top = -__builtin_inff();
    for (int64_t v = 0; v < vocab_; ++v) {
      radii_[static_cast<size_t>(v)] = static_cast<float>(
          radius_of(bounds.token_e[v], bounds.token_n[v]) * (1.0 + 0x1p-20) + 0x1p-99);
      top = std::max(top, mid_[v]);
    }
    constexpr float kNear = 10.0f;  // in units of the logits
    std::vector<int64_t> near;
    for (int64_t v = 0; v < vocab_; ++v)
      if (mid_[v] + radii_[static_cast<size_t>(v)] >= top - kNear && mid_[v] > -__builtin_inff())
        near.push_back(v);
    lmhead::ScreenBounds with = bounds;
    with.token_e = screen_.low_e;
    const std::vector<int64_t> rows(near.size(), row);
    std::vector<double> both(near.size()), off(near.size());
    screen_.kernels->refine(screen_.low, screen_.states, with, rows.data(), near.data(),
                            static_cast<int64_t>(near.size()), both.data(), off.data(), 1);
    for (size_t i = 0; i < near.size(); ++i) {
      mid_[near[i]] = static_cast<float>(both[i]);
      radii_[static_cast<size_t>(near[i])] =
          static_cast<float>((off[i] + float_n_ * bounds.token_n[near[i]]) * (1.0 + 0x1p-20));
    }
    for (int64_t v = 0; v < vocab_; ++v)
      if (mid_[v] > -__builtin_inff())
        radii_[static_cast<size_t>(v)] += std::fabs(mid_[v]) * 0x1p-19f + 0x1p-100f;
  }

  // mid through tanh: its slope is at most 1, and what rounding adds is in the slack.
  void apply_tanh(double base) {
    const lmhead::SampleMap& map = source_.map;
    const auto from = static_cast<float>(base), outer = static_cast<float>(map.outer);
    const auto scale = static_cast<float>(map.scale), shift = static_cast<float>(map.shift);
    const auto outer_shift = static_cast<float>(map.outer_shift);
    for (int64_t v = 0; v < vocab_; v += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, vocab_ - v));
      const vf a = n == kLanes ? load(mid_ + v) : load(mid_ + v, n, 0.0f);
      const vf z = tanh((a + from) * scale + shift) * outer + outer_shift;
      store(mid_ + v, a == -__builtin_inff() ? a : z, n);
    }
    for (float& radius : radii_)
      radius = static_cast<float>(radius * stretch_ * (1.0 + 0x1p-20)) + 0x1p-100f;
  }

  // The largest of each block.
  void find_block_maxima(const float* known) {
    const lmhead::ScreenBounds& bounds = screen_.bounds;
    const int64_t blocks = screen_blocks(vocab_);
    tops_.resize(static_cast<size_t>(blocks));
    radii_of_blocks_.resize(static_cast<size_t>(blocks));
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t lo = block * kScreenBlock, hi = std::min(vocab_, lo + kScreenBlock);
      const auto at = static_cast<size_t>(block);
      tops_[at] = known ? known[block] : *std::max_element(mid_ + lo, mid_ + hi);
      top_ = std::max(top_, tops_[at]);
      // x + |x| / 2^20 grows with x: the largest of each bounds all.
      double radius = radius_of(bounds.block_e[block], bounds.block_n[block]) * stretch_ +
                      (tops_[at] > -FLT_MAX ? std::fabs(tops_[at]) * 0x1p-20 : 0.0) + 0x1p-99;
      if (!radii_.empty()) radius = *std::max_element(radii_.begin() + lo, radii_.begin() + hi);
      radii_of_blocks_[at] = radius;
    }
  }

  // Σ exp(factor · (mid ± radius - top)), to within 2^-15 of it. Of weights p and offsets x from 0
  // to m in a block, Σ p exp(-x) >= P exp(-Σ p x / P) and Σ p exp(x) <= P + Σ p x (exp(m) - 1) / m.
  Range masses(double factor) const {
    Range all{0.0, 0.0};
    const float f = static_cast<float>(factor);
    for (size_t block = 0; block < tops_.size(); ++block) {
      if (tops_[block] == -__builtin_inff()) continue;
      const int64_t lo = static_cast<int64_t>(block) * kScreenBlock;
      const int64_t hi = std::min(vocab_, lo + kScreenBlock);
      const float* given = radii_.empty() ? screen_.bounds.token_e : radii_.data();
      vf weights{}, offsets{};
      for (int64_t v = lo; v < hi; v += kLanes) {
        const int n = static_cast<int>(std::min<int64_t>(kLanes, hi - v));
        const vf mid = n == kLanes ? load(mid_ + v) : load(mid_ + v, n, -__builtin_inff());
        const vf weight = exp_down((mid - top_) * f);
        weights += weight;
        offsets += weight * (n == kLanes ? load(given + v) : load(given + v, n, 0.0f));
      }
      const double sum_of = sum(weights), most = factor * (tops_radius(block) + near_top());
      const double fixed = radii_.empty() ? most - factor * e_ * stretch_ * block_e(block) : 0.0;
      const double unit = radii_.empty() ? factor * e_ * stretch_ : factor;
      const double offset = unit * sum(offsets) * (1.0 + 0x1p-16) + sum_of * fixed;
      // What exp rounded to 0 may be as large as its bound.
      all.hi += static_cast<double>(hi - lo) * 2.2e-38 * std::exp(most);
      if (!(sum_of > 0.0)) continue;
      all.lo += sum_of * std::exp(-std::min(most, offset / sum_of));
      all.hi += sum_of + offset * (most > 1e-3 ? std::expm1(most) / most : 1.0 + most);
    }
    return all;
  }

  // A counted token is at most the top; the difference bounds its rounding error.
  double near_top() const { return std::fabs(top_) * 0x1p-20; }
  double block_e(size_t block) const { return screen_.bounds.block_e[block]; }
  double tops_radius(size_t block) const { return radii_of_blocks_[block]; }

  template <class Takes>
  bool scan(double limit, size_t most, std::vector<int64_t>* ids, const Takes& takes) const {
    for (size_t block = 0; block < tops_.size(); ++block) {
      const double off = radii_of_blocks_[block];
      if (tops_[block] + off < limit || tops_[block] == -__builtin_inff()) continue;
      const int64_t lo = static_cast<int64_t>(block) * kScreenBlock;
      const int64_t hi = std::min(vocab_, lo + kScreenBlock);
      // In float32 with a margin; what passes is compared in float64.
      const double lowest = limit - off, margin = 0x1p-20 * (std::fabs(lowest) + off) + 0x1p-100;
      const float least = limit == kNone ? -FLT_MAX : static_cast<float>(lowest - margin);
      for (int64_t v = lo; v < hi; v += kLanes) {
        const int n = static_cast<int>(std::min<int64_t>(kLanes, hi - v));
        const vf a = n == kLanes ? load(mid_ + v) : load(mid_ + v, n, -__builtin_inff());
        const vi hit = a >= least;
        if (!any(hit)) continue;
        for (int k = 0; k < n; ++k)
          if (hit[k] && takes(v + k)) ids->push_back(v + k);
      }
      if (ids->size() > most) return false;
    }
    return true;
  }

  const lmhead::SampleScreen& screen_;
  const lmhead::SampleSource& source_;
  int64_t vocab_;
  const float* hidden_;
  bool wide_;
  float* mid_;
  double e_, n_, float_n_, slack_;
  double scale_ = 1.0, shift_ = 0.0, stretch_ = 1.0;
  float top_ = -__builtin_inff();
  std::vector<float> radii_;  // of all tokens, of "4+4"
  std::vector<float> tops_;
  std::vector<double> radii_of_blocks_;
};

}  // namespace
}  // namespace LMHEAD_ISA
