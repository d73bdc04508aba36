// Stored floats for the tests: their values, written out, and random ones.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "floats.hpp"
#include "tally.hpp"

namespace stored {

using lmhead::Bf16;
using lmhead::F16;

inline double value(float x) { return x; }

inline double value(Bf16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &wide, 4);
  return y;
}

inline double value(F16 x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const double sign = x.bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return fraction ? NAN : sign * HUGE_VAL;
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

template <class T>
T rounded(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  if constexpr (std::is_same_v<T, Bf16>) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return {static_cast<uint16_t>(bits >> 16)};
  }
  if constexpr (std::is_same_v<T, F16>) {
    const auto sign = static_cast<uint16_t>(std::signbit(x) ? 0x8000 : 0);
    if (std::isinf(x)) return {static_cast<uint16_t>(sign | 0x7c00)};
    const int exponent = x == 0.0f ? -14 : std::max(-14, std::min(15, std::ilogb(x)));
    const auto steps = static_cast<int>(std::min(2047.0f, std::ldexp(std::abs(x), 10 - exponent)));
    return {static_cast<uint16_t>(sign | (steps < 1024 ? steps : ((exponent + 14) << 10) + steps))};
  }
}

template <class T>
lmhead::FloatType type_of() {
  if constexpr (std::is_same_v<T, float>) return lmhead::FloatType::f32;
  return std::is_same_v<T, Bf16> ? lmhead::FloatType::bf16 : lmhead::FloatType::f16;
}

template <class T>
lmhead::Floats floats(const Buffer<T>& buffer) {
  return {buffer.data(), type_of<T>()};
}

template <class T>
const char* type_name() {
  if constexpr (std::is_same_v<T, float>) return "float32";
  return std::is_same_v<T, Bf16> ? "bfloat16" : "float16";
}

}  // namespace stored
