// Python bindings of decode.hpp: one step of sequences through a Llama. See bind.cpp.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "decode.hpp"

namespace lmhead {
namespace {

Stored stored_type(const std::string& name) {
  if (name == "F32") return Stored::f32;
  if (name == "Q4_0") return Stored::q4_0;
  if (name == "Q4_1") return Stored::q4_1;
  require(name == "Q8_0", "type must be F32, Q4_0, Q4_1 or Q8_0");
  return Stored::q8_0;
}

// float32 (rows, columns), or uint8 (rows, bytes) of blocks.
StoredMatrix to_matrix(const FloatArray<2>& array, const std::string& name) {
  const Stored type = stored_type(name);
  if (type == Stored::f32) {
    require(array.dtype() == nb::dtype<float>(), "a matrix of type F32 must be float32");
    return {array.data(), type, length(array), length(array, 1)};
  }
  require(array.dtype() == nb::dtype<uint8_t>(), "blocks must be uint8");
  require(length(array, 1) % block_bytes(type) == 0, "rows must be whole blocks");
  return {array.data(), type, length(array), length(array, 1) / block_bytes(type) * kBlockEntries};
}

// A model and the tensors that it reads.
struct HeldModel {
  DecodeModel model;
  std::vector<FloatArray<2>> matrices;
  std::vector<Array<const float, 1>> norms;
};

// Of each layer the matrices query, key, value, output, gate, up and down, with their types, and
// the norms before attention and before the feed-forward sublayer; the last norm is that after all
// layers.
HeldModel to_model(std::vector<FloatArray<2>> matrices, const std::vector<std::string>& types,
                   std::vector<Array<const float, 1>> norms, int64_t heads, int64_t key_heads,
                   int64_t head_size, float eps, bool interleaved) {
  const size_t layers = matrices.size() / 7;
  require(matrices.size() == 7 * layers && types.size() == matrices.size() &&
              norms.size() == 2 * layers + 1,
          "there must be seven matrices and two norms per layer, and one norm");
  require(
      heads > 0 && key_heads > 0 && heads % key_heads == 0 && head_size > 0 && head_size % 2 == 0,
      "heads must be a multiple of key_heads, and head_size even");
  require(std::max(heads, head_size) < int64_t{1} << 31,
          "heads and head_size must be less than 2^31");
  DecodeModel model{};
  model.size = length(norms.back()), model.norm = norms.back().data();
  model.heads = heads, model.key_heads = key_heads, model.head_size = head_size;
  model.eps = eps, model.interleaved = interleaved;
  const int64_t wide = heads * head_size, narrow = key_heads * head_size;
  for (size_t l = 0; l < layers; ++l) {
    StoredMatrix m[7];
    for (size_t i = 0; i < 7; ++i) m[i] = to_matrix(matrices[7 * l + i], types[7 * l + i]);
    if (l == 0) model.inner = m[4].rows;
    const int64_t shapes[7][2] = {{wide, model.size},        {narrow, model.size},
                                  {narrow, model.size},      {model.size, wide},
                                  {model.inner, model.size}, {model.inner, model.size},
                                  {model.size, model.inner}};
    for (int i = 0; i < 7; ++i)
      require(m[i].rows == shapes[i][0] && m[i].columns == shapes[i][1],
              "matrices must have the shapes of a Llama");
    for (size_t i = 0; i < 2; ++i)
      require(length(norms[2 * l + i]) == model.size, "norms must have the hidden size");
    model.layers.push_back(
        {norms[2 * l].data(), norms[2 * l + 1].data(), m[0], m[1], m[2], m[3], m[4], m[5], m[6]});
  }
  return {std::move(model), std::move(matrices), std::move(norms)};
}

// Of each sequence: keys and values (layers, key_heads, room, head_size), where `room` positions
// are allocated, and how many are used; its rows of x (count, size), cos and sin (count, head_size
// / 2).
void step(const HeldModel& held, Array<float, 2> x, Array<const float, 2> cos,
          Array<const float, 2> sin, const std::vector<Array<float, 4>>& keys,
          const std::vector<Array<float, 4>>& values, const std::vector<int64_t>& used,
          int threads) {
  require_threads(threads);
  const DecodeModel& model = held.model;
  const int64_t half = model.head_size / 2, count = length(x);
  require(length(x, 1) == model.size && length(cos, 1) == half && length(sin, 1) == half,
          "x must have the hidden size, cos and sin half of a head's");
  require(count > 0, "x must have at least one row");
  require(length(cos) == count && length(sin) == count && keys.size() == x.shape(0) &&
              values.size() == x.shape(0) && used.size() == x.shape(0),
          "there must be one row of x, cos and sin, keys, values and used per sequence");
  std::vector<DecodeCache> caches;
  for (size_t i = 0; i < used.size(); ++i) {
    for (const auto* cache : {&keys[i], &values[i]})
      require(cache->shape(0) == model.layers.size() && length(*cache, 1) == model.key_heads &&
                  cache->shape(2) == keys[i].shape(2) && length(*cache, 3) == model.head_size,
              "keys and values must be (layers, key_heads, room, head_size)");
    require(used[i] >= 0 && used[i] < length(keys[i], 2),
            "keys and values must have room for one more");
    for (size_t j = 0; j < i; ++j)
      require(keys[j].data() != keys[i].data() && values[j].data() != values[i].data(),
              "sequences must not share keys and values");
    caches.push_back({keys[i].data(), values[i].data(), length(keys[i], 2), used[i]});
  }
  const nb::gil_scoped_release release;
  chosen_kernels()->decode->step(model, caches.data(), count, cos.data(), sin.data(), x.data(),
                                 threads);
}

void multiply(FloatArray<2> blocks, const std::string& type, Array<const float, 2> x,
              Array<float, 2> out, int threads) {
  const StoredMatrix matrix = to_matrix(blocks, type);
  require_threads(threads);
  require(length(x) > 0, "x must have at least one row");
  require(
      length(out, 1) == matrix.rows && length(x, 1) == matrix.columns && length(out) == length(x),
      "x must have one entry per column, out one per row of the matrix");
  const nb::gil_scoped_release release;
  chosen_kernels()->decode->multiply(matrix, x.data(), length(x), out.data(), threads);
}

}  // namespace

void bind_decode(nb::module_& m) {
  using nb::arg;
  nb::class_<HeldModel>(m, "DecodeModel");
  m.def("decode_model", &to_model, tensor("matrices"), arg("types"), tensor("norms"), arg("heads"),
        arg("key_heads"), arg("head_size"), arg("eps"), arg("interleaved"));
  m.def("decode_step", &step, arg("model"), tensor("x"), tensor("cos"), tensor("sin"),
        tensor("keys"), tensor("values"), arg("used"), arg("threads"));
  m.def("stored_product", &multiply, tensor("blocks"), arg("type"), tensor("x"), tensor("out"),
        arg("threads"));
}

}  // namespace lmhead
