#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.hpp"

namespace lmhead {

#if defined(__x86_64__)
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx2;
#endif
extern const Kernels kernels_baseline;

namespace {

// Best first.
std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> list;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    list.push_back(&kernels_avx512);
  if (avx2) list.push_back(&kernels_avx2);
#endif
  list.push_back(&kernels_baseline);
  return list;
}

}  // namespace

const Kernels* best_kernels() {
  static const Kernels* best = usable().front();
  return best;
}

const Kernels* kernels_named(const char* name) {
  for (const Kernels* k : usable())
    if (std::strcmp(k->name, name) == 0) return k;
  return nullptr;
}

std::vector<const char*> kernel_names() {
  std::vector<const char*> names;
  for (const Kernels* k : usable()) names.push_back(k->name);
  return names;
}

// Positive floats are ordered as their bits are. A histogram of the mass over the leading 16 bits
// finds the bin in which the threshold lies; the same over the trailing 16 bits of that bin's
// entries finds the threshold itself. Two passes, no sort.
float tail_threshold(const float* x, int64_t n, double mass) {
  float largest = 0.0f;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, x[i]);
  uint32_t prefix = 0;
  for (int shift : {16, 0}) {
    std::vector<double> bins(1 << 16, 0.0);
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits;
      std::memcpy(&bits, x + i, 4);
      if (shift == 16 || (bits >> 16) == prefix) bins[(bits >> shift) & 0xffff] += x[i];
    }
    uint32_t bin = 0;
    while (bin < 0xffff && bins[bin] <= mass) mass -= bins[bin++];
    prefix = shift == 16 ? bin : (prefix << 16) | bin;
  }
  float threshold;
  std::memcpy(&threshold, &prefix, 4);
  // Past the last bin, where all of x fits into the mass, the bits are those of a NaN.
  return threshold <= largest ? threshold : largest;
}

}  // namespace lmhead
