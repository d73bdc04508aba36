#include "parallel.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace lmhead {
namespace {

// OpenMP's entry point in libgomp, which LLVM's and Intel's runtimes export too. Torch has loaded
// one of them; a second pool of threads would compete for the cores, since OpenMP's idle
// threads spin.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

GompParallel find_gomp() {
  static const auto found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

// More threads than cores gain nothing, and libgomp ends the process if one cannot be made. Eight
// on any machine, so that tests on a small one run several.
int most_threads() {
  static const int most = std::max(8, static_cast<int>(std::thread::hardware_concurrency()));
  return most;
}

struct Work {
  std::atomic<int64_t> next{0};
  int64_t n;
  const std::function<void(int64_t)>* body;
  std::mutex mutex;
  std::exception_ptr failure;
};

// An exception must not leave a thread: it ends the work, and parallel_for throws it again.
void run(void* data) {
  auto* work = static_cast<Work*>(data);
  try {
    for (int64_t i; (i = work->next.fetch_add(1)) < work->n;) (*work->body)(i);
  } catch (...) {
    work->next.store(work->n);
    const std::lock_guard<std::mutex> lock(work->mutex);
    if (!work->failure) work->failure = std::current_exception();
  }
}

void run_on_own_threads(Work& work, int threads) {
  std::vector<std::thread> helpers;
  helpers.reserve(static_cast<size_t>(threads));
  try {
    for (int i = 1; i < threads; ++i) helpers.emplace_back(run, &work);
  } catch (const std::system_error&) {
    // The threads that could be started share the work.
  }
  run(&work);
  for (auto& helper : helpers) helper.join();
}

}  // namespace

void parallel_for(int64_t n, int threads, const std::function<void(int64_t)>& body) {
  const int wanted = static_cast<int>(std::min<int64_t>({n, threads, most_threads()}));
  if (wanted <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  Work work;
  work.n = n;
  work.body = &body;
  if (const auto gomp = find_gomp())
    gomp(run, &work, static_cast<unsigned>(wanted), 0);
  else
    run_on_own_threads(work, wanted);
  if (work.failure) std::rethrow_exception(work.failure);
}

const char* thread_runtime() { return find_gomp() ? "torch's OpenMP" : "std::thread"; }

}  // namespace lmhead
