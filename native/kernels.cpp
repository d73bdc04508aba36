// One instruction set's kernels. LMHEAD_ISA names the namespace, LMHEAD_NAME the string.
#include "kernels.hpp"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "dot.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace LMHEAD_ISA {

// logits.cpp
void row_logits(const float* hidden, int64_t rows, const lmhead::Floats& weight, int64_t vocab,
                int64_t d, double* out, int threads);

// float_logits.cpp
void float_logits(const float* hidden, int64_t rows, const lmhead::Floats& weight, int64_t vocab,
                  int64_t d, float* out, double* square, int threads);
// product.cpp
void product(const float* a, bool transposed, const float* b, float* out, int64_t m, int64_t n,
             int64_t inner, bool add, const int64_t* ids, int threads);

// screen_sample.cpp
void sample_screened(const lmhead::SampleScreen& screen, const lmhead::SampleSource& source,
                     const lmhead::SampleChain& chain, const lmhead::SampleEdits& edits,
                     const lmhead::SampleDrawn& out, int threads);

namespace {

using lmhead::Floats;
using lmhead::Heaps;
using lmhead::Map;
using lmhead::Pair;
using lmhead::parallel_for;
using lmhead::Pick;
using lmhead::Ranks;

constexpr float kInf = __builtin_inff();
// Replaces -inf where 0 · -inf would make a NaN; exp of it is 0.
constexpr float kFloor = -1.0e4f;
// Tokens handled at a time, so that a block of them stays in the first-level cache.
constexpr int64_t kTokens = 32;
constexpr int64_t kMaxRows = 256;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// A vector's worth of rows, or the few that are left at the end.
struct Lanes {
  int n;
  bool full() const { return n == kLanes; }
  vf get(const float* p, float fill = 0.0f) const { return full() ? load(p) : load(p, n, fill); }
  void put(float* p, vf v) const { full() ? store(p, v) : store(p, v, n); }
};

// All rows of [begin, end), a vector at a time.
template <class Body>
void each_lanes(int64_t begin, int64_t end, const Body& body) {
  for (int64_t j = begin; j < end; j += kLanes)
    body(j, Lanes{static_cast<int>(std::min<int64_t>(kLanes, end - j))});
}

vf apply(const Map& map, vf x) {
  const vf inner = x * map.scale + map.shift;
  if (!map.bounded) return inner;
  const vf z = tanh(inner) * map.outer + map.outer_shift;
  return x == -kInf ? splat(-kInf) : z;  // a masked token is not revived
}

// dz/dx from z; 0 for masked tokens.
vf slope(const Map& map, vf z) {
  if (!map.bounded) return splat(map.scale);
  const vf t = (z - map.outer_shift) / map.outer;
  const vf d = 1.0f - t * t;
  return (d > 0.0f ? d : splat(0.0f)) * (map.scale * map.outer);
}

// Push (value, id) on a row's heap, replacing its smallest entry if it is full.
void push(const Heaps& heaps, int64_t row, float value, int64_t id) {
  float* values = heaps.values + row * heaps.kept;
  int64_t* ids = heaps.ids + row * heaps.kept;
  int32_t& size = heaps.sizes[row];
  int64_t i;
  if (size < heaps.kept) {
    i = size++;
    for (int64_t up; i > 0 && values[up = (i - 1) / 2] > value; i = up) {
      values[i] = values[up];
      ids[i] = ids[up];
    }
  } else {
    i = 0;
    for (int64_t down; (down = 2 * i + 1) < size; i = down) {
      if (down + 1 < size && values[down + 1] < values[down]) ++down;
      if (values[down] >= value) break;
      values[i] = values[down];
      ids[i] = ids[down];
    }
  }
  values[i] = value;
  ids[i] = id;
}

float threshold(const Heaps& heaps, int64_t row) {
  return heaps.sizes[row] < heaps.kept ? -kInf : heaps.values[row * heaps.kept];
}

// One block of tokens for one vector of rows: everything that is computed from it.
struct Block {
  const float* z;
  int64_t tokens, rows, token, row;
  Lanes lanes;

  vf logits(int64_t w) const { return lanes.get(z + w * rows + row, -kInf); }

  void offer(const Heaps& heaps, vf largest, int64_t lo) const {
    float limits[kLanes];
    for (int i = 0; i < kLanes; ++i) limits[i] = i < lanes.n ? threshold(heaps, row + i) : kInf;
    if (!any(largest > load(limits))) return;
    for (int64_t w = token; w < token + tokens; ++w) {
      const vf v = logits(w);
      if (!any(v > load(limits))) continue;
      for (int i = 0; i < lanes.n; ++i) {
        if (!(v[i] > limits[i])) continue;
        push(heaps, row + i, v[i], lo + w);
        limits[i] = threshold(heaps, row + i);
      }
    }
  }

