// The kernels on trees of decisions, as Python sees them: see bind.cpp and tree.hpp.
#include "bind.hpp"
#include "tree.hpp"

namespace lmhead {
namespace {

template <class T>
void sums(Array<const double, 1> factors, Array<const T, 2> from, Array<const int64_t, 1> a,
          Array<const int64_t, 1> b, Array<float, 2> to, int threads) {
  require_threads(threads);
  require(factors.size() == a.size() && b.size() == a.size(), "one entry per pair");
  require(from.shape(1) == to.shape(1), "from and to must have the same width");
  require_below(a, from.shape(0), "a must be rows of from");
  require_below(b, to.shape(0), "b must be rows of to");
  const nb::gil_scoped_release release;
  const auto* tree = chosen_kernels()->tree;
  const auto d = static_cast<int64_t>(to.shape(1)), pairs = static_cast<int64_t>(a.size());
  const auto size = static_cast<int64_t>(to.shape(0));
  if constexpr (sizeof(T) == 4) {
    tree->sums_f32(factors.data(), from.data(), d, a.data(), b.data(), pairs, to.data(), size,
                   threads);
  } else {
    tree->sums_bf16(factors.data(), from.data(), d, a.data(), b.data(), pairs, to.data(), size,
                    threads);
  }
}

// The sizes of a tree; its nodes are checked where the search comes across them.
WordTree to_tree(const Array<const int64_t, 1>& start, const Array<const int64_t, 1>& child,
                 int64_t vocab) {
  const auto forks = static_cast<int64_t>(start.size()) - 1;
  const auto edges = static_cast<int64_t>(child.size());
  require(vocab >= 1 && edges == (forks ? vocab + forks - 1 : 0),
          "a tree has one branch less than nodes");
  require(forks > 0 || vocab == 1, "a tree without forks has one word");
  return {start.data(), child.data(), vocab, forks};
}

template <class T>
void best(Array<const T, 2> hidden, Array<const T, 2> weight, Maybe<const T, 1> bias,
          Array<const int64_t, 1> start, Array<const int64_t, 1> child, int64_t vocab,
          Array<double, 2> values, Array<int64_t, 2> ids, Array<int64_t, 1> opened, int threads) {
  require_threads(threads);
  require(start.size() >= 1, "start must have an entry per fork, and one more");
  const auto tree = to_tree(start, child, vocab);
  const size_t rows = hidden.shape(0), k = values.shape(1);
  require(weight.shape(0) == static_cast<size_t>(vocab) - 1, "weight must have vocab - 1 rows");
  require(hidden.shape(1) == weight.shape(1), "hidden and weight must have the same width");
  require(!bias || bias->size() == weight.shape(0), "bias must have one entry per row of weight");
  require(k >= 1 && k <= static_cast<size_t>(vocab), "k must be from 1 to vocab");
  require(values.shape(0) == rows && ids.shape(0) == rows && ids.shape(1) == k &&
              opened.size() == rows,
          "values and ids must be (rows, k), opened (rows,)");
  {
    const nb::gil_scoped_release release;
    const auto* kernels = chosen_kernels()->tree;
    const T* shift = bias ? bias->data() : nullptr;
    const auto n = static_cast<int64_t>(rows), d = static_cast<int64_t>(hidden.shape(1));
    const auto few = static_cast<int64_t>(k);
    if constexpr (sizeof(T) == 4) {
      kernels->best_f32(hidden.data(), weight.data(), shift, n, d, tree, few, values.data(),
                        ids.data(), opened.data(), threads);
    } else {
      kernels->best_bf16(hidden.data(), weight.data(), shift, n, d, tree, few, values.data(),
                         ids.data(), opened.data(), threads);
    }
  }
  for (size_t i = 0; i < rows; ++i)
    require(opened.data()[i] >= 0,
            "the tree must hold every word once, its forks numbered from the root down");
}

void paths(Array<const int64_t, 1> parent, Array<const int64_t, 1> branches, int64_t vocab,
           Array<const int64_t, 1> words, Array<const int64_t, 1> ends, Array<int64_t, 1> fork,
           Array<int64_t, 1> branch) {
  const auto nodes = static_cast<int64_t>(parent.size());
  require(vocab >= 1 && vocab <= nodes && branches.size() == parent.size(),
          "parent and branches must have one entry per node");
  require(words.size() == ends.size(), "one end per word");
  require(fork.size() == branch.size(), "fork and branch must be of one length");
  require_below(words, static_cast<size_t>(vocab), "words must be in the vocabulary");
  int64_t last = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    require(ends.data()[i] >= last, "ends must not fall");
    last = ends.data()[i];
  }
  require(last == static_cast<int64_t>(fork.size()), "fork must have one entry per decision");
  const nb::gil_scoped_release release;
  require(tree_paths(parent.data(), branches.data(), vocab, nodes - vocab, words.data(),
                     ends.data(), static_cast<int64_t>(words.size()), fork.data(),
                     branch.data()),
          "paths must be as long as ends says");
}

template <class T>
void bind(nb::module_& m, const char* sums_name, const char* best_name) {
  using nb::arg;
  m.def(sums_name, &sums<T>, tensor("factors"), tensor("from_"), tensor("a"), tensor("b"),
        tensor("to"), arg("threads"));
  m.def(best_name, &best<T>, tensor("hidden"), tensor("weight"), maybe("bias"), tensor("start"),
        tensor("child"), arg("vocab"), tensor("values"), tensor("ids"), tensor("opened"),
        arg("threads"));
}

}  // namespace

void bind_tree(nb::module_& m) {
  m.def("tree_paths", &paths, tensor("parent"), tensor("branches"), nb::arg("vocab"),
        tensor("words"), tensor("ends"), tensor("fork"), tensor("branch"));
  bind<float>(m, "tree_sums_f32", "tree_best_f32");
  bind<uint16_t>(m, "tree_sums_bf16", "tree_best_bf16");
}

}  // namespace lmhead
