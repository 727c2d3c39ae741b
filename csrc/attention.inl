// Rotary embedding with the write into the cache, and attention over the cache's pages.
//
// A context is cut at fixed absolute positions into chunks; within one, scores and weighted values are added up in the
// order of positions, and the chunks follow each other. So a row's result depends on its own context only.

namespace {

inline const uint8_t* bytes_of(const uint16_t* p) { return reinterpret_cast<const uint8_t*>(p); }

inline f32x16 f16_load_up_to(const uint16_t* p, int64_t n) {
  if (n >= kLanes) return f32_load_f16(bytes_of(p));
  uint16_t lanes[kLanes] = {};
  std::memcpy(lanes, p, n * sizeof(uint16_t));
  return f32_load_f16(bytes_of(lanes));
}

inline void f16_store_all(const float* x, int64_t size, uint16_t* y) {
  for (int64_t i = 0; i < size; i += kLanes) {
    uint16_t lanes[kLanes];
    f16_store(reinterpret_cast<uint8_t*>(lanes), f32_load_up_to(x + i, size - i));
    std::memcpy(y + i, lanes, (size - i < kLanes ? size - i : kLanes) * sizeof(uint16_t));
  }
}

// Pairs (i, i + d/2) of a head turned by the angle of one position.
inline void rotate(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i] + first * sin[i];
  }
}

void rotary_write(const AttentionBatch& batch, const LayerCache& cache, int64_t row, float* qkv) {
  const int64_t half = batch.head_dim / 2, kv_size = batch.num_kv_heads * batch.head_dim;
  const float *cos = batch.cos + batch.positions[row] * half, *sin = batch.sin + batch.positions[row] * half;
  for (int64_t h = 0; h < batch.num_heads + batch.num_kv_heads; h++) rotate(qkv + h * batch.head_dim, cos, sin, half);
  const float *k = qkv + batch.num_heads * batch.head_dim, *v = k + kv_size;
  const int64_t slot = batch.slot_mapping[row];
  f16_store_all(k, kv_size, cache.keys + slot * kv_size);
  f16_store_all(v, kv_size, cache.values + slot * kv_size);
}

// Scores to exp(score - largest), filled up to 16 with scores that count nothing.
inline void exponentials(float* scores, int64_t length, float* largest, float* sum) {
  f32x16 poison = f32_zero(), sums = f32_zero();
  *largest = largest_of(scores, length, poison);
  for (int64_t i = 0; i < length; i += kLanes) {
    const f32x16 weights =
        exponential(sub(f32_load_up_to(scores + i, length - i, -__builtin_inff()), f32_set(*largest)));
    f32_store(scores + i, weights);
    sums = add(sums, weights);
  }
  // An infinite score gives NaN, as a NaN does.
  *sum = fold_sum(sums) + fold_sum(poison) + (*largest - *largest);
}

// The sums of values, each times its weight, for kHeads heads: weights [kHeads][chunk], y [kHeads][head_dim].
template <int kMaxParts, int kHeads, class At>
inline void weighted_values(At at, const float* weights, int64_t length, int64_t head_dim, float* y) {
  f32x16 total[kHeads][kMaxParts];
  for (int h = 0; h < kHeads; h++) {
    for (int part = 0; part < kMaxParts; part++) total[h][part] = f32_zero();
  }
  for (int64_t i = 0; i < length; i++) {
    const uint16_t* value = at(i);
    for (int part = 0; part < kMaxParts && part * kLanes < head_dim; part++) {
      const f32x16 values = f16_load_up_to(value + part * kLanes, head_dim - part * kLanes);
      for (int h = 0; h < kHeads; h++) {
        total[h][part] = fma(f32_set(weights[h * kAttentionChunk + i]), values, total[h][part]);
      }
    }
  }
  for (int h = 0; h < kHeads; h++) {
    for (int part = 0; part < kMaxParts && part * kLanes < head_dim; part++) {
      f32_store_up_to(y + h * head_dim + part * kLanes, head_dim - part * kLanes, total[h][part]);
    }
  }
}

