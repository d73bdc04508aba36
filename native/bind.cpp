// The only file that knows Python. Tensors cross as views, checked for type and shape, never copied.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "kernels.hpp"
#include "parallel.hpp"
#include "philox.hpp"

namespace nb = nanobind;
using lmhead::Kernels;

namespace {

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using Maybe = std::optional<Array<T, N>>;

template <class A>
auto pointer(const std::optional<A>& array) -> decltype(array->data()) {
  return array ? array->data() : nullptr;
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

template <class A>
void require_size(const std::optional<A>& array, size_t size, const char* what) {
  require(!array || array->size() == size, what);
}

void require_threads(int threads) { require(threads >= 1, "threads must be at least 1"); }

template <class A, class B>
bool same_shape(const A& a, const B& b) {
  return a.shape(0) == b.shape(0) && a.shape(1) == b.shape(1);
}

const Kernels* chosen = lmhead::best_kernels();

using MapTuple = std::tuple<double, double, bool, double, double>;

lmhead::Map to_map(const MapTuple& t) {
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
  const size_t words = z.shape(0), tokens = z.shape(1);
  require_threads(threads);
  require(m.size() == tokens && s.size() == tokens, "m and s must have one entry per token");
  require_size(t, tokens, "t must have one entry per token");
  require_size(bias, words, "bias must have one entry per word");
  lmhead::Heaps heaps{};
  if (heap_values) {
    const size_t kept = heap_values->shape(1);
    require(heap_ids && heap_sizes && heap_values->shape(0) == tokens && kept >= 1 &&
                same_shape(*heap_ids, *heap_values) && heap_sizes->size() == tokens,
            "heaps must be (tokens, kept), (tokens, kept) and (tokens,), kept at least 1");
    heaps = {heap_values->data(), heap_ids->data(), heap_sizes->data(),
             static_cast<int64_t>(kept)};
    for (size_t j = 0; j < tokens; ++j)
      require(heaps.sizes[j] >= 0 && heaps.sizes[j] <= heaps.kept,
              "sizes of heaps must be from 0 to kept");
  }
  lmhead::Ranks ranks{};
  if (rank_mine) {
    require(rank_slack && rank_per_norm && rank_norms && rank_counts &&
                rank_mine->shape(1) == tokens && same_shape(*rank_slack, *rank_mine) &&
                same_shape(*rank_counts, *rank_mine) && rank_per_norm->size() == tokens &&
                rank_norms->size() == words,
            "ranks must be (n, tokens) twice, (tokens,), (words,) and (n, tokens)");
    ranks = {rank_mine->data(),  rank_slack->data(),  rank_per_norm->data(),
             rank_norms->data(), rank_counts->data(), static_cast<int64_t>(rank_mine->shape(0))};
  }
  std::vector<lmhead::Pair> close;
  {
    const nb::gil_scoped_release release;
    chosen->softmax(z.data(), static_cast<int64_t>(words), static_cast<int64_t>(tokens),
                    pointer(bias), to_map(map), m.data(), s.data(), pointer(t), lo,
                    heap_values ? &heaps : nullptr, rank_mine ? &ranks : nullptr, &close, threads);
  }
  Triples out;
  out.reserve(close.size());
  for (const auto& pair : close) out.emplace_back(pair.which, pair.word, pair.token);
  return out;
}

void gradient(Array<float, 2> z, Array<const float, 1> high, Array<const float, 1> low,
              Array<const float, 1> a, Maybe<const float, 1> b, Maybe<const float, 1> mix,
              Maybe<const float, 1> mixed, const MapTuple& map,
              Maybe<const int64_t, 1> pick_words, Maybe<const int64_t, 1> pick_tokens,
              Maybe<const float, 1> pick_values, Maybe<float, 1> columns, Maybe<float, 1> rows,
              int threads) {
  const size_t words = z.shape(0), tokens = z.shape(1);
  require_threads(threads);
  require(high.size() == tokens && low.size() == tokens && a.size() == tokens,
          "high, low and a must have one entry per token");
  require_size(b, tokens, "b must have one entry per token");
  require_size(mix, words, "mix must have one entry per word");
  require_size(mixed, tokens, "mixed must have one entry per token");
  require(mix.has_value() == mixed.has_value(), "mix and mixed go together");
  require_size(columns, words, "columns must have one entry per word");
  require_size(rows, tokens, "rows must have one entry per token");
  std::vector<lmhead::Pick> picks;
  if (pick_words) {
    const size_t n = pick_words->size();
    require(pick_tokens && pick_values && pick_tokens->size() == n && pick_values->size() == n,
            "picks must be three vectors of one length");
    picks.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      const int64_t word = pick_words->data()[i], token = pick_tokens->data()[i];
      require(word >= 0 && word < static_cast<int64_t>(words) && token >= 0 &&
                  token < static_cast<int64_t>(tokens),
              "picks must lie in the tile");
      picks.push_back({word, token, pick_values->data()[i]});
    }
  }
  const nb::gil_scoped_release release;
  chosen->gradient(z.data(), static_cast<int64_t>(words), static_cast<int64_t>(tokens),
                   high.data(), low.data(), a.data(), pointer(b), pointer(mix), pointer(mixed),
                   to_map(map), picks, pointer(columns), pointer(rows), threads);
}

void check_numbers(const Array<const int64_t, 1>& numbers, size_t limit, const char* what) {
  for (size_t i = 0; i < numbers.size(); ++i)
    require(numbers.data()[i] >= 0 && numbers.data()[i] < static_cast<int64_t>(limit), what);
}

// bfloat16 comes as its bits: uint16.
template <class T>
void pairs(Array<const T, 2> hidden, Array<const T, 2> weight, Array<const int64_t, 1> rows,
           Array<const int64_t, 1> ids, Array<double, 1> out, int threads) {
  require_threads(threads);
  require(hidden.shape(1) == weight.shape(1), "hidden and weight must have the same width");
  require(rows.size() == ids.size() && out.size() == ids.size(), "one entry per pair");
  check_numbers(rows, hidden.shape(0), "rows must be rows of hidden");
  check_numbers(ids, weight.shape(0), "ids must be rows of weight");
  const nb::gil_scoped_release release;
  const auto d = static_cast<int64_t>(hidden.shape(1)), n = static_cast<int64_t>(ids.size());
  if constexpr (sizeof(T) == 4) {
    chosen->pairs_f32(hidden.data(), weight.data(), d, rows.data(), ids.data(), n, out.data(),
                      threads);
  } else {
    chosen->pairs_bf16(hidden.data(), weight.data(), d, rows.data(), ids.data(), n, out.data(),
                       threads);
  }
}

void scatter_add(Array<float, 2> into, Array<const int64_t, 1> ids, Array<const float, 2> from,
                 int threads) {
  require_threads(threads);
  require(from.shape(0) == ids.size() && from.shape(1) == into.shape(1),
          "from must be (len(ids), width of into)");
  check_numbers(ids, into.shape(0), "ids must be rows of into");
  const nb::gil_scoped_release release;
  chosen->scatter_add(into.data(), static_cast<int64_t>(into.shape(1)), ids.data(),
                      static_cast<int64_t>(ids.size()), from.data(), threads);
}

void widen(Array<const uint16_t, 2> from, Array<float, 2> to, int threads) {
  require_threads(threads);
  require(same_shape(from, to), "from and to must have the same shape");
  const nb::gil_scoped_release release;
  chosen->widen(from.data(), to.data(), static_cast<int64_t>(to.size()), threads);
}

template <class A>
std::pair<int64_t, int64_t> shape(const A& z) {
  return {static_cast<int64_t>(z.shape(0)), static_cast<int64_t>(z.shape(1))};
}

template <class... As>
void require_rows(size_t rows, const As&... arrays) {
  require(((arrays.size() == rows) && ...), "one entry per row");
}

void row_top(Array<const float, 2> z, Array<double, 1> max, Array<double, 1> n, int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), max, n);
  const nb::gil_scoped_release release;
  chosen->rows->top(z.data(), rows, vocab, max.data(), n.data(), threads);
}

