// One token of each of several sequences through a Llama: norms, attention over cached keys and
// values, feed-forward. Weights are float32, or quantized blocks of a GGUF file: their codes are
// multiplied as float32 numbers, and a block's scale by the sum of its products. A weight is read
// once for all sequences, and the order of every sum is fixed: a sequence gets the same bits alone
// and in any batch.
#pragma once

#include <cstdint>
#include <vector>

namespace lmhead {

// Blocks of 32 entries: a float16 scale d, for q4_1 a float16 m, then the codes. An entry is
// d · (code - 8) in q4_0 and d · code + m in q4_1, both with entries i and i + 16 in one byte, low
// bits first, and d · code in q8_0.
enum class Stored { f32, q4_0, q4_1, q8_0 };

inline constexpr int64_t kBlockEntries = 32;

inline constexpr int64_t block_bytes(Stored type) {
  return type == Stored::q4_0 ? 18 : type == Stored::q4_1 ? 20 : 34;
}

// (rows, columns). Rows of blocks have a multiple of 32 columns.
struct StoredMatrix {
  const void* data;
  Stored type;
  int64_t rows, columns;
};

struct DecodeLayer {
  const float *attention_norm, *feed_forward_norm;  // (size,)
  StoredMatrix query, key, value, output, gate, up, down;
};

struct DecodeModel {
  std::vector<DecodeLayer> layers;
  const float* norm;  // (size,), after the last layer
  int64_t size, inner, heads, key_heads, head_size;
  float eps;
  bool interleaved;  // pairs of coordinates that rotate together: 2 i and 2 i + 1, or i and i + d/2
};

// Keys and values, (layers, key_heads, room, head_size): memory for `room` positions, of which
// `length` are used; those of the new token are written to the next one.
struct DecodeCache {
  float *keys, *values;
  int64_t room, length;
};

struct DecodeKernels {
  // x (count, size): the tokens' embeddings on entry, their hidden states after the final norm on
  // return. caches (count,), of different sequences. cos, sin (count, head_size / 2): of the
  // tokens' positions.
  void (*step)(const DecodeModel& model, const DecodeCache* caches, int64_t count, const float* cos,
               const float* sin, float* x, int threads);

  // out (count, rows) = x (count, columns) · matrix^T.
  void (*multiply)(const StoredMatrix& matrix, const float* x, int64_t count, float* out,
                   int threads);
};

}  // namespace lmhead
