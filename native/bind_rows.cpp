// Python bindings of rows.hpp: the kernels on whole rows of logits. See bind.cpp.
#include <utility>

#include "bind.hpp"
#include "philox.hpp"

namespace lmhead {
namespace {

const RowKernels& kernels() { return *chosen_kernels()->rows; }

template <class A>
std::pair<int64_t, int64_t> shape(const A& z) {
  return {static_cast<int64_t>(z.shape(0)), static_cast<int64_t>(z.shape(1))};
}

template <class... As>
void require_rows(size_t rows, const As&... arrays) {
  require(((arrays.size() == rows) && ...), "one entry per row");
}

// keys: (rows, 2), seed and position.
using Keys = Array<const int64_t, 2>;

void require_keys(const Keys& keys, size_t rows) {
  require(has_shape(keys, rows, 2), "keys must be (rows, 2)");
}

const Key* to_keys(const Keys& keys) {
  static_assert(sizeof(Key) == 2 * sizeof(int64_t));
  return reinterpret_cast<const Key*>(keys.data());
}

void row_max(Array<const float, 2> z, Array<double, 1> max, Array<double, 1> n, int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), max, n);
  const nb::gil_scoped_release release;
  kernels().max_and_count(z.data(), rows, vocab, max.data(), n.data(), threads);
}

// betas: (count, rows); out: (2, count, rows), mass and weighted.
void row_softmax_sums(Array<const float, 2> z, Array<const double, 2> betas,
                      Array<const double, 1> max, Array<double, 3> out, int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), max);
  require(betas.shape(1) == z.shape(0), "betas must be (count, rows)");
  require(out.shape(0) == 2 && out.shape(1) == betas.shape(0) && out.shape(2) == betas.shape(1),
          "out must be (2, count, rows)");
  const nb::gil_scoped_release release;
  kernels().softmax_sums(z.data(), rows, vocab, betas.data(), static_cast<int64_t>(betas.shape(0)),
                         max.data(), out.data(), out.data() + betas.size(), threads);
}

void row_moments(Array<const float, 2> z, Array<const double, 1> max, Array<double, 1> shift,
                 Array<double, 1> square, int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), max, shift, square);
  const nb::gil_scoped_release release;
  kernels().moments(z.data(), rows, vocab, max.data(), shift.data(), square.data(), threads);
}

void row_kth_largest(Array<const float, 2> z, Array<const int64_t, 1> k, Array<float, 1> value,
                     int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), k, value);
  for (size_t i = 0; i < k.size(); ++i) require(k.data()[i] >= 1, "k must be at least 1");
  const nb::gil_scoped_release release;
  kernels().kth_largest(z.data(), rows, vocab, k.data(), value.data(), threads);
}

void row_mass_radius(Array<const float, 2> z, Array<const double, 1> beta,
                     Array<const double, 1> max, Array<const double, 1> centre,
                     Array<const double, 1> width, Array<const double, 1> limit,
                     Array<double, 1> radius, int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), beta, max, centre, width, limit, radius);
  const nb::gil_scoped_release release;
  kernels().mass_radius(z.data(), rows, vocab, beta.data(), max.data(), centre.data(), width.data(),
                        limit.data(), radius.data(), threads);
}

void row_range(Array<const float, 2> z, Array<const float, 1> lo, Array<const float, 1> hi,
               Array<int64_t, 1> counts, Array<int64_t, 2> ids, Array<double, 2> values,
               int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), lo, hi, counts);
  require(ids.shape(0) == z.shape(0), "one row of ids per row");
  require(same_shape(ids, values), "ids and values must have the same shape");
  const nb::gil_scoped_release release;
  kernels().in_range(z.data(), rows, vocab, lo.data(), hi.data(),
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
  kernels().nucleus(z.data(), rows, vocab, beta.data(), max.data(), centre.data(), limit.data(),
                    least, static_cast<int64_t>(ids.shape(1)), counts.data(), ids.data(),
                    values.data(), threads);
}