  void count(const Ranks& ranks, vf largest, std::vector<Pair>& close) const {
    const float* norms = ranks.norms + token;
    const float widest = *std::max_element(norms, norms + tokens);
    const vf per_norm = lanes.get(ranks.per_norm + row);
    for (int64_t n = 0; n < ranks.n; ++n) {
      const int64_t at = n * rows + row;
      const vf mine = lanes.get(ranks.mine + at, kInf), slack = lanes.get(ranks.slack + at);
      // Nearly all tokens are far below and contribute nothing. A NaN is not far below.
      if (!any(~(largest - mine < -(per_norm * widest + slack)))) continue;
      vi above{};
      for (int64_t w = 0; w < tokens; ++w) {
        const vf ahead = logits(token + w) - mine;
        const vf margin = per_norm * norms[w] + slack;
        const vi over = ahead > margin;
        above -= over;
        const vi unsure = ~(over | (ahead < -margin));
        if (!any(unsure)) continue;
        for (int i = 0; i < lanes.n; ++i)
          if (unsure[i])
            close.push_back({static_cast<int32_t>(n), static_cast<int32_t>(token + w),
                             static_cast<int32_t>(row + i)});
      }
      for (int i = 0; i < lanes.n; ++i) ranks.counts[at + i] += above[i];
    }
  }
};

void softmax(float* z, int64_t tokens, int64_t rows, const float* bias, const Map& map, float* m,
             double* s, double* t, int64_t lo, const Heaps* heaps, const Ranks* ranks,
             std::vector<Pair>* close, int threads) {
  const bool maps = map.bounded || map.scale != 1.0f || map.shift != 0.0f;
  const bool masks = bias && std::find(bias, bias + tokens, -kInf) != bias + tokens;
  // Cut by rows alone: a row's result does not depend on the number of threads.
  const int64_t share = std::clamp<int64_t>(round_up(ceil_div(rows, threads), 16), 16, kMaxRows);
  std::mutex close_lock;
  parallel_for(ceil_div(rows, share), threads, [&](int64_t part) {
    const int64_t begin = part * share, end = std::min(rows, begin + share);
    std::vector<Pair> own_close;
    for (int64_t w0 = 0; w0 < tokens; w0 += kTokens) {
      const int64_t w1 = std::min(tokens, w0 + kTokens);
      each_lanes(begin, end, [&](int64_t j, Lanes lanes) {
        vf largest = splat(-kInf);
        if (maps || bias) {
          for (int64_t w = w0; w < w1; ++w) {
            vf v = lanes.get(z + w * rows + j);
            if (bias) v += bias[w];
            if (maps) v = apply(map, v);
            lanes.put(z + w * rows + j, v);
            largest = max(largest, v);
          }
        } else {
          for (int64_t w = w0; w < w1; ++w) {
            const float* v = z + w * rows + j;
            __builtin_prefetch(v + 2 * kLanes);  // too many short streams for the hardware to see
            largest = max(largest, lanes.get(v));
          }
        }
        const vf old_m = lanes.get(m + j), new_m = max(old_m, largest);
        const vf origin = new_m == -kInf ? splat(0.0f) : new_m;
        if (any(new_m > old_m)) {
          // Sums count from the maximum; when it moves by d, s shrinks by exp(d), t moves too.
          // Where d is below the floor, or -inf, exp(d) is 0 and nothing is left of either.
          const vf moved = max(old_m - origin, splat(kFloor));
          const vf decay = exp(old_m - origin);
          for (int i = 0; i < lanes.n; ++i) {
            if (t) t[j + i] = (t[j + i] + s[j + i] * moved[i]) * decay[i];
            s[j + i] *= decay[i];
          }
          lanes.put(m + j, new_m);
        }
        vf sum_s{}, sum_t{};
        // skips(w): whether a token is masked, which adds nothing and costs no exp.
        const auto add_up = [&](const auto& skips) {
          for (int64_t w = w0; w < w1; ++w) {
            if (skips(w)) continue;
            const vf centred = lanes.get(z + w * rows + j) - origin, e = exp_down(centred);
            sum_s += e;
            if (t) sum_t += e * max(centred, splat(kFloor));
          }
        };
        if (masks)
          add_up([&](int64_t w) { return bias[w] == -kInf; });
        else
          add_up([](int64_t) { return false; });
        if (t)
          for (int i = 0; i < lanes.n; ++i) t[j + i] += sum_t[i];
        for (int i = 0; i < lanes.n; ++i) s[j + i] += sum_s[i];
        const Block block{z, w1 - w0, rows, w0, j, lanes};
        if (heaps) block.offer(*heaps, largest, lo);
        if (ranks) block.count(*ranks, largest, own_close);
      });
    }
    if (!own_close.empty()) {
      const std::lock_guard<std::mutex> lock(close_lock);
      close->insert(close->end(), own_close.begin(), own_close.end());
    }
  });
}

void gradient(float* z, int64_t tokens, int64_t rows, const float* high, const float* low,
              const float* a, const float* b, const float* mix, const float* mixed, const Map& map,
              const std::vector<Pick>& picks, float* token_sums, float* row_sums, int threads) {
  std::vector<float> steep(picks.size());
  for (size_t i = 0; i < picks.size(); ++i)
    steep[i] = slope(map, splat(z[picks[i].token * rows + picks[i].row]))[0];

  // Row sums are kept by block and added in order, so that threads do not change the result.
  const int64_t blocks = ceil_div(tokens, 4 * kTokens);
  std::vector<float> partial(row_sums ? static_cast<size_t>(blocks * rows) : 0, 0.0f);
  parallel_for(blocks, threads, [&](int64_t block) {
    const int64_t w0 = block * 4 * kTokens, w1 = std::min(tokens, w0 + 4 * kTokens);
    for (int64_t w = w0; w < w1; ++w) {
      vf column{};
      float* logits = z + w * rows;
      const bool may_skip = rows > 0 && logits[0] == -kInf;
      each_lanes(0, rows, [&](int64_t j, Lanes lanes) {
        const vf v = lanes.get(logits + j, -kInf);
        if (may_skip && !mix && !any(v != -kInf)) {  // a masked token: no gradient, no exp
          lanes.put(logits + j, splat(0.0f));
          return;
        }
        const vf log_p = (v - lanes.get(high + j)) - lanes.get(low + j);
        vf factor = lanes.get(a + j);
        if (b) factor += lanes.get(b + j) * max(log_p, splat(kFloor));
        vf g = exp(log_p) * factor;
        if (map.bounded) {
          g *= slope(map, v);
        } else {
          g *= map.scale;
        }
        if (token_sums) column += g;
        if (row_sums) {
          float* sums = partial.data() + block * rows + j;
          lanes.put(sums, lanes.get(sums) + g);
        }
        if (mix) g += lanes.get(mixed + j) * mix[w] * slope(map, v);
        lanes.put(logits + j, g);
      });
      if (token_sums) token_sums[w] = sum(column);
    }
  });
  if (row_sums)
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t j = 0; j < rows; ++j) row_sums[j] += partial[block * rows + j];
  for (size_t i = 0; i < picks.size(); ++i)
    z[picks[i].token * rows + picks[i].row] += picks[i].value * steep[i];
}

