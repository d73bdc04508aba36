// Python bindings of screen.hpp: the kernels of certified decode. See bind.cpp.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cmath>
#include <tuple>
#include <type_traits>
#include <vector>

#include "bind.hpp"
#include "screen.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace lmhead {
namespace {

lmhead::ScreenStates to_states(const Array<const int16_t, 2>& main,
                               const Array<const int16_t, 2>& lead,
                               const Array<const double, 1>& scales,
                               const Array<const double, 1>& lead_scales) {
  const size_t rows = main.shape(0);
  require(main.shape(1) > 0 && main.shape(1) % 64 == 0, "width must be a multiple of 64");
  require(lead.shape(0) == rows && scales.size() == rows && lead_scales.size() == rows,
          "one entry per state");
  return {main.data(), lead.data(), scales.data(), lead_scales.data(), length(main)};
}

// Prepares states (rows, size) into main, lead and numbers (5, rows): scales, lead_scales, base, e
// and n. factors: all of them, one after the other; constants: room, lead_room, per_lead, small_e
// and small_n.
void prepare(Array<const double, 1> mean, Array<const double, 2> basis,
             Array<const int8_t, 1> signs, Array<const double, 1> factors,
             const std::vector<int64_t>& sizes,
             const std::tuple<double, double, double, double, double, double>& constants,
             Array<const double, 2> hidden, Array<int16_t, 2> main, Array<int16_t, 2> lead,
             Array<double, 2> numbers, int threads) {
  const size_t rows = hidden.shape(0), size = mean.size(), width = signs.size();
  require_threads(threads);
  require(hidden.shape(1) == size && basis.shape(1) == size && size <= width,
          "hidden, basis and mean must have the same width");
  require(has_shape(main, rows, width) && has_shape(lead, rows, basis.shape(0)) &&
              has_shape(numbers, 5, rows),
          "main, lead and numbers must have room for all states");
  lmhead::require_factors(sizes, factors.size(), width);
  const auto [unit, room, lead_room, per_lead, small_e, small_n] = constants;
  const lmhead::ScreenBasis given{mean.data(),
                                  basis.data(),
                                  signs.data(),
                                  factors.data(),
                                  sizes.data(),
                                  static_cast<int64_t>(sizes.size()),
                                  static_cast<int64_t>(size),
                                  static_cast<int64_t>(width),
                                  length(basis),
                                  unit,
                                  room,
                                  lead_room,
                                  per_lead,
                                  small_e,
                                  small_n};
  double* to = numbers.data();
  const lmhead::ScreenPrepared out{main.data(),   lead.data(),   to,           to + rows,
                                   to + 2 * rows, to + 3 * rows, to + 4 * rows};
  const nb::gil_scoped_release release;
  lmhead::chosen_kernels()->screen->prepare(given, hidden.data(), static_cast<int64_t>(rows), out,
                                            threads);
}

// See ScreenCopy, for copies of 8 and of 4 bits. What is best differs between machines.
std::atomic<int64_t> prefetch_whole{0}, prefetch_nibbles{0};
std::atomic<int64_t> streams_whole{2}, streams_nibbles{2};

void set_prefetch(int64_t whole, int64_t nibbles) {
  for (int64_t bytes : {whole, nibbles})
    require(bytes >= 0 && bytes <= 65536, "prefetch must be from 0 to 65536 bytes");
  prefetch_whole = whole, prefetch_nibbles = nibbles;
}

void set_streams(int64_t whole, int64_t nibbles) {
  for (int64_t count : {whole, nibbles})
    require(count == 1 || count == 2 || count == 4, "streams must be 1, 2 or 4");
  streams_whole = whole, streams_nibbles = nibbles;
}

// Asks the system for huge pages for new memory, before its first use: a pass over it then has
// fewer TLB misses. Does nothing where there are no huge pages.
void advise_huge_pages(Array<uint8_t, 1> bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  const auto from = reinterpret_cast<uintptr_t>(bytes.data());
  const uintptr_t first = (from + kPage - 1) / kPage * kPage,
                  last = (from + bytes.size()) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)bytes;
#endif
}

