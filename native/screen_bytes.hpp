// Products of the copy's bytes with the two bytes of each entry of a hidden state,
// y = 256 high + low, high signed and low not, by instructions that add up four products of 8 bits.
// For screen.cpp alone, compiled with it.
//
// All sums are modulo 2^32, as these instructions add: a result that fits into 32 bits is exact.
#pragma once

#if defined(LMHEAD_LANES)  // the kernel tests: vectors of 64 bytes on any machine
#define LMHEAD_BYTES
#elif defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#include <immintrin.h>
#define LMHEAD_BYTES
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define LMHEAD_BYTES
#endif

#if defined(LMHEAD_BYTES)

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace LMHEAD_ISA {
namespace {

// One instruction set. Instructions multiply signed bytes `w` or unsigned ones `u`; `u` holds the
// same numbers plus an offset (0 for nibbles, which have no sign).
//   add_high: sums += (w or u) · high        add_low: sums += (w or u) · low
// kOffsetHigh: whether it is `high` that is multiplied with `u`, else `low` is.
// kTokens, kStates: a tile whose sums fit into the registers.
#if defined(LMHEAD_LANES)

struct Dot {
  struct Bytes {
    uint8_t at[64];
  };
  struct Sums {
    uint32_t at[16];
  };
  static constexpr bool kOffsetHigh = true;
  static constexpr int kTokens = 4, kStates = 2;

  static Bytes load(const void* p, size_t bytes = 64) {
    Bytes v{};
    std::memcpy(v.at, p, bytes);
    return v;
  }
  static Bytes load_half(const void* p) { return load(p, 32); }
  static Bytes flip(Bytes v) {
    for (uint8_t& x : v.at) x ^= 0x80;
    return v;
  }
  template <int Shift>
  static Bytes nibbles(Bytes v) {
    for (uint8_t& x : v.at) x = x >> Shift & 15;
    return v;
  }
  static void add_products(Sums& sums, const Bytes& u, const Bytes& w) {
    for (int i = 0; i < 64; ++i)
      sums.at[i / 4] += static_cast<uint32_t>(u.at[i] * static_cast<int8_t>(w.at[i]));
  }
  static void add_high(Sums& sums, const Bytes&, const Bytes& u, const Bytes& high) {
    add_products(sums, u, high);
  }
  static void add_low(Sums& sums, const Bytes& w, const Bytes&, const Bytes& low) {
    add_products(sums, low, w);
  }
  static Sums joined(const Sums& high, const Sums& low) {
    Sums sums;
    for (int i = 0; i < 16; ++i) sums.at[i] = (high.at[i] << 8) + low.at[i];
    return sums;
  }
  static Sums plus(Sums a, const Sums& b) {
    for (int i = 0; i < 16; ++i) a.at[i] += b.at[i];
    return a;
  }
  static uint32_t total(const Sums& sums) {
    uint32_t sum = 0;
    for (uint32_t x : sums.at) sum += x;
    return sum;
  }
  static void totals(const Sums (&sums)[4], uint32_t* out) {
    for (int i = 0; i < 4; ++i) out[i] = total(sums[i]);
  }
};

#elif defined(__AVX512VNNI__) && !defined(LMHEAD_NARROW)

struct Dot {
  using Bytes = __m512i;
  using Sums = __m512i;
  static constexpr bool kOffsetHigh = true;
  static constexpr int kTokens = 4, kStates = 2;

  static Bytes load(const void* p) { return _mm512_loadu_si512(p); }
  static Bytes load_half(const void* p) { return _mm512_maskz_loadu_epi64(15, p); }
  static Bytes flip(Bytes v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }
  template <int Shift>
  static Bytes nibbles(Bytes v) {
    return _mm512_and_si512(Shift ? _mm512_srli_epi16(v, Shift) : v, _mm512_set1_epi8(15));
  }
  // GCC 12 moves all sums to other registers and back in every step if it sees the intrinsic.
  static void add_products(Sums& sums, Bytes u, Bytes w) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(u), "v"(w));
  }
  static void add_high(Sums& sums, Bytes, Bytes u, Bytes high) { add_products(sums, u, high); }
  static void add_low(Sums& sums, Bytes w, Bytes, Bytes low) { add_products(sums, low, w); }
  static Sums joined(Sums high, Sums low) {
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  }
  static Sums plus(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
  static __m128i folded(Sums v) {
    const __m256i half =
        _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  }
  static uint32_t total(Sums v) {
    __m128i s = folded(v);
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(s));
  }
  static void totals(const Sums (&v)[4], uint32_t* out) {
    const Sums a =
        _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const Sums b =
        _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    const Sums all = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), folded(all));
  }
};

#elif defined(__AVXVNNI__) || defined(__AVX512VNNI__)

struct Dot {
  using Bytes = __m256i;
  using Sums = __m256i;
  static constexpr bool kOffsetHigh = true;
  static constexpr int kTokens = 2, kStates = 2;

