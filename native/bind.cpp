// Python bindings of kernels.hpp, and the module; the other kernels are bound in bind_*.cpp.
// Tensors are passed as views, checked for type and shape, never copied.
#include "bind.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "parallel.hpp"

namespace lmhead {
namespace {

const Kernels* chosen = best_kernels();

using MapTuple = std::tuple<double, double, bool, double, double>;

Map to_map(const MapTuple& t) {
  return {static_cast<float>(std::get<0>(t)), static_cast<float>(std::get<1>(t)), std::get<2>(t),
          static_cast<float>(std::get<3>(t)), static_cast<float>(std::get<4>(t))};
}

using Triples = std::vector<std::tuple<int, int, int>>;

Triples softmax(Array<float, 2> z, Maybe<const float, 1> bias, const MapTuple& map,
                Array<float, 1> m, Array<double, 1> s, Maybe<double, 1> t, int64_t lo,
                Maybe<float, 2> heap_values, Maybe<int64_t, 2> heap_ids,
                Maybe<int32_t, 1> heap_sizes, Maybe<const float, 2> rank_mine,
                Maybe<const float, 2> rank_slack, Maybe<const float, 1> rank_per_norm,
                Maybe<const float, 1> rank_norms, Maybe<int64_t, 2> rank_counts, int threads) {
  const size_t tokens = z.shape(0), rows = z.shape(1);
  require_threads(threads);
  require(m.size() == rows && s.size() == rows, "m and s must have one entry per row");
  require_size(t, rows, "t must have one entry per row");
  require_size(bias, tokens, "bias must have one entry per token");
  Heaps heaps{};
  if (heap_values) {
    const size_t kept = heap_values->shape(1);
    require(heap_ids && heap_sizes && heap_values->shape(0) == rows && kept >= 1 &&
                same_shape(*heap_ids, *heap_values) && heap_sizes->size() == rows,
            "heaps must be (rows, kept), (rows, kept) and (rows,), kept at least 1");
    heaps = {heap_values->data(), heap_ids->data(), heap_sizes->data(), static_cast<int64_t>(kept)};
    for (size_t j = 0; j < rows; ++j)
      require(heaps.sizes[j] >= 0 && heaps.sizes[j] <= heaps.kept,
              "sizes of heaps must be from 0 to kept");
  }
  Ranks ranks{};
  if (rank_mine) {
    require(rank_slack && rank_per_norm && rank_norms && rank_counts &&
                rank_mine->shape(1) == rows && same_shape(*rank_slack, *rank_mine) &&
                same_shape(*rank_counts, *rank_mine) && rank_per_norm->size() == rows &&
                rank_norms->size() == tokens,
            "ranks must be (n, rows) twice, (rows,), (tokens,) and (n, rows)");
    ranks = {rank_mine->data(),  rank_slack->data(),  rank_per_norm->data(),
             rank_norms->data(), rank_counts->data(), static_cast<int64_t>(rank_mine->shape(0))};
  }
  std::vector<Pair> close;
  {
    const nb::gil_scoped_release release;
    chosen->softmax(z.data(), static_cast<int64_t>(tokens), static_cast<int64_t>(rows),
                    pointer(bias), to_map(map), m.data(), s.data(), pointer(t), lo,
                    heap_values ? &heaps : nullptr, rank_mine ? &ranks : nullptr, &close, threads);
  }
  Triples out;
  out.reserve(close.size());
  for (const auto& pair : close) out.emplace_back(pair.which, pair.token, pair.row);
  return out;
}

void gradient(Array<float, 2> z, Array<const float, 1> high, Array<const float, 1> low,
              Array<const float, 1> a, Maybe<const float, 1> b, Maybe<const float, 1> mix,
              Maybe<const float, 1> mixed, const MapTuple& map, Maybe<const int64_t, 1> pick_tokens,
              Maybe<const int64_t, 1> pick_rows, Maybe<const float, 1> pick_values,
              Maybe<float, 1> token_sums, Maybe<float, 1> row_sums, int threads) {
  const size_t tokens = z.shape(0), rows = z.shape(1);
  require_threads(threads);
  require(high.size() == rows && low.size() == rows && a.size() == rows,
          "high, low and a must have one entry per row");
  require_size(b, rows, "b must have one entry per row");
  require_size(mix, tokens, "mix must have one entry per token");
  require_size(mixed, rows, "mixed must have one entry per row");
  require(mix.has_value() == mixed.has_value(), "mix and mixed go together");
  require_size(token_sums, tokens, "token_sums must have one entry per token");
  require_size(row_sums, rows, "row_sums must have one entry per row");
  std::vector<Pick> picks;
  if (pick_tokens) {
    const size_t n = pick_tokens->size();
    require(pick_rows && pick_values && pick_rows->size() == n && pick_values->size() == n,
            "picks must be three vectors of one length");
    picks.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      const int64_t token = pick_tokens->data()[i], row = pick_rows->data()[i];
      require(token >= 0 && token < static_cast<int64_t>(tokens) && row >= 0 &&
                  row < static_cast<int64_t>(rows),
              "picks must lie in the tile");
      picks.push_back({token, row, pick_values->data()[i]});
    }
  }
  const nb::gil_scoped_release release;
  chosen->gradient(z.data(), static_cast<int64_t>(tokens), static_cast<int64_t>(rows), high.data(),
                   low.data(), a.data(), pointer(b), pointer(mix), pointer(mixed), to_map(map),
                   picks, pointer(token_sums), pointer(row_sums), threads);
}

void pairs(FloatArray<2> hidden, FloatArray<2> weight, Array<const int64_t, 1> rows,
           Array<const int64_t, 1> ids, Array<double, 1> out, int threads) {
  const char* what = "hidden and weight must be float32, bfloat16 or float16";
  const Floats h = to_floats(hidden, what), w = to_floats(weight, what);
  require_threads(threads);
  require(h.type == w.type || h.type == FloatType::f32,
          "hidden must be float32, or of the type of weight");
  require(hidden.shape(1) == weight.shape(1), "hidden and weight must have the same width");
  require(rows.size() == ids.size() && out.size() == ids.size(), "one entry per pair");
  require_below(rows, hidden.shape(0), "rows must be rows of hidden");
  require_below(ids, weight.shape(0), "ids must be rows of weight");
  const nb::gil_scoped_release release;
  chosen->pairs(h, w, length(hidden, 1), rows.data(), ids.data(), length(ids), out.data(), threads);
}

// out: (rows, vocab); its type is that of the sums, float64 or float32. square: (1,), receives the
// largest |w|².
void row_logits(Array<const float, 2> hidden, FloatArray<2> weight,
                Checked<nb::ndim<2>, nb::c_contig, nb::device::cpu> out, int threads,
                Maybe<double, 1> square) {
  const Floats w = to_floats(weight, "weight must be float32, bfloat16 or float16");
  const bool exact = out.dtype() == nb::dtype<double>();
  if (!exact && out.dtype() != nb::dtype<float>())
    throw nb::type_error("out must be float64 or float32");
  require_threads(threads);
  require(hidden.shape(1) == weight.shape(1), "hidden and weight must have the same width");
  require(has_shape(out, hidden.shape(0), weight.shape(0)), "out must be (rows, vocab)");
  require(!square || (!exact && square->size() == 1), "square is one number, with float32 sums");
  const nb::gil_scoped_release release;
  const int64_t rows = length(hidden), vocab = length(weight), d = length(hidden, 1);
  if (exact)
    chosen->row_logits(hidden.data(), rows, w, vocab, d, static_cast<double*>(out.data()), threads);
  else
    chosen->float_logits(hidden.data(), rows, w, vocab, d, static_cast<float*>(out.data()),
                         pointer(square), threads);
}

void product(Array<const float, 2> left, Array<const float, 2> right, Array<float, 2> out,
             bool transposed, bool add, int threads,
             const std::optional<Array<const int64_t, 1>>& ids) {
  const size_t m = left.shape(transposed ? 1 : 0), inner = left.shape(transposed ? 0 : 1);
  require_threads(threads);
  require(right.shape(0) == inner, "left and right must have the same inner size");
  require(has_shape(out, m, right.shape(1)), "out must be (rows of left, columns of right)");
  if (ids) require_below(*ids, left.shape(0), "ids must be rows of left as it is stored");
  const auto used = [&](size_t all) { return static_cast<int64_t>(ids ? ids->size() : all); };
  const nb::gil_scoped_release release;
  chosen->product(left.data(), transposed, right.data(), out.data(),
                  transposed ? static_cast<int64_t>(m) : used(m), length(right, 1),
                  transposed ? used(inner) : static_cast<int64_t>(inner), add, pointer(ids),
                  threads);
}

void scatter_add(Array<float, 2> into, Array<const int64_t, 1> ids, Array<const float, 2> from,
                 int threads) {
  require_threads(threads);
  require(from.shape(0) == ids.size() && from.shape(1) == into.shape(1),
          "from must be (len(ids), width of into)");
  require_below(ids, into.shape(0), "ids must be rows of into");
  const nb::gil_scoped_release release;
  chosen->scatter_add(into.data(), static_cast<int64_t>(into.shape(1)), ids.data(),
                      static_cast<int64_t>(ids.size()), from.data(), threads);
}

float threshold(Array<const float, 1> x, double mass) {
  const nb::gil_scoped_release release;
  return lmhead::tail_threshold(x.data(), static_cast<int64_t>(x.size()), mass);
}

void use(const std::string& name) {
  const Kernels* found = kernels_named(name.c_str());
  if (!found) throw std::invalid_argument("this machine cannot run the kernels for " + name);
  chosen = found;
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const char* name : kernel_names()) names.emplace_back(name);
  return names;
}

}  // namespace

