// Packed matrices that read the same rows, and a model's layers made of them.
#pragma once
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <vector>

#include "attention.h"

namespace {

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

  // A matrix of num_outputs × k weights, whose rows come with `pack`; bias: float [num_outputs], or 0.
  void add(int type, int64_t num_outputs, uintptr_t bias) {
    Part part;
    part.type = static_cast<WeightType>(type);
    part.num_outputs = num_outputs;
    const BlockShape shape = block_shape(part.type);
    part.panel_bytes = k_ / shape.weights * shape.panel_bytes;
    if (bias != 0) part.bias.assign(pointer<const float>(bias), pointer<const float>(bias) + num_outputs);
    uses_32_ = uses_32_ || input_block(part.type) == 32;
    uses_256_ = uses_256_ || input_block(part.type) == 256;
    part.column = num_outputs_;
    num_outputs_ += num_outputs;
    num_bytes_ += part.panels() * part.panel_bytes;
    parts_.push_back(std::move(part));
  }

  // Repacks the file's rows of each matrix that was added into num_bytes() bytes of a buffer that outlives this layer.
  // Gate and up lie panel by panel beside each other: the order in which they are read.
  void pack(const Buffer& buffer, int64_t offset, const std::vector<uintptr_t>& rows) {
    if (offset < 0 || offset + num_bytes_ > static_cast<int64_t>(buffer.size())) {
      throw std::out_of_range("the packed weights do not fit into the buffer");
    }
    if (rows.size() != parts_.size()) throw std::invalid_argument("linear: each matrix needs its rows");
    packed_ = pointer<uint8_t>(buffer.address()) + offset;
    int64_t start = 0;
    for (size_t i = 0; i < parts_.size(); i++) {
      Part& part = parts_[i];
      part.start = start;
      part.stride = gated_ ? parts_[0].panel_bytes + parts_[1].panel_bytes : part.panel_bytes;
      start += gated_ ? part.panel_bytes : part.panels() * part.panel_bytes;
      team().run(variant_.threads, [&](Worker self) {
        const int64_t first = part.panels() * self.index / self.count;
        for (int64_t panel = first; panel < part.panels() * (self.index + 1) / self.count; panel++) {
          pack_panel(part.type, pointer<const uint8_t>(rows[i]), part.num_outputs, k_, panel, address(part, panel));
        }
      });
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

    const int count = team_size(num_rows * num_bytes_, variant_.threads);
    thread_local std::vector<Share> shares;
    if (shares.size() < static_cast<size_t>(count)) shares = std::vector<Share>(count);
    Share* share = shares.data();
    team().run(count, [&](Worker self) {
      const FloatMode mode;
      share[self.index].set(num_units() * self.index / self.count, num_units() * (self.index + 1) / self.count);
      prefetch(self);
      prepare(self, x, delta, values, with_32, with_256);
      self.barrier();
      for (int other = 0; other < self.count; other++) {
        int64_t first, last;
        while (share[(self.index + other) % self.count].take(units_at_once(), other != 0, &first, &last)) {
          multiply(first, last, with_32, with_256, y);
        }
      }
    });
  }

 private:
  struct Part {
    WeightType type;
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
      return input_block(part.type) == 256 ? with_256 : with_32;
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

// One layer, in its order.
struct DecoderLayer {
  const LinearLayer* qkv;
  const HeadNorms* head_norms;  // or null
  const LinearLayer *attention_output, *gate_up, *down;
};

// All layers of a model, so that a forward is one call.
class DecoderLayers {
 public:
  void add(const LinearLayer& qkv, const HeadNorms* head_norms, const LinearLayer& attention_output,
           const LinearLayer& gate_up, const LinearLayer& down) {
    layers_.push_back({&qkv, head_norms, &attention_output, &gate_up, &down});
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
      attention.run(static_cast<int64_t>(i), layer.head_norms, qkv, attended);
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

}  // namespace
