// Shared by the files that bind kernels to Python: views of tensors, and checks of arguments.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace lmhead {

namespace nb = nanobind;

// The kernels chosen from Python; defined in bind.cpp.
const Kernels* chosen_kernels();

// A view of a tensor, never a copy, that has memory of its own: see the caster below.
template <class... Args>
class Checked : public nb::ndarray<Args...> {
 public:
  using Base = nb::ndarray<Args...>;
  Checked() = default;
  explicit Checked(Base&& base) : Base(std::move(base)) {}

  // Freed storage and tensors that only claim a shape have no memory.
  bool has_memory() const {
    if (Base::size() == 0) return true;
    const auto at = reinterpret_cast<uintptr_t>(Base::data());
    return at != 0 && at % Base::itemsize() == 0;
  }
};

template <class T, int N>
using Array = Checked<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using Maybe = std::optional<Array<T, N>>;

// float32, bfloat16 or float16.
template <int N>
using FloatArray = Checked<nb::ro, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <int N>
using MaybeFloats = std::optional<FloatArray<N>>;

template <class A>
Floats to_floats(const A& array, const char* what) {
  const nb::dlpack::dtype type = array.dtype();
  if (type == nb::dtype<float>()) return {array.data(), FloatType::f32};
  if (type.bits == 16 && type.lanes == 1) {
    if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat))
      return {array.data(), FloatType::bf16};
    if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float))
      return {array.data(), FloatType::f16};
  }
  throw nb::type_error(what);
}

// Not converted: a copy would be written to in place of the tensor.
inline auto tensor(const char* name) { return nb::arg(name).noconvert(); }
inline auto maybe(const char* name) { return nb::arg(name).noconvert().none(); }

template <class A>
auto pointer(const std::optional<A>& array) -> decltype(array->data()) {
  return array ? array->data() : nullptr;
}

template <class A>
int64_t length(const A& array, size_t dim = 0) {
  return static_cast<int64_t>(array.shape(dim));
}

template <class A>
bool has_shape(const A& array, size_t rows, size_t columns) {
  return array.shape(0) == rows && array.shape(1) == columns;
}

template <class A, class B>
bool same_shape(const A& a, const B& b) {
  return has_shape(a, b.shape(0), b.shape(1));
}

inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

template <class A>
void require_size(const std::optional<A>& array, size_t size, const char* what) {
  require(!array || array->size() == size, what);
}

inline void require_threads(int threads) { require(threads >= 1, "threads must be at least 1"); }

// Requires every number to be in [0, limit).
inline void require_below(const Array<const int64_t, 1>& numbers, size_t limit, const char* what) {
  for (size_t i = 0; i < numbers.size(); ++i)
    require(numbers.data()[i] >= 0 && numbers.data()[i] < static_cast<int64_t>(limit), what);
}

// Square factors of these sizes, one after the other, whose sizes multiply to `width`.
inline void require_factors(const std::vector<int64_t>& sizes, size_t entries, size_t width) {
  size_t found = 0, together = 1;
  for (int64_t n : sizes) {
    require(n > 0 && static_cast<size_t>(n) <= width, "sizes must be from 1 to the width");
    found += static_cast<size_t>(n) * static_cast<size_t>(n);
    together *= static_cast<size_t>(n);
    require(found <= entries && together <= width, "factors must multiply to the width");
  }
  require(found == entries && together == width, "factors must multiply to the width");
}

}  // namespace lmhead

// Rejects an argument without memory, as one of another type is rejected.
template <class... Args>
struct nanobind::detail::type_caster<lmhead::Checked<Args...>> {
  using View = lmhead::Checked<Args...>;
  NB_TYPE_CASTER(View, make_caster<typename View::Base>::Name)

  bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) noexcept {
    make_caster<typename View::Base> caster;
    if (!caster.from_python(source, flags, cleanup)) return false;
    value = View(std::move(caster.value));
    return value.has_memory();
  }
};
