// The Python module: pointers and sizes in, nothing else. `pilotfish.ops.native` checks what it passes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;

namespace {

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
#if defined(PILOTFISH_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
    found.push_back(&kAvx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    found.push_back(&kAvx2);
  }
#endif
  found.push_back(&kPortable);
  return found;
}

const Kernels& find(const std::string& isa) {
  for (const Kernels* kernels : available()) {
    if (isa == kernels->name) return *kernels;
  }
  throw std::invalid_argument("this CPU cannot run the instruction set " + isa);
}

// Zeroed memory for repacked weights: private and anonymous, since huge pages are only given to such.
class Buffer {
 public:
  explicit Buffer(size_t size) : size_(size) {
#if defined(__linux__)
    data_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
    madvise(data_, size, MADV_HUGEPAGE);
#else
    data_ = std::calloc(size, 1);
    if (data_ == nullptr) throw std::bad_alloc();
#endif
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
#if defined(__linux__)
    munmap(data_, size_);
#else
    std::free(data_);
#endif
  }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(data_); }
  size_t size() const { return size_; }

 private:
  void* data_;
  size_t size_;
};

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

int64_t num_panels(int64_t num_outputs) { return (num_outputs + kLanes - 1) / kLanes; }

size_t packed_bytes(int type, int64_t num_outputs, int64_t k) {
  const BlockShape shape = block_shape(static_cast<WeightType>(type));
  return static_cast<size_t>(num_panels(num_outputs)) * (k / shape.weights) * shape.panel_bytes;
}

void pack(int type, uintptr_t rows, int64_t num_outputs, int64_t k, uintptr_t out, int threads) {
  const int64_t panels = num_panels(num_outputs);
  const size_t panel_bytes = packed_bytes(type, kLanes, k);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t panel = 0; panel < panels; panel++) {
    pack_panel(static_cast<WeightType>(type), pointer<const uint8_t>(rows), num_outputs, k, panel,
               pointer<uint8_t>(out) + panel * panel_bytes);
  }
}

void linear(const std::string& isa, int type, uintptr_t packed, int64_t num_outputs, int64_t k, uintptr_t x,
            int64_t num_rows, uintptr_t codes, uintptr_t scales, uintptr_t sums, uintptr_t y, int threads) {
  const Kernels& kernels = find(isa);
  const WeightType weight_type = static_cast<WeightType>(type);
  const Activations activations = {pointer<int8_t>(codes), pointer<float>(scales), pointer<int16_t>(sums), k};
  kernels.quantize(pointer<const float>(x), num_rows, weight_type, activations);
  const int64_t panels = num_panels(num_outputs);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int part = 0; part < threads; part++) {
    kernels.linear(weight_type, pointer<const uint8_t>(packed), panels * part / threads, panels * (part + 1) / threads,
                   activations, num_rows, pointer<float>(y), num_outputs, num_outputs);
  }
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available()) names.push_back(kernels->name);
  return names;
}

}  // namespace

NB_MODULE(_kernels, m) {
  nb::class_<Buffer>(m, "Buffer")
      .def(nb::init<size_t>(), nb::arg("size"))
      .def_prop_ro("address", &Buffer::address)
      .def_prop_ro("size", &Buffer::size);
  m.def("instruction_sets", &instruction_sets);
  m.def("packed_bytes", &packed_bytes, nb::arg("type"), nb::arg("num_outputs"), nb::arg("k"));
  m.def("pack", &pack, nb::arg("type"), nb::arg("rows"), nb::arg("num_outputs"), nb::arg("k"), nb::arg("out"),
        nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
  m.def("linear", &linear, nb::arg("isa"), nb::arg("type"), nb::arg("packed"), nb::arg("num_outputs"), nb::arg("k"),
        nb::arg("x"), nb::arg("num_rows"), nb::arg("codes"), nb::arg("scales"), nb::arg("sums"), nb::arg("y"),
        nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
}
