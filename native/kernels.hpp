// The steps on a tile of logits. A tile is (tokens, rows), rows contiguous: vectors run
// over rows. Pure functions on pointers: no Python, no allocation that outlives them.
//
// `kernels.cpp` is compiled once per instruction set, each into a namespace of its own; `dispatch`
// picks one at run time.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "floats.hpp"
#include "rows.hpp"

namespace lmhead {

// z = scale · x + shift, or outer · tanh(scale · x + shift) + outer_shift if bounded.
struct Map {
  float scale = 1.0f, shift = 0.0f;
  bool bounded = false;
  float outer = 1.0f, outer_shift = 0.0f;
};

// The k largest logits of each row: a heap per row, smallest first. A NaN is skipped (it
// shows in s).
struct Heaps {
  float* values;   // (rows, kept)
  int64_t* ids;    // (rows, kept)
  int32_t* sizes;  // (rows,)
  int64_t kept;
};

// How many logits are above a given one, and which are too close to tell.
struct Ranks {
  const float* mine;      // (n, rows), the given logits
  const float* slack;     // (n, rows), uncertainty whatever the token
  const float* per_norm;  // (rows,), uncertainty per unit of |w|
  const float* norms;     // (tokens,), |w| of this tile
  int64_t* counts;        // (n, rows)
  int64_t n;
};

struct Pair {
  int32_t which, token, row;
};

// One entry of the gradient that comes on top of the softmax part.
struct Pick {
  int64_t token, row;
  float value;
};

struct ScreenKernels;  // see screen.hpp
struct SampleScreen;   // see screen_sample.hpp
struct SampleSource;
struct SampleChain;
struct SampleEdits;
struct SampleDrawn;
struct TreeKernels;      // see tree.hpp
struct QuantizeKernels;  // see quantize.hpp
struct DecodeKernels;    // see decode.hpp

struct Kernels {
  const char* name;
  const ScreenKernels* screen;

  // Bias and map in place; then the running softmax of each row: maximum m, s = Σ exp(z - m),
  // t = Σ exp(z - m)(z - m) if not null; sums in float64, since a long tail of small terms is lost
  // when added to a float32 one by one. `heaps`, `ranks` may be null; `lo` is the tile's first id.
  void (*softmax)(float* z, int64_t tokens, int64_t rows, const float* bias, const Map& map,
                  float* m, double* s, double* t, int64_t lo, const Heaps* heaps,
                  const Ranks* ranks, std::vector<Pair>* close, int threads);

  // exp(z - lse) · (a + b (z - lse)) + mix · mixed, and the picks, times the slope of the map, in
  // place of z. lse = high + low. b, mix and mixed may be null. Where not null, `token_sums`
  // (tokens,) and `row_sums` (rows,) receive the sums of the softmax part: token_sums are set,
  // row_sums added to.
  void (*gradient)(float* z, int64_t tokens, int64_t rows, const float* high, const float* low,
                   const float* a, const float* b, const float* mix, const float* mixed,
                   const Map& map, const std::vector<Pick>& picks, float* token_sums,
                   float* row_sums, int threads);

  // out[i] = Σ_d weight[ids[i], d] · hidden[rows[i], d] in float64, always in the same order: see
  // dot.hpp. The two are of one type, or `hidden` is float32.
  void (*pairs)(const Floats& hidden, const Floats& weight, int64_t d, const int64_t* rows,
                const int64_t* ids, int64_t n, double* out, int threads);

  // All products of hidden (rows, d) and weight (vocab, d), to the last bit those of `pairs`; the
  // weight is read once.
  void (*row_logits)(const float* hidden, int64_t rows, const Floats& weight, int64_t vocab,
                     int64_t d, double* out, int threads);

  // The same summed in float32, in an order of its own: see float_logits.cpp. `square`, if not
  // null and there are rows, receives the largest |w|² of a token, to within 2^-17 of it.
  void (*float_logits)(const float* hidden, int64_t rows, const Floats& weight, int64_t vocab,
                       int64_t d, float* out, double* square, int threads);

  // out (m, n) = a b, or a b added to it; b is (inner, n), a is (m, inner), or (inner, m) if
  // `transposed`. With `ids` only these rows of a as it is stored, and of b, or of the result if a
  // is not transposed: inner, or m, is their number.
  void (*product)(const float* a, bool transposed, const float* b, float* out, int64_t m, int64_t n,
                  int64_t inner, bool add, const int64_t* ids, int threads);

  // A sampler's token of each row, from a quantized copy: see screen_sample.hpp.
  void (*sample_screened)(const SampleScreen& screen, const SampleSource& source,
                          const SampleChain& chain, const SampleEdits& edits,
                          const SampleDrawn& out, int threads);

  // into[ids[i], :] += from[i, :]; ids are distinct.
  void (*scatter_add)(float* into, int64_t d, const int64_t* ids, int64_t n, const float* from,
                      int threads);

  const RowKernels* rows;
  const TreeKernels* tree;
  const QuantizeKernels* quantize;
  const DecodeKernels* decode;
};

// The kernels for this machine, or for a named instruction set; null if it cannot run that.
const Kernels* best_kernels();
const Kernels* kernels_named(const char* name);
std::vector<const char*> kernel_names();

// Whether `product` is faster on this processor than the library that torch uses. MKL reaches 82 to
// 86 % of the peak of a Zen 4, `product` 90 to 93 %. The tile unit of a Sapphire Rapids is 1.5
// times as fast as MKL's float32 vectors. Others were not measured.
bool fast_product();

// The largest t, of those up to the largest entry of x, such that the entries of x (n, not
// negative) below t add up to at most `mass`.
float tail_threshold(const float* x, int64_t n, double mass);

}  // namespace lmhead