void pairs(const Floats& hidden, const Floats& weight, int64_t d, const int64_t* rows,
           const int64_t* ids, int64_t n, double* out, int threads) {
  constexpr int64_t kBlock = 64;
  with_types(hidden, weight, [&](auto* h, auto* w) {
    parallel_for(ceil_div(n, kBlock), threads, [&](int64_t block) {
      int64_t i = block * kBlock;
      const int64_t end = std::min(n, i + kBlock);
      const auto x = [&](int64_t at) { return h + rows[at] * d; };
      const auto y = [&](int64_t at) { return w + ids[at] * d; };
      for (; i + 4 <= end; i += 4)
        dots<4>({x(i), x(i + 1), x(i + 2), x(i + 3)}, {y(i), y(i + 1), y(i + 2), y(i + 3)}, d,
                out + i);
      for (; i < end; ++i) out[i] = dot(x(i), y(i), d);
    });
  });
}

void scatter_add(float* into, int64_t d, const int64_t* ids, int64_t n, const float* from,
                 int threads) {
  constexpr int64_t kBlock = 64;
  parallel_for(ceil_div(n, kBlock), threads, [&](int64_t block) {
    const int64_t end = std::min(n, (block + 1) * kBlock);
    for (int64_t i = block * kBlock; i < end; ++i) {
      float* to = into + ids[i] * d;
      const float* row = from + i * d;
      each_lanes(0, d, [&](int64_t j, Lanes lanes) {
        lanes.put(to + j, lanes.get(to + j) + lanes.get(row + j));
      });
    }
  });
}

}  // namespace
}  // namespace LMHEAD_ISA

namespace lmhead {

extern const RowKernels LMHEAD_ROWS;
extern const ScreenKernels LMHEAD_SCREEN;
extern const TreeKernels LMHEAD_TREE;
extern const QuantizeKernels LMHEAD_QUANTIZE;
extern const DecodeKernels LMHEAD_DECODE;
extern const Kernels LMHEAD_TABLE;
const Kernels LMHEAD_TABLE = {
    LMHEAD_NAME,
    &LMHEAD_SCREEN,
    LMHEAD_ISA::softmax,
    LMHEAD_ISA::gradient,
    LMHEAD_ISA::pairs,
    LMHEAD_ISA::row_logits,
    LMHEAD_ISA::float_logits,
    LMHEAD_ISA::product,
    LMHEAD_ISA::sample_screened,
    LMHEAD_ISA::scatter_add,
    &LMHEAD_ROWS,
    &LMHEAD_TREE,
    &LMHEAD_QUANTIZE,
    &LMHEAD_DECODE,
};

}  // namespace lmhead
