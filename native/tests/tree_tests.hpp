// Trees of decisions: sums of rows by pairs, and the search for the best tokens.
#pragma once

#include <algorithm>

#include "cases.hpp"
#include "references.hpp"
#include "stored.hpp"
#include "tree.hpp"

namespace tree_tests {

using lmhead::Kernels;
using lmhead::TokenTree;

using stored::value;

template <class T>
T make(Random& random, double scale) {
  return stored::rounded<T>(random.normal(scale));
}

template <class T>
T masked() {
  return stored::rounded<T>(-HUGE_VALF);
}

// Rows with very many pairs, with one, and with none, which must stay as they are.
template <class T>
void run_sums(const Kernels& k, Tally& tally) {
  for (Place place : {Place::tight, Place::padded})
    for (int64_t d : sizes({1, 7, 31, 33, 64, 129}))
      for (int64_t pairs : sizes({0, 1, 65, 700})) {
        tally.begin(label(k, "tree sums", {pairs, d}, stored::type_name<T>(), place));
        Random random(static_cast<uint32_t>(d * 1000 + pairs));
        const int64_t rows = 9, size = 40;
        const auto width = static_cast<size_t>(d), count = static_cast<size_t>(pairs);
        const Buffer<T> from(rows * width, place, [&](size_t) { return make<T>(random, 1.0); });
        const Buffer<double> factors(count, place, [&](size_t) { return random.normal(1.0); });
        const Buffer<int64_t> a(count, place, [&](size_t i) { return i ? random.below(rows) : 8; });
        const Buffer<int64_t> b(count, place, [&](size_t i) {
          return i % 2 ? 3 : (i ? random.below(size - 1) : size - 1);
        });
        std::vector<float> before(size * width);
        for (float& x : before) x = random.normal(1.0);
        std::vector<double> want(before.begin(), before.end()), bound(before.size(), 0.0);
        std::vector<bool> named(before.size(), false);
        for (size_t p = 0; p < count; ++p)
          for (size_t e = 0; e < width; ++e) {
            const size_t at = static_cast<size_t>(b[p]) * width + e;
            const double term = factors[p] * value(from[static_cast<size_t>(a[p]) * width + e]);
            want[at] += term;
            bound[at] += 1e-5 * std::abs(term) + 1e-6;
            named[at] = true;
          }
        std::vector<float> first;
        for (int threads : thread_counts()) {
          const Buffer<float> to(before.size(), place, [&](size_t i) { return before[i]; });
          k.tree->sums(factors.data(), stored::floats(from), d, a.data(), b.data(), pairs,
                       to.data(), size, threads);
          tally.expect(to.intact() && from.intact(), "wrote outside a buffer");
          if (first.empty()) first = to.copy();
          tally.expect(to.same(first), "differs with " + std::to_string(threads) + " threads");
          for (size_t i = 0; i < want.size(); ++i) {
            if (!named[i]) tally.expect(to[i] == before[i], "a row that was not named has changed");
            tally.expect_near(to[i], want[i], bound[i], "sum", static_cast<int64_t>(i));
          }
        }
      }
}

// A tree over tokens with forks of 2 to `arity` branches; a chain where `deep`.
struct Made {
  std::vector<int64_t> start{0}, child;
};

inline Made make_tree(int64_t vocab, int64_t arity, bool deep, Random& random) {
  // Parts of [0, vocab) in a queue, each a fork or a token; the tokens are dealt out in some order.
  std::vector<int64_t> tokens(static_cast<size_t>(vocab));
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int64_t>(i);
  for (size_t i = tokens.size() - 1; i > 0; --i)
    std::swap(tokens[i], tokens[static_cast<size_t>(random.below(static_cast<int64_t>(i) + 1))]);
  Made tree;
  std::vector<std::pair<int64_t, int64_t>> parts = {{0, vocab}};
  int64_t forks = vocab > 1 ? 1 : 0;
  for (size_t f = 0; static_cast<int64_t>(f) < forks; ++f) {
    auto [low, high] = parts[f];
    const int64_t ways = std::min(high - low, deep ? 2 : 2 + random.below(arity - 1));
    for (int64_t w = 0; w < ways; ++w) {
      const int64_t left = ways - w;
      int64_t take = high - low;
      if (left > 1) take = deep ? 1 : std::max<int64_t>(1, take / left);
      if (take == 1) {
        tree.child.push_back(tokens[static_cast<size_t>(low)]);
      } else {
        tree.child.push_back(vocab + forks++);
        parts.push_back({low, low + take});
      }
      low += take;
    }
    tree.start.push_back(static_cast<int64_t>(tree.child.size()));
  }
  return tree;
}

struct Scored {
  double mass;
  int64_t id;
};

// Every token, by the definition: down the tree, then sorted.
template <class T>
std::vector<Scored> all_tokens(const T* hidden, const T* weight, const T* bias, size_t d,
                               const TokenTree& tree) {
  if (tree.forks == 0) return {{0.0, 0}};
  std::vector<double> mass(static_cast<size_t>(tree.vocab + tree.forks), 0.0);
  for (int64_t f = 0; f < tree.forks; ++f) {
    std::vector<double> scores;
    const int64_t begin = tree.start[f], end = tree.start[f + 1];
    for (int64_t e = begin; e < end; ++e) {
      double z = 0.0;
      const auto row = static_cast<size_t>(e - f);
      if (e + 1 < end) {
        for (size_t i = 0; i < d; ++i)
          z += static_cast<double>(value(hidden[i])) * value(weight[row * d + i]);
        if (bias) z += value(bias[row]);
      }
      scores.push_back(z);
    }
    double most = *std::max_element(scores.begin(), scores.end()), total = 0.0;
    for (double z : scores) total += std::exp(z - most);
    for (int64_t e = begin; e < end; ++e)
      mass[static_cast<size_t>(tree.child[e])] = mass[static_cast<size_t>(tree.vocab + f)] +
                                                 scores[static_cast<size_t>(e - begin)] - most -
                                                 std::log(total);
  }
  std::vector<Scored> tokens;
  for (int64_t v = 0; v < tree.vocab; ++v) tokens.push_back({mass[static_cast<size_t>(v)], v});
  std::stable_sort(tokens.begin(), tokens.end(),
                   [](const Scored& x, const Scored& y) { return x.mass > y.mass; });
  return tokens;
}

// The best tokens of one state against all tokens, sorted.
inline void check_best(const std::vector<Scored>& want, const double* values, const int64_t* ids,
                       size_t count, bool tied, Tally& tally) {
  std::vector<int64_t> seen(ids, ids + count);
  for (size_t j = 0; j < count; ++j) {
    const double slack = 1e-10 * (1.0 + std::abs(std::max(want[j].mass, -1e300)));
    tally.expect_near(values[j], want[j].mass, slack, "log p", static_cast<int64_t>(j));
    if (ids[j] == want[j].id) continue;
    // Another token only where the reference's rounding cannot tell them, never where all tokens
    // tie.
    const auto same = std::find_if(want.begin(), want.end(),
                                   [&](const Scored& token) { return token.id == ids[j]; });
    tally.expect(same != want.end() && !tied && near(same->mass, want[j].mass, slack),
                 "another token");
  }
  std::sort(seen.begin(), seen.end());
  tally.expect(std::adjacent_find(seen.begin(), seen.end()) == seen.end(), "a token twice");
}

// A tree with its parameters, and states.
template <class T>
struct Case {
  static constexpr int64_t kRows = 3, kWidth = 19;
  Buffer<int64_t> start, child;
  Buffer<T> hidden, weight, bias;
  int64_t vocab;

