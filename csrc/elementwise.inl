// What works along one row: norm, quantisation of activations, gate, exponential, argmax and log-sum-exp.
//
// Every float sum runs over 16 virtual lanes (element i belongs to lane i mod 16) in order, and the lanes are folded by
// one fixed tree. So no result depends on anything but its own row.

#include <math.h>  // sqrtf: std::sqrt is an inline function, and the linker would keep one copy for all variants

#include "float64.h"

namespace {

// At most n values, the other lanes `fill`.
inline f32x16 f32_load_up_to(const float* p, int64_t n, float fill = 0.0f) {
  if (n >= kLanes) return f32_load(p);
  alignas(64) float lanes[kLanes];
  f32_store(lanes, f32_set(fill));
  std::memcpy(lanes, p, n * sizeof(float));
  return f32_load(lanes);
}

inline void f32_store_up_to(float* p, int64_t n, f32x16 a) {
  if (n >= kLanes) return f32_store(p, a);
  alignas(64) float lanes[kLanes];
  f32_store(lanes, a);
  std::memcpy(p, lanes, n * sizeof(float));
}

// The tree of fold_sums, for one vector.
inline float fold_sum(f32x16 a) {
  alignas(64) float lanes[kLanes];
  f32_store(lanes, a);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// e^x for x <= 88, within 2 units in the last place; below -86 the result is that of -86. A polynomial of our own, since
// libm differs from CPU to CPU. NaN gives NaN, and 0 gives 1.
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

inline float exponential(float x) {
  alignas(64) float lanes[kLanes];
  f32_store(lanes, exponential(f32_set(x)));
  return lanes[0];
}

inline f32x16 silu_mul(f32x16 gate, f32x16 up) {
  return mul(div(gate, add(f32_set(1.0f), exponential(sub(f32_zero(), gate)))), up);
}

void add_rms_norm(float* x, const float* delta, const float* weight, float eps, int64_t size, float* y) {
  f32x16 squares = f32_zero();
  for (int64_t i = 0; i < size; i += kLanes) {
    f32x16 values = f32_load_up_to(x + i, size - i);
    if (delta != nullptr) {
      values = add(values, f32_load_up_to(delta + i, size - i));
      f32_store_up_to(x + i, size - i, values);
    }
    squares = fma(values, values, squares);
  }
  const f32x16 scale = f32_set(1.0f / sqrtf(fold_sum(squares) / static_cast<float>(size) + eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const f32x16 normal = mul(f32_load_up_to(x + i, size - i), scale);
    f32_store_up_to(y + i, size - i, mul(normal, f32_load_up_to(weight + i, size - i)));
  }
}

// One block of x to codes −127 … 127. A NaN or an infinity makes the scale NaN, and with it every output of its row.
inline float quantize_block(const float* x, int64_t weights, int8_t* codes) {
  f32x16 largest = f32_zero(), poison = f32_zero();
  for (int64_t i = 0; i < weights; i += kLanes) {
    const f32x16 values = f32_load(x + i);
    largest = abs_max(largest, values);
    poison = add(poison, mul(values, f32_zero()));  // stays 0 unless a value is not finite
  }
  alignas(64) float lanes[kLanes], poisoned[kLanes];
  f32_store(lanes, largest);
  f32_store(poisoned, poison);
  float most = 0.0f;
  bool finite = true;
  for (int i = 0; i < kLanes; i++) {
    finite = finite && poisoned[i] == 0.0f;
    most = lanes[i] > most ? lanes[i] : most;
  }
  // A block whose largest value is so small that 127 / most overflows counts as zero.
  const float inverse = 127.0f / most;
  if (!finite || !(inverse <= 3e38f)) {
    std::memset(codes, 0, weights);
    return finite ? 0.0f : __builtin_nanf("");
  }
  for (int64_t i = 0; i < weights; i += kLanes) {
    i8_store(codes + i, round_to_i32(mul(f32_load(x + i), f32_set(inverse))));
  }
  return most / 127.0f;
}

void quantize(const Activations& x, int64_t first_block, int64_t last_block, int64_t first_row, int64_t last_row) {
  for (int64_t block = first_block; block < last_block; block++) {
    for (int64_t row = first_row; row < last_row; row++) {
      const int64_t place = block * x.num_rows + row;
      int8_t* codes = x.codes + place * x.block;
      x.scales[place] = quantize_block(x.values + row * x.k + block * x.block, x.block, codes);
      int16_t *sums16 = x.sums16 + place * (x.block / 16), *sums32 = x.sums32 + place * (x.block / 32);
      for (int64_t i = 0; i < x.block / 16; i++) sums16[i] = static_cast<int16_t>(i8_sum16(codes + 16 * i));
      for (int64_t i = 0; i < x.block / 32; i++) sums32[i] = static_cast<int16_t>(sums16[2 * i] + sums16[2 * i + 1]);
    }
  }
}

inline float largest_lane(f32x16 a) {
  alignas(64) float lanes[kLanes];
  f32_store(lanes, a);
  float most = lanes[0];
  for (int i = 1; i < kLanes; i++) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

// NaN where the lane of x is NaN, else 0; infinities are fine.
inline f32x16 nan_or_zero(f32x16 x) {
  return mul(smaller(f32_set(3e38f), larger(f32_set(-3e38f), x)), f32_zero());
}

// The largest of size > 0 values, whose NaNs show in `poison`.
inline float largest_of(const float* x, int64_t size, f32x16& poison) {
  f32x16 most = f32_set(-__builtin_inff());
  for (int64_t i = 0; i < size; i += kLanes) {
    const f32x16 values = f32_load_up_to(x + i, size - i, -__builtin_inff());
    poison = add(poison, nan_or_zero(values));
    most = larger(most, values);
  }
  return largest_lane(most);
}

int64_t argmax(const float* x, int64_t size) {
  constexpr int64_t kPart = 1024;
  int64_t best_part = -1;
  float most = -__builtin_inff();
  f32x16 poison = f32_zero();
  for (int64_t start = 0; start < size; start += kPart) {
    const float value = largest_of(x + start, size - start < kPart ? size - start : kPart, poison);
    if (value > most) {
      most = value;
      best_part = start;
    }
  }
  if (best_part < 0 || most == __builtin_inff() || fold_sum(poison) != 0.0f) return -1;
  int64_t best = best_part;
  while (x[best] != most) best++;
  return best;
}

float log_sum_exp(const float* x, int64_t size) {
  f32x16 sum = f32_zero(), poison = f32_zero();
  const float most = largest_of(x, size, poison);
  // Nothing above -infinity, +infinity or a NaN: the value that the definition gives.
  if (fold_sum(poison) != 0.0f) return __builtin_nanf("");
  if (!(most - most == 0.0f)) return most;
  for (int64_t i = 0; i < size; i += kLanes) {
    // Lanes beyond the end count e^-86, which a sum of at least 1 does not feel.
    sum = add(sum, exponential(sub(f32_load_up_to(x + i, size - i, -__builtin_inff()), f32_set(most))));
  }
  return most + static_cast<float>(logarithm(fold_sum(sum)));
}

}  // namespace
