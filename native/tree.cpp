// One instruction set's kernels on trees of decisions.
#include "tree.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "dot.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace LMHEAD_ISA {
namespace {

using lmhead::Floats;
using lmhead::parallel_for;
using lmhead::TokenTree;

// Terms added in float32 before they are added to the total: less error in long sums.
constexpr int64_t kTerms = 64;
// Vectors of a row that are summed side by side.
constexpr int kSide = 4;
// Rows of `to` per task of a thread.
constexpr int64_t kGroups = 16;

inline vf load_row(const float* p) { return load(p); }

template <class T>
inline vf load_row(const T* p) {
  vf v;
  for (int i = 0; i < kLanes; ++i) v[i] = value(p[i]);
  return v;
}

// to[:] += Σ factors[p] · from[a[p], :] over the pairs of one row of `to`.
template <class T>
void sum_rows(const double* factors, const T* from, int64_t d, const int64_t* a,
              const int64_t* pairs, int64_t n, float* to) {
  int64_t j = 0;
  for (; j + kSide * kLanes <= d; j += kSide * kLanes)
    for (int64_t begin = 0; begin < n; begin += kTerms) {
      const int64_t end = std::min(n, begin + kTerms);
      vf sums[kSide] = {};
      for (int64_t i = begin; i < end; ++i) {
        const vf factor = splat(static_cast<float>(factors[pairs[i]]));
        const T* row = from + a[pairs[i]] * d + j;
        for (int s = 0; s < kSide; ++s) sums[s] += factor * load_row(row + s * kLanes);
      }
      for (int s = 0; s < kSide; ++s)
        store(to + j + s * kLanes, load(to + j + s * kLanes) + sums[s]);
    }
  for (; j < d; ++j)
    for (int64_t begin = 0; begin < n; begin += kTerms) {
      const int64_t end = std::min(n, begin + kTerms);
      float sum = 0.0f;
      for (int64_t i = begin; i < end; ++i)
        sum += static_cast<float>(factors[pairs[i]]) * value(from[a[pairs[i]] * d + j]);
      to[j] += sum;
    }
}

void sums(const double* factors, const Floats& from, int64_t d, const int64_t* a, const int64_t* b,
          int64_t pairs, float* to, int64_t size, int threads) {
  // The pairs of each row of `to`, by counting: in order, so that the result is the same always.
  std::vector<int64_t> first(static_cast<size_t>(size) + 1, 0);
  for (int64_t p = 0; p < pairs; ++p) ++first[static_cast<size_t>(b[p]) + 1];
  std::vector<int64_t> named;
  for (int64_t i = 0; i < size; ++i) {
    if (first[static_cast<size_t>(i) + 1]) named.push_back(i);
    first[static_cast<size_t>(i) + 1] += first[static_cast<size_t>(i)];
  }
  std::vector<int64_t> place(first.begin(), first.end() - 1);
  std::vector<int64_t> sorted(static_cast<size_t>(pairs));
  for (int64_t p = 0; p < pairs; ++p)
    sorted[static_cast<size_t>(place[static_cast<size_t>(b[p])]++)] = p;
  const auto groups = static_cast<int64_t>(named.size());
  parallel_for((groups + kGroups - 1) / kGroups, threads, [&](int64_t block) {
    const int64_t end = std::min(groups, (block + 1) * kGroups);
    for (int64_t g = block * kGroups; g < end; ++g) {
      const auto row = static_cast<size_t>(named[static_cast<size_t>(g)]);
      with_type(from, [&](auto* rows) {
        sum_rows(factors, rows, d, a, sorted.data() + first[row], first[row + 1] - first[row],
                 to + static_cast<int64_t>(row) * d);
      });
    }
  });
}

// A node and the log of its probability; `less` by mass alone orders the forks that are open.
struct Node {
  double mass;
  int64_t id;
};

bool lighter(const Node& x, const Node& y) { return x.mass < y.mass; }

// Whether x comes before y among tokens: more mass, or as much and a lower id.
bool before(const Node& x, const Node& y) {
  return x.mass > y.mass || (x.mass == y.mass && x.id < y.id);
}

// log σ(z), as log p of a branch of two.
double log_sigmoid(double z) { return std::min(z, 0.0) - std::log1p(std::exp(-std::abs(z))); }

template <class T>
class Search {
 public:
  Search(const T* hidden, const T* weight, const T* bias, int64_t d, const TokenTree& tree,
         int64_t k)
      : hidden_(hidden), weight_(weight), bias_(bias), d_(d), tree_(tree), k_(k) {}

  // Whether no probability was a NaN, and all nodes were valid.
  bool run() {
    if (tree_.forks == 0) {
      best_.push_back({0.0, 0});
      return true;
    }
    open_.push_back({0.0, 0});
    while (!open_.empty()) {
      std::pop_heap(open_.begin(), open_.end(), lighter);
      const Node fork = open_.back();
      open_.pop_back();
      // A fork that ties with the last token may hold a token with a lower id.
      if (full() && fork.mass < best_.front().mass) break;
      if (!expand(fork)) return false;
    }
    std::sort_heap(best_.begin(), best_.end(), before);
    if (!full()) opened_ = -1;  // the tree has fewer tokens than it must
    return full();
  }

