// The softmax kernel: logits in place, running sums, top-k heaps, rank counts.
#pragma once

#include <algorithm>
#include <cfloat>
#include <memory>
#include <set>

#include "cases.hpp"
#include "references.hpp"

namespace softmax_tests {

using lmhead::Kernels;
using lmhead::Map;
using lmhead::Pair;

// What the linear layer may hand over.
enum class Content { plain, rising, masked, broken };

inline const char* name(Content content) {
  const char* names[] = {"plain", "rising", "masked", "broken"};
  return names[static_cast<int>(content)];
}

inline std::vector<float> linear_layer(Shape shape, Content content, Random& random) {
  const float inf = HUGE_VALF, nan = NAN;
  std::vector<float> x(static_cast<size_t>(shape.tokens * shape.rows));
  for (int64_t w = 0; w < shape.tokens; ++w)
    for (int64_t j = 0; j < shape.rows; ++j) {
      float& v = x[static_cast<size_t>(w * shape.rows + j)];
      v = random.normal(4.0);
      if (content == Content::plain) continue;
      if (content == Content::rising) {  // the maximum moves with every block of tokens
        v += 0.1f * static_cast<float>(w);
        continue;
      }
      // Two ways to mask, whole blocks of tokens and single ones; and rows that see nothing else.
      if (w < 40 || random.below(10) == 0) v = j % 2 ? -inf : -FLT_MAX;
      if (j % 7 == 5) v = -inf;
      if (content == Content::masked) continue;
      if (j % 7 == 1 && w == shape.tokens / 2) v = nan;
      if (j % 7 == 2 && w == shape.tokens - 1) v = nan;
      if (j % 7 == 3 && w % 32 == 31) v = nan;
      if (j % 7 == 4 && w == 0) v = inf;
    }
  return x;
}

// Everything one call reads and writes, in a place of its own.
struct Call {
  Shape shape;
  Buffer<float> z, bias, m;
  Buffer<double> s, t;

  Call(Shape shape, Place place)
      : shape(shape),
        z(static_cast<size_t>(shape.tokens * shape.rows), place),
        bias(static_cast<size_t>(shape.tokens), place),
        m(static_cast<size_t>(shape.rows), place, [](size_t) { return -HUGE_VALF; }),
        s(static_cast<size_t>(shape.rows), place, [](size_t) { return 0.0; }),
        t(static_cast<size_t>(shape.rows), place, [](size_t) { return 0.0; }) {}

  std::vector<float> row(int64_t j) const {
    std::vector<float> column;
    for (int64_t w = 0; w < shape.tokens; ++w)
      column.push_back(z[static_cast<size_t>(w * shape.rows + j)]);
    return column;
  }

