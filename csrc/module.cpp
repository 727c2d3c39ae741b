// The Python module: pointers and sizes in, nothing else. `pilotfish.ops.native` checks what it passes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#if defined(PILOTFISH_X86)
#include <cpuid.h>
#endif
// PILOTFISH_SANITIZE: AddressSanitizer watches the heap, not what is mapped.
#if defined(__linux__) && !defined(PILOTFISH_SANITIZE)
#define PILOTFISH_MMAP
#include <sys/mman.h>
#endif

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(PILOTFISH_X86)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;

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

struct Worker {
  int index, count;
};

Worker worker() {
#if defined(_OPENMP)
  return {omp_get_thread_num(), omp_get_num_threads()};
#else
  return {0, 1};
#endif
}

// Memory that a thread keeps from call to call, so that a forward allocates nothing large.
template <class T>
T* scratch(std::vector<T>& memory, int64_t size) {
  if (static_cast<int64_t>(memory.size()) < size) memory = std::vector<T>(size);
  return memory.data();
}

// Waking a team costs some microseconds, and much more on a busy machine: below this much work, in products or in bytes
// of weights times rows, one thread is quicker. How many threads share the work never changes a result. It is one or
// all: OpenMP ends the threads that a smaller team has no use for.
int team_size(int64_t work, int threads) { return work < 1 << 17 ? 1 : threads; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

  // Multiply-accumulates done, by all threads.
  int64_t dot_products(int64_t iterations) const {
    int64_t products = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : products)
    for (int thread = 0; thread < threads; thread++) products += kernels->dot_products(iterations);
    return products;
  }

  // Bytes read: whole pages, each thread its part.
  int64_t read_memory(uintptr_t address, int64_t size) const {
    const int64_t pages = size / 4096;
    int64_t bytes = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : bytes)
    for (int part = 0; part < threads; part++) {
      const int64_t first = pages * part / threads, last = pages * (part + 1) / threads;
      bytes += kernels->read_memory(pointer<const uint8_t>(address) + 4096 * first, 4096 * (last - first));
    }
    return bytes;
  }
};

// The attention of one forward: what all its layers share.
class Attention {
 public:
  // keys and values: float16 [num_layers, num_pages, page_size, num_kv_heads, head_dim]; filled: [num_layers, num_pages].
  Attention(const Variant& variant, uintptr_t positions, uintptr_t slot_mapping, uintptr_t query_start_loc,
            uintptr_t seq_lens, uintptr_t page_table, uintptr_t cos, uintptr_t sin, uintptr_t keys, uintptr_t values,
            uintptr_t filled, int64_t num_rows, int64_t num_seqs, int64_t max_pages, int64_t num_positions,
            int64_t num_pages, int64_t page_size, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim)
      : variant_(variant),
        num_pages_(num_pages),
        cache_{pointer<uint16_t>(keys), pointer<uint16_t>(values), pointer<int32_t>(filled)} {
    const int32_t *starts = pointer<const int32_t>(query_start_loc), *lengths = pointer<const int32_t>(seq_lens);
    const int32_t* pages = pointer<const int32_t>(page_table);
    require(head_dim <= kMaxHeadDim, "heads are too large");
    require(starts[0] == 0 && starts[num_seqs] == num_rows, "query_start_loc does not span the rows");
    for (int64_t s = 0; s < num_seqs; s++) {
      const int64_t count = starts[s + 1] - starts[s], length = lengths[s], used = ceil_div(length, page_size);
      require(count >= 0 && count <= length, "seq_lens must count the new rows");
      require(used <= max_pages, "a sequence is longer than its pages");
      for (int64_t page = 0; page < used; page++) {
        require(0 <= pages[s * max_pages + page] && pages[s * max_pages + page] < num_pages, "there is no such page");
      }
      longest_ = std::max<int64_t>(longest_, length);
      for (int64_t row = 0; row < count; row++) rows_.push_back({s, length - count + row + 1});
    }
    for (int64_t row = 0; row < num_rows; row++) {
      const int32_t position = pointer<const int32_t>(positions)[row], slot = pointer<const int32_t>(slot_mapping)[row];
      require(0 <= position && position < num_positions, "a position is beyond the rotary tables");
      require(0 <= slot && slot < num_pages * page_size, "there is no such slot");
    }
    batch_ = {pointer<const int32_t>(positions),
              pointer<const int32_t>(slot_mapping),
              pointer<const int32_t>(page_table),
              pointer<const float>(cos),
              pointer<const float>(sin),
              num_rows,
              max_pages,
              page_size,
              num_heads,
              num_kv_heads,
              head_dim};
  }

