// Memory that a call of an operator needs.
#pragma once

#include <cstdint>
#include <vector>

namespace gptfast {

// Memory for one call, kept by its thread for the next one. Every piece starts a cache line.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    thread_local std::vector<uint8_t> memory;
    if (int64_t(memory.size()) < bytes + 64) memory.resize(bytes + 64);
    next_ = (uint8_t*)((uintptr_t(memory.data()) + 63) / 64 * 64);
  }
  template <class T>
  T* take(int64_t count) {
    T* piece = (T*)next_;
    next_ += round_up(count * int64_t(sizeof(T)));
    return piece;
  }
  static int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  uint8_t* next_;
};

}  // namespace gptfast