  bool intact() const {
    return z.intact() && bias.intact() && m.intact() && s.intact() && t.intact();
  }
};

inline void check_logits(const Call& call, const std::vector<float>& x, bool biased, const Map& map,
                         Tally& tally) {
  const auto rows = static_cast<size_t>(call.shape.rows);
  for (size_t i = 0; i < x.size(); ++i) {
    const double linear = static_cast<double>(x[i]) + (biased ? call.bias[i / rows] : 0.0f);
    const double inner = std::abs(linear * map.scale) + std::abs(map.shift);
    const double size = map.bounded ? std::abs(map.outer) + std::abs(map.outer_shift) : inner;
    // Rounding of the linear layer's sum, stretched by the map, and of the map itself.
    const double bound =
        1.2e-7 * (map.bounded ? std::min(inner, 30.0) * size : inner) + 2.4e-7 * size;
    double want = reference::apply(map, linear);
    if (std::abs(want) > FLT_MAX) want = std::copysign(reference::kInf, want);
    tally.expect_near(call.z[i], want, bound, "logit", static_cast<int64_t>(i));
  }
}

inline void check_sums(const Call& call, bool entropy, Tally& tally) {
  for (int64_t j = 0; j < call.shape.rows; ++j) {
    const auto at = static_cast<size_t>(j);
    const reference::Softmax want(call.row(j));
    // A row with a NaN, or with +inf, has no maximum to speak of: s tells.
    if (!std::isnan(want.s)) tally.expect_near(call.m[at], want.m, 0.0, "m", j);
    tally.expect_near(call.s[at], want.s, 1e-6 * want.s, "s", j);
    if (entropy) tally.expect_near(call.t[at], want.t, 1e-6 * (want.s - want.t), "t", j);
  }
}

// Two tiles one after the other, in which a row's maximum may be in either: as one tile of both.
inline void check_two_tiles(const Kernels& k, const Call& whole, const std::vector<float>& x,
                            const Map& map, bool biased, Place place, Tally& tally) {
  const Shape shape = whole.shape;
  const int64_t first = shape.tokens / 3;
  Call state({0, shape.rows}, place);
  for (auto [lo, hi] : {std::pair<int64_t, int64_t>{0, first}, {first, shape.tokens}}) {
    const Call part({hi - lo, shape.rows}, place);
    part.z.fill({x.begin() + lo * shape.rows, x.begin() + hi * shape.rows});
    for (int64_t w = lo; w < hi; ++w)
      part.bias[static_cast<size_t>(w - lo)] = whole.bias[static_cast<size_t>(w)];
    k.softmax(part.z.data(), hi - lo, shape.rows, biased ? part.bias.data() : nullptr, map,
              state.m.data(), state.s.data(), state.t.data(), lo, nullptr, nullptr, nullptr, 2);
    tally.expect(part.intact() && state.intact(), "wrote outside a buffer");
  }
  for (size_t j = 0; j < state.s.size(); ++j) {
    const double s = whole.s[j], t = whole.t[j];
    tally.expect_near(state.s[j], s, 1e-6 * s, "s of two tiles", static_cast<int64_t>(j));
    tally.expect_near(state.t[j], t, 1e-6 * (s - t), "t of two tiles", static_cast<int64_t>(j));
  }
}

inline void run_sums(const Kernels& k, Shape shape, const NamedMap& named, Content content,
                     bool biased, Place place, Tally& tally) {
  const Map& map = named.map;
  tally.begin(label(
      k, "softmax", shape,
      (std::string(named.name) + (biased ? ", biased, " : ", ") + name(content)).c_str(), place));
  Random random(static_cast<uint32_t>(shape.tokens * 1009 + shape.rows));
  const std::vector<float> x = linear_layer(shape, content, random);
  const Call call(shape, place);
  for (size_t w = 0; w < call.bias.size(); ++w)
    call.bias[w] = content == Content::masked && w % 5 == 4 ? -HUGE_VALF : random.normal(1.0);
  std::unique_ptr<Call> first;
  for (int threads : thread_counts())
    for (bool entropy : {true, false}) {
      if (!entropy && threads != 2) continue;
      auto now = std::make_unique<Call>(shape, place);
      now->z.fill(x);
      now->bias.fill(call.bias.copy());
      k.softmax(now->z.data(), shape.tokens, shape.rows, biased ? now->bias.data() : nullptr, map,
                now->m.data(), now->s.data(), entropy ? now->t.data() : nullptr, 0, nullptr,
                nullptr, nullptr, threads);
      tally.expect(now->intact(), "wrote outside a buffer");
      if (!first) {
        first = std::move(now);
        continue;
      }
      tally.expect(now->z.same(first->z.copy()) && now->m.same(first->m.copy()) &&
                       now->s.same(first->s.copy()) && (!entropy || now->t.same(first->t.copy())),
                   "differs with " + std::to_string(threads) + " threads");
    }
  check_logits(*first, x, biased, map, tally);
  check_sums(*first, true, tally);
  check_two_tiles(k, *first, x, map, biased, place, tally);
}

inline void check_heap(const std::vector<float>& z, const float* values, const int64_t* ids,
                       int32_t size, int64_t kept, int64_t lo, Tally& tally) {
  const bool ordered = std::none_of(z.begin(), z.end(), [](float v) { return std::isnan(v); });
  std::vector<float> want, got(values, values + size);
  for (float v : z)
    if (v > -HUGE_VALF) want.push_back(v);
  std::sort(want.begin(), want.end(), std::greater<float>());
  if (static_cast<int64_t>(want.size()) > kept) want.resize(static_cast<size_t>(kept));
  for (int32_t i = 1; i < size; ++i)
    tally.expect(values[i] >= values[(i - 1) / 2], "a heap is out of order");
  std::sort(got.begin(), got.end(), std::greater<float>());
  if (ordered) tally.expect(got == want, "the largest logits are others");
  std::set<int64_t> seen(ids, ids + size);
  tally.expect(static_cast<int32_t>(seen.size()) == size, "an id is kept twice");
  for (int32_t i = 0; i < size; ++i) {
    const int64_t w = ids[i] - lo;
    const bool inside = w >= 0 && w < static_cast<int64_t>(z.size());
    tally.expect(inside && z[static_cast<size_t>(w)] == values[i],
                 "an id is not that of its logit");
  }
}

inline void run_heaps(const Kernels& k, Shape shape, Content content, int64_t kept, Place place,
                      Tally& tally) {
  tally.begin(
      label(k, "heaps", shape, (std::to_string(kept) + " kept, " + name(content)).c_str(), place));
  Random random(static_cast<uint32_t>(shape.tokens * 31 + shape.rows + kept));
  std::vector<float> x = linear_layer(shape, content, random);
  for (float& v : x)
    if (random.below(3) == 0 && std::isfinite(v)) v = std::round(v);  // ties
  const auto rows = static_cast<size_t>(shape.rows), places = rows * static_cast<size_t>(kept);
  std::vector<float> first;
  for (int threads : thread_counts()) {
    const Call call(shape, place);
    call.z.fill(x);
    const Buffer<float> values(places, place);
    const Buffer<int64_t> ids(places, place);
    const Buffer<int32_t> sizes(rows, place, [](size_t) { return 0; });
    const lmhead::Heaps heaps{values.data(), ids.data(), sizes.data(), kept};
    const int64_t lo = 1000000007;
    k.softmax(call.z.data(), shape.tokens, shape.rows, nullptr, {}, call.m.data(), call.s.data(),
              nullptr, lo, &heaps, nullptr, nullptr, threads);
    tally.expect(call.intact() && values.intact() && ids.intact() && sizes.intact(),
                 "wrote outside a buffer");
    if (first.empty()) first = values.copy();
    tally.expect(values.same(first), "differs with " + std::to_string(threads) + " threads");
    for (size_t j = 0; j < rows; ++j) {
      const size_t at = j * static_cast<size_t>(kept);
      check_heap(call.row(static_cast<int64_t>(j)), values.data() + at, ids.data() + at, sizes[j],
                 kept, lo, tally);
    }
  }
}

inline void run_ranks(const Kernels& k, Shape shape, Content content, bool sure, Place place,
                      Tally& tally) {
  tally.begin(label(k, "ranks", shape,
                    (std::string(sure ? "no doubt, " : "margins, ") + name(content)).c_str(),
                    place));
  Random random(static_cast<uint32_t>(shape.tokens * 77 + shape.rows));
  const std::vector<float> x = linear_layer(shape, content, random);
  const auto rows = static_cast<size_t>(shape.rows), tokens = static_cast<size_t>(shape.tokens);
  const size_t n = 3, size = n * rows;
  // The first given logit is one of the row's own, so that there is a tie; the second is
  // anything; the third is masked or unknown.
  const Buffer<float> mine(size, place, [&](size_t i) {
    const size_t j = i % rows;
    if (i < rows) return x[static_cast<size_t>(random.below(shape.tokens)) * rows + j];
    if (i < 2 * rows) return random.normal(5.0);
    return j % 2 ? -HUGE_VALF : NAN;
  });
  const Buffer<float> slack(size, place, [&](size_t i) {
    return sure ? 0.0f : static_cast<float>(i % 3 == 0 ? 0.3 : 1e-6);
  });
  const Buffer<float> per_norm(rows, place, [&](size_t j) {
    return sure ? 0.0f : static_cast<float>(j % 2 == 0 ? 0.1 : 1e-5);
  });
  const Buffer<float> norms(tokens, place,
                            [&](size_t) { return static_cast<float>(random.uniform(0.1, 3.0)); });
  std::vector<std::vector<int64_t>> first;
  for (int threads : thread_counts()) {
    const Call call(shape, place);
    call.z.fill(x);
    const Buffer<int64_t> counts(size, place, [](size_t) { return 5; });  // they are added to
    const lmhead::Ranks ranks{mine.data(),  slack.data(),  per_norm.data(),
                              norms.data(), counts.data(), static_cast<int64_t>(n)};
    std::vector<Pair> pairs;
    k.softmax(call.z.data(), shape.tokens, shape.rows, nullptr, {}, call.m.data(), call.s.data(),
              nullptr, 0, nullptr, &ranks, &pairs, threads);
    tally.expect(call.intact() && counts.intact() && mine.intact() && slack.intact() &&
                     per_norm.intact() && norms.intact(),
                 "wrote outside a buffer");
    std::vector<std::vector<int64_t>> close(size);
    for (const Pair& pair : pairs)
      close[static_cast<size_t>(pair.which) * rows + static_cast<size_t>(pair.row)].push_back(
          pair.token);
    for (auto& tokens : close) std::sort(tokens.begin(), tokens.end());
    if (first.empty()) first = close;
    tally.expect(close == first, "differs with " + std::to_string(threads) + " threads");
    for (size_t i = 0; i < size; ++i) {
      const std::vector<float> z = call.row(static_cast<int64_t>(i % rows));
      if (std::isnan(reference::Softmax(z).s)) continue;  // no order, so no rank
      const reference::Rank want(z, mine[i], slack[i], per_norm[i % rows], norms.copy());
      std::vector<int64_t> undecided = close[i];
      for (int64_t w : want.either)
        undecided.erase(std::remove(undecided.begin(), undecided.end(), w), undecided.end());
      tally.expect(undecided == want.close, "other tokens are too close to tell");
      const int64_t over = counts[i] - 5 - want.above;
      tally.expect(over >= 0 && over <= static_cast<int64_t>(want.either.size()),
                   "a count is wrong by " + std::to_string(over));
    }
  }
}

// From the lowest float to the highest: the distance itself overflows.
inline void run_extremes(const Kernels& k, Tally& tally) {
  tally.begin(std::string(k.name) + " softmax from one end of the floats to the other");
  const Shape shape{33, 1};
  const Call call(shape, Place::tight);
  for (size_t w = 0; w < 33; ++w) call.z[w] = w < 32 ? -FLT_MAX : FLT_MAX;
  k.softmax(call.z.data(), 33, 1, nullptr, {}, call.m.data(), call.s.data(), call.t.data(), 0,
            nullptr, nullptr, nullptr, 1);
  check_sums(call, true, tally);
  tally.begin(std::string(k.name) + " softmax of no rows, of no tokens");
  const Call none({5, 0}, Place::tight), empty({0, 5}, Place::tight);
  for (const Call* c : {&none, &empty})
    k.softmax(c->z.data(), c->shape.tokens, c->shape.rows, nullptr, {}, c->m.data(), c->s.data(),
              c->t.data(), 0, nullptr, nullptr, nullptr, 3);
  check_sums(empty, true, tally);
}

inline void run(const Kernels& k, Tally& tally) {
  run_extremes(k, tally);
  for (Place place : {Place::tight, Place::padded})
    for (Shape shape : shapes())
      for (Content content : {Content::plain, Content::rising, Content::masked, Content::broken}) {
        for (const NamedMap& map : maps())
          for (bool biased : {false, true}) run_sums(k, shape, map, content, biased, place, tally);
        for (int64_t kept : {1, 6, 40}) run_heaps(k, shape, content, kept, place, tally);
        for (bool sure : {true, false}) run_ranks(k, shape, content, sure, place, tally);
      }
}

}  // namespace softmax_tests
