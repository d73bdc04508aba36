// Python bindings of screen_sample.hpp: sampling from a quantized copy. See bind.cpp.
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind.hpp"
#include "screen_sample.hpp"

namespace lmhead {

namespace {

using MapTuple = std::tuple<double, double, bool, double, double>;

// The groups of arguments: bounds (approx, block_max, token_e, token_n, block_e, block_n, e, n,
// base); the second pass of "4+4" (low, low_e, scales, states, state_scales); source (hidden,
// weight, bias, map, mean_norm); chain (kinds, least, values, flags (2, rows): greedy, wide; keys);
// edits (starts, ids, logits (2, n): before, after). Results: whole (3, rows): token, scored,
// state; numbers (5, rows): z, log_prob low and high, lse low and high.
void sample(Array<float, 2> approx, Array<const float, 2> block_max, Array<const float, 1> token_e,
            Array<const float, 1> token_n, Array<const float, 1> block_e,
            Array<const float, 1> block_n, Array<const double, 1> e, Array<const double, 1> n,
            Array<const double, 1> base, Maybe<const uint8_t, 2> low, Array<const float, 1> low_e,
            Array<const float, 1> scales, Array<const int16_t, 2> states,
            Array<const double, 1> state_scales, Maybe<const int32_t, 2> allowed,
            Array<const float, 2> hidden, FloatArray<2> weight, Maybe<const double, 1> bias,
            const MapTuple& map, double mean_norm, Array<const int64_t, 1> kinds,
            Array<const int64_t, 1> least, Array<const double, 2> values,
            Array<const int64_t, 2> flags, Array<const int64_t, 2> keys,
            Array<const int64_t, 1> starts, Array<const int64_t, 1> ids,
            Array<const double, 2> logits, Array<int64_t, 2> whole, Array<double, 2> numbers,
            int threads) {
  const size_t rows = approx.shape(0), vocab = approx.shape(1), steps = kinds.size();
  const auto blocks = static_cast<size_t>(screen_blocks(static_cast<int64_t>(vocab)));
  require_threads(threads);
  require(vocab > 0 && has_shape(block_max, rows, blocks), "block_max must be (rows, blocks)");
  require(token_e.size() == vocab && token_n.size() == vocab && low_e.size() == vocab &&
              scales.size() == vocab && (!bias || bias->size() == vocab),
          "one entry per token");
  require(block_e.size() == blocks && block_n.size() == blocks, "one entry per block");
  require(e.size() == rows && n.size() == rows && base.size() == rows &&
              state_scales.size() == rows && states.shape(0) == rows,
          "one entry per state");
  require(states.shape(1) > 0 && states.shape(1) % 64 == 0, "width must be a multiple of 64");
  require(!low || has_shape(*low, vocab, states.shape(1) / 2), "low must be (tokens, width / 2)");
  require(!allowed || has_shape(*allowed, rows, (vocab + 31) / 32), "allowed: a bit per token");
  require(weight.shape(0) == vocab && has_shape(hidden, rows, weight.shape(1)),
          "hidden must be (rows, size), weight (tokens, size)");
  const auto& [scale, shift, bounded, outer, outer_shift] = map;
  require(scale > 0.0 && outer > 0.0, "the map must grow");
  require(least.size() == steps && has_shape(values, steps, rows), "one value per step and row");
  for (size_t i = 0; i < steps; ++i) {
    const int64_t kind = kinds.data()[i];
    require(kind >= 0 && kind < kSampleSteps && least.data()[i] >= 0, "no such step");
    for (size_t r = 0; r < rows && kind == kTopK; ++r)
      require(values.data()[i * rows + r] >= 1.0, "k must be at least 1");
  }
  require(has_shape(flags, 2, rows) && has_shape(keys, rows, 2), "flags (2, rows), keys (rows, 2)");
  require(starts.size() == rows + 1 && has_shape(logits, 2, ids.size()), "one entry per edit");
  for (size_t r = 0; r <= rows; ++r)
    require(starts.data()[r] >= (r ? starts.data()[r - 1] : 0) && starts.data()[r] <= length(ids),
            "starts must ascend within the edits");
  require_below(ids, vocab, "ids must be tokens");
  require(has_shape(whole, 3, rows) && has_shape(numbers, 5, rows), "results: (3 and 5, rows)");
  const Floats stored = to_floats(weight, "weight must be float32, bfloat16 or float16");

  SampleScreen screen{};
  screen.kernels = chosen_kernels()->screen;
  screen.bounds = {approx.data(),
                   block_max.data(),
                   token_e.data(),
                   token_n.data(),
                   block_e.data(),
                   block_n.data(),
                   e.data(),
                   n.data(),
                   nullptr,
                   static_cast<int64_t>(rows),
                   static_cast<int64_t>(vocab)};
  screen.approx = approx.data();
  screen.low.nibbles = pointer(low), screen.low.scales = scales.data();
  screen.low.vocab = static_cast<int64_t>(vocab), screen.low.width = length(states, 1);
  screen.states = {states.data(), nullptr, state_scales.data(), nullptr,
                   static_cast<int64_t>(rows)};
  screen.low_e = low_e.data();
  screen.allowed = allowed ? reinterpret_cast<const uint32_t*>(allowed->data()) : nullptr;
  screen.n_uint32 = static_cast<int64_t>((vocab + 31) / 32);
  const SampleSource source{
      hidden.data(), stored,    pointer(bias),    {scale, shift, bounded, outer, outer_shift},
      base.data(),   mean_norm, length(hidden, 1)};
  const SampleChain chain{kinds.data(),
                          least.data(),
                          values.data(),
                          flags.data(),
                          flags.data() + rows,
                          reinterpret_cast<const Key*>(keys.data()),
                          static_cast<int64_t>(steps)};
  const SampleEdits edits{starts.data(), ids.data(), logits.data(), logits.data() + ids.size()};
  int64_t* to = whole.data();
  double* number = numbers.data();
  const SampleDrawn out{to,
                        to + rows,
                        to + 2 * rows,
                        number,
                        number + rows,
                        number + 2 * rows,
                        number + 3 * rows,
                        number + 4 * rows};
  const nb::gil_scoped_release release;
  chosen_kernels()->sample_screened(screen, source, chain, edits, out, threads);
}

}  // namespace

void bind_screen_sample(nb::module_& m) {
  using nb::arg;
  m.def("screen_sample", &sample, tensor("approx"), tensor("block_max"), tensor("token_e"),
        tensor("token_n"), tensor("block_e"), tensor("block_n"), tensor("e"), tensor("n"),
        tensor("base"), maybe("low"), tensor("low_e"), tensor("scales"), tensor("states"),
        tensor("state_scales"), maybe("allowed"), tensor("hidden"), tensor("weight"), maybe("bias"),
        arg("map"), arg("mean_norm"), tensor("kinds"), tensor("least"), tensor("values"),
        tensor("flags"), tensor("keys"), tensor("starts"), tensor("ids"), tensor("logits"),
        tensor("whole"), tensor("numbers"), arg("threads"));
}

}  // namespace lmhead