  // qkv [num_rows, (num_heads + 2 num_kv_heads) · head_dim], of which queries and keys are rotated in place;
  // y [num_rows, num_heads · head_dim].
  void run(int64_t layer, float* qkv, float* y) const {
    const int64_t layer_size = num_pages_ * batch_.page_size * batch_.num_kv_heads * batch_.head_dim;
    const LayerCache cache = {cache_.keys + layer * layer_size, cache_.values + layer * layer_size,
                              cache_.filled + layer * num_pages_};
    for (int64_t row = 0; row < batch_.num_rows; row++) {
      const int32_t slot = batch_.slot_mapping[row];
      int32_t& filled = cache.filled[slot / batch_.page_size];
      filled = std::max<int32_t>(filled, slot % static_cast<int32_t>(batch_.page_size) + 1);
    }
    const int64_t max_chunks = ceil_div(longest_, kAttentionChunk), num_heads = batch_.num_heads;
    // As many rows at once as have room for what their chunks give in 16 MB.
    const int64_t at_once =
        std::max<int64_t>(1, (1 << 22) / std::max<int64_t>(1, max_chunks * num_heads * (batch_.head_dim + 2)));
    const int64_t results = std::min(at_once, batch_.num_rows) * max_chunks * num_heads;
    const int team = team_size(batch_.num_rows * num_heads * longest_ * batch_.head_dim, variant_.threads);
    const int64_t own_size = num_heads / batch_.num_kv_heads *
                             (ceil_div(batch_.head_dim, kLanes) * kLanes + kAttentionChunk + kLanes * kLanes);
    thread_local std::vector<float> memory;
    float* largest = scratch(memory, results * (batch_.head_dim + 2) + team * own_size);
    const Chunks chunks = {largest, largest + results, largest + 2 * results, max_chunks};
    float* own = largest + results * (batch_.head_dim + 2);
#pragma omp parallel num_threads(team)
    {
      const FloatMode mode;
#pragma omp for schedule(static)
      for (int64_t row = 0; row < batch_.num_rows; row++) {
        variant_.kernels->rotary_write(batch_, cache, row, qkv + row * batch_.row_size());
      }
      for (int64_t first = 0; first < batch_.num_rows; first += at_once) {
        attend(cache, first, std::min(at_once, batch_.num_rows - first), qkv, chunks, own + worker().index * own_size, y);
      }
    }
  }

 private:
  static void require(bool holds, const char* otherwise) {
    if (!holds) throw std::invalid_argument(std::string("attention: ") + otherwise);
  }

  struct Row {
    int64_t sequence, length;  // what it sees of its sequence, itself included
  };

  // What the chunks of some rows give: [rows, max_chunks, num_heads], weighted values [..., head_dim].
  struct Chunks {
    float *largest, *sums, *weighted;
    int64_t max_chunks;
  };

  // The rows first … first + count - 1, shared by the workers of the parallel region that calls this.
  void attend(const LayerCache& cache, int64_t first, int64_t count, const float* qkv, const Chunks& chunks, float* own,
              float* y) const {
    const int64_t heads = batch_.num_heads, kv_heads = batch_.num_kv_heads, head_dim = batch_.head_dim;
    const int64_t group = heads / kv_heads, max_chunks = chunks.max_chunks;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < count * kv_heads * max_chunks; task++) {
      const int64_t index = task / (kv_heads * max_chunks), chunk = task / kv_heads % max_chunks;
      const int64_t kv_head = task % kv_heads, start = chunk * kAttentionChunk;
      const Row& row = rows_[first + index];
      if (start >= row.length) continue;
      const int64_t result = (index * max_chunks + chunk) * heads + kv_head * group;
      variant_.kernels->attention_chunk(
          batch_, cache, qkv + (first + index) * batch_.row_size() + kv_head * group * head_dim, row.sequence, kv_head,
          start, std::min<int64_t>(start + kAttentionChunk, row.length), own, chunks.largest + result,
          chunks.sums + result, chunks.weighted + result * head_dim);
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < count * heads; task++) {
      const int64_t index = task / heads, result = index * max_chunks * heads + task % heads;
      variant_.kernels->attention_merge(ceil_div(rows_[first + index].length, kAttentionChunk), head_dim,
                                        chunks.largest + result, chunks.sums + result,
                                        chunks.weighted + result * head_dim, heads,
                                        y + (first * heads + task) * head_dim);
    }
  }

  Variant variant_;
  int64_t num_pages_, longest_ = 0;
  LayerCache cache_;
  AttentionBatch batch_;
  std::vector<Row> rows_;
};