// betas: (count, rows); out: (2, count, rows), mass and weighted.
void row_mass(Array<const float, 2> z, Array<const double, 2> betas, Array<const double, 1> max,
              Array<double, 3> out, int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), max);
  require(betas.shape(1) == z.shape(0), "betas must be (count, rows)");
  require(out.shape(0) == 2 && out.shape(1) == betas.shape(0) && out.shape(2) == betas.shape(1),
          "out must be (2, count, rows)");
  const nb::gil_scoped_release release;
  chosen->rows->mass(z.data(), rows, vocab, betas.data(), static_cast<int64_t>(betas.shape(0)),
                     max.data(), out.data(), out.data() + betas.size(), threads);
}

void row_moments(Array<const float, 2> z, Array<const double, 1> max, Array<double, 1> shift,
                 Array<double, 1> square, int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), max, shift, square);
  const nb::gil_scoped_release release;
  chosen->rows->moments(z.data(), rows, vocab, max.data(), shift.data(), square.data(), threads);
}

void row_kth(Array<const float, 2> z, Array<const int64_t, 1> k, Array<float, 1> value,
             int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), k, value);
  for (size_t i = 0; i < k.size(); ++i) require(k.data()[i] >= 1, "k must be at least 1");
  const nb::gil_scoped_release release;
  chosen->rows->kth(z.data(), rows, vocab, k.data(), value.data(), threads);
}

