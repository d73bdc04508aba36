// A sampler's token for each hidden state, from the bounds of a quantized copy: the token that the
// logits of all tokens would give. Pure functions on pointers, as in kernels.hpp.
//
//   greedy, top_k, top_h    the best tokens are scored
//   min_p, top_p, epsilon   as many of the best as the cut may keep; a mass of all tokens is known
//                           within bounds, and the token must be the same for all it can be
//   temperature alone       the noise of a token is known before its logit: only tokens whose upper
//                           bound plus noise can win are scored
//
// A row that this does not decide, within the roundings of any other way to compute it, is left to
// the caller.
#pragma once

#include "kernels.hpp"
#include "rows.hpp"
#include "screen.hpp"

namespace lmhead {

enum SampleStep : int64_t { kTemperature, kTopK, kTopP, kMinP, kEpsilon, kTopH, kSampleSteps };

// A sampler's steps, in order, on logits that edits have changed already.
struct SampleChain {
  const int64_t* kinds;   // (steps,), of SampleStep
  const int64_t* least;   // (steps,), tokens that a cut keeps at least
  const double* values;   // (steps, rows); of a temperature its inverse
  const int64_t* greedy;  // (rows,), 1 to take the best token
  const int64_t* wide;    // (rows,), 1 to add products in float64, 0 in float32: float_logits.cpp
  const Key* keys;        // (rows,)
  int64_t steps;
};

// Tokens whose logits were changed: those of row r are [starts[r], starts[r + 1]), each once.
struct SampleEdits {
  const int64_t* starts;  // (rows + 1,)
  const int64_t* ids;
  const double *before, *after;
};

// x to scale x + shift, or to outer tanh(scale x + shift) + outer_shift; it grows.
struct SampleMap {
  double scale, shift;
  bool bounded;
  double outer, outer_shift;
};

// Hidden states, weight, bias and map: a logit is map(hidden · weight + bias).
struct SampleSource {
  const float* hidden;  // (rows, size)
  Floats weight;        // (vocab, size)
  const double* bias;   // (vocab,) or null
  SampleMap map;
  const double* base;  // (rows,), mean · hidden, not part of approx
  double mean_norm;    // of the mean that the copy leaves out, or more
  int64_t size;
};

// The bounds from the copy. With "4+4", bounds.token_e is that of the first pass, and `low`,
// `states` and `low_e` make the second; else low.nibbles is null.
struct SampleScreen {
  const ScreenKernels* kernels;
  ScreenBounds bounds;  // limits are not used
  float* approx;        // that of the bounds; changed
  ScreenCopy low;
  ScreenStates states;
  const float* low_e;
  const uint32_t* allowed;  // (rows, n_uint32), a bit per token; null for all
  int64_t n_uint32;
};

enum SampleState : int64_t { kUndecided, kDecided, kUnsound };

// (rows,) each, meaningless unless decided. Ranges hold what float32 and float64 logits give.
struct SampleDrawn {
  int64_t* token;
  int64_t* scored;                    // tokens scored
  int64_t* state;                     // of SampleState; unsound: a logit lay outside its bounds
  double* z;                          // the token's logit before edits
  double *log_prob_lo, *log_prob_hi;  // in the distribution it was drawn from
  double *lse_lo, *lse_hi;            // of the logits before edits
};

}  // namespace lmhead