// The units of work of one worker. It takes from the front; a worker that has nothing left takes from the back of
// another's, so that a core that is slower, or busy with something else, does not keep the rest waiting.
class Share {
 public:
  void set(int64_t first, int64_t last) { range_.store(pack(first, last), std::memory_order_relaxed); }

  // Up to `count` units as [first, last), or nothing.
  bool take(int64_t count, bool from_back, int64_t* first, int64_t* last) {
    uint64_t range = range_.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t begin = static_cast<int64_t>(range >> 32), end = static_cast<int64_t>(range & 0xffffffff);
      if (begin >= end) return false;
      count = std::min(count, end - begin);
      *first = from_back ? end - count : begin;
      *last = *first + count;
      const uint64_t rest = from_back ? pack(begin, *first) : pack(*last, end);
      if (range_.compare_exchange_weak(range, rest, std::memory_order_relaxed)) return true;
    }
  }

 private:
  static uint64_t pack(int64_t first, int64_t last) {
    return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(last);
  }

  alignas(64) std::atomic<uint64_t> range_{0};
};

// Matrices that read the same rows: packed weights of their own, and what happens to the rows before and after.
class LinearLayer {
 public:
  // norm: float [k], or 0: then rows are used as they come. gated: two matrices, gate and up, give silu(gate) · up.
  LinearLayer(const Variant& variant, int64_t k, uintptr_t norm, float eps, bool gated)
      : variant_(variant), k_(k), eps_(eps), gated_(gated) {
    if (norm != 0) norm_.assign(pointer<const float>(norm), pointer<const float>(norm) + k);
  }
  LinearLayer(const LinearLayer&) = delete;
  LinearLayer& operator=(const LinearLayer&) = delete;

  // A file's rows of num_outputs × k weights; bias: float [num_outputs], or 0.
  void add(int type, uintptr_t rows, int64_t num_outputs, uintptr_t bias) {
    Part part;
    part.type = static_cast<WeightType>(type);
    part.rows = pointer<const uint8_t>(rows);
    part.num_outputs = num_outputs;
    const BlockShape shape = block_shape(part.type);
    part.panel_bytes = k_ / shape.weights * shape.panel_bytes;
    if (bias != 0) part.bias.assign(pointer<const float>(bias), pointer<const float>(bias) + num_outputs);
    uses_32_ = uses_32_ || shape.weights == 32;
    uses_256_ = uses_256_ || shape.weights == 256;
    part.column = num_outputs_;
    num_outputs_ += num_outputs;
    num_bytes_ += part.panels() * part.panel_bytes;
    parts_.push_back(std::move(part));
  }

  // Repacks what was added into num_bytes() bytes of a buffer that outlives this layer; the file's rows are not needed
  // afterwards. Gate and up lie panel by panel beside each other: the order in which they are read.
  void pack(const Buffer& buffer, int64_t offset) {
    if (offset < 0 || offset + num_bytes_ > static_cast<int64_t>(buffer.size())) {
      throw std::out_of_range("the packed weights do not fit into the buffer");
    }
    packed_ = pointer<uint8_t>(buffer.address()) + offset;
    int64_t start = 0;
    for (Part& part : parts_) {
      part.start = start;
      part.stride = gated_ ? parts_[0].panel_bytes + parts_[1].panel_bytes : part.panel_bytes;
      start += gated_ ? part.panel_bytes : part.panels() * part.panel_bytes;
#pragma omp parallel for schedule(static) num_threads(variant_.threads)
      for (int64_t panel = 0; panel < part.panels(); panel++) {
        pack_panel(part.type, part.rows, part.num_outputs, k_, panel, address(part, panel));
      }
    }
  }

