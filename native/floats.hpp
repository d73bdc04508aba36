// Stored floats: float32, bfloat16 and float16. All of them convert to float32 without rounding.
#pragma once

#include <cstdint>

namespace lmhead {

struct Bf16 {
  uint16_t bits;
};

struct F16 {
  uint16_t bits;
};

enum class FloatType { f32, bf16, f16 };

// A contiguous array of one of them.
struct Floats {
  const void* data;
  FloatType type;
};

// visit(pointer) with the pointer's own type.
template <class Visit>
decltype(auto) with_type(const Floats& floats, const Visit& visit) {
  switch (floats.type) {
    case FloatType::bf16:
      return visit(static_cast<const Bf16*>(floats.data));
    case FloatType::f16:
      return visit(static_cast<const F16*>(floats.data));
    default:
      return visit(static_cast<const float*>(floats.data));
  }
}

// visit(first, second) for two arrays of one type, or a float32 first one.
template <class Visit>
decltype(auto) with_types(const Floats& first, const Floats& second, const Visit& visit) {
  return with_type(second, [&](auto* y) {
    using Own = decltype(y);
    if (first.type == FloatType::f32) return visit(static_cast<const float*>(first.data), y);
    return visit(static_cast<Own>(first.data), y);
  });
}

}  // namespace lmhead
