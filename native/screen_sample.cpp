// Sampling from the bounds of a copy; compiled once per instruction set, as kernels.cpp is.
#include "screen_sample.hpp"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "gumbel_filter.hpp"
#include "parallel.hpp"
#include "screen_row.hpp"

namespace LMHEAD_ISA {
namespace {

using lmhead::SampleChain;

// Relative; exceeds the float64 rounding errors of any other order of computation.
constexpr double kRounding = 1e-12;
// top_h looks at this many of the best tokens.
constexpr int64_t kTopHMost = 100;

struct Step {
  int64_t kind, least;
  double value;
};

// How many of the best tokens are kept, at least and at most.
struct Counts {
  size_t lo, hi;
};

struct Undecided {};
struct Unsound {};

// The decision of one row; throws where there is none.
class RowSampler {
 public:
  RowSampler(const BoundedRow& row, const SampleChain& chain, const lmhead::SampleEdits& edits,
             int64_t number, int64_t rows, int64_t vocab)
      : row_(row), key_(chain.keys[number]), greedy_(chain.greedy[number] != 0), vocab_(vocab) {
    for (int64_t i = edits.starts[number]; i < edits.starts[number + 1]; ++i)
      edited_.push_back({edits.after[i], edits.before[i], edits.ids[i]});
    if (greedy_) {
      steps_.push_back({lmhead::kTopK, 1, 1.0});
      return;
    }
    for (int64_t i = 0; i < chain.steps; ++i) {
      const Step step{chain.kinds[i], chain.least[i], chain.values[i * rows + number]};
      if (step.kind == lmhead::kTemperature && steps_.empty())
        beta_ *= step.value;
      else if (!keeps_all(step))
        steps_.push_back(step);
    }
    if (std::all_of(steps_.begin(), steps_.end(),
                    [](const Step& s) { return s.kind == lmhead::kTemperature; })) {
      for (const Step& step : steps_) beta_ *= step.value;
      steps_.clear();
    }
    // The caller handles a distribution this flat or this steep.
    if (!(beta_ > 1e-30 && beta_ < 1e30)) throw Undecided();
  }

  void draw(const lmhead::SampleDrawn& out, int64_t number) {
    Range log_prob{0.0, 0.0};
    const Token token = steps_.empty() ? by_gumbel(&log_prob) : from_best(&log_prob);
    const Range lse = log_total(1.0, [](const Token& t) { return t.raw; });
    out.token[number] = token.id;
    out.z[number] = token.raw;
    out.scored[number] = static_cast<int64_t>(tokens_.size() + edited_.size());
    out.log_prob_lo[number] = std::min(0.0, log_prob.lo);
    out.log_prob_hi[number] = std::min(0.0, log_prob.hi);
    const double off = 2.0 * float_error();  // of the logit and of the sum
    out.lse_lo[number] = lse.lo - off, out.lse_hi[number] = lse.hi + off;
    out.state[number] = lmhead::kDecided;
  }

  size_t scored() const { return tokens_.size(); }

 private:
  bool keeps_all(const Step& s) const {
    switch (s.kind) {
      case lmhead::kTopK:
        return s.value >= static_cast<double>(vocab_);
      case lmhead::kTopP:
        return s.value >= 1.0;
      case lmhead::kMinP:
      case lmhead::kEpsilon:
        return s.value <= 0.0;
      default:
        return false;
    }
  }

  void score(const std::vector<int64_t>& ids) {
    if (!row_.score(ids, &tokens_)) throw Unsound();
  }

  // Scores those of these tokens that were not scored before.
  void score_others(std::vector<int64_t> ids) {
    std::vector<int64_t> known, others;
    for (const Token& t : tokens_) known.push_back(t.id);
    std::sort(known.begin(), known.end());
    std::sort(ids.begin(), ids.end());
    std::set_difference(ids.begin(), ids.end(), known.begin(), known.end(),
                        std::back_inserter(others));
    score(others);
  }

  // The log of Σ exp(β of(token)) over all tokens: exact for those that were scored.
  template <class Of>
  Range log_total(double beta, const Of& of) const {
    const Range others = row_.log_mass(beta, tokens_);
    double top = std::isinf(others.hi) ? others.lo : others.hi;
    for (const auto* list : {&tokens_, &edited_})
      for (const Token& t : *list) top = std::max(top, beta * of(t));
    if (top == kNone) throw Undecided();
    double known = 0.0;
    for (const auto* list : {&tokens_, &edited_})
      for (const Token& t : *list) known += std::exp(beta * of(t) - top);
    return {top + std::log(known + std::exp(others.lo - top)) - kRounding,
            top + std::log(known + std::exp(others.hi - top)) + kRounding};
  }

