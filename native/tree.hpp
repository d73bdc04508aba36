// A tree of decisions over words: gradients of its rows, and the search for its best words. Pure
// functions on pointers, as in kernels.hpp.
#pragma once

#include <cstdint>

namespace lmhead {

// Nodes are words, 0 to vocab - 1, and forks, vocab + f; fork 0 is the root. The branches of fork f
// are child[start[f]] to child[start[f + 1] - 1]; all but the last have a row of the weight each,
// from start[f] - f on. The score of the last is 0.
struct WordTree {
  const int64_t* start;  // (forks + 1,)
  const int64_t* child;  // (edges,)
  int64_t vocab, forks;  // a fork stands after the one above it; edges = vocab + forks - 1
};

// The decisions that lead from the root to each of n words: those of word i go to fork[ends[i - 1]]
// to fork[ends[i] - 1], and likewise `branch`, from the root down. Nodes as above, each with the
// fork above it in `parent` and its place there in `branches`. False where a path is not as long as
// `ends` says.
inline bool tree_paths(const int64_t* parent, const int64_t* branches, int64_t vocab, int64_t forks,
                       const int64_t* words, const int64_t* ends, int64_t n, int64_t* fork,
                       int64_t* branch) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t begin = i ? ends[i - 1] : 0;
    int64_t node = words[i];
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
  void (*sums_f32)(const double* factors, const float* from, int64_t d, const int64_t* a,
                   const int64_t* b, int64_t pairs, float* to, int64_t size, int threads);
  void (*sums_bf16)(const double* factors, const uint16_t* from, int64_t d, const int64_t* a,
                    const int64_t* b, int64_t pairs, float* to, int64_t size, int threads);

  // The k words of largest log-probability of each row, largest first, lowest id first among
  // equals: forks are opened in the order of their mass, until none can hold a better word. `bias`
  // may be null. `opened` (rows,) receives how many forks that took; -1 where the tree is not one:
  // it is checked as far as it is walked, since to look at all of it would take longer than to
  // search. Where a score that was looked at is a NaN, the row's ids are -1 and its values NaN.
  void (*best_f32)(const float* hidden, const float* weight, const float* bias, int64_t rows,
                   int64_t d, const WordTree& tree, int64_t k, double* values, int64_t* ids,
                   int64_t* opened, int threads);
  void (*best_bf16)(const uint16_t* hidden, const uint16_t* weight, const uint16_t* bias,
                    int64_t rows, int64_t d, const WordTree& tree, int64_t k, double* values,
                    int64_t* ids, int64_t* opened, int threads);
};

}  // namespace lmhead