  static Bytes load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static Bytes load_half(const void* p) { return load(p); }  // never needed: 32 bytes are a whole
  static Bytes flip(Bytes v) { return _mm256_xor_si256(v, _mm256_set1_epi8(-128)); }
  template <int Shift>
  static Bytes nibbles(Bytes v) {
    return _mm256_and_si256(Shift ? _mm256_srli_epi16(v, Shift) : v, _mm256_set1_epi8(15));
  }
  static void add_products(Sums& sums, Bytes u, Bytes w) {
#if defined(__AVXVNNI__)
    sums = _mm256_dpbusd_avx_epi32(sums, u, w);
#else  // the kernel tests, on machines that have the wider ones alone
    sums = _mm256_dpbusd_epi32(sums, u, w);
#endif
  }
  static void add_high(Sums& sums, Bytes, Bytes u, Bytes high) { add_products(sums, u, high); }
  static void add_low(Sums& sums, Bytes w, Bytes, Bytes low) { add_products(sums, low, w); }
  static Sums joined(Sums high, Sums low) {
    return _mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
  }
  static Sums plus(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
  static uint32_t total(Sums v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(s));
  }
  static void totals(const Sums (&v)[4], uint32_t* out) {
    for (int i = 0; i < 4; ++i) out[i] = total(v[i]);
  }
};

#else

struct Dot {
  using Bytes = uint8x16_t;
  using Sums = uint32x4_t;
  static constexpr bool kOffsetHigh = false;
  static constexpr int kTokens = 4, kStates = 2;

  static Bytes load(const void* p) { return vld1q_u8(static_cast<const uint8_t*>(p)); }
  static Bytes load_half(const void* p) { return load(p); }  // never needed: 32 bytes are two
  static Bytes flip(Bytes v) { return veorq_u8(v, vdupq_n_u8(0x80)); }
  template <int Shift>
  static Bytes nibbles(Bytes v) {
    if constexpr (Shift == 4) return vshrq_n_u8(v, 4);
    return vandq_u8(v, vdupq_n_u8(15));
  }
  static void add_high(Sums& sums, Bytes w, Bytes, Bytes high) {
    sums = vreinterpretq_u32_s32(
        vdotq_s32(vreinterpretq_s32_u32(sums), vreinterpretq_s8_u8(w), vreinterpretq_s8_u8(high)));
  }
  static void add_low(Sums& sums, Bytes, Bytes u, Bytes low) { sums = vdotq_u32(sums, u, low); }
  static Sums joined(Sums high, Sums low) { return vaddq_u32(vshlq_n_u32(high, 8), low); }
  static Sums plus(Sums a, Sums b) { return vaddq_u32(a, b); }
  static uint32_t total(Sums v) { return vaddvq_u32(v); }
  static void totals(const Sums (&v)[4], uint32_t* out) {
    vst1q_u32(out, vpaddq_u32(vpaddq_u32(v[0], v[1]), vpaddq_u32(v[2], v[3])));
  }
};

#endif

constexpr int64_t kVector = sizeof(Dot::Bytes);

// The kinds of rows. A byte of the copy holds kParts entries; part<P> gives those of a vector as
// signed bytes and, plus kOffset, as unsigned ones. entry(i, p): which entry of the row that is.
struct Whole {
  using Entry = int8_t;
  static constexpr int kParts = 1, kOffset = 128;
  template <int P>
  static void part(Dot::Bytes v, Dot::Bytes& w, Dot::Bytes& u) {
    w = v, u = Dot::flip(v);
  }
  static int64_t entry(int64_t i, int) { return i; }
};

struct Nibbles {
  using Entry = uint8_t;
  static constexpr int kParts = 2, kOffset = 0;
  template <int P>
  static void part(Dot::Bytes v, Dot::Bytes& w, Dot::Bytes& u) {
    w = u = Dot::nibbles<4 * P>(v);
  }
  static int64_t entry(int64_t i, int p) { return i / 32 * 64 + i % 2 * 32 + p * 16 + i % 32 / 2; }
};

// Hidden states as bytes in the order of the copy's: for each state and part the high bytes of a
// row, then the low ones, with zeros up to whole vectors.
template <class Kind>
class Planes {
 public:
  static constexpr int64_t kPerEntry = Kind::kParts;

  Planes(const int16_t* y, int64_t rows, int64_t width)
      : row_bytes(width / kPerEntry),
        padded_((row_bytes + kVector - 1) / kVector * kVector),
        bytes_(static_cast<size_t>(rows * Kind::kParts * 2 * padded_)),
        offsets_(static_cast<size_t>(rows)) {
    uint8_t any_low = 0;
    for (int64_t b = 0; b < rows; ++b) {
      uint32_t high_sum = 0, low_sum = 0;
      for (int p = 0; p < Kind::kParts; ++p) {
        uint8_t* to = bytes_.data() + (b * Kind::kParts + p) * 2 * padded_;
        for (int64_t i = 0; i < row_bytes; ++i) {
          const auto bits = static_cast<uint16_t>(y[b * width + Kind::entry(i, p)]);
          to[i] = static_cast<uint8_t>(bits >> 8), to[padded_ + i] = static_cast<uint8_t>(bits);
          any_low |= to[padded_ + i];
          high_sum += static_cast<uint32_t>(static_cast<int8_t>(to[i])), low_sum += to[padded_ + i];
        }
      }
      offsets_[static_cast<size_t>(b)] =
          Kind::kOffset * (Dot::kOffsetHigh ? high_sum << 8 : low_sum);
    }
    high_only = any_low == 0;
  }

