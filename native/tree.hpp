// A tree of decisions over tokens: gradients of its rows, and the search for its best tokens. Pure
// functions on pointers, as in kernels.hpp.
#pragma once

#include <cstdint>

#include "floats.hpp"

namespace lmhead {

// Nodes are tokens, 0 to vocab - 1, and forks, vocab + f; fork 0 is the root. The branches of fork
// f are child[start[f]] to child[start[f + 1] - 1]; all but the last have a row of the weight each,
// from start[f] - f on. The score of the last is 0.
struct TokenTree {
  const int64_t* start;  // (forks + 1,)
  const int64_t* child;  // (edges,)
  int64_t vocab, forks;  // a fork comes after its parent; edges = vocab + forks - 1
};

// The decisions that lead from the root to each of n tokens: those of token i go to fork[ends[i -
// 1]] to fork[ends[i] - 1], and likewise `branch`, from the root down. Nodes as above, each with
// the fork above it in `parent` and its place there in `branches`. False where a path is not as
// long as `ends` says.
inline bool tree_paths(const int64_t* parent, const int64_t* branches, int64_t vocab, int64_t forks,
                       const int64_t* tokens, const int64_t* ends, int64_t n, int64_t* fork,
                       int64_t* branch) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t begin = i ? ends[i - 1] : 0;
    int64_t node = tokens[i];
    for (int64_t place = ends[i]; place-- > begin; node = vocab + fork[place]) {
      if (parent[node] < 0 || parent[node] >= forks) return false;
      fork[place] = parent[node];
      branch[place] = branches[node];
    }
    if (parent[node] >= 0) return false;
  }
  return true;
}

struct TreeKernels {
  // to[b[p], :] += factors[p] · from[a[p], :] for all p, in the order of p. Rows of `to` that no
  // b[p] names are not touched. Summed in float32, a few terms at a time.
  void (*sums)(const double* factors, const Floats& from, int64_t d, const int64_t* a,
               const int64_t* b, int64_t pairs, float* to, int64_t size, int threads);

  // The k tokens of largest log-probability of each row, largest first, lowest id first among
  // equals: forks are opened in the order of their mass, until none can hold a better token. All
  // three tensors are of one type; `bias` may be null. `opened` (rows,) receives how many forks
  // that took; -1 for an invalid tree: only the nodes that the search visits are checked, since a
  // check of all of them would take longer than the search. Where a visited score is a NaN, the
  // row's ids are -1 and its values NaN.
  void (*best)(const Floats& hidden, const Floats& weight, const void* bias, int64_t rows,
               int64_t d, const TokenTree& tree, int64_t k, double* values, int64_t* ids,
               int64_t* opened, int threads);
};

}  // namespace lmhead
