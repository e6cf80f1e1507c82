#include "arena.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <mutex>

namespace gptfast {
namespace {

constexpr int64_t HUGE_PAGE = 2 << 20;
constexpr int64_t REGION_BYTES = 64 << 20;
constexpr int64_t CACHE_LINE = 64;

int64_t round_up(int64_t bytes, int64_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

// Memory of the system, mapped when it is first written.
class Region {
 public:
  explicit Region(int64_t bytes) : bytes_(round_up(bytes, HUGE_PAGE) + HUGE_PAGE) {
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, memory_ != MAP_FAILED, "there is no memory for ", bytes, " bytes of weights");
    next_ = (uint8_t*)round_up(int64_t(memory_), HUGE_PAGE);
#ifdef MADV_HUGEPAGE
    madvise(next_, bytes_ - HUGE_PAGE, MADV_HUGEPAGE);  // a wish; without it all works as before
#endif
  }
  Region(const Region&) = delete;
  ~Region() { munmap(memory_, bytes_); }

  int64_t left() const { return (uint8_t*)memory_ + bytes_ - next_; }
  void* take(int64_t bytes) {
    void* piece = next_;
    next_ += round_up(bytes, CACHE_LINE);
    return piece;
  }

 private:
  int64_t bytes_;
  void* memory_;
  uint8_t* next_;
};

}  // namespace

at::Tensor allocate_packed(int64_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<Region> current;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Region> region = current.lock();
  if (!region || region->left() < bytes + CACHE_LINE) {
    region = std::make_shared<Region>(std::max(bytes + CACHE_LINE, REGION_BYTES));
    current = region;
  }
  return at::from_blob(region->take(bytes), {bytes}, [region](void*) {}, at::TensorOptions(at::kByte));
}

}  // namespace gptfast