void row_reach(Array<const float, 2> z, Array<const double, 1> beta, Array<const double, 1> max,
               Array<const double, 1> centre, Array<const double, 1> width,
               Array<const double, 1> limit, bool count, Array<double, 1> radius, int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), beta, max, centre, width, limit, radius);
  const nb::gil_scoped_release release;
  chosen->rows->reach(z.data(), rows, vocab, beta.data(), max.data(), centre.data(), width.data(),
                      limit.data(), count, radius.data(), threads);
}

void row_band(Array<const float, 2> z, Array<const float, 1> lo, Array<const float, 1> hi,
              Array<int64_t, 1> counts, Array<int64_t, 2> ids, Array<double, 2> values,
              int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), lo, hi, counts);
  require(ids.shape(0) == z.shape(0), "one row of ids per row");
  require(same_shape(ids, values), "ids and values must have the same shape");
  const nb::gil_scoped_release release;
  chosen->rows->band(z.data(), rows, vocab, lo.data(), hi.data(),
                     static_cast<int64_t>(ids.shape(1)), counts.data(), ids.data(), values.data(),
                     threads);
}

void row_nucleus(Array<const float, 2> z, Array<const double, 1> beta, Array<const double, 1> max,
                 Array<const double, 1> centre, Array<const double, 1> limit, int64_t least,
                 Array<int64_t, 1> counts, Array<int64_t, 2> ids, Array<double, 2> values,
                 int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), beta, max, centre, limit, counts);
  require(ids.shape(0) == z.shape(0), "one row of ids per row");
  require(same_shape(ids, values), "ids and values must have the same shape");
  const nb::gil_scoped_release release;
  chosen->rows->nucleus(z.data(), rows, vocab, beta.data(), max.data(), centre.data(),
                        limit.data(), least, static_cast<int64_t>(ids.shape(1)), counts.data(),
                        ids.data(), values.data(), threads);
}

