#include "parallel.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace lmhead {
namespace {

// OpenMP's entry point in libgomp, which LLVM's and Intel's runtimes export too. Torch has loaded
// one of them; a second pool of threads beside it would fight for the cores, since OpenMP's idle
// threads spin.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

GompParallel find_gomp() {
  static const auto found =
      reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

struct Work {
  std::atomic<int64_t> next{0};
  int64_t n;
  const std::function<void(int64_t)>* body;
};

void run(void* data) {
  auto* work = static_cast<Work*>(data);
  for (int64_t i; (i = work->next.fetch_add(1)) < work->n;) (*work->body)(i);
}

}  // namespace

void parallel_for(int64_t n, int threads, const std::function<void(int64_t)>& body) {
  const int wanted = static_cast<int>(std::min<int64_t>(n, threads));
  if (wanted <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  Work work;
  work.n = n;
  work.body = &body;
  if (const auto gomp = find_gomp()) {
    gomp(run, &work, static_cast<unsigned>(wanted), 0);
    return;
  }
  std::vector<std::thread> helpers;
  for (int i = 1; i < wanted; ++i) helpers.emplace_back(run, &work);
  run(&work);
  for (auto& helper : helpers) helper.join();
}

const char* thread_runtime() { return find_gomp() ? "torch's OpenMP" : "std::thread"; }

}  // namespace lmhead