  const std::vector<Node>& best() const { return best_; }
  int64_t opened() const { return opened_; }

 private:
  bool full() const { return static_cast<int64_t>(best_.size()) == k_; }

  // Two branches or more, each a token or a fork further down; the rows before the last are there.
  bool is_fork(int64_t id, int64_t begin, int64_t end) const {
    // Compare before subtracting: the numbers may be arbitrary.
    if (begin < id || end <= begin || end > tree_.vocab + tree_.forks - 1) return false;
    if (end - begin < 2) return false;
    if (end - id - 1 > tree_.vocab - 1) return false;
    for (int64_t e = begin; e < end; ++e) {
      const int64_t node = tree_.child[e];
      if (node < 0 || node >= tree_.vocab + tree_.forks) return false;
      if (node >= tree_.vocab && node - tree_.vocab <= id) return false;
    }
    return true;
  }

  double score(int64_t row) const {
    const double shift = bias_ ? value(bias_[row]) : 0.0f;
    return dot(hidden_, weight_ + row * d_, d_) + shift;
  }

  bool expand(const Node& fork) {
    ++opened_;
    const int64_t begin = tree_.start[fork.id], end = tree_.start[fork.id + 1];
    const int64_t row = begin - fork.id;
    if (opened_ > tree_.forks || !is_fork(fork.id, begin, end)) {
      opened_ = -1;
      return false;
    }
    if (end - begin == 2) {
      const double z = score(row);
      if (std::isnan(z)) return false;
      add(tree_.child[begin], fork.mass + log_sigmoid(z));
      add(tree_.child[begin + 1], fork.mass + log_sigmoid(-z));
      return true;
    }
    scores_.clear();
    double most = 0.0, total = 0.0;
    for (int64_t e = begin; e < end; ++e) {
      const double z = e + 1 < end ? score(row + e - begin) : 0.0;
      if (!(z < std::numeric_limits<double>::infinity())) return false;  // inf - inf is NaN
      scores_.push_back(z);
      most = std::max(most, z);
    }
    for (double z : scores_) total += std::exp(z - most);
    const double log_total = std::log(total);
    for (int64_t e = begin; e < end; ++e)
      add(tree_.child[e], fork.mass + (scores_[static_cast<size_t>(e - begin)] - most - log_total));
    return true;
  }

  void add(int64_t node, double mass) {
    if (node >= tree_.vocab) {
      if (full() && mass < best_.front().mass) return;
      open_.push_back({mass, node - tree_.vocab});
      std::push_heap(open_.begin(), open_.end(), lighter);
      return;
    }
    const Node token{mass, node};
    if (full()) {
      if (!before(token, best_.front())) return;
      std::pop_heap(best_.begin(), best_.end(), before);
      best_.pop_back();
    }
    best_.push_back(token);
    std::push_heap(best_.begin(), best_.end(), before);
  }

  const T* hidden_;
  const T* weight_;
  const T* bias_;
  int64_t d_;
  const TokenTree& tree_;
  int64_t k_, opened_ = 0;
  std::vector<Node> open_;  // a heap, heaviest first
  std::vector<Node> best_;  // a heap, worst token first
  std::vector<double> scores_;
};

template <class T>
void best_of(const T* hidden, const T* weight, const T* bias, int64_t rows, int64_t d,
             const TokenTree& tree, int64_t k, double* values, int64_t* ids, int64_t* opened,
             int threads) {
  parallel_for(rows, threads, [&](int64_t i) {
    Search<T> search(hidden + i * d, weight, bias, d, tree, k);
    const bool fine = search.run();
    opened[i] = search.opened();
    for (int64_t j = 0; j < k; ++j) {
      const auto at = static_cast<size_t>(j);
      values[i * k + j] = fine ? search.best()[at].mass : std::numeric_limits<double>::quiet_NaN();
      ids[i * k + j] = fine ? search.best()[at].id : -1;
    }
  });
}

void best(const Floats& hidden, const Floats& weight, const void* bias, int64_t rows, int64_t d,
          const TokenTree& tree, int64_t k, double* values, int64_t* ids, int64_t* opened,
          int threads) {
  with_type(weight, [&](auto* w) {
    using T = decltype(w);
    best_of(static_cast<T>(hidden.data), w, static_cast<T>(bias), rows, d, tree, k, values, ids,
            opened, threads);
  });
}

}  // namespace
}  // namespace LMHEAD_ISA

namespace lmhead {

extern const TreeKernels LMHEAD_TREE;
const TreeKernels LMHEAD_TREE = {
    LMHEAD_ISA::sums,
    LMHEAD_ISA::best,
};

}  // namespace lmhead
