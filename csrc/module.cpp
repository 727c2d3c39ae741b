// The Python module: pointers and sizes in, nothing else. `pilotfish.ops.native` checks what it passes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;

namespace {

std::vector<const Kernels*> detect() {
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

// Asked for with every call of a kernel, and the same for as long as the process lives.
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

// Waking a team costs some microseconds, and much more on a busy machine: below this many products one thread is
// quicker. How many threads share the work never changes a result.
int team_size(int64_t num_products, int threads) { return num_products < 1 << 17 ? 1 : threads; }

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
  const int team = team_size(num_outputs * k * num_rows, threads);
#pragma omp parallel for schedule(static) num_threads(team)
  for (int part = 0; part < team; part++) {
    kernels.linear(weight_type, pointer<const uint8_t>(packed), panels * part / team, panels * (part + 1) / team,
                   activations, num_rows, pointer<float>(y), num_outputs);
  }
}

void rms_norm(const std::string& isa, uintptr_t x, uintptr_t weight, float eps, int64_t num_rows, int64_t size,
              uintptr_t y) {
  find(isa).rms_norm(pointer<const float>(x), pointer<const float>(weight), eps, num_rows, size, pointer<float>(y));
}

void silu_mul(const std::string& isa, uintptr_t gate, uintptr_t up, int64_t num_rows, int64_t size, uintptr_t y) {
  find(isa).silu_mul(pointer<const float>(gate), pointer<const float>(up), num_rows, size, pointer<float>(y));
}

void rotary_write(const std::string& isa, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t positions,
                  uintptr_t slot_mapping, uintptr_t cos, uintptr_t sin, uintptr_t keys, uintptr_t values,
                  uintptr_t filled, int64_t num_rows, int64_t page_size, int64_t num_heads, int64_t num_kv_heads,
                  int64_t head_dim, uintptr_t rotated_q) {
  const RotaryBatch batch = {pointer<const int32_t>(positions),
                             pointer<const int32_t>(slot_mapping),
                             pointer<const float>(cos),
                             pointer<const float>(sin),
                             pointer<float>(keys),
                             pointer<float>(values),
                             pointer<int32_t>(filled),
                             num_rows,
                             page_size,
                             num_heads,
                             num_kv_heads,
                             head_dim};
  find(isa).rotary_write(batch, pointer<const float>(q), pointer<const float>(k), pointer<const float>(v),
                         pointer<float>(rotated_q));
}

void attention(const std::string& isa, uintptr_t q, uintptr_t keys, uintptr_t values, uintptr_t query_start_loc,
               uintptr_t seq_lens, uintptr_t page_table, int64_t num_seqs, int64_t max_pages, int64_t page_size,
               int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, uintptr_t y, int threads) {
  const Kernels& kernels = find(isa);
  const AttentionBatch batch = {pointer<const float>(keys),
                                pointer<const float>(values),
                                pointer<const int32_t>(query_start_loc),
                                pointer<const int32_t>(seq_lens),
                                pointer<const int32_t>(page_table),
                                num_seqs,
                                max_pages,
                                page_size,
                                num_heads,
                                num_kv_heads,
                                head_dim};
  int64_t longest = 0;
  std::vector<int64_t> sequence_of;
  for (int64_t s = 0; s < num_seqs; s++) {
    longest = std::max<int64_t>(longest, batch.seq_lens[s]);
    sequence_of.insert(sequence_of.end(), batch.query_start_loc[s + 1] - batch.query_start_loc[s], s);
  }
  const int64_t num_tasks = static_cast<int64_t>(sequence_of.size()) * num_kv_heads;
  const int64_t scores_size = (longest + kLanes - 1) / kLanes * kLanes * (num_heads / num_kv_heads);
#pragma omp parallel num_threads(team_size(num_tasks * scores_size * head_dim, threads))
  {
    std::vector<float> scores(scores_size);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < num_tasks; task++) {
      const int64_t row = task / num_kv_heads;
      kernels.attention(batch, pointer<const float>(q), sequence_of[row], row, task % num_kv_heads, scores.data(),
                        pointer<float>(y));
    }
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
  m.def("rms_norm", &rms_norm, nb::arg("isa"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("num_rows"),
        nb::arg("size"), nb::arg("y"), nb::call_guard<nb::gil_scoped_release>());
  m.def("silu_mul", &silu_mul, nb::arg("isa"), nb::arg("gate"), nb::arg("up"), nb::arg("num_rows"), nb::arg("size"),
        nb::arg("y"), nb::call_guard<nb::gil_scoped_release>());
  m.def("rotary_write", &rotary_write, nb::arg("isa"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("positions"),
        nb::arg("slot_mapping"), nb::arg("cos"), nb::arg("sin"), nb::arg("keys"), nb::arg("values"), nb::arg("filled"),
        nb::arg("num_rows"), nb::arg("page_size"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
        nb::arg("rotated_q"), nb::call_guard<nb::gil_scoped_release>());
  m.def("attention", &attention, nb::arg("isa"), nb::arg("q"), nb::arg("keys"), nb::arg("values"),
        nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("page_table"), nb::arg("num_seqs"),
        nb::arg("max_pages"), nb::arg("page_size"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
        nb::arg("y"), nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
}