  // How far the logits of these tokens may be from those of float64 sums.
  double float_error() const {
    double most = 0.0;
    for (const auto* list : {&tokens_, &edited_})
      for (const Token& t : *list)
        if (t.z > kNone) most = std::max(most, row_.float_error(t));
    return most;
  }

  double noise(int64_t id) const {
    return lmhead::to_gumbel(lmhead::philox(key_, 0, static_cast<uint64_t>(id)));
  }

  // The best of some tokens by β z + noise; no other may be within rounding error of it.
  size_t winner(const std::vector<Token>& tokens, size_t n, double beta) const {
    size_t best = 0;
    double first = kNone, second = kNone, off = 0.0;
    for (size_t i = 0; i < n; ++i) {
      if (tokens[i].z == kNone) continue;
      const double x = beta * tokens[i].z, score = x + noise(tokens[i].id);
      off = std::max(off, beta * row_.score_error(tokens[i].z) + kRounding * (1.0 + std::fabs(x)));
      if (score > first) {
        second = first;
        first = score;
        best = i;
      } else {
        second = std::max(second, score);
      }
    }
    if (!(first - second > 2.0 * off)) throw Undecided();
    return best;
  }

  // Sampling by temperature alone.
  Token by_gumbel(Range* log_prob) {
    const double factor = beta_ * row_.scale();
    std::vector<int64_t> ids;
    if (!row_.empty()) contenders(factor, &ids);
    score(ids);
    std::vector<Token> all = tokens_;
    all.insert(all.end(), edited_.begin(), edited_.end());
    const Token token = all[winner(all, all.size(), beta_)];
    const Range total = log_total(beta_, [](const Token& t) { return t.z; });
    const double x = beta_ * token.z, off = 2.0 * beta_ * float_error();
    *log_prob = {x - total.hi - off, x - total.lo + off};
    return token;
  }

  // The tokens that can win, by their upper bounds and the lower bound of the best.
  void contenders(double factor, std::vector<int64_t>* ids) const {
    const double slack = 2.0 * beta_ * row_.slack() + 1e-9;
    std::vector<std::pair<double, int64_t>> found;  // upper bounds
    double best = kNone;                            // the largest lower bound
    for (int64_t lo = 0; lo < vocab_; lo += kChunk) {
      const int64_t hi = std::min(vocab_, lo + kChunk);
      const double wide = std::max(row_.block_radius(lo), row_.block_radius(hi - 1));
      each_contender(
          row_.mids(), lo, hi, factor, row_.top(), key_,
          [&] { return best - factor * wide - slack; },
          [&](int64_t v, double score) {
            const double off = factor * row_.radius(v);
            best = std::max(best, score - off);
            if (score + off + slack >= best) found.emplace_back(score + off, v);
          });
    }
    for (const auto& [score, v] : found)
      if (score + slack >= best) ids->push_back(v);
    if (ids->size() > most()) throw Undecided();
  }

  // The most tokens to score: more would take as long as all logits.
  size_t most() const {
    return std::max<size_t>(1024, static_cast<size_t>(vocab_ / (row_.coarse() ? 16 : 4)));
  }

  // A limit that the tokens kept by the first cut reach; for a share of a mass that is known within
  // bounds it is a guess, better with the best `some` tokens scored.
  double first_limit(int64_t some) {
    const Step& cut = steps_.front();
    int64_t k = std::max<int64_t>(1, cut.least);
    if (by_mass()) k = std::max(k, some);
    if (cut.kind == lmhead::kTopK) k = static_cast<int64_t>(cut.value);
    if (cut.kind == lmhead::kTopH) k = kTopHMost;
    if (k > static_cast<int64_t>(most())) throw Undecided();
    double limit = kNone;
    if (!row_.empty()) {
      const std::vector<int64_t> pivots = row_.best(k);
      if (static_cast<int64_t>(pivots.size()) < k) return kNone;
      score_others(pivots);
      limit = __builtin_inf();
      for (const Token& t : tokens_) limit = std::min(limit, t.z);
    } else if (edited_.empty()) {
      throw Undecided();
    }
    double best = kNone;
    for (const auto* list : {&tokens_, &edited_})
      for (const Token& t : *list) best = std::max(best, t.z);
    const double off = kRounding * (1.0 + std::fabs(best)) + 2.0 * row_.score_error(best);
    if (cut.kind == lmhead::kMinP) return std::min(limit, best + std::log(cut.value) / beta_ - off);
    if (cut.kind == lmhead::kEpsilon) {
      const Range total = log_total(beta_, [](const Token& t) { return t.z; });
      return std::min(limit, (total.lo + std::log(cut.value)) / beta_ - off);
    }
    if (cut.kind == lmhead::kTopP) return std::min(limit, nucleus_limit(cut.value));
    return limit - 2.0 * row_.score_error(limit);
  }

