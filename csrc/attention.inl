// Norm, gate, rotary embedding and attention, written once over the sixteen lanes of a simd_*.h.
//
// Every float sum runs over 16 virtual lanes (element i belongs to lane i mod 16) in order, and the lanes are folded by
// one fixed tree. Attention adds up positions in their order. So no result depends on anything but its own row.

#include <cmath>

namespace {

// n < 16 values, the other lanes zero.
inline f32x16 f32_load_part(const float* p, int64_t n) {
  alignas(64) float lanes[kLanes] = {};
  std::memcpy(lanes, p, n * sizeof(float));
  return f32_load(lanes);
}
inline f32x16 f32_load_up_to(const float* p, int64_t n) { return n >= kLanes ? f32_load(p) : f32_load_part(p, n); }

inline void f32_store_up_to(float* p, int64_t n, f32x16 a) {
  if (n >= kLanes) return f32_store(p, a);
  alignas(64) float lanes[kLanes];
  f32_store(lanes, a);
  std::memcpy(p, lanes, n * sizeof(float));
}

inline float fold_sum(f32x16 a) {
  alignas(64) float lanes[kLanes];
  f32_store(lanes, a);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// e^x for x <= 88, within 2 units in the last place; below -86 the result is that of -86. A polynomial of our own, since
// libm differs from CPU to CPU. NaN gives NaN.
inline f32x16 exponential(f32x16 x) {
  x = smaller(f32_set(88.0f), larger(f32_set(-86.0f), x));
  const i32x16 n = round_to_i32(mul(x, f32_set(1.44269504f)));
  const f32x16 k = to_f32(n);
  f32x16 r = fnma(k, f32_set(0.693359375f), x);  // ln 2 in two parts, the first exact in few bits
  r = fnma(k, f32_set(-2.12194440e-4f), r);
  f32x16 p = f32_set(1.98756915e-4f);
  p = fma(p, r, f32_set(1.39819995e-3f));
  p = fma(p, r, f32_set(8.33345191e-3f));
  p = fma(p, r, f32_set(4.16657959e-2f));
  p = fma(p, r, f32_set(1.66666655e-1f));
  p = fma(p, r, f32_set(0.5f));
  p = fma(mul(r, r), p, add(r, f32_set(1.0f)));
  return times_power_of_two(p, n);
}

void rms_norm(const float* x, const float* weight, float eps, int64_t num_rows, int64_t size, float* y) {
  for (int64_t row = 0; row < num_rows; row++, x += size, y += size) {
    f32x16 squares = f32_zero();
    for (int64_t i = 0; i < size; i += kLanes) {
      const f32x16 values = f32_load_up_to(x + i, size - i);
      squares = fma(values, values, squares);
    }
    const f32x16 scale = f32_set(1.0f / std::sqrt(fold_sum(squares) / static_cast<float>(size) + eps));
    for (int64_t i = 0; i < size; i += kLanes) {
      const f32x16 normal = mul(f32_load_up_to(x + i, size - i), scale);
      f32_store_up_to(y + i, size - i, mul(normal, f32_load_up_to(weight + i, size - i)));
    }
  }
}

void silu_mul(const float* gate, const float* up, int64_t num_rows, int64_t size, float* y) {
  for (int64_t row = 0; row < num_rows; row++, gate += size, up += size, y += size) {
    for (int64_t i = 0; i < size; i += kLanes) {
      const f32x16 g = f32_load_up_to(gate + i, size - i);
      const f32x16 silu = div(g, add(f32_set(1.0f), exponential(sub(f32_zero(), g))));
      f32_store_up_to(y + i, size - i, mul(silu, f32_load_up_to(up + i, size - i)));
    }
  }
}

// Pairs (i, i + d/2) of a head turned by the angle of one position.
inline void rotate(const float* x, const float* cos, const float* sin, int64_t half, float* y) {
  for (int64_t i = 0; i < half; i++) {
    const float first = x[i], second = x[i + half];
    y[i] = first * cos[i] - second * sin[i];
    y[i + half] = second * cos[i] + first * sin[i];
  }
}

void rotary_write(const RotaryBatch& batch, const float* q, const float* k, const float* v, float* rotated_q) {
  const int64_t half = batch.head_dim / 2, kv_size = batch.num_kv_heads * batch.head_dim;
  for (int64_t row = 0; row < batch.num_rows; row++) {
    const float *cos = batch.cos + batch.positions[row] * half, *sin = batch.sin + batch.positions[row] * half;
    for (int64_t h = 0; h < batch.num_heads; h++, q += batch.head_dim, rotated_q += batch.head_dim) {
      rotate(q, cos, sin, half, rotated_q);
    }
    const int64_t slot = batch.slot_mapping[row];
    for (int64_t h = 0; h < batch.num_kv_heads; h++, k += batch.head_dim) {
      rotate(k, cos, sin, half, batch.keys + slot * kv_size + h * batch.head_dim);
    }
    std::memcpy(batch.values + slot * kv_size, v + row * kv_size, kv_size * sizeof(float));
    int32_t* filled = batch.filled + slot / batch.page_size;
    const int32_t end = static_cast<int32_t>(slot % batch.page_size + 1);
    *filled = *filled > end ? *filled : end;
  }
}

inline float dot(const float* a, const float* b, int64_t size) {
  f32x16 sum = f32_zero();
  for (int64_t i = 0; i < size; i += kLanes) {
    sum = fma(f32_load_up_to(a + i, size - i), f32_load_up_to(b + i, size - i), sum);
  }
  return fold_sum(sum);
}

// Scores to exp(score - largest); returns 1 / their sum. The row's end is filled up to 16 with scores that count nothing.
inline float softmax_weights(float* scores, int64_t length) {
  float largest = scores[0], poison = 0.0f;
  for (int64_t i = 0; i < length; i++) {
    largest = scores[i] > largest ? scores[i] : largest;
    poison += scores[i] * 0.0f;  // NaN as soon as a score is not finite
  }
  f32x16 sum = f32_zero();
  for (int64_t i = 0; i < length; i += kLanes) {
    f32x16 weights = exponential(sub(f32_load_up_to(scores + i, length - i), f32_set(largest)));
    if (length - i < kLanes) {
      alignas(64) float lanes[kLanes];
      f32_store(lanes, weights);
      for (int64_t lane = length - i; lane < kLanes; lane++) lanes[lane] = 0.0f;
      weights = f32_load(lanes);
    }
    f32_store(scores + i, weights);
    sum = add(sum, weights);
  }
  return 1.0f / (fold_sum(sum) + poison);
}

void attention(const AttentionBatch& batch, const float* q, int64_t sequence, int64_t row, int64_t kv_head,
               float* scores, float* y) {
  const int64_t group = batch.num_heads / batch.num_kv_heads, head_dim = batch.head_dim;
  const int64_t length = batch.seq_lens[sequence] - (batch.query_start_loc[sequence + 1] - row) + 1;
  const int64_t stride = (length + kLanes - 1) / kLanes * kLanes;
  const int32_t* pages = batch.page_table + sequence * batch.max_pages;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  const int64_t first = (row * batch.num_heads + kv_head * group) * head_dim;
  auto offset = [&](int64_t position) {
    const int64_t slot = pages[position / batch.page_size] * batch.page_size + position % batch.page_size;
    return (slot * batch.num_kv_heads + kv_head) * head_dim;
  };

  for (int64_t position = 0; position < length; position++) {
    const float* key = batch.keys + offset(position);
    for (int64_t h = 0; h < group; h++) {
      scores[h * stride + position] = dot(q + first + h * head_dim, key, head_dim) * scale;
    }
  }
  for (int64_t h = 0; h < group; h++) {
    const f32x16 inverse = f32_set(softmax_weights(scores + h * stride, length));
    for (int64_t i = 0; i < head_dim; i += kLanes) {
      f32x16 sum = f32_zero();
      for (int64_t position = 0; position < length; position++) {
        const f32x16 value = f32_load_up_to(batch.values + offset(position) + i, head_dim - i);
        sum = fma(f32_set(scores[h * stride + position]), value, sum);
      }
      f32_store_up_to(y + first + h * head_dim + i, head_dim - i, mul(sum, inverse));
    }
  }
}

}  // namespace