// Of `whole` (V, width) and `nibbles` (V, width / 2) exactly one is given. Returns the number of
// tokens read.
int64_t products(Maybe<const int8_t, 2> whole, Maybe<const uint8_t, 2> nibbles,
                 Array<const int16_t, 2> lead, Array<const float, 1> scales,
                 Array<const float, 1> lead_scales, Maybe<const double, 1> bias,
                 Array<const int16_t, 2> states, Array<const int16_t, 2> lead_states,
                 Array<const double, 1> state_scales, Array<const double, 1> lead_state_scales,
                 Maybe<const int32_t, 2> allowed, Array<float, 2> approx, Array<float, 2> block_max,
                 int threads) {
  auto given = to_states(states, lead_states, state_scales, lead_state_scales);
  const size_t vocab = scales.size(), width = states.shape(1), leading = lead.shape(1);
  require_threads(threads);
  require(whole.has_value() != nibbles.has_value(), "whole or nibbles, not both");
  require(whole ? has_shape(*whole, vocab, width) : has_shape(*nibbles, vocab, width / 2),
          "the copy must have one row per token, as wide as the states");
  require(has_shape(lead, vocab, leading) && leading % 16 == 0 && lead_states.shape(1) == leading,
          "leading must be a multiple of 16, the same for tokens and states");
  require(lead_scales.size() == vocab && (!bias || bias->size() == vocab), "one entry per token");
  require(!allowed || has_shape(*allowed, states.shape(0), (vocab + 31) / 32),
          "allowed: a bit per token");
  if (allowed) given.allowed = reinterpret_cast<const uint32_t*>(allowed->data());
  require(has_shape(approx, states.shape(0), vocab), "approx must be (states, tokens)");
  require(has_shape(block_max, states.shape(0),
                    static_cast<size_t>(lmhead::screen_blocks(static_cast<int64_t>(vocab)))),
          "block_max must be (states, blocks)");
  const lmhead::ScreenCopy copy{whole ? whole->data() : nullptr,
                                nibbles ? nibbles->data() : nullptr,
                                lead.data(),
                                scales.data(),
                                lead_scales.data(),
                                bias ? bias->data() : nullptr,
                                static_cast<int64_t>(vocab),
                                static_cast<int64_t>(width),
                                static_cast<int64_t>(leading),
                                whole ? prefetch_whole : prefetch_nibbles,
                                whole ? streams_whole : streams_nibbles};
  const nb::gil_scoped_release release;
  return lmhead::chosen_kernels()->screen->products(copy, given, approx.data(), block_max.data(),
                                                    threads);
}

// values (2, pairs): the refined approx, and how far it may be off.
void refine(Maybe<const uint8_t, 2> nibbles, Array<const float, 1> scales,
            Array<const int16_t, 2> states, Array<const double, 1> state_scales,
            Array<const float, 2> approx, Array<const float, 1> token_e,
            Array<const float, 1> token_n, Array<const double, 1> e, Array<const double, 1> n,
            Array<const int64_t, 1> rows, Array<const int64_t, 1> ids, Array<double, 2> values,
            int threads) {
  const size_t vocab = scales.size(), width = states.shape(1), count = states.shape(0);
  require_threads(threads);
  require(width > 0 && width % 64 == 0, "width must be a multiple of 64");
  require(!nibbles || has_shape(*nibbles, vocab, width / 2), "nibbles must be (tokens, width / 2)");
  require(has_shape(approx, count, vocab), "approx must be (states, tokens)");
  require(token_e.size() == vocab && token_n.size() == vocab, "one entry per token");
  require(state_scales.size() == count && e.size() == count && n.size() == count,
          "one entry per state");
  require(rows.size() == ids.size() && has_shape(values, 2, ids.size()), "one entry per pair");
  for (size_t i = 0; i < ids.size(); ++i)
    require(rows.data()[i] >= 0 && rows.data()[i] < static_cast<int64_t>(count) &&
                ids.data()[i] >= 0 && ids.data()[i] < static_cast<int64_t>(vocab),
            "rows and ids must be of the states and tokens");
  lmhead::ScreenCopy low{};
  low.nibbles = nibbles ? nibbles->data() : nullptr, low.scales = scales.data();
  low.vocab = static_cast<int64_t>(vocab), low.width = static_cast<int64_t>(width);
  const lmhead::ScreenStates given{states.data(), nullptr, state_scales.data(), nullptr,
                                   static_cast<int64_t>(count)};
  lmhead::ScreenBounds bounds{};
  bounds.approx = approx.data(), bounds.token_e = token_e.data(), bounds.token_n = token_n.data();
  bounds.e = e.data(), bounds.n = n.data();
  const nb::gil_scoped_release release;
  lmhead::chosen_kernels()->screen->refine(low, given, bounds, rows.data(), ids.data(), length(ids),
                                           values.data(), values.data() + ids.size(), threads);
}

