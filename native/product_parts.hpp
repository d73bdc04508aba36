// What the products of all instruction sets share: stored matrices, memory, parts of the result.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <new>

namespace lmhead::parts {

// The rows of a stored matrix that are used: all, or those of `ids`.
struct Stored {
  const float* data;
  int64_t stride;
  const int64_t* ids;
  const float* row(int64_t i) const { return data + (ids ? ids[i] : i) * stride; }
};

// [i · step, (i + 1) · step) of `size`, with steps of a multiple of `unit`.
struct Split {
  int64_t step, parts;
};

inline Split split(int64_t size, int64_t parts, int64_t unit) {
  const int64_t units = (size + unit - 1) / unit;
  const int64_t step = (units + parts - 1) / parts * unit;
  return {step, (size + step - 1) / step};
}

// Floats on whole cache lines, not initialized.
class Buffer {
 public:
  explicit Buffer(int64_t size)
      : floats_(static_cast<float*>(
            ::operator new(static_cast<size_t>(size) * sizeof(float), std::align_val_t{64}))) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { ::operator delete(floats_, std::align_val_t{64}); }
  float* get() const { return floats_; }

 private:
  float* floats_;
};

struct Part {
  int64_t row, rows, column, columns;
};

// The parts of a result (m, n) that threads compute. Every thread copies its rows of a and its
// columns of b: as few of both together as possible.
struct Grid {
  Split down, across;

  Grid(int64_t m, int64_t n, int threads, int64_t row_unit, int64_t column_unit)
      : down(split(m, threads, row_unit)), across(split(n, 1, column_unit)) {
    for (int64_t parts = 1; parts <= threads; ++parts) {
      const Split rows = split(m, parts, row_unit);
      const Split columns = split(n, threads / parts, column_unit);
      const bool busier = rows.parts * columns.parts > down.parts * across.parts;
      const bool as_busy = rows.parts * columns.parts == down.parts * across.parts;
      if (busier || (as_busy && rows.step + columns.step < down.step + across.step))
        down = rows, across = columns;
    }
  }

  int64_t size() const { return down.parts * across.parts; }
  Part part(int64_t task, int64_t m, int64_t n) const {
    const int64_t row = task / across.parts * down.step;
    const int64_t column = task % across.parts * across.step;
    return {row, std::min(down.step, m - row), column, std::min(across.step, n - column)};
  }
};

// Bytes of the second-level cache of one core.
inline int64_t second_level_cache() {
  static const int64_t size = [] {
#if defined(_SC_LEVEL2_CACHE_SIZE)
    return std::max<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), 1 << 18);
#else
    return int64_t{1} << 19;
#endif
  }();
  return size;
}

}  // namespace lmhead::parts