// keys: (rows, 2), seed and position.
void row_race(Array<const float, 2> z, Array<const double, 1> beta, Array<const int64_t, 2> keys,
              Array<int64_t, 1> winners, int threads) {
  static_assert(sizeof(lmhead::Key) == 2 * sizeof(int64_t));
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), beta, winners);
  require(keys.shape(0) == z.shape(0) && keys.shape(1) == 2, "keys must be (rows, 2)");
  const nb::gil_scoped_release release;
  chosen->rows->race(z.data(), rows, vocab, beta.data(),
                     reinterpret_cast<const lmhead::Key*>(keys.data()), winners.data(), threads);
}

void row_contenders(Array<const float, 2> z, Array<const double, 1> beta,
                    Array<const int64_t, 2> keys, Array<const double, 1> least,
                    Array<int64_t, 1> counts, Array<int64_t, 2> ids, int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), beta, least, counts);
  require(keys.shape(0) == z.shape(0) && keys.shape(1) == 2, "keys must be (rows, 2)");
  require(ids.shape(0) == z.shape(0), "one row of ids per row");
  const nb::gil_scoped_release release;
  chosen->rows->contenders(z.data(), rows, vocab, beta.data(),
                           reinterpret_cast<const lmhead::Key*>(keys.data()), least.data(),
                           static_cast<int64_t>(ids.shape(1)), counts.data(), ids.data(), threads);
}

void row_settle(Array<const float, 2> z, Array<const double, 1> lse, Array<const int64_t, 2> ids,
                Array<const double, 2> words, Array<const int64_t, 2> keys,
                Array<int64_t, 1> token, Array<double, 1> log_prob, Array<double, 1> raw_log_prob,
                Array<double, 1> kept_mass, int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), lse, token, log_prob, raw_log_prob, kept_mass);
  require(ids.shape(0) == z.shape(0), "one row of ids per row");
  require(same_shape(ids, words), "ids and words must have the same shape");
  require(keys.shape(0) == z.shape(0) && keys.shape(1) == 2, "keys must be (rows, 2)");
  for (size_t i = 0; i < ids.size(); ++i)
    require(ids.data()[i] >= 0 && ids.data()[i] < vocab, "ids must be words of z");
  const nb::gil_scoped_release release;
  chosen->rows->settle(z.data(), rows, vocab, lse.data(), ids.data(), words.data(),
                       static_cast<int64_t>(ids.shape(1)),
                       reinterpret_cast<const lmhead::Key*>(keys.data()), token.data(),
                       log_prob.data(), raw_log_prob.data(), kept_mass.data(), threads);
}

void uniforms(Array<const int64_t, 2> keys, uint32_t stream, Array<const int64_t, 2> ids,
              Array<double, 2> out) {
  require(keys.shape(0) == ids.shape(0) && keys.shape(1) == 2, "keys must be (rows, 2)");
  require(same_shape(ids, out), "ids and out must have the same shape");
  const nb::gil_scoped_release release;
  const size_t width = ids.shape(1);
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t* key = keys.data() + i / width * 2;
    out.data()[i] = lmhead::to_uniform(
        lmhead::philox({static_cast<uint64_t>(key[0]), static_cast<uint64_t>(key[1])}, stream,
                       static_cast<uint64_t>(ids.data()[i])));
  }
}

float tail_threshold(Array<const float, 1> x, double mass) {
  const nb::gil_scoped_release release;
  return lmhead::tail_threshold(x.data(), static_cast<int64_t>(x.size()), mass);
}

void use(const std::string& name) {
  const Kernels* found = lmhead::kernels_named(name.c_str());
  if (!found) throw std::invalid_argument("this machine cannot run the kernels for " + name);
  chosen = found;
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const char* name : lmhead::kernel_names()) names.emplace_back(name);
  return names;
}

// Not converted: a copy would be written to in place of the tensor.
auto tensor(const char* name) { return nb::arg(name).noconvert(); }
auto maybe(const char* name) { return nb::arg(name).noconvert().none(); }

}  // namespace

