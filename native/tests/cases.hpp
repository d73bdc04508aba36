// The cases that every kernel goes through: odd shapes, maps, threads, both places.
#pragma once

#include <algorithm>
#include <string>

#include "kernels.hpp"
#include "tally.hpp"

struct Shape {
  int64_t tokens, rows;
};

// What `kernel_tests --fuzz` draws sizes and thread counts from; null for the lists as written.
inline Random*& fuzz_random() {
  static Random* random = nullptr;
  return random;
}

// The sizes of a test; one drawn from their range where they are drawn.
inline std::vector<int64_t> sizes(const std::vector<int64_t>& listed) {
  if (!fuzz_random()) return listed;
  const auto [least, most] = std::minmax_element(listed.begin(), listed.end());
  // Small ones as often as large ones.
  const double low = std::log(static_cast<double>(*least) + 1.0);
  const double high = std::log(static_cast<double>(*most) + 2.0);
  const auto drawn = static_cast<int64_t>(std::exp(fuzz_random()->uniform(low, high))) - 1;
  return {std::max(*least, std::min(*most, drawn))};
}

inline std::vector<int> thread_counts() {
  const auto drawn = sizes({1, 2, 3, 8});
  return {drawn.begin(), drawn.end()};
}

// Around the widths of vectors (4, 8, 16), of a block of tokens (32) and of a share of rows (256).
inline std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (int64_t rows : sizes({1, 7, 33, 257}))
    for (int64_t tokens : sizes({1, 31, 33, 1000})) all.push_back({tokens, rows});
  return all;
}

struct NamedMap {
  const char* name;
  lmhead::Map map;
};

inline std::vector<NamedMap> maps() {
  return {{"identity", {}},
          {"affine", {1.7f, -0.3f, false, 1.0f, 0.0f}},
          {"bounded", {0.2f, 0.05f, true, 5.0f, 0.0f}},
          {"bounded and shifted", {-0.3f, 0.1f, true, 4.0f, 0.7f}}};
}

inline std::string label(const lmhead::Kernels& k, const char* what, Shape shape, const char* how,
                         Place place) {
  return std::string(k.name) + " " + what + " " + std::to_string(shape.tokens) + "x" +
         std::to_string(shape.rows) + " " + how + " " + name(place);
}
