// Certified decode: products of a quantized copy of the weight with quantized hidden states, and
// the tokens that the bounds do not exclude. Pure functions on pointers, as in kernels.hpp.
// docs/certified.md has the proof; integer products are exact here because the states are scaled so
// that every partial sum fits into 32 bits.
#pragma once

#include <cstdint>

#include "floats.hpp"

namespace lmhead {

// Tokens per block: the unit of work, and of the maxima by which whole blocks are skipped.
inline constexpr int64_t kScreenBlock = 256;

inline int64_t screen_blocks(int64_t vocab) { return (vocab + kScreenBlock - 1) / kScreenBlock; }

// The copy. `width` is a multiple of 64, `leading` of 16. Of `whole` and `nibbles` one is null.
// Nibbles lie in groups of 64: the group's 16-bit number i holds entries i, i + 16, i + 32, i + 48,
// lowest bits first.
struct ScreenCopy {
  const int8_t* whole;       // (vocab, width)
  const uint8_t* nibbles;    // (vocab, width / 2), entries from 0 to 15
  const int16_t* lead;       // (vocab, leading)
  const float* scales;       // (vocab,)
  const float* lead_scales;  // (vocab,)
  const double* bias;        // (vocab,) or null
  int64_t vocab, width, leading;
  // With one hidden state: bytes to prefetch ahead, 0 for none; and how many parts of a block are
  // read side by side, 1, 2 or 4.
  int64_t ahead, streams;
};

// The hidden states: (rows, width), (rows, leading), and their scales (rows,).
struct ScreenStates {
  const int16_t* main;
  const int16_t* lead;
  const double* scales;
  const double* lead_scales;
  int64_t rows;
  const uint32_t* allowed = nullptr;  // (rows, ceil(vocab / 32)), a bit per token; null for all
};

// What hidden states are prepared with: see docs/certified.md. `factors` are square matrices of the
// sizes in `sizes`, one after the other; `room`: the largest norm that integers may have. With a
// `unit` of 256 the integers have eight bits, and products of bytes need half the instructions.
struct ScreenBasis {
  const double* mean;   // (size,)
  const double* basis;  // (leading, size)
  const int8_t* signs;  // (width,)
  const double* factors;
  const int64_t* sizes;  // (n_factors,)
  int64_t n_factors, size, width, leading;
  double unit;  // what the integers are multiples of
  double room, lead_room;
  double per_lead;          // of n, for each unit of the norm of lead · scale
  double small_e, small_n;  // of e and n, for each unit of the norm of the state
};

// Prepared states, as ScreenStates, and base, e and n: (rows,) each.
struct ScreenPrepared {
  int16_t* main;
  int16_t* lead;
  double *scales, *lead_scales, *base, *e, *n;
};

// A token stays if approx + e · token_e + n · token_n + |approx| · 2^-22 + 2^-120 reaches the
// limit. block_e, block_n: the largest of each block of tokens.
struct ScreenBounds {
  const float* approx;     // (rows, vocab)
  const float* block_max;  // (rows, blocks)
  const float* token_e;    // (vocab,)
  const float* token_n;    // (vocab,)
  const float* block_e;    // (blocks,)
  const float* block_n;    // (blocks,)
  const double* e;         // (rows,)
  const double* n;         // (rows,)
  const double* limits;    // (rows,)
  int64_t rows, vocab;
};

// One hidden state and the stored weight, of one type. A value is hidden · weight +
// bias in float64.
struct ScreenExact {
  Floats hidden;       // (size,)
  Floats weight;       // (vocab, size)
  const double* bias;  // (vocab,) or null
  double base;         // mean · hidden, not part of approx
  int64_t size;
};

struct ScreenDecided {
  int64_t scored;  // tokens
  bool decided;
  bool sound;  // whether every exact value lay within its bounds
};

struct ScreenKernels {
  // Quantizes hidden states (rows, size).
  void (*prepare)(const ScreenBasis& basis, const double* hidden, int64_t rows,
                  const ScreenPrepared& out, int threads);

  // approx (rows, vocab) and the largest of each block, (rows, blocks). With nibbles, an entry u
  // means 16 u - 120.5. Tokens that no state allows, or with a bias of -inf, are not read: their
  // approx is -inf. Returns the number of tokens read.
  int64_t (*products)(const ScreenCopy& copy, const ScreenStates& states, float* approx,
                      float* block_max, int threads);

  // out[i] = approx[rows[i], ids[i]] and what the low nibbles add, if there are any; an entry u
  // means u - 7.5. radius[i]: how far that may be off. Of the bounds approx, token_e,
  // token_n, e and n are used.
  void (*refine)(const ScreenCopy& low, const ScreenStates& states, const ScreenBounds& bounds,
                 const int64_t* rows, const int64_t* ids, int64_t n, double* out, double* radius,
                 int threads);

  // How many tokens of each block stay, (rows, blocks).
  void (*count)(const ScreenBounds& bounds, int32_t* counts, int threads);

  // Which: those of a row's block go to ids[starts[row, block]] and on, lowest first.
  void (*fill)(const ScreenBounds& bounds, const int32_t* counts, const int64_t* starts,
               int64_t* ids, int threads);

  // Some k tokens of each row with the largest approx, ids ascending: (rows, k). k is at most the
  // number of blocks.
  void (*best)(const ScreenBounds& bounds, int64_t k, int64_t* ids, int threads);

  // The k best tokens of one row, best first, the lowest id among equals. Undecided where more than
  // `most` tokens are left, or a masked one is among the best. The bounds' limits are not used.
  ScreenDecided (*decide)(const ScreenBounds& bounds, const ScreenExact& exact, int64_t k,
                          int64_t most, double* values, int64_t* ids, int threads);
};

}  // namespace lmhead
