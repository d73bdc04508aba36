// Threads: those of torch, so that its products and our kernels take turns on the same ones.
#pragma once

#include <cstdint>
#include <functional>

namespace lmhead {

// Run body(i) for i in [0, n) on up to `threads` threads. Which thread runs what is not fixed, so a
// body must not depend on it.
void parallel_for(int64_t n, int threads, const std::function<void(int64_t)>& body);

// "torch's OpenMP" or "std::thread".
const char* thread_runtime();

}  // namespace lmhead
