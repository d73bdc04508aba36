// Python bindings of tree.hpp: the kernels on trees of decisions. See bind.cpp.
#include "bind.hpp"
#include "tree.hpp"

namespace lmhead {
namespace {

void sums(Array<const double, 1> factors, FloatArray<2> from, Array<const int64_t, 1> a,
          Array<const int64_t, 1> b, Array<float, 2> to, int threads) {
  require_threads(threads);
  require(factors.size() == a.size() && b.size() == a.size(), "one entry per pair");
  require(from.shape(1) == to.shape(1), "from and to must have the same width");
  require_below(a, from.shape(0), "a must be rows of from");
  require_below(b, to.shape(0), "b must be rows of to");
  const Floats rows = to_floats(from, "from must be float32, bfloat16 or float16");
  const nb::gil_scoped_release release;
  chosen_kernels()->tree->sums(factors.data(), rows, length(to, 1), a.data(), b.data(), length(a),
                               to.data(), length(to), threads);
}

// The sizes of a tree; its nodes are checked when the search visits them.
TokenTree to_tree(const Array<const int64_t, 1>& start, const Array<const int64_t, 1>& child,
                  int64_t vocab) {
  const auto forks = static_cast<int64_t>(start.size()) - 1;
  const auto edges = static_cast<int64_t>(child.size());
  require(vocab >= 1 && edges == (forks ? vocab + forks - 1 : 0),
          "a tree has one branch less than nodes");
  require(forks > 0 || vocab == 1, "a tree without forks has one token");
  return {start.data(), child.data(), vocab, forks};
}

void best(FloatArray<2> hidden, FloatArray<2> weight, MaybeFloats<1> bias,
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
  require(
      values.shape(0) == rows && ids.shape(0) == rows && ids.shape(1) == k && opened.size() == rows,
      "values and ids must be (rows, k), opened (rows,)");
  const char* what = "hidden, weight and bias must be float32, bfloat16 or float16";
  const Floats h = to_floats(hidden, what), w = to_floats(weight, what);
  require(h.type == w.type && (!bias || to_floats(*bias, what).type == w.type),
          "hidden, weight and bias must be of one type");
  {
    const nb::gil_scoped_release release;
    chosen_kernels()->tree->best(h, w, pointer(bias), length(hidden), length(hidden, 1), tree,
                                 length(values, 1), values.data(), ids.data(), opened.data(),
                                 threads);
  }
  for (size_t i = 0; i < rows; ++i)
    require(opened.data()[i] >= 0,
            "the tree must hold every token once, its forks numbered from the root down");
}

void paths(Array<const int64_t, 1> parent, Array<const int64_t, 1> branches, int64_t vocab,
           Array<const int64_t, 1> tokens, Array<const int64_t, 1> ends, Array<int64_t, 1> fork,
           Array<int64_t, 1> branch) {
  const auto nodes = static_cast<int64_t>(parent.size());
  require(vocab >= 1 && vocab <= nodes && branches.size() == parent.size(),
          "parent and branches must have one entry per node");
  require(tokens.size() == ends.size(), "one end per token");
  require(fork.size() == branch.size(), "fork and branch must be of one length");
  require_below(tokens, static_cast<size_t>(vocab), "tokens must be in the vocabulary");
  int64_t last = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    require(ends.data()[i] >= last, "ends must not fall");
    last = ends.data()[i];
  }
  require(last == static_cast<int64_t>(fork.size()), "fork must have one entry per decision");
  const nb::gil_scoped_release release;
  require(tree_paths(parent.data(), branches.data(), vocab, nodes - vocab, tokens.data(),
                     ends.data(), static_cast<int64_t>(tokens.size()), fork.data(), branch.data()),
          "paths must be as long as ends says");
}

}  // namespace

void bind_tree(nb::module_& m) {
  using nb::arg;
  m.def("tree_paths", &paths, tensor("parent"), tensor("branches"), arg("vocab"), tensor("tokens"),
        tensor("ends"), tensor("fork"), tensor("branch"));
  m.def("tree_sums", &sums, tensor("factors"), tensor("from_"), tensor("a"), tensor("b"),
        tensor("to"), arg("threads"));
  m.def("tree_best", &best, tensor("hidden"), tensor("weight"), maybe("bias"), tensor("start"),
        tensor("child"), arg("vocab"), tensor("values"), tensor("ids"), tensor("opened"),
        arg("threads"));
}

}  // namespace lmhead
