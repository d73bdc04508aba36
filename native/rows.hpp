// Rows of logits, (rows, vocab), vocab contiguous: what sampling asks of a whole row, so that only
// the few tokens that matter need be sorted. Pure functions on pointers, as in kernels.hpp.
//
// β = 1 / temperature; a token's mass is exp(β (z - max)), in float64. A masked token has z = -inf.
#pragma once

#include <cstdint>

namespace lmhead {

// The noise of a token is a function of these two and its id.
struct Key {
  uint64_t seed, position;
};

struct RowKernels {
  // The largest z of each row (NaN if there is one), and how many tokens are not masked.
  void (*max_and_count)(const float* z, int64_t rows, int64_t vocab, double* max, double* n,
                        int threads);

  // Σ exp(β (z - max)) and Σ exp(β (z - max)) · β (z - max), for several β of each row: betas,
  // mass and weighted are (count, rows).
  void (*softmax_sums)(const float* z, int64_t rows, int64_t vocab, const double* betas,
                       int64_t count, const double* max, double* mass, double* weighted,
                       int threads);

  // Σ (z - max) and Σ (z - max)², over tokens that are not masked.
  void (*moments)(const float* z, int64_t rows, int64_t vocab, const double* max, double* shift,
                  double* square, int threads);

  // The k-th largest z of each row, -inf if there are fewer: a heap, for small k.
  void (*kth_largest)(const float* z, int64_t rows, int64_t vocab, const int64_t* k, float* value,
                      int threads);

  // The radius, rounded up, around `centre` within which the tokens that are nearest to it have
  // together at least `limit` of mass; inf if they never have. Found by a histogram of
  // β |z - centre| in steps of `width`.
  void (*mass_radius)(const float* z, int64_t rows, int64_t vocab, const double* beta,
                      const double* max, const double* centre, const double* width,
                      const double* limit, double* radius, int threads);

  // The tokens with lo <= z <= hi that are not masked: how many, and if these fit in `width`,
  // which, best first, lowest id first among equals.
  void (*in_range)(const float* z, int64_t rows, int64_t vocab, const float* lo, const float* hi,
                   int64_t width, int64_t* counts, int64_t* ids, double* values, int threads);

  // The tokens nearest to `centre` until their masses reach `limit`, with the one that reaches it,
  // and at least `least` of them: how many, and if these fit in `width`, which, best first, with β
  // z. 0 if they lie too far off to be found at once. Of tokens at one distance the better comes
  // first.
  void (*nucleus)(const float* z, int64_t rows, int64_t vocab, const double* beta,
                  const double* max, const double* centre, const double* limit, int64_t least,
                  int64_t width, int64_t* counts, int64_t* ids, double* values, int threads);

  // The token with the largest β z + noise, ties to the lowest id; -1 if all are masked.
  void (*gumbel_argmax)(const float* z, int64_t rows, int64_t vocab, const double* beta,
                        const Key* keys, int64_t* winners, int threads);

  // A draw among few tokens, (rows, width), -inf for none, by their logits and noise; ties to the
  // first. Its log-probability among them, and in the whole row, whose log Σ exp z is `lse`; and
  // the log of what these tokens have in the whole row. `ids` are their token ids.
  void (*draw)(const float* z, int64_t rows, int64_t vocab, const double* lse, const int64_t* ids,
               const double* logits, int64_t width, const Key* keys, int64_t* token,
               double* log_prob, double* raw_log_prob, double* kept_mass, int threads);
};

}  // namespace lmhead