  Dot::Bytes high(int64_t b, int p, int64_t i) const {
    return Dot::load(bytes_.data() + (b * Kind::kParts + p) * 2 * padded_ + i);
  }
  Dot::Bytes low(int64_t b, int p, int64_t i) const { return high(b, p, padded_ + i); }
  const uint8_t* bytes(int64_t b) const { return bytes_.data() + b * Kind::kParts * 2 * padded_; }
  // The excess that the offset of the unsigned bytes causes.
  int32_t offset32(int64_t b) const { return static_cast<int32_t>(offset(b)); }
  uint32_t offset(int64_t b) const { return offsets_[static_cast<size_t>(b)]; }

  int64_t row_bytes;
  bool high_only;  // whether all low bytes are 0: states of eight bits

 private:
  int64_t padded_;
  std::vector<uint8_t> bytes_;
  std::vector<uint32_t> offsets_;
};

// sums += one vector of R rows from byte i on, times T states from `b` on; part P of each byte.
template <class Kind, bool Low, int P, int R, int T>
void add_part(const Dot::Bytes (&rows)[R], const Planes<Kind>& y, int64_t b, int64_t i,
              Dot::Sums (&high)[R][T], Dot::Sums (&low)[R][T]) {
  Dot::Bytes w[R], u[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) Kind::template part<P>(rows[r], w[r], u[r]);
#pragma GCC unroll 2
  for (int t = 0; t < T; ++t) {
    const Dot::Bytes y_high = y.high(b + t, P, i);
    const Dot::Bytes y_low = Low ? y.low(b + t, P, i) : y_high;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      Dot::add_high(high[r][t], w[r], u[r], y_high);
      if constexpr (Low) Dot::add_low(low[r][t], w[r], u[r], y_low);
    }
  }
}

// out[t][r] = Σ w · y for R rows of the copy, `stride` bytes apart, and T states from `b` on.
// `ahead`: how far ahead of its use memory is prefetched, in bytes; 0 for not at all.
template <class Kind, bool Low, int R, int T>
void dot_planes(const typename Kind::Entry* w, int64_t stride, const Planes<Kind>& y, int64_t b,
                int64_t ahead, int32_t (*out)[R]) {
  Dot::Sums high[R][T] = {}, low[R][T] = {};
  // With few sums, separate ones for the second part of a byte: shorter dependency chains.
  constexpr bool kMore = R * T <= 2 && Kind::kParts == 2;
  Dot::Sums more_high[R][T] = {}, more_low[R][T] = {};
  for (int64_t i = 0; i < y.row_bytes; i += kVector) {
    // Rows of nibbles are multiples of 32 bytes.
    const bool half = Kind::kParts == 2 && kVector > 32 && i + kVector > y.row_bytes;
    Dot::Bytes rows[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const auto* at = w + r * stride + i;
      if (T == 1 && ahead > 0 && i % 64 == 0) __builtin_prefetch(at + ahead, 0, 0);
      rows[r] = half ? Dot::load_half(at) : Dot::load(at);
    }
    add_part<Kind, Low, 0>(rows, y, b, i, high, low);
    if constexpr (kMore)
      add_part<Kind, Low, 1>(rows, y, b, i, more_high, more_low);
    else if constexpr (Kind::kParts == 2)
      add_part<Kind, Low, 1>(rows, y, b, i, high, low);
  }
#pragma GCC unroll 2
  for (int t = 0; t < T; ++t) {
    Dot::Sums all[R];
    uint32_t total[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      all[r] = Dot::joined(high[r][t], low[r][t]);
      if constexpr (kMore) all[r] = Dot::plus(all[r], Dot::joined(more_high[r][t], more_low[r][t]));
      if constexpr (R != 4) total[r] = Dot::total(all[r]);
    }
    if constexpr (R == 4) Dot::totals(all, total);
    const uint32_t offset = y.offset(b + t);
    if constexpr (R == 4) {
      uint32_t four __attribute__((vector_size(16)));
      std::memcpy(&four, total, sizeof four);
      four -= offset;
      std::memcpy(out[t], &four, sizeof four);
    } else {
      for (int r = 0; r < R; ++r) out[t][r] = static_cast<int32_t>(total[r] - offset);
    }
  }
}

template <class Kind, int R, int T>
void dot(const typename Kind::Entry* w, int64_t stride, const Planes<Kind>& y, int64_t b,
         int64_t ahead, int32_t (*out)[R]) {
  const auto run = y.high_only ? dot_planes<Kind, false, R, T> : dot_planes<Kind, true, R, T>;
  run(w, stride, y, b, ahead, out);
}

}  // namespace
}  // namespace LMHEAD_ISA

#endif
