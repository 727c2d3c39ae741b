// Which instruction sets this CPU has, and the kernels of one of them.
#pragma once
#if defined(PILOTFISH_X86)
#include <cpuid.h>
#endif

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "runtime.h"
#include "sampling.h"

namespace {

#if defined(PILOTFISH_X86)
// Clang 14's __builtin_cpu_supports knows neither of these two. Both work on the registers of AVX2, of which it also
// says whether the operating system keeps them.
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

bool has_avxvnni() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & (1u << 4));
}
#endif

// What this CPU can run, best first.
std::vector<const Kernels*> detect() {
  std::vector<const Kernels*> found;
#if defined(PILOTFISH_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512vl = avx2 && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (avx512vl && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq")) {
    found.push_back(&kAvx512);
  }
  if (avx2 && has_avxvnni()) found.push_back(&kAvxVnni);
  if (avx2) found.push_back(&kAvx2);
  if (avx512vl) found.push_back(&kAvx512Vl);
#endif
  found.push_back(&kPortable);
  return found;
}

const std::vector<const Kernels*>& available() {
  static const std::vector<const Kernels*> found = detect();
  return found;
}

const Kernels& find(const std::string& isa) {
  for (const Kernels* kernels : available()) {
    if (isa == kernels->name) return *kernels;
  }
  throw std::invalid_argument("this CPU cannot run the instruction set " + isa);
}

// The kernels of one instruction set, run by a number of threads.
struct Variant {
  const Kernels* kernels;
  int threads;

  Variant(const std::string& isa, int threads_) : kernels(&find(isa)), threads(threads_) {}

  // [num_rows, size] to [num_rows].
  std::vector<int64_t> argmax(uintptr_t x, int64_t num_rows, int64_t size) const {
    const FloatMode mode;
    std::vector<int64_t> best(num_rows);
    for (int64_t row = 0; row < num_rows; row++) {
      best[row] = kernels->argmax(pointer<const float>(x) + row * size, size);
    }
    return best;
  }

  void log_sum_exp(uintptr_t x, int64_t num_rows, int64_t size, uintptr_t y) const {
    const FloatMode mode;
    for (int64_t row = 0; row < num_rows; row++) {
      pointer<float>(y)[row] = kernels->log_sum_exp(pointer<const float>(x) + row * size, size);
    }
  }

  int64_t distribution(uintptr_t x, int64_t size, double temperature, int64_t top_k, double top_p, double min_p,
                       uintptr_t ids, uintptr_t probs) const {
    const FloatMode mode;
    return ::distribution(*kernels, pointer<const float>(x), size, temperature, top_k, top_p, min_p,
                          pointer<int32_t>(ids), pointer<double>(probs));
  }

  int64_t largest(uintptr_t x, int64_t size, int64_t count, uintptr_t ids) const {
    const FloatMode mode;
    return ::largest(*kernels, pointer<const float>(x), size, count, pointer<int32_t>(ids));
  }

  int64_t residual(uintptr_t p_ids, uintptr_t p, int64_t p_count, uintptr_t q_ids, uintptr_t q, int64_t q_count,
                   uintptr_t ids, uintptr_t probs) const {
    const FloatMode mode;
    return ::residual(pointer<const int32_t>(p_ids), pointer<const double>(p), p_count, pointer<const int32_t>(q_ids),
                      pointer<const double>(q), q_count, pointer<int32_t>(ids), pointer<double>(probs));
  }

  int64_t gumbel_argmax(uintptr_t ids, uintptr_t probs, int64_t count, uint64_t stream) const {
    const FloatMode mode;
    return kernels->gumbel_argmax(pointer<const int32_t>(ids), pointer<const double>(probs), count, stream);
  }

  // Multiply-accumulates done, by all threads.
  int64_t dot_products(int64_t iterations) const {
    std::atomic<int64_t> products{0};
    team().run(threads, [&](Worker) { products += kernels->dot_products(iterations); });
    return products;
  }

  // Bytes read: whole pages, each thread its part.
  int64_t read_memory(uintptr_t address, int64_t size) const {
    const int64_t pages = size / 4096;
    std::atomic<int64_t> bytes{0};
    team().run(threads, [&](Worker self) {
      const int64_t first = pages * self.index / self.count, last = pages * (self.index + 1) / self.count;
      bytes += kernels->read_memory(pointer<const uint8_t>(address) + 4096 * first, 4096 * (last - first));
    });
    return bytes;
  }
};

}  // namespace
