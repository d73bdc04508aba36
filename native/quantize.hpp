// The quantized copy of a weight, as screen/quantized_weight.py defines it: rows as 16-bit numbers
// along a few leading directions and 8-bit numbers after a rotation, with bounds on what is lost.
// And a hash of a weight's bytes, by which a stored copy is found again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "floats.hpp"

namespace lmhead {

// Rows of a weight and how they are quantized. A factor of the rotation whose size is a power of
// two must be Hadamard's matrix over the root of its size; `leading` is a multiple of 8.
struct QuantizeRows {
  Floats weight;  // (rows, size), the rows of this call
  int64_t rows, size, width, leading;
  const double* mean;   // (size,)
  const double* basis;  // (leading, size)
  const int8_t* signs;  // (width,)
  const double* factors;
  const int64_t* sizes;  // (n_factors,)
  int64_t n_factors;
  double mean_norm;
  double kappa, share, lost, up;  // constants of the proof: see screen/quantized_weight.py
  float tiny;
};

// (rows, width), (rows, leading), and (rows,) each.
struct QuantizedRows {
  int8_t* codes;
  int16_t* lead;
  float *scales, *lead_scales, *e, *e_high, *n;
};

// The largest norms of codes and of lead; finite: whether all of the weight was.
struct QuantizedNorms {
  double codes, lead;
  bool finite;
};

struct QuantizeKernels {
  QuantizedNorms (*quantize)(const QuantizeRows& given, const QuantizedRows& out, int threads);

  // sums (size,) of the columns of weight (rows, size), in float64, always in the same order.
  void (*column_sums)(const Floats& weight, int64_t rows, int64_t size, double* sums, int threads);

  // The first step of a hash, at the speed of memory: two sums of products for each kHashBlock
  // bytes, sums (blocks, 2). See hash.cpp.
  void (*hash_blocks)(const uint8_t* bytes, int64_t blocks, const uint32_t* keys, uint64_t* sums,
                      int threads);
};

// Bytes of a block of the hash, and the 32-bit keys of a block: two sets.
inline constexpr int64_t kHashBlock = 1024;
inline constexpr int64_t kHashKeys = 2 * kHashBlock / 4;

// Lanes of the hash.
inline constexpr int kHashLanes = 8;

// A hash of bytes for finding equal ones again. Two inputs of equal size that differ agree with a
// probability below 2^-40 over the choice of the keys. The keys are fixed, so it is no
// cryptographic hash: inputs that agree can be constructed.
void hash_bytes(const QuantizeKernels& kernels, const uint8_t* bytes, size_t size,
                uint64_t (&lanes)[kHashLanes], int threads);

}  // namespace lmhead