// Writes how many tokens of each row stay into counts (rows,), and their ids into `ids` if it has
// room for all. Returns the total number.
int64_t choose(Array<const float, 2> approx, Array<const float, 2> block_max,
               Array<const float, 1> token_e, Array<const float, 1> token_n,
               Array<const float, 1> block_e, Array<const float, 1> block_n,
               Array<const double, 1> e, Array<const double, 1> n, Array<const double, 1> limits,
               Array<int64_t, 1> counts, Array<int64_t, 1> ids, int threads) {
  const size_t rows = approx.shape(0), vocab = approx.shape(1);
  const auto blocks = static_cast<size_t>(lmhead::screen_blocks(static_cast<int64_t>(vocab)));
  require_threads(threads);
  require(has_shape(block_max, rows, blocks), "block_max must be (rows, blocks)");
  require(token_e.size() == vocab && token_n.size() == vocab, "one entry per token");
  require(block_e.size() == blocks && block_n.size() == blocks, "one entry per block");
  require(e.size() == rows && n.size() == rows && limits.size() == rows && counts.size() == rows,
          "one entry per row");
  const lmhead::ScreenBounds bounds{approx.data(),
                                    block_max.data(),
                                    token_e.data(),
                                    token_n.data(),
                                    block_e.data(),
                                    block_n.data(),
                                    e.data(),
                                    n.data(),
                                    limits.data(),
                                    static_cast<int64_t>(rows),
                                    static_cast<int64_t>(vocab)};
  const nb::gil_scoped_release release;
  const auto* screen = lmhead::chosen_kernels()->screen;
  std::vector<int32_t> found(rows * blocks);
  screen->count(bounds, found.data(), threads);
  std::vector<int64_t> starts(rows * blocks);
  int64_t total = 0;
  for (size_t b = 0; b < rows; ++b) {
    const int64_t before = total;
    for (size_t i = b * blocks; i < (b + 1) * blocks; ++i) {
      starts[i] = total;
      total += found[i];
    }
    counts.data()[b] = total - before;
  }
  if (total <= length(ids)) screen->fill(bounds, found.data(), starts.data(), ids.data(), threads);
  return total;
}

// ids (rows, k), ascending.
void best(Array<const float, 2> approx, Array<const float, 2> block_max, Array<int64_t, 2> ids,
          int threads) {
  const size_t rows = approx.shape(0), vocab = approx.shape(1), k = ids.shape(1);
  const auto blocks = static_cast<size_t>(lmhead::screen_blocks(static_cast<int64_t>(vocab)));
  require_threads(threads);
  require(has_shape(block_max, rows, blocks), "block_max must be (rows, blocks)");
  require(ids.shape(0) == rows && k >= 1 && k <= blocks, "ids must be (rows, k), k of the blocks");
  lmhead::ScreenBounds bounds{};
  bounds.approx = approx.data(), bounds.block_max = block_max.data();
  bounds.rows = static_cast<int64_t>(rows), bounds.vocab = static_cast<int64_t>(vocab);
  const nb::gil_scoped_release release;
  lmhead::chosen_kernels()->screen->best(bounds, static_cast<int64_t>(k), ids.data(), threads);
}

// Returns how many tokens were scored, whether that decided, and whether the bounds held. values
// and ids (k,).
std::tuple<int64_t, bool, bool> decide(
    Array<const float, 2> approx, Array<const float, 2> block_max, Array<const float, 1> token_e,
    Array<const float, 1> token_n, Array<const float, 1> block_e, Array<const float, 1> block_n,
    Array<const double, 1> e, Array<const double, 1> n, Array<const double, 1> base,
    FloatArray<2> hidden, FloatArray<2> weight, Maybe<const double, 1> bias, int64_t most,
    Array<double, 2> values, Array<int64_t, 2> ids, int threads) {
  const size_t vocab = approx.shape(1), k = ids.shape(1);
  const auto blocks = static_cast<size_t>(lmhead::screen_blocks(static_cast<int64_t>(vocab)));
  require_threads(threads);
  require(approx.shape(0) == 1 && has_shape(block_max, 1, blocks), "one row");
  require(token_e.size() == vocab && token_n.size() == vocab, "one entry per token");
  require(block_e.size() == blocks && block_n.size() == blocks, "one entry per block");
  require(e.size() == 1 && n.size() == 1 && base.size() == 1, "one state");
  require(weight.shape(0) == vocab && has_shape(hidden, 1, weight.shape(1)),
          "hidden must be (1, size), weight (tokens, size)");
  require(!bias || bias->size() == vocab, "one bias per token");
  require(k >= 1 && k <= blocks && has_shape(ids, 1, k) && has_shape(values, 1, k),
          "values and ids must be (1, k), k of the blocks");
  const lmhead::ScreenBounds bounds{approx.data(),
                                    block_max.data(),
                                    token_e.data(),
                                    token_n.data(),
                                    block_e.data(),
                                    block_n.data(),
                                    e.data(),
                                    n.data(),
                                    nullptr,
                                    1,
                                    static_cast<int64_t>(vocab)};
  const char* what = "hidden and weight must be float32, bfloat16 or float16";
  const lmhead::ScreenExact exact{to_floats(hidden, what), to_floats(weight, what), pointer(bias),
                                  base.data()[0], length(weight, 1)};
  require(exact.hidden.type == exact.weight.type || exact.hidden.type == lmhead::FloatType::f32,
          "hidden must be float32, or of the type of weight");
  const nb::gil_scoped_release release;
  const auto done = lmhead::chosen_kernels()->screen->decide(
      bounds, exact, static_cast<int64_t>(k), most, values.data(), ids.data(), threads);
  return {done.scored, done.decided, done.sound};
}