const Kernels* chosen_kernels() { return chosen; }

void bind_decode(nb::module_& m);
void bind_quantize(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_screen(nb::module_& m);
void bind_screen_sample(nb::module_& m);
void bind_tree(nb::module_& m);

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // models may live until the interpreter ends
  m.doc() = "Kernels on tiles of logits; see native/kernels.hpp.";
  using nb::arg;
  m.def("softmax", &softmax, tensor("z"), maybe("bias"), arg("map"), tensor("m"), tensor("s"),
        maybe("t"), arg("lo"), maybe("heap_values"), maybe("heap_ids"), maybe("heap_sizes"),
        maybe("rank_mine"), maybe("rank_slack"), maybe("rank_per_norm"), maybe("rank_norms"),
        maybe("rank_counts"), arg("threads"));
  m.def("gradient", &gradient, tensor("z"), tensor("high"), tensor("low"), tensor("a"), maybe("b"),
        maybe("mix"), maybe("mixed"), arg("map"), maybe("pick_tokens"), maybe("pick_rows"),
        maybe("pick_values"), maybe("token_sums"), maybe("row_sums"), arg("threads"));
  m.def("pairs", &pairs, tensor("hidden"), tensor("weight"), tensor("rows"), tensor("ids"),
        tensor("out"), arg("threads"));
  m.def("row_logits", &row_logits, tensor("hidden"), tensor("weight"), tensor("out"),
        arg("threads"), maybe("square") = nb::none());
  m.def("product", &product, tensor("left"), tensor("right"), tensor("out"), arg("transposed"),
        arg("add"), arg("threads"), maybe("ids") = nb::none());
  m.def("scatter_add", &scatter_add, tensor("into"), tensor("ids"), tensor("from_"),
        arg("threads"));
  m.def("tail_threshold", &threshold, tensor("x"), arg("mass"));
  m.def("fast_product", &fast_product);
  m.def("use", &use, arg("name"));
  m.def("instruction_sets", &instruction_sets);
  m.def("instruction_set", [] { return std::string(chosen->name); });
  m.def("thread_runtime", [] { return std::string(thread_runtime()); });
  bind_decode(m);
  bind_quantize(m);
  bind_rows(m);
  bind_screen(m);
  bind_screen_sample(m);
  bind_tree(m);
}

}  // namespace lmhead
