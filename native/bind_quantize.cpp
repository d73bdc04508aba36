// Python bindings of quantize.hpp: the quantization of a weight. See bind.cpp.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdio>
#include <string>
#include <tuple>
#include <vector>

#include "bind.hpp"
#include "quantize.hpp"

namespace lmhead {
namespace {

// Quantizes rows (n, size) into codes (n, width), lead (n, leading) and numbers (5, n): scales,
// lead_scales, e, e_high and n. constants: kappa, share, lost, up and tiny. Returns the largest
// norms of codes and of lead; NaN if the weight is not finite.
std::tuple<double, double> quantize(FloatArray<2> weight, Array<const double, 1> mean,
                                    Array<const double, 2> basis, Array<const int8_t, 1> signs,
                                    Array<const double, 1> factors,
                                    const std::vector<int64_t>& sizes, double mean_norm,
                                    const std::tuple<double, double, double, double, double>& c,
                                    Array<int8_t, 2> codes, Array<int16_t, 2> lead,
                                    Array<float, 2> numbers, int threads) {
  const size_t rows = weight.shape(0), size = mean.size(), width = signs.size();
  require_threads(threads);
  require(weight.shape(1) == size && basis.shape(1) == size && size <= width,
          "weight, basis and mean must have the same width");
  require(basis.shape(0) % 8 == 0, "leading must be a multiple of 8");
  require(has_shape(codes, rows, width) && has_shape(lead, rows, basis.shape(0)) &&
              has_shape(numbers, 5, rows),
          "codes, lead and numbers must have room for all rows");
  require_factors(sizes, factors.size(), width);
  QuantizeRows given{};
  given.weight = to_floats(weight, "weight must be float32, bfloat16 or float16");
  given.rows = length(weight), given.size = static_cast<int64_t>(size);
  given.width = static_cast<int64_t>(width), given.leading = length(basis);
  given.mean = mean.data(), given.basis = basis.data(), given.signs = signs.data();
  given.factors = factors.data(), given.sizes = sizes.data();
  given.n_factors = static_cast<int64_t>(sizes.size()), given.mean_norm = mean_norm;
  double tiny = 0.0;
  std::tie(given.kappa, given.share, given.lost, given.up, tiny) = c;
  given.tiny = static_cast<float>(tiny);
  float* to = numbers.data();
  const QuantizedRows out{codes.data(),  lead.data(),   to,           to + rows,
                          to + 2 * rows, to + 3 * rows, to + 4 * rows};
  QuantizedNorms norms{};
  {
    const nb::gil_scoped_release release;
    norms = chosen_kernels()->quantize->quantize(given, out, threads);
  }
  const double nan = __builtin_nan("");
  return norms.finite ? std::tuple{norms.codes, norms.lead} : std::tuple{nan, nan};
}

void column_sums(FloatArray<2> weight, Array<double, 1> sums, int threads) {
  require_threads(threads);
  require(weight.shape(1) == sums.size(), "sums must have one entry per column");
  const Floats all = to_floats(weight, "weight must be float32, bfloat16 or float16");
  const nb::gil_scoped_release release;
  chosen_kernels()->quantize->column_sums(all, length(weight), length(sums), sums.data(), threads);
}

// 128 hexadecimal digits.
std::string hash(Array<const uint8_t, 1> bytes, int threads) {
  require_threads(threads);
  uint64_t lanes[kHashLanes];
  {
    const nb::gil_scoped_release release;
    hash_bytes(*chosen_kernels()->quantize, bytes.data(), bytes.size(), lanes, threads);
  }
  std::string text;
  char digits[17];
  for (uint64_t lane : lanes) {
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(lane));
    text += digits;
  }
  return text;
}

}  // namespace

void bind_quantize(nb::module_& m) {
  using nb::arg;
  m.def("quantize_rows", &quantize, tensor("weight"), tensor("mean"), tensor("basis"),
        tensor("signs"), tensor("factors"), arg("sizes"), arg("mean_norm"), arg("constants"),
        tensor("codes"), tensor("lead"), tensor("numbers"), arg("threads"));
  m.def("column_sums", &column_sums, tensor("weight"), tensor("sums"), arg("threads"));
  m.def("hash_bytes", &hash, tensor("bytes"), arg("threads"));
}

}  // namespace lmhead