// Returns whether every x[i] lies within base[rows[i]] + values[0, i] ± values[1, i] and roundings
// of the sum: values as from `refine`. An infinite x[i] must equal values[0, i].
bool within(Array<const double, 2> values, Array<const double, 1> base,
            Array<const int64_t, 1> rows, Array<const double, 1> x) {
  const size_t n = x.size();
  require(has_shape(values, 2, n) && rows.size() == n, "one entry per pair");
  for (size_t i = 0; i < n; ++i) {
    require(rows.data()[i] >= 0 && rows.data()[i] < length(base), "rows must be of the states");
    const double from = base.data()[rows.data()[i]], approx = values.data()[i];
    const double slack = 0x1p-48 * (std::fabs(x.data()[i]) + std::fabs(from));
    const bool fits = std::fabs(x.data()[i] - from - approx) <= values.data()[n + i] + slack;
    if (!fits && x.data()[i] != approx) return false;
  }
  return true;
}

}  // namespace

void bind_screen(nb::module_& m) {
  using nb::arg;
  m.def("prefetch", [] { return nb::make_tuple(prefetch_whole.load(), prefetch_nibbles.load()); });
  m.def("advise_huge_pages", &advise_huge_pages, tensor("bytes"));
  m.def("streams", [] { return nb::make_tuple(streams_whole.load(), streams_nibbles.load()); });
  m.def("set_streams", &set_streams, arg("whole"), arg("nibbles"));
  m.def("set_prefetch", &set_prefetch, arg("whole"), arg("nibbles"));
  m.attr("SCREEN_BLOCK") = lmhead::kScreenBlock;
  m.def("screen_prepare", &prepare, tensor("mean"), tensor("basis"), tensor("signs"),
        tensor("factors"), arg("sizes"), arg("constants"), tensor("hidden"), tensor("main"),
        tensor("lead"), tensor("numbers"), arg("threads"));
  m.def("screen_products", &products, maybe("whole"), maybe("nibbles"), tensor("lead"),
        tensor("scales"), tensor("lead_scales"), maybe("bias"), tensor("states"),
        tensor("lead_states"), tensor("state_scales"), tensor("lead_state_scales"),
        maybe("allowed"), tensor("approx"), tensor("block_max"), arg("threads"));
  m.def("screen_refine", &refine, maybe("nibbles"), tensor("scales"), tensor("states"),
        tensor("state_scales"), tensor("approx"), tensor("token_e"), tensor("token_n"), tensor("e"),
        tensor("n"), tensor("rows"), tensor("ids"), tensor("values"), arg("threads"));
  m.def("screen_select", &choose, tensor("approx"), tensor("block_max"), tensor("token_e"),
        tensor("token_n"), tensor("block_e"), tensor("block_n"), tensor("e"), tensor("n"),
        tensor("limits"), tensor("counts"), tensor("ids"), arg("threads"));
  m.def("screen_best", &best, tensor("approx"), tensor("block_max"), tensor("ids"), arg("threads"));
  m.def("screen_decide", &decide, tensor("approx"), tensor("block_max"), tensor("token_e"),
        tensor("token_n"), tensor("block_e"), tensor("block_n"), tensor("e"), tensor("n"),
        tensor("base"), tensor("hidden"), tensor("weight"), maybe("bias"), arg("most"),
        tensor("values"), tensor("ids"), arg("threads"));
  m.def("screen_within", &within, tensor("values"), tensor("base"), tensor("rows"), tensor("x"));
}

}  // namespace lmhead
