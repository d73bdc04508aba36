// Shared by the kernel tests: buffers that detect stray accesses, random numbers, a tally.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

// Where a buffer lies. Tight: an allocation of exactly its size, so that AddressSanitizer sees the
// first byte read or written beyond it. Padded: amid NaNs (or their bits) that must not leak into
// a result and must still be there afterwards.
enum class Place { tight, padded };

inline const char* name(Place place) { return place == Place::tight ? "tight" : "padded"; }

template <class T>
class Buffer {
 public:
  Buffer(size_t size, Place place)
      : size_(size), guard_(place == Place::padded ? 67 : 0), all_(new T[size + 2 * guard_]) {
    std::memset(static_cast<void*>(all_.get()), 0xff, (size_ + 2 * guard_) * sizeof(T));
  }

  template <class Make>
  Buffer(size_t size, Place place, const Make& make) : Buffer(size, place) {
    for (size_t i = 0; i < size; ++i) (*this)[i] = make(i);
  }

  T* data() const { return all_.get() + guard_; }
  size_t size() const { return size_; }
  T& operator[](size_t i) const { return data()[i]; }

  std::vector<T> copy() const { return std::vector<T>(data(), data() + size_); }

  void fill(const std::vector<T>& values) const {
    for (size_t i = 0; i < size_; ++i) (*this)[i] = values[i];
  }

  // Bit by bit, so that a NaN equals itself.
  bool same(const std::vector<T>& other) const {
    return other.size() == size_ &&
           (size_ == 0 || std::memcmp(data(), other.data(), size_ * sizeof(T)) == 0);
  }

  bool intact() const {
    const auto* bytes = reinterpret_cast<const unsigned char*>(all_.get());
    const size_t guard = guard_ * sizeof(T), inside = size_ * sizeof(T);
    for (size_t i = 0; i < guard; ++i)
      if (bytes[i] != 0xff || bytes[guard + inside + i] != 0xff) return false;
    return true;
  }

 private:
  size_t size_, guard_;
  std::unique_ptr<T[]> all_;
};

// The same numbers everywhere: the standard's distributions differ between libraries.
class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  double uniform(double low, double high) { return low + (high - low) * engine_() / 4294967296.0; }
  // About normal: peaked rows and long tails come from its scale.
  float normal(double scale) {
    const double sum = uniform(-1.0, 1.0) + uniform(-1.0, 1.0) + uniform(-1.0, 1.0);
    return static_cast<float>(scale * sum);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(uniform(0.0, static_cast<double>(n))); }

 private:
  std::mt19937 engine_;
};

// Within a bound; NaN only where NaN is due, infinities of the same sign.
inline bool near(double got, double want, double bound) {
  if (std::isnan(want) || std::isinf(want)) return std::isnan(want) ? std::isnan(got) : got == want;
  return std::abs(got - want) <= bound;
}

// Counts cases, and says what went wrong in the first ones that fail.
class Tally {
 public:
  void begin(const std::string& name) {
    finish();
    name_ = name;
    open_ = true;
  }

  void expect(bool holds, const char* what) {
    if (!holds && wrong_.empty()) wrong_ = what;
  }

  void expect(bool holds, const std::string& what) { expect(holds, what.c_str()); }

  void expect_near(double got, double want, double bound, const char* what, int64_t at) {
    if (near(got, want, bound)) return;
    char text[200];
    std::snprintf(text, sizeof text, "%s[%lld] is %.9g, should be %.9g (bound %.3g)", what,
                  static_cast<long long>(at), got, want, bound);
    expect(false, text);
  }

  // Print the totals; whether all is well.
  bool end() {
    finish();
    std::printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ == 0;
  }

 private:
  void finish() {
    if (!open_) return;
    ++(wrong_.empty() ? passed_ : failed_);
    if (!wrong_.empty() && failed_ <= 40)
      std::printf("FAILED %s: %s\n", name_.c_str(), wrong_.c_str());
    wrong_.clear();
    open_ = false;
  }

  std::string name_, wrong_;
  bool open_ = false;
  int passed_ = 0, failed_ = 0;
};
