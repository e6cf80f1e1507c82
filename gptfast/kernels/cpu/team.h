// The threads that share the work of a call.
//
// OpenMP waits at the end of a loop for every thread to arrive, also for one that has not begun: with a busy
// neighbour on its core that takes milliseconds, several hundred times a token. Here the caller waits for pieces of
// work that were begun and for nothing else; what no other thread takes it does itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace gptfast {

class Team {
 public:
  // Of the whole process; it is never destroyed, as its threads may outlive all else.
  static Team& get();

  // Calls function(index), which must not throw, once for every index below `count`, on any thread in any order; at
  // most `threads` take part, and in a process that was forked only the caller does.
  // The others of them then fetch what lies at `next` into their caches, until there is work again.
  template <class Function>
  void run(int64_t count, int threads, const Function& function, const uint8_t* next = nullptr) {
    if (count == 0) return;
    // A second caller at the same time works alone.
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (count == 1 || threads <= 1 || !lock.owns_lock()) {
      for (int64_t index = 0; index < count; ++index) function(index);
      return;
    }
    share(
        count, threads, [](const void* data, int64_t index) { (*(const Function*)data)(index); }, &function, next);
  }

 private:
  using Call = void (*)(const void*, int64_t);

  Team() = default;
  void start(int count);
  void share(int64_t count, int threads, Call call, const void* data, const uint8_t* next);
  bool take_piece();
  void serve(int number);
  void fetch_next();

  std::mutex busy_;
  // What is shared out. It changes only while no piece is left and none is being done, so whoever takes a piece may
  // read it afterwards.
  Call call_ = nullptr;
  const void* data_ = nullptr;
  int64_t count_ = 0;
  alignas(64) std::atomic<int32_t> left_{0};  // pieces that nobody has taken
  alignas(64) std::atomic<int32_t> done_{0};
  alignas(64) std::atomic<int> wanted_{0};  // threads beside the caller
  std::atomic<const uint8_t*> next_{nullptr};
  int started_ = 0;
  bool can_start_ = true;
};

}  // namespace gptfast