  Case(const Made& made, int64_t tokens, double scale, Place place, Random& random)
      : start(made.start.size(), place, [&](size_t i) { return made.start[i]; }),
        child(made.child.size(), place, [&](size_t i) { return made.child[i]; }),
        hidden(kRows * kWidth, place, [&](size_t) { return make<T>(random, 1.0); }),
        weight(static_cast<size_t>((tokens - 1) * kWidth), place,
               [&](size_t) { return make<T>(random, scale); }),
        bias(static_cast<size_t>(tokens - 1), place,
             [&](size_t i) { return i % 7 == 6 ? masked<T>() : make<T>(random, scale); }),
        vocab(tokens) {}

  TokenTree tree() const {
    return {start.data(), child.data(), vocab, static_cast<int64_t>(start.size()) - 1};
  }
};

template <class T>
void run_case(const Kernels& k, const Case<T>& c, const T* bias, int64_t few, bool tied,
              Place place, Tally& tally) {
  const auto count = static_cast<size_t>(few), width = static_cast<size_t>(c.kWidth);
  const auto rows = static_cast<size_t>(c.kRows);
  const TokenTree tree = c.tree();
  for (int threads : thread_counts()) {
    const Buffer<double> values(rows * count, place);
    const Buffer<int64_t> ids(rows * count, place), opened(rows, place);
    k.tree->best(stored::floats(c.hidden), stored::floats(c.weight), bias, c.kRows, c.kWidth, tree,
                 few, values.data(), ids.data(), opened.data(), threads);
    tally.expect(values.intact() && ids.intact() && opened.intact(), "wrote outside a buffer");
    for (size_t i = 0; i < rows; ++i) {
      const T* state = c.hidden.data() + i * width;
      const auto want = all_tokens(state, c.weight.data(), bias, width, tree);
      tally.expect(opened[i] <= tree.forks, "opened a fork twice");
      check_best(want, values.data() + i * count, ids.data() + i * count, count, tied, tally);
    }
  }
}

template <class T>
void run_best(const Kernels& k, Tally& tally) {
  for (Place place : {Place::tight, Place::padded})
    for (int64_t vocab : sizes({1, 2, 3, 50, 400}))
      for (int64_t arity : {2, 5})
        for (bool deep : {false, true})
          for (double scale : {0.0, 1.0, 100.0}) {
            const std::string how = std::string(stored::type_name<T>()) + (deep ? " deep" : "");
            tally.begin(label(k, "tree best", {vocab, arity}, how.c_str(), place));
            Random random(static_cast<uint32_t>(vocab * 10 + arity));
            const Made made = make_tree(vocab, arity, deep, random);
            const Case<T> c(made, vocab, scale, place, random);
            for (int64_t few : {int64_t{1}, std::min<int64_t>(vocab, 7), vocab}) {
              run_case<T>(k, c, nullptr, few, scale == 0.0, place, tally);
              run_case<T>(k, c, c.bias.data(), few, false, place, tally);
            }
          }
}

// A NaN that is looked at leaves no token; one in a state must not disturb its neighbours.
inline void run_broken(const Kernels& k, Tally& tally) {
  for (int64_t arity : {2, 4}) {
    tally.begin(label(k, "best tokens with a NaN", {30, arity}, "", Place::padded));
    Random random(5);
    const Made made = make_tree(30, arity, false, random);
    const TokenTree tree{made.start.data(), made.child.data(), 30,
                         static_cast<int64_t>(made.start.size()) - 1};
    std::vector<float> hidden(2 * 4), weight(29 * 4);
    for (float& x : hidden) x = random.normal(1.0);
    for (float& x : weight) x = random.normal(1.0);
    hidden[6] = NAN;
    const Buffer<double> values(2 * 3, Place::padded);
    const Buffer<int64_t> ids(2 * 3, Place::padded), opened(2, Place::padded);
    k.tree->best({hidden.data(), lmhead::FloatType::f32}, {weight.data(), lmhead::FloatType::f32},
                 nullptr, 2, 4, tree, 3, values.data(), ids.data(), opened.data(), 2);
    for (size_t j = 0; j < 3; ++j) {
      tally.expect(ids[j] >= 0 && std::isfinite(values[j]), "a NaN reached another state");
      tally.expect(ids[3 + j] == -1 && std::isnan(values[3 + j]), "a token from a NaN");
    }
  }
}

// Tables that are not a tree must be rejected, not followed for ever or past their end.
inline void run_bad_trees(const Kernels& k, Tally& tally) {
  const std::vector<int64_t> even = {0, 2, 4, 6};
  const struct {
    const char* name;
    std::vector<int64_t> start, child;
  } cases[] = {
      {"a cycle", even, {4, 5, 0, 4, 2, 3}},
      {"a node too large", even, {5, 7, 0, 1, 2, 3}},
      {"a negative node", even, {5, -1, 0, 1, 2, 3}},
      {"a token missing", even, {0, 1, 0, 1, 2, 3}},
      {"one branch", {0, 1, 4, 6}, {5, 6, 0, 1, 2, 3}},
      {"too many", {0, 7, 4, 6}, {5, 6, 0, 1, 2, 3}},
      {"a fork twice", even, {5, 5, 6, 6, 2, 3}},
      {"backwards", {0, -3, 4, 6}, {5, 6, 0, 1, 2, 3}},
  };
  for (const auto& c : cases) {
    tally.begin(label(k, "best tokens of", {4, 2}, c.name, Place::tight));
    const Buffer<int64_t> start(4, Place::tight, [&](size_t i) { return c.start[i]; });
    const Buffer<int64_t> child(6, Place::tight, [&](size_t i) { return c.child[i]; });
    const TokenTree tree{start.data(), child.data(), 4, 3};
    const Buffer<float> hidden(5, Place::tight, [](size_t) { return 1.0f; });
    const Buffer<float> weight(15, Place::tight, [](size_t) { return 0.0f; });
    const Buffer<double> values(4, Place::tight);
    const Buffer<int64_t> ids(4, Place::tight), opened(1, Place::tight);
    k.tree->best(stored::floats(hidden), stored::floats(weight), nullptr, 1, 5, tree, 4,
                 values.data(), ids.data(), opened.data(), 1);
    tally.expect(opened[0] == -1 && ids[0] == -1, "not told");
  }
}

// Every token's path, from the tables of a tree; and tables that lead nowhere.
inline void run_paths(Tally& tally) {
  for (Place place : {Place::tight, Place::padded})
    for (int64_t vocab : sizes({1, 2, 3, 50}))
      for (bool deep : {false, true}) {
        tally.begin("tree paths of " + std::to_string(vocab) + (deep ? ", deep" : ""));
        Random random(static_cast<uint32_t>(vocab));
        const Made made = make_tree(vocab, 4, deep, random);
        const auto forks = static_cast<int64_t>(made.start.size()) - 1;
        const auto nodes = static_cast<size_t>(vocab + forks), count = static_cast<size_t>(vocab);
        const Buffer<int64_t> parent(nodes, place, [](size_t) { return -1; });
        const Buffer<int64_t> branches(nodes, place, [](size_t) { return 0; });
        std::vector<std::vector<std::pair<int64_t, int64_t>>> want(nodes);
        for (int64_t f = 0; f < forks; ++f)
          for (int64_t e = made.start[static_cast<size_t>(f)];
               e < made.start[static_cast<size_t>(f) + 1]; ++e) {
            const auto node = static_cast<size_t>(made.child[static_cast<size_t>(e)]);
            parent[node] = f;
            branches[node] = e - made.start[static_cast<size_t>(f)];
            want[node] = want[static_cast<size_t>(vocab + f)];
            want[node].push_back({f, branches[node]});
          }
        const Buffer<int64_t> tokens(count, place, [&](size_t i) { return vocab - 1 - i; });
        int64_t last = 0;
        const Buffer<int64_t> ends(count, place, [&](size_t i) {
          return last += static_cast<int64_t>(want[count - 1 - i].size());
        });
        const Buffer<int64_t> fork(static_cast<size_t>(last), place);
        const Buffer<int64_t> branch(static_cast<size_t>(last), place);
        const auto walk = [&] {
          return lmhead::tree_paths(parent.data(), branches.data(), vocab, forks, tokens.data(),
                                    ends.data(), vocab, fork.data(), branch.data());
        };
        tally.expect(walk(), "refused");
        tally.expect(fork.intact() && branch.intact(), "wrote outside a buffer");
        size_t at = 0;
        for (size_t i = 0; i < count; ++i)
          for (const auto& step : want[count - 1 - i]) {
            tally.expect(fork[at] == step.first && branch[at] == step.second, "another path");
            ++at;
          }
        if (forks == 0) continue;
        ends[count - 1] -= 1;
        tally.expect(!walk(), "a path longer than its end");
        ends[count - 1] += 1;
        for (int64_t wrong : {forks, int64_t{-7}}) {
          const int64_t before = parent[0];
          parent[0] = wrong;
          tally.expect(!walk(), "a fork that is not there");
          parent[0] = before;
        }
      }
}

inline void run(const Kernels& k, Tally& tally) {
  run_sums<float>(k, tally);
  run_sums<lmhead::Bf16>(k, tally);
  run_sums<lmhead::F16>(k, tally);
  run_best<float>(k, tally);
  run_best<lmhead::Bf16>(k, tally);
  run_best<lmhead::F16>(k, tally);
  run_broken(k, tally);
  run_bad_trees(k, tally);
  run_paths(tally);
}

}  // namespace tree_tests