// kParts: head_dim / 16 where that is known when compiling, else 0.
template <int kParts>
void attention_chunk(const AttentionBatch& batch, const LayerCache& cache, const float* q, int64_t sequence,
                     int64_t kv_head, int64_t first, int64_t last, float* scratch, float* largest, float* sums,
                     float* weighted) {
  constexpr int kMaxParts = kParts ? kParts : kMaxHeadDim / kLanes;
  const int64_t group = batch.num_heads / batch.num_kv_heads, head_dim = kParts ? kParts * kLanes : batch.head_dim;
  const int64_t parts = kParts ? kParts : (head_dim + kLanes - 1) / kLanes, length = last - first;
  const int32_t* pages = batch.page_table + sequence * batch.max_pages;
  int32_t offsets[kAttentionChunk];  // slots of the positions
  for (int64_t i = 0; i < length; i++) {
    const int64_t position = first + i;
    offsets[i] = static_cast<int32_t>(pages[position / batch.page_size] * batch.page_size + position % batch.page_size);
  }
  auto at = [&](const uint16_t* store, int64_t i) {
    return store + (offsets[i] * batch.num_kv_heads + kv_head) * head_dim;
  };
  auto at_values = [&](int64_t i) { return at(cache.values, i); };

  // scratch: the query heads, scaled and filled up [group][parts][16]; scores [group][chunk]; 16 products [group][16][16]
  float *queries = scratch, *scores = queries + group * parts * kLanes, *products = scores + group * kAttentionChunk;
  const f32x16 scale = f32_set(1.0f / sqrtf(static_cast<float>(head_dim)));
  for (int64_t h = 0; h < group; h++) {
    for (int64_t part = 0; part < parts; part++) {
      const int64_t i = part * kLanes;
      f32_store(queries + (h * parts + part) * kLanes, mul(f32_load_up_to(q + h * head_dim + i, head_dim - i), scale));
    }
  }
  for (int64_t start = 0; start < length; start += kLanes) {
    for (int64_t i = 0; i < kLanes; i++) {
      const uint16_t* key = at(cache.keys, start + i < length ? start + i : start);
      f32x16 values[kMaxParts];
      for (int64_t part = 0; part < parts; part++) {
        values[part] = f16_load_up_to(key + part * kLanes, head_dim - part * kLanes);
      }
      for (int64_t h = 0; h < group; h++) {
        f32x16 product = f32_zero();
        for (int64_t part = 0; part < parts; part++) {
          product = fma(f32_load(queries + (h * parts + part) * kLanes), values[part], product);
        }
        f32_store(products + (h * kLanes + i) * kLanes, product);
      }
    }
    for (int64_t h = 0; h < group; h++) {
      f32x16 vectors[kLanes];
      for (int64_t i = 0; i < kLanes; i++) vectors[i] = f32_load(products + (h * kLanes + i) * kLanes);
      f32_store(scores + h * kAttentionChunk + start, fold_sums(vectors));
    }
  }
  for (int64_t h = 0; h < group; h++) exponentials(scores + h * kAttentionChunk, length, largest + h, sums + h);
  // As many heads share a value's conversion as there are registers for their sums.
  constexpr int64_t kHeads = kParts ? kTileRows * 2 / kParts : 1;
  for (int64_t h = 0; h < group; h += kHeads) {
    const int64_t heads = group - h < kHeads ? group - h : kHeads;
    const float* weights = scores + h * kAttentionChunk;
    if (heads == kHeads) {
      weighted_values<kMaxParts, kHeads>(at_values, weights, length, head_dim, weighted + h * head_dim);
    } else {
      for (int64_t i = 0; i < heads; i++) {
        weighted_values<kMaxParts, 1>(at_values, weights + i * kAttentionChunk, length, head_dim,
                                      weighted + (h + i) * head_dim);
      }
    }
  }
}

void attention_chunk(const AttentionBatch& batch, const LayerCache& cache, const float* q, int64_t sequence,
                     int64_t kv_head, int64_t first, int64_t last, float* scratch, float* largest, float* sums,
                     float* weighted) {
  switch (batch.head_dim) {
    case 64: return attention_chunk<4>(batch, cache, q, sequence, kv_head, first, last, scratch, largest, sums, weighted);
    case 128: return attention_chunk<8>(batch, cache, q, sequence, kv_head, first, last, scratch, largest, sums, weighted);
    default: return attention_chunk<0>(batch, cache, q, sequence, kv_head, first, last, scratch, largest, sums, weighted);
  }
}

void attention_merge(int64_t num_chunks, int64_t head_dim, const float* largest, const float* sums,
                     const float* weighted, int64_t stride, float* y) {
  float most = largest[0], sum = 0.0f;
  for (int64_t c = 1; c < num_chunks; c++) most = largest[c * stride] > most ? largest[c * stride] : most;
  for (int64_t c = 0; c < num_chunks; c++) sum += sums[c * stride] * exponential(largest[c * stride] - most);
  const f32x16 inverse = f32_set(1.0f / sum);
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    f32x16 total = f32_zero();
    for (int64_t c = 0; c < num_chunks; c++) {
      const f32x16 factor = f32_set(exponential(largest[c * stride] - most));
      total = fma(factor, f32_load_up_to(weighted + c * stride * head_dim + i, head_dim - i), total);
    }
    f32_store_up_to(y + i, head_dim - i, mul(total, inverse));
  }
}

}  // namespace