  // An estimate of the smallest logit in the nucleus, from the midpoints of the bounds.
  double nucleus_limit(double p) const {
    if (row_.empty()) return kNone;
    const double factor = beta_ * row_.scale();
    const Range range = log_total(beta_, [](const Token& t) { return t.z; });
    const double total = (range.lo + range.hi) / 2.0, target = p + 0.15 * (1.0 - p);
    double known = 0.0;
    for (const Token& t : edited_) known += std::exp(beta_ * t.z - total);
    for (double near = 3.0; near < 100.0; near *= 1.5) {
      std::vector<int64_t> ids;
      if (!row_.above(row_.top() - near / factor, most(), &ids)) throw Undecided();
      std::sort(ids.begin(), ids.end(),
                [&](int64_t a, int64_t b) { return row_.mid(a) > row_.mid(b); });
      double before = known;
      for (int64_t v : ids) {
        before += std::exp(beta_ * row_.centre(v) - total);
        if (before >= target) return row_.centre(v) - row_.scale() * row_.radius(v);
      }
    }
    return kNone;
  }

  bool by_mass() const {
    return steps_.front().kind == lmhead::kTopP || steps_.front().kind == lmhead::kEpsilon;
  }

  // The best tokens, the cuts, and a draw among what they keep: few first, more where their mass
  // does not decide.
  Token from_best(Range* log_prob) {
    const double beta = beta_;
    const auto all = static_cast<int64_t>(most());
    std::vector<int64_t> levels{48, 384, all / 4, all};
    if (row_.coarse()) levels.resize(2);  // more of them would not narrow the mass of the rest
    for (int64_t some : levels) {
      try {
        return from_best(some, log_prob);
      } catch (const Undecided&) {
        if (!by_mass() || some == levels.back()) throw;
        beta_ = beta;
      }
    }
    throw Undecided();
  }

  Token from_best(int64_t some, Range* log_prob) {
    const double limit = first_limit(some);
    std::vector<int64_t> ids;
    if (!row_.empty() && !row_.reaching(limit, most(), &ids)) throw Undecided();
    score_others(ids);
    // Below the limit there may be tokens that were not scored.
    std::vector<Token> best;
    for (const auto* list : {&tokens_, &edited_})
      for (const Token& t : *list)
        if (t.z >= limit && t.z > kNone) best.push_back(t);
    if (best.empty()) throw Undecided();
    std::sort(best.begin(), best.end());

    Counts n = cut(best, limit == kNone);
    for (size_t end : {n.lo, n.hi})  // two that may come in another order, one of them cut
      if (end < best.size() && best[end - 1].z - best[end].z < 2.0 * row_.score_error(best[end].z))
        throw Undecided();
    if (greedy_) return best[0];
    const size_t place = winner(best, n.hi, beta_);
    if (place >= n.lo) throw Undecided();
    const double off = 2.0 * beta_ * float_error() + kRounding;
    *log_prob = {beta_ * (best[place].z - best[0].z) - std::log(mass(best, n.hi)) - off,
                 beta_ * (best[place].z - best[0].z) - std::log(mass(best, n.lo)) + off};
    return best[place];
  }

  // Σ exp(β (z - z of the best)) over the first n.
  double mass(const std::vector<Token>& best, size_t n) const {
    double sum = 0.0;
    for (size_t i = 0; i < n; ++i) sum += std::exp(beta_ * (best[i].z - best[0].z));
    return sum;
  }

