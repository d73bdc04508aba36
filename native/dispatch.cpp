#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.hpp"
#include "screen.hpp"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace lmhead {

#if defined(__x86_64__)
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx2;
#endif
#if defined(LMHEAD_AVX512_VNNI)
extern const ScreenKernels screen_avx512_vnni;
#endif
#if defined(LMHEAD_AVX_VNNI)
extern const ScreenKernels screen_avx_vnni;
#endif
#if defined(LMHEAD_NEON_DOT)
extern const ScreenKernels screen_neon_dot;
#endif
extern const Kernels kernels_baseline;
#if defined(LMHEAD_AMX)
void product_amx(const float* a, bool transposed, const float* b, float* out, int64_t m, int64_t n,
                 int64_t inner, bool add, const int64_t* ids, int threads);
bool has_amx();
#endif

namespace {

// Kernels of one instruction set, with the screen's of another that adds to it.
template <const ScreenKernels* screen>
const Kernels* extended(const Kernels& kernels, const char* name) {
  static const Kernels with = [&] {
    Kernels copy = kernels;
    copy.name = name, copy.screen = screen;
    return copy;
  }();
  return &with;
}

#if defined(LMHEAD_AMX)
// Kernels with the tile unit's product.
const Kernels* with_tiles(const Kernels& kernels) {
  static const Kernels with = [&] {
    Kernels copy = kernels;
    copy.name = "amx", copy.product = product_amx;
    return copy;
  }();
  return &with;
}
#endif

// Best first.
std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> list;
#if defined(LMHEAD_NEON_DOT)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP)
    list.push_back(extended<&screen_neon_dot>(kernels_baseline, "neon_dot"));
#endif
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
#if defined(LMHEAD_AVX512_VNNI)
  if (avx512 && __builtin_cpu_supports("avx512vnni")) {
    const Kernels* vnni = extended<&screen_avx512_vnni>(kernels_avx512, "avx512_vnni");
#if defined(LMHEAD_AMX)
    if (has_amx()) list.push_back(with_tiles(*vnni));
#endif
    list.push_back(vnni);
  }
#endif
  if (avx512) list.push_back(&kernels_avx512);
#if defined(LMHEAD_AVX_VNNI)
  if (avx2 && __builtin_cpu_supports("avxvnni"))
    list.push_back(extended<&screen_avx_vnni>(kernels_avx2, "avx_vnni"));
#endif
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

bool fast_product() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(LMHEAD_AMX)
  if (best_kernels()->product == product_amx) return true;
#endif
  return __builtin_cpu_is("amd") && best_kernels() != &kernels_baseline;
#else
  return false;
#endif
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
