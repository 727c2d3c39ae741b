// Attention over a cache, for all rows of a forward: checks what it is given, and shares the work among threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "variants.h"

namespace {

// The RMS norms that each query and each key head of a layer goes through before it is rotated.
class HeadNorms {
 public:
  // query and key: float [head_dim].
  HeadNorms(uintptr_t query, float query_eps, uintptr_t key, float key_eps, int64_t head_dim)
      : query_(pointer<const float>(query), pointer<const float>(query) + head_dim),
        key_(pointer<const float>(key), pointer<const float>(key) + head_dim),
        query_eps_(query_eps),
        key_eps_(key_eps) {}

  int64_t head_dim() const { return static_cast<int64_t>(query_.size()); }

  // One row's query and key heads, in place.
  void apply(const Kernels& kernels, const AttentionBatch& batch, float* qkv) const {
    for (int64_t head = 0; head < batch.num_heads + batch.num_kv_heads; head++, qkv += head_dim()) {
      const bool is_query = head < batch.num_heads;
      kernels.add_rms_norm(qkv, nullptr, (is_query ? query_ : key_).data(), is_query ? query_eps_ : key_eps_, head_dim(),
                           qkv);
    }
  }

 private:
  std::vector<float> query_, key_;
  float query_eps_, key_eps_;
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

  // qkv [num_rows, (num_heads + 2 num_kv_heads) · head_dim], of which queries and keys are normed (norms: or null) and
  // rotated in place; y [num_rows, num_heads · head_dim].
  void run(int64_t layer, const HeadNorms* norms, float* qkv, float* y) const {
    require(norms == nullptr || norms->head_dim() == batch_.head_dim, "the head norms are of another size");
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
    const int count = team_size(batch_.num_rows * num_heads * longest_ * batch_.head_dim, variant_.threads);
    const int64_t own_size = num_heads / batch_.num_kv_heads *
                             (ceil_div(batch_.head_dim, kLanes) * kLanes + kAttentionChunk + kLanes * kLanes);
    thread_local std::vector<float> memory;
    float* largest = scratch(memory, results * (batch_.head_dim + 2) + count * own_size);
    const Chunks chunks = {largest, largest + results, largest + 2 * results, max_chunks};
    float* own = largest + results * (batch_.head_dim + 2);
    std::atomic<int64_t> next_task{0};
    team().run(count, [&](Worker self) {
      const FloatMode mode;
      for (int64_t row = self.index; row < batch_.num_rows; row += self.count) {
        if (norms != nullptr) norms->apply(*variant_.kernels, batch_, qkv + row * batch_.row_size());
        variant_.kernels->rotary_write(batch_, cache, row, qkv + row * batch_.row_size());
      }
      for (int64_t first = 0; first < batch_.num_rows; first += at_once) {
        self.barrier();  // all keys and values are written, and what the rows before gave is merged
        attend(self, next_task, cache, first, std::min(at_once, batch_.num_rows - first), qkv, chunks,
               own + self.index * own_size, y);
      }
    });
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

  // One worker's part of the rows first … first + count - 1: the tasks that it takes.
  void attend(Worker self, std::atomic<int64_t>& next_task, const LayerCache& cache, int64_t first, int64_t count,
              const float* qkv, const Chunks& chunks, float* own, float* y) const {
    const int64_t heads = batch_.num_heads, kv_heads = batch_.num_kv_heads, head_dim = batch_.head_dim;
    const int64_t group = heads / kv_heads, max_chunks = chunks.max_chunks;
    for (int64_t task; (task = next_task.fetch_add(1)) < count * kv_heads * max_chunks;) {
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
    self.barrier();
    if (self.index == 0) next_task.store(0);  // for the next rows
    for (int64_t task = self.index; task < count * heads; task += self.count) {
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

}  // namespace