  int64_t num_bytes() const { return num_bytes_; }
  int64_t num_inputs() const { return k_; }
  int64_t num_outputs() const { return gated_ ? parts_[0].num_outputs : num_outputs_; }

  // x [num_rows, k]; with a norm x becomes x + delta, where there is a delta. A row of y holds the outputs of all
  // matrices one after the other, or those of a gated pair.
  void run(float* x, const float* delta, int64_t num_rows, float* y) const {
    if (packed_ == nullptr) throw std::logic_error("linear: the weights were not packed");
    if (num_rows == 0) return;
    thread_local std::vector<float> floats;
    thread_local std::vector<int8_t> codes;
    thread_local std::vector<int16_t> sums;
    const int64_t size = num_rows * k_, blocks_32 = size / 32, blocks_256 = size / 256;
    float* values = scratch(floats, size + blocks_32 + blocks_256);
    int8_t* code = scratch(codes, 2 * size);
    int16_t* sum = scratch(sums, 6 * blocks_32);
    const float* rows = norm_.empty() ? x : values;
    const Activations with_32 = {num_rows, k_, 32, rows, code, values + size, sum, sum + 2 * blocks_32};
    const Activations with_256 = {
        num_rows, k_, 256, rows, code + size, values + size + blocks_32, sum + 3 * blocks_32, sum + 5 * blocks_32};

    const int team = team_size(num_rows * num_bytes_, variant_.threads);
    thread_local std::vector<Share> shares;
    if (shares.size() < static_cast<size_t>(team)) shares = std::vector<Share>(team);
    Share* share = shares.data();
#pragma omp parallel num_threads(team)
    {
      const FloatMode mode;
      const Worker self = worker();
      share[self.index].set(num_units() * self.index / self.count, num_units() * (self.index + 1) / self.count);
      prefetch(self);
      prepare(self, x, delta, values, with_32, with_256);
#pragma omp barrier
      for (int other = 0; other < self.count; other++) {
        int64_t first, last;
        while (share[(self.index + other) % self.count].take(units_at_once(), other != 0, &first, &last)) {
          multiply(first, last, with_32, with_256, y);
        }
      }
    }
  }

 private:
  struct Part {
    WeightType type;
    const uint8_t* rows;
    int64_t num_outputs, panel_bytes;
    int64_t column;                 // where its outputs stand in a row
    int64_t start = 0, stride = 0;  // where its panels lie
    std::vector<float> bias;

    int64_t panels() const { return ceil_div(num_outputs, kLanes); }
  };

  uint8_t* address(const Part& part, int64_t panel) const {
    return packed_ + part.start + panel * part.stride;
  }

  Matrix matrix(const Part& part) const {
    return {part.type, address(part, 0), part.stride, part.num_outputs, part.bias.empty() ? nullptr : part.bias.data()};
  }

  // A unit of work is one panel of a matrix, or of a gated pair.
  int64_t num_units() const {
    if (gated_) return parts_[0].panels();
    int64_t count = 0;
    for (const Part& part : parts_) count += part.panels();
    return count;
  }

  int64_t units_at_once() const { return std::max<int64_t>(1, (1 << 17) / (num_bytes_ / num_units())); }

  // A worker's first lines are on their way while it prepares the rows.
  void prefetch(Worker self) const {
    const uint8_t* p = packed_ + num_bytes_ * self.index / self.count;
    for (int i = 0; i < kPrefetchBytes; i += 64) __builtin_prefetch(p + i, 0, 0);
  }

