// The cases that every kernel goes through: odd shapes, maps, threads, both places.
#pragma once

#include <string>

#include "kernels.hpp"
#include "tally.hpp"

struct Shape {
  int64_t tokens, rows;
};

// Around the widths of vectors (4, 8, 16), of a block of tokens (32) and of a share of rows (256).
inline std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (int64_t rows : {1, 7, 33, 257})
    for (int64_t tokens : {1, 31, 33, 1000}) all.push_back({tokens, rows});
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

constexpr int kThreads[] = {1, 2, 3, 8};

inline std::string label(const lmhead::Kernels& k, const char* what, Shape shape, const char* how,
                         Place place) {
  return std::string(k.name) + " " + what + " " + std::to_string(shape.tokens) + "x" +
         std::to_string(shape.rows) + " " + how + " " + name(place);
}