void row_gumbel_argmax(Array<const float, 2> z, Array<const double, 1> beta, Keys keys,
                       Array<int64_t, 1> winners, int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), beta, winners);
  require_keys(keys, z.shape(0));
  const nb::gil_scoped_release release;
  kernels().gumbel_argmax(z.data(), rows, vocab, beta.data(), to_keys(keys), winners.data(),
                          threads);
}

void row_draw(Array<const float, 2> z, Array<const double, 1> lse, Array<const int64_t, 2> ids,
              Array<const double, 2> logits, Keys keys, Array<int64_t, 1> token,
              Array<double, 1> log_prob, Array<double, 1> raw_log_prob, Array<double, 1> kept_mass,
              int threads) {
  const auto [rows, vocab] = shape(z);
  require_threads(threads);
  require_rows(z.shape(0), lse, token, log_prob, raw_log_prob, kept_mass);
  require(ids.shape(0) == z.shape(0), "one row of ids per row");
  require(same_shape(ids, logits), "ids and logits must have the same shape");
  require_keys(keys, z.shape(0));
  for (size_t i = 0; i < ids.size(); ++i)
    require(ids.data()[i] >= 0 && ids.data()[i] < vocab, "ids must be tokens of z");
  const nb::gil_scoped_release release;
  kernels().draw(z.data(), rows, vocab, lse.data(), ids.data(), logits.data(),
                 static_cast<int64_t>(ids.shape(1)), to_keys(keys), token.data(), log_prob.data(),
                 raw_log_prob.data(), kept_mass.data(), threads);
}

void uniforms(Keys keys, uint32_t stream, Array<const int64_t, 2> ids, Array<double, 2> out) {
  require_keys(keys, ids.shape(0));
  require(same_shape(ids, out), "ids and out must have the same shape");
  const nb::gil_scoped_release release;
  const size_t width = ids.shape(1);
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t* key = keys.data() + i / width * 2;
    out.data()[i] =
        to_uniform(philox({static_cast<uint64_t>(key[0]), static_cast<uint64_t>(key[1])}, stream,
                          static_cast<uint64_t>(ids.data()[i])));
  }
}

}  // namespace

void bind_rows(nb::module_& m) {
  using nb::arg;
  m.def("row_max", &row_max, tensor("z"), tensor("max"), tensor("n"), arg("threads"));
  m.def("row_softmax_sums", &row_softmax_sums, tensor("z"), tensor("betas"), tensor("max"),
        tensor("out"), arg("threads"));
  m.def("row_moments", &row_moments, tensor("z"), tensor("max"), tensor("shift"), tensor("square"),
        arg("threads"));
  m.def("row_kth_largest", &row_kth_largest, tensor("z"), tensor("k"), tensor("value"),
        arg("threads"));
  m.def("row_mass_radius", &row_mass_radius, tensor("z"), tensor("beta"), tensor("max"),
        tensor("centre"), tensor("width"), tensor("limit"), tensor("radius"), arg("threads"));
  m.def("row_range", &row_range, tensor("z"), tensor("lo"), tensor("hi"), tensor("counts"),
        tensor("ids"), tensor("values"), arg("threads"));
  m.def("row_nucleus", &row_nucleus, tensor("z"), tensor("beta"), tensor("max"), tensor("centre"),
        tensor("limit"), arg("least"), tensor("counts"), tensor("ids"), tensor("values"),
        arg("threads"));
  m.def("row_draw", &row_draw, tensor("z"), tensor("lse"), tensor("ids"), tensor("logits"),
        tensor("keys"), tensor("token"), tensor("log_prob"), tensor("raw_log_prob"),
        tensor("kept_mass"), arg("threads"));
  m.def("row_gumbel_argmax", &row_gumbel_argmax, tensor("z"), tensor("beta"), tensor("keys"),
        tensor("winners"), arg("threads"));
  m.def("uniforms", &uniforms, tensor("keys"), arg("stream"), tensor("ids"), tensor("out"));
}

}  // namespace lmhead