  void prepare(Worker self, float* x, const float* delta, float* values, const Activations& with_32,
               const Activations& with_256) const {
    const int64_t num_rows = with_32.num_rows;
    auto quantize = [&](int64_t part, int64_t num_parts, int64_t first_row, int64_t last_row) {
      for (const Activations* each : {&with_32, &with_256}) {
        if (each == &with_32 ? !uses_32_ : !uses_256_) continue;
        const int64_t blocks = k_ / each->block;
        variant_.kernels->quantize(*each, blocks * part / num_parts, blocks * (part + 1) / num_parts, first_row,
                                   last_row);
      }
    };
    if (norm_.empty()) return quantize(self.index, self.count, 0, num_rows);
    for (int64_t row = self.index; row < num_rows; row += self.count) {
      variant_.kernels->add_rms_norm(x + row * k_, delta == nullptr ? nullptr : delta + row * k_, norm_.data(), eps_, k_,
                                     values + row * k_);
      quantize(0, 1, row, row + 1);
    }
  }

  void multiply(int64_t first, int64_t last, const Activations& with_32, const Activations& with_256, float* y) const {
    auto input = [&](const Part& part) -> const Activations& {
      return block_shape(part.type).weights == 256 ? with_256 : with_32;
    };
    if (gated_) {
      variant_.kernels->gated_linear(matrix(parts_[0]), matrix(parts_[1]), first, last, input(parts_[0]),
                                     input(parts_[1]), {y, parts_[0].num_outputs});
      return;
    }
    int64_t start = 0;  // units of the parts before
    for (const Part& part : parts_) {
      const int64_t from = std::max(first, start), to = std::min(last, start + part.panels());
      if (from < to) {
        variant_.kernels->linear(matrix(part), from - start, to - start, input(part), {y + part.column, num_outputs_});
      }
      start += part.panels();
    }
  }

  Variant variant_;
  int64_t k_, num_bytes_ = 0, num_outputs_ = 0;
  std::vector<float> norm_;
  float eps_;
  bool gated_, uses_32_ = false, uses_256_ = false;
  std::vector<Part> parts_;
  uint8_t* packed_ = nullptr;
};

// The products of one layer, in their order.
struct DecoderLayer {
  const LinearLayer *qkv, *attention_output, *gate_up, *down;
};

// All layers of a model, so that a forward is one call.
class DecoderLayers {
 public:
  void add(const LinearLayer& qkv, const LinearLayer& attention_output, const LinearLayer& gate_up,
           const LinearLayer& down) {
    layers_.push_back({&qkv, &attention_output, &gate_up, &down});
  }

  // x [num_rows, hidden_size] goes through all layers, in place.
  void run(const Attention& attention, float* x, int64_t num_rows) const {
    if (layers_.empty()) throw std::logic_error("layers: there is none");
    const DecoderLayer& sizes = layers_.front();
    const int64_t qkv_size = num_rows * sizes.qkv->num_outputs(), delta_size = num_rows * sizes.down->num_outputs();
    const int64_t attended_size = num_rows * sizes.attention_output->num_inputs();
    thread_local std::vector<float> memory;
    float* qkv = scratch(memory, qkv_size + attended_size + delta_size + num_rows * sizes.down->num_inputs());
    float *attended = qkv + qkv_size, *delta = attended + attended_size, *gated = delta + delta_size;
    for (size_t i = 0; i < layers_.size(); i++) {
      const DecoderLayer& layer = layers_[i];
      layer.qkv->run(x, i == 0 ? nullptr : delta, num_rows, qkv);
      attention.run(static_cast<int64_t>(i), qkv, attended);
      layer.attention_output->run(attended, nullptr, num_rows, delta);
      layer.gate_up->run(x, delta, num_rows, gated);
      layer.down->run(gated, nullptr, num_rows, delta);
    }
    const FloatMode mode;
    for (int64_t i = 0; i < delta_size; i++) x[i] += delta[i];
  }

 private:
  std::vector<DecoderLayer> layers_;
};

// Rows of a file's matrix as float: y [num_ids, k]. Throws for an id beyond num_rows.
void embedding(int type, uintptr_t rows, int64_t num_rows, int64_t k, uintptr_t ids, int64_t num_ids, uintptr_t y) {
  const WeightType weight_type = static_cast<WeightType>(type);
  const BlockShape shape = block_shape(weight_type);
  const int64_t row_bytes = k / shape.weights * shape.file_bytes;
  const FloatMode mode;
  for (int64_t i = 0; i < num_ids; i++) {
    const int32_t id = pointer<const int32_t>(ids)[i];
    if (id < 0 || id >= num_rows) {
      throw std::out_of_range("embedding: there is no row " + std::to_string(id) + " among " + std::to_string(num_rows));
    }
    dequantize_row(weight_type, pointer<const uint8_t>(rows) + id * row_bytes, k, pointer<float>(y) + i * k);
  }
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available()) names.push_back(kernels->name);
  return names;
}

}  // namespace

