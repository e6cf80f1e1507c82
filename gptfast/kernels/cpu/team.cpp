#include "team.h"

#include <omp.h>
#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gptfast {
namespace {

// How long a thread looks for work before it sleeps; waking it takes as long as the work of a small model's layer.
constexpr std::chrono::milliseconds PATIENCE{5};
constexpr int LOOKS_PER_CLOCK = 256;
// What is fetched ahead: no more than a core's own cache holds beside the rest.
constexpr int64_t AHEAD_BYTES = 512 << 10;
constexpr int LINES_AT_ONCE = 16;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Team& Team::get() {
  static Team* team = new Team;
  return *team;
}

// Where the system has no more threads to give, those that there are do the work.
void Team::start(int count) {
  if (started_ >= count || !can_start_) return;
  // Signals are the caller's.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (; started_ < count; ++started_) std::thread(&Team::serve, this, started_).detach();
  } catch (const std::system_error&) {
    can_start_ = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Team::share(int64_t count, int threads, Call call, const void* data, const uint8_t* next) {
  start(threads - 1);
  call_ = call;
  data_ = data;
  count_ = count;
  done_.store(0, std::memory_order_relaxed);
  if (wanted_.load(std::memory_order_relaxed) != threads - 1) {
    wanted_.store(threads - 1, std::memory_order_relaxed);
    wanted_.notify_all();
  }
  next_.store(next, std::memory_order_relaxed);
  left_.store(int32_t(count), std::memory_order_release);
  left_.notify_all();
  while (take_piece()) {
  }
  for (int looks = 0; done_.load(std::memory_order_acquire) < count; ++looks) {
    pause();
    if (looks % 4096 == 4095) std::this_thread::yield();  // to a thread that lost its core over a piece
  }
}

bool Team::take_piece() {
  int32_t left = left_.load(std::memory_order_acquire);
  while (left > 0) {
    if (left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      call_(data_, count_ - left);
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
  }
  return false;
}

// The caller has work between two calls, and memory none: this is its time to deliver.
void Team::fetch_next() {
  const uint8_t* next = next_.exchange(nullptr, std::memory_order_relaxed);
  if (next == nullptr) return;
  for (int64_t at = 0; at < AHEAD_BYTES && left_.load(std::memory_order_relaxed) == 0; at += LINES_AT_ONCE * 64) {
    for (int line = 0; line < LINES_AT_ONCE; ++line) __builtin_prefetch(next + at + line * 64, 0, 2);
  }
}

void Team::serve(int number) {
  omp_set_num_threads(1);  // of the libraries that a piece may call
  auto last_work = std::chrono::steady_clock::now();
  while (true) {
    const int wanted = wanted_.load(std::memory_order_relaxed);
    if (number >= wanted) {
      wanted_.wait(wanted, std::memory_order_relaxed);
      continue;
    }
    if (take_piece()) {
      while (number < wanted_.load(std::memory_order_relaxed) && take_piece()) {
      }
      fetch_next();
      last_work = std::chrono::steady_clock::now();
      continue;
    }
    for (int look = 0; look < LOOKS_PER_CLOCK && left_.load(std::memory_order_relaxed) == 0; ++look) pause();
    if (std::chrono::steady_clock::now() - last_work > PATIENCE) {
      left_.wait(0, std::memory_order_relaxed);
      last_work = std::chrono::steady_clock::now();
    }
  }
}

}  // namespace gptfast