namespace lmhead {
const Kernels* chosen_kernels() { return chosen; }
}  // namespace lmhead

void bind_screen(nb::module_& m);
void bind_tree(nb::module_& m);

NB_MODULE(_native, m) {
  bind_screen(m);
  bind_tree(m);
  m.doc() = "Kernels on tiles of logits; see native/kernels.hpp.";
  using nb::arg;
  m.def("softmax", &softmax, tensor("z"), maybe("bias"), arg("map"), tensor("m"), tensor("s"),
        maybe("t"), arg("lo"), maybe("heap_values"), maybe("heap_ids"), maybe("heap_sizes"),
        maybe("rank_mine"), maybe("rank_slack"), maybe("rank_per_norm"), maybe("rank_norms"),
        maybe("rank_counts"), arg("threads"));
  m.def("gradient", &gradient, tensor("z"), tensor("high"), tensor("low"), tensor("a"), maybe("b"),
        maybe("mix"), maybe("mixed"), arg("map"), maybe("pick_words"), maybe("pick_tokens"),
        maybe("pick_values"), maybe("columns"), maybe("rows"), arg("threads"));
  m.def("pairs_f32", &pairs<float>, tensor("hidden"), tensor("weight"), tensor("rows"),
        tensor("ids"), tensor("out"), arg("threads"));
  m.def("pairs_bf16", &pairs<uint16_t>, tensor("hidden"), tensor("weight"), tensor("rows"),
        tensor("ids"), tensor("out"), arg("threads"));
  m.def("scatter_add", &scatter_add, tensor("into"), tensor("ids"), tensor("from_"),
        arg("threads"));
  m.def("widen", &widen, tensor("from_"), tensor("to"), arg("threads"));
  m.def("row_top", &row_top, tensor("z"), tensor("max"), tensor("n"), arg("threads"));
  m.def("row_mass", &row_mass, tensor("z"), tensor("betas"), tensor("max"), tensor("out"),
        arg("threads"));
  m.def("row_moments", &row_moments, tensor("z"), tensor("max"), tensor("shift"),
        tensor("square"), arg("threads"));
  m.def("row_kth", &row_kth, tensor("z"), tensor("k"), tensor("value"), arg("threads"));
  m.def("row_reach", &row_reach, tensor("z"), tensor("beta"), tensor("max"), tensor("centre"),
        tensor("width"), tensor("limit"), arg("count"), tensor("radius"), arg("threads"));
  m.def("row_band", &row_band, tensor("z"), tensor("lo"), tensor("hi"), tensor("counts"),
        tensor("ids"), tensor("values"), arg("threads"));
  m.def("row_nucleus", &row_nucleus, tensor("z"), tensor("beta"), tensor("max"), tensor("centre"),
        tensor("limit"), arg("least"), tensor("counts"), tensor("ids"), tensor("values"),
        arg("threads"));
  m.def("row_settle", &row_settle, tensor("z"), tensor("lse"), tensor("ids"), tensor("words"),
        tensor("keys"), tensor("token"), tensor("log_prob"), tensor("raw_log_prob"),
        tensor("kept_mass"), arg("threads"));
  m.def("row_race", &row_race, tensor("z"), tensor("beta"), tensor("keys"), tensor("winners"),
        arg("threads"));
  m.def("row_contenders", &row_contenders, tensor("z"), tensor("beta"), tensor("keys"),
        tensor("least"), tensor("counts"), tensor("ids"), arg("threads"));
  m.def("uniforms", &uniforms, tensor("keys"), arg("stream"), tensor("ids"), tensor("out"));
  m.def("tail_threshold", &tail_threshold, tensor("x"), arg("mass"));
  m.def("use", &use, arg("name"));
  m.def("instruction_sets", &instruction_sets);
  m.def("instruction_set", [] { return std::string(chosen->name); });
  m.def("thread_runtime", [] { return std::string(lmhead::thread_runtime()); });
}