  // Applies all steps. The first cut must end among these tokens, unless they are all.
  Counts cut(const std::vector<Token>& best, bool all) {
    Counts n{best.size(), best.size()};
    for (size_t i = 0; i < steps_.size(); ++i) {
      const Step& step = steps_[i];
      if (step.kind == lmhead::kTemperature) {
        beta_ *= step.value;
        continue;
      }
      const double slack = kRounding + 4.0 * beta_ * row_.score_error(best[0].z);
      Range total{0.0, 0.0};
      if (step.kind == lmhead::kTopP || step.kind == lmhead::kEpsilon) {
        total = {mass(best, n.lo), mass(best, n.hi)};
        if (i == 0 && !all) {
          total = log_total(beta_, [](const Token& t) { return t.z; });
          total = {std::exp(total.lo - beta_ * best[0].z), std::exp(total.hi - beta_ * best[0].z)};
        }
      }
      total = {total.lo * (1.0 - slack), total.hi * (1.0 + slack)};
      const Counts kept{kept_by(step, best, n.lo, total.lo, total.hi, 1.0 + slack),
                        kept_by(step, best, n.hi, total.hi, total.lo, 1.0 - slack)};
      if (step.kind == lmhead::kTopH && n.lo != n.hi) throw Undecided();
      // Other cuts cannot keep a token below the limit, by its choice.
      if (i == 0 && !all && step.kind == lmhead::kTopP && kept.hi == best.size()) throw Undecided();
      n = {std::max<size_t>(1, std::min(kept.lo, kept.hi)), std::max(kept.lo, kept.hi)};
    }
    return n;
  }

  // How many of n tokens a cut keeps. top_p with a mass of all of `total`, epsilon with `other`;
  // `strict` moves limits of probabilities.
  size_t kept_by(const Step& step, const std::vector<Token>& best, size_t n, double total,
                 double other, double strict) const {
    const auto least = std::min(n, static_cast<size_t>(std::max<int64_t>(1, step.least)));
    const auto p = [&](size_t i) { return std::exp(beta_ * (best[i].z - best[0].z)); };
    size_t kept = 0;
    switch (step.kind) {
      case lmhead::kTopK:
        return std::min(n, static_cast<size_t>(step.value));
      case lmhead::kTopP:
        for (double before = 0.0; kept < n && (before < step.value * total || kept < least); ++kept)
          before += p(kept);
        return kept;
      case lmhead::kMinP:
        while (kept < n && (p(kept) >= step.value * strict || kept < least)) ++kept;
        return kept;
      case lmhead::kEpsilon:
        while (kept < n && (p(kept) >= step.value * other * strict || kept < least)) ++kept;
        return kept;
      default:
        return kept_by_entropy(step.value, best, std::min<size_t>(n, kTopHMost), strict);
    }
  }

  // top_h: while the entropies -p log p, their own included, are at most a share of all.
  size_t kept_by_entropy(double share, const std::vector<Token>& best, size_t n,
                         double strict) const {
    if (share >= 1.0) return n;
    const double log_mass = std::log(mass(best, n));
    // With one likely token and negligible others, rounding errors are no longer small.
    if (log_mass < 1e-6 && n > 1) throw Undecided();
    const auto term = [&](size_t i) {
      const double x = beta_ * (best[i].z - best[0].z) - log_mass;
      if (x < -700.0) throw Undecided();
      return -std::exp(x) * x;
    };
    double all = 0.0, sum = term(0);
    for (size_t i = 0; i < n; ++i) all += term(i);
    size_t kept = 1;
    while (kept < n && (sum += term(kept)) * strict <= share * all) ++kept;
    return kept;
  }

  const BoundedRow& row_;
  lmhead::Key key_;
  bool greedy_;
  int64_t vocab_;
  double beta_ = 1.0;
  std::vector<Step> steps_;    // with an effect, from the first cut on
  std::vector<Token> edited_;  // tokens that edits changed
  std::vector<Token> tokens_;  // others that were scored
};

}  // namespace

void sample_screened(const lmhead::SampleScreen& screen, const lmhead::SampleSource& source,
                     const SampleChain& chain, const lmhead::SampleEdits& edits,
                     const lmhead::SampleDrawn& out, int threads) {
  const int64_t rows = screen.bounds.rows, vocab = screen.bounds.vocab;
  lmhead::parallel_for(rows, threads, [&](int64_t i) {
    out.state[i] = lmhead::kUndecided, out.scored[i] = 0;
    const int64_t first = edits.starts[i], n = edits.starts[i + 1] - first;
    const BoundedRow row(screen, source, i, chain.wide[i] != 0, edits.ids + first, n);
    try {
      RowSampler(row, chain, edits, i, rows, vocab).draw(out, i);
    } catch (const Undecided&) {
    } catch (const Unsound&) {
      out.state[i] = lmhead::kUnsound;
    }
  });
}

}  // namespace LMHEAD_ISA