NB_MODULE(_kernels, m) {
  nb::set_leak_warnings(false);  // what Python's caches hold to the end is no leak
  const auto free_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Buffer>(m, "Buffer")
      .def(nb::init<size_t>(), nb::arg("size"))
      .def_prop_ro("address", &Buffer::address)
      .def_prop_ro("size", &Buffer::size);
  nb::class_<Variant>(m, "Variant")
      .def(nb::init<const std::string&, int>(), nb::arg("isa"), nb::arg("threads"))
      .def("argmax", &Variant::argmax, nb::arg("x"), nb::arg("num_rows"), nb::arg("size"), free_gil)
      .def("log_sum_exp", &Variant::log_sum_exp, nb::arg("x"), nb::arg("num_rows"), nb::arg("size"), nb::arg("y"),
           free_gil)
      .def("dot_products", &Variant::dot_products, nb::arg("iterations"), free_gil)
      .def("read_memory", &Variant::read_memory, nb::arg("address"), nb::arg("size"), free_gil);
  nb::class_<Attention>(m, "Attention")
      .def(nb::init<const Variant&, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t,
                    uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t>(),
           nb::arg("variant"), nb::arg("positions"), nb::arg("slot_mapping"), nb::arg("query_start_loc"),
           nb::arg("seq_lens"), nb::arg("page_table"), nb::arg("cos"), nb::arg("sin"), nb::arg("keys"),
           nb::arg("values"), nb::arg("filled"), nb::arg("num_rows"), nb::arg("num_seqs"), nb::arg("max_pages"),
           nb::arg("num_positions"), nb::arg("num_pages"), nb::arg("page_size"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"))
      .def(
          "run",
          [](const Attention& self, int64_t layer, uintptr_t qkv, uintptr_t y) {
            self.run(layer, pointer<float>(qkv), pointer<float>(y));
          },
          nb::arg("layer"), nb::arg("qkv"), nb::arg("y"), free_gil);
  nb::class_<LinearLayer>(m, "LinearLayer")
      .def(nb::init<const Variant&, int64_t, uintptr_t, float, bool>(), nb::arg("variant"), nb::arg("k"),
           nb::arg("norm"), nb::arg("eps"), nb::arg("gated"))
      .def("add", &LinearLayer::add, nb::arg("type"), nb::arg("rows"), nb::arg("num_outputs"), nb::arg("bias"),
           free_gil)
      .def("pack", &LinearLayer::pack, nb::arg("buffer"), nb::arg("offset"), nb::keep_alive<1, 2>(), free_gil)
      .def(
          "run",
          [](const LinearLayer& self, uintptr_t x, uintptr_t delta, int64_t num_rows, uintptr_t y) {
            use_huge_pages(pointer<float>(y), num_rows * self.num_outputs() * sizeof(float));
            self.run(pointer<float>(x), pointer<const float>(delta), num_rows, pointer<float>(y));
          },
          nb::arg("x"), nb::arg("delta"), nb::arg("num_rows"), nb::arg("y"), free_gil)
      .def_prop_ro("num_bytes", &LinearLayer::num_bytes);
  nb::class_<DecoderLayers>(m, "DecoderLayers")
      .def(nb::init<>())
      .def("add", &DecoderLayers::add, nb::arg("qkv"), nb::arg("attention_output"), nb::arg("gate_up"), nb::arg("down"),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def(
          "run",
          [](const DecoderLayers& self, const Attention& attention, uintptr_t x, int64_t num_rows) {
            self.run(attention, pointer<float>(x), num_rows);
          },
          nb::arg("attention"), nb::arg("x"), nb::arg("num_rows"), free_gil);
  m.def("embedding", &embedding, nb::arg("type"), nb::arg("rows"), nb::arg("num_rows"), nb::arg("k"), nb::arg("ids"),
        nb::arg("num_ids"), nb::arg("y"), free_gil);
  m.def("instruction_sets", &instruction_sets);
}
