// What the module's classes stand on: memory, threads, the floating-point mode.
#pragma once
// PILOTFISH_SANITIZE: AddressSanitizer watches the heap, not what is mapped.
#if defined(__linux__) && !defined(PILOTFISH_SANITIZE)
#define PILOTFISH_MMAP
#include <sys/mman.h>
#endif
#if defined(PILOTFISH_X86)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

#include "team.h"

namespace {

constexpr size_t kHugePage = 1 << 21;

// Zeroed memory for repacked weights: private and anonymous, since huge pages are only given to such, and starting where
// a huge page does.
class Buffer {
 public:
  explicit Buffer(size_t size) : size_(size) {
#if defined(PILOTFISH_MMAP)
    memory_ = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    madvise(memory_, size + kHugePage, MADV_HUGEPAGE);
    address_ = (reinterpret_cast<uintptr_t>(memory_) + kHugePage - 1) / kHugePage * kHugePage;
#else
    memory_ = std::calloc(size, 1);
    if (memory_ == nullptr) throw std::bad_alloc();
    address_ = reinterpret_cast<uintptr_t>(memory_);
#endif
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
#if defined(PILOTFISH_MMAP)
    munmap(memory_, size_ + kHugePage);
#else
    std::free(memory_);
#endif
  }
  uintptr_t address() const { return address_; }
  size_t size() const { return size_; }

 private:
  void* memory_;
  uintptr_t address_;
  size_t size_;
};

// Fresh memory is given out page by page as it is first written, which for many rows of logits takes as long as a tenth
// of computing them; in huge pages it does not.
void use_huge_pages(void* data, size_t size) {
#if defined(PILOTFISH_MMAP)
  const uintptr_t start = reinterpret_cast<uintptr_t>(data), first = (start + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (start + size) / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)size;
#endif
}

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// The kernels round to nearest and keep subnormal numbers, whatever the calling thread has set for itself: its workers
// would not know of it.
class FloatMode {
 public:
#if defined(PILOTFISH_X86)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FloatMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatMode() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
};

// Memory that a thread keeps from call to call, so that a forward allocates nothing large.
template <class T>
T* scratch(std::vector<T>& memory, int64_t size) {
  if (static_cast<int64_t>(memory.size()) < size) memory = std::vector<T>(size);
  return memory.data();
}

// Waking a team costs some microseconds, and much more on a busy machine: below this much work, in products or in bytes
// of weights times rows, one thread is quicker. How many threads share the work never changes a result.
int team_size(int64_t work, int threads) { return work < 1 << 17 ? 1 : threads; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace
