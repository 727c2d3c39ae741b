// Sixteen lanes in plain C++: what every variant's functions mean, and the path for CPUs without a variant.
#pragma once
#include <math.h>

#include <cstdint>
#include <cstring>

#include "half.h"

namespace {

constexpr int kTileRows = 4;  // rows for which an unpacked block is used at once: what the registers hold

struct f32x16 {
  float v[16];
};
struct i32x16 {
  int32_t v[16];
};
struct u8x64 {
  uint8_t v[64];  // four bytes for each lane
};

#define PILOTFISH_LANES(i) for (int i = 0; i < 16; i++)
#define PILOTFISH_BYTES(i) for (int i = 0; i < 64; i++)

inline f32x16 f32_set(float x) {
  f32x16 y;
  PILOTFISH_LANES(i) y.v[i] = x;
  return y;
}
inline f32x16 f32_zero() { return f32_set(0.0f); }
inline f32x16 f32_load(const float* p) {
  f32x16 y;
  std::memcpy(y.v, p, 64);
  return y;
}
inline void f32_store(float* p, f32x16 a) { std::memcpy(p, a.v, 64); }
inline f32x16 add(f32x16 a, f32x16 b) {
  PILOTFISH_LANES(i) a.v[i] += b.v[i];
  return a;
}
inline f32x16 mul(f32x16 a, f32x16 b) {
  PILOTFISH_LANES(i) a.v[i] *= b.v[i];
  return a;
}
inline f32x16 sub(f32x16 a, f32x16 b) {
  PILOTFISH_LANES(i) a.v[i] -= b.v[i];
  return a;
}
inline f32x16 div(f32x16 a, f32x16 b) {
  PILOTFISH_LANES(i) a.v[i] /= b.v[i];
  return a;
}
// The larger and the smaller of the two; b where either is NaN.
inline f32x16 larger(f32x16 a, f32x16 b) {
  PILOTFISH_LANES(i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline f32x16 smaller(f32x16 a, f32x16 b) {
  PILOTFISH_LANES(i) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
// max(a, |b|) for numbers; what a NaN gives is not defined.
inline f32x16 abs_max(f32x16 a, f32x16 b) {
  PILOTFISH_LANES(i) {
    const float magnitude = fabsf(b.v[i]);
    a.v[i] = a.v[i] > magnitude ? a.v[i] : magnitude;
  }
  return a;
}
// a * b + c and c - a * b, rounded once.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  PILOTFISH_LANES(i) c.v[i] = fmaf(a.v[i], b.v[i], c.v[i]);
  return c;
}
inline f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) {
  PILOTFISH_LANES(i) c.v[i] = fmaf(-a.v[i], b.v[i], c.v[i]);
  return c;
}

inline i32x16 i32_set(int32_t x) {
  i32x16 y;
  PILOTFISH_LANES(i) y.v[i] = x;
  return y;
}
inline i32x16 i32_zero() { return i32_set(0); }
inline i32x16 add(i32x16 a, i32x16 b) {
  PILOTFISH_LANES(i) a.v[i] += b.v[i];
  return a;
}
inline i32x16 mul(i32x16 a, i32x16 b) {
  PILOTFISH_LANES(i) a.v[i] *= b.v[i];
  return a;
}
inline f32x16 to_f32(i32x16 a) {
  f32x16 y;
  PILOTFISH_LANES(i) y.v[i] = static_cast<float>(a.v[i]);
  return y;
}
// To the nearest integer, ties to even (the default rounding mode); what a NaN gives is not defined.
inline i32x16 round_to_i32(f32x16 a) {
  i32x16 y;
  PILOTFISH_LANES(i) y.v[i] = a.v[i] == a.v[i] ? static_cast<int32_t>(nearbyintf(a.v[i])) : 0;
  return y;
}
// a * 2^n, where a is at least 0.5 and below 2, or NaN, and the result is a normal number.
inline f32x16 times_power_of_two(f32x16 a, i32x16 n) {
  PILOTFISH_LANES(i) {
    int32_t bits;
    std::memcpy(&bits, &a.v[i], 4);
    bits = static_cast<int32_t>(static_cast<uint32_t>(bits) + (static_cast<uint32_t>(n.v[i]) << 23));
    std::memcpy(&a.v[i], &bits, 4);
  }
  return a;
}
inline void i8_store(int8_t* p, i32x16 a) { PILOTFISH_LANES(i) p[i] = static_cast<int8_t>(a.v[i]); }
inline int32_t i8_sum16(const int8_t* p) {
  int32_t sum = 0;
  PILOTFISH_LANES(i) sum += p[i];
  return sum;
}
inline i32x16 i32_load_u8(const uint8_t* p) {
  i32x16 y;
  PILOTFISH_LANES(i) y.v[i] = p[i];
  return y;
}

// Sixteen float16.
inline f32x16 f32_load_f16(const uint8_t* p) {
  f32x16 y;
  PILOTFISH_LANES(i) {
    uint16_t half;
    std::memcpy(&half, p + 2 * i, 2);
    y.v[i] = half_to_float(half);
  }
  return y;
}

// Sixteen bfloat16.
inline f32x16 f32_load_bf16(const uint8_t* p) {
  f32x16 y;
  PILOTFISH_LANES(i) {
    uint16_t upper;
    std::memcpy(&upper, p + 2 * i, 2);
    y.v[i] = bf16_to_float(upper);
  }
  return y;
}
inline void f16_store(uint8_t* p, f32x16 a) {
  PILOTFISH_LANES(i) {
    const uint16_t half = float_to_half(a.v[i]);
    std::memcpy(p + 2 * i, &half, 2);
  }
}
// The lanes of each of 16 vectors added up by one fixed tree: lane i of the result is vector i's sum.
inline f32x16 fold_sums(const f32x16* a) {
  f32x16 y;
  PILOTFISH_LANES(i) {
    f32x16 lanes = a[i];
    for (int half = 8; half > 0; half /= 2) {
      for (int lane = 0; lane < half; lane++) lanes.v[lane] += lanes.v[lane + half];
    }
    y.v[i] = lanes.v[0];
  }
  return y;
}

// 16 pairs of bytes widened to 16 pairs of i16.
struct i16x32 {
  int16_t v[32];
};
inline i16x32 pairs_load_u8(const uint8_t* p) {
  i16x32 y;
  for (int i = 0; i < 32; i++) y.v[i] = p[i];
  return y;
}
inline i16x32 pairs_load_i8(const uint8_t* p) {
  i16x32 y;
  for (int i = 0; i < 32; i++) y.v[i] = static_cast<int8_t>(p[i]);
  return y;
}
inline i32x16 first_of_pairs(i16x32 a) {
  i32x16 y;
  PILOTFISH_LANES(i) y.v[i] = a.v[2 * i];
  return y;
}
inline i32x16 second_of_pairs(i16x32 a) {
  i32x16 y;
  PILOTFISH_LANES(i) y.v[i] = a.v[2 * i + 1];
  return y;
}
// acc[lane] += first of the lane's pair * x[0] + second * x[1].
inline i32x16 dot_pairs(i32x16 acc, i16x32 a, const int16_t* x) {
  PILOTFISH_LANES(i) acc.v[i] += a.v[2 * i] * x[0] + a.v[2 * i + 1] * x[1];
  return acc;
}

inline u8x64 u8_load(const uint8_t* p) {
  u8x64 y;
  std::memcpy(y.v, p, 64);
  return y;
}
inline u8x64 low_nibbles(u8x64 a) {
  PILOTFISH_BYTES(i) a.v[i] &= 15;
  return a;
}
inline u8x64 high_nibbles(u8x64 a) {
  PILOTFISH_BYTES(i) a.v[i] >>= 4;
  return a;
}
// Each byte moved so that its bit `shift` stands at bit 4, and there what `mask` keeps: of bits 4 … 7 only.
template <int shift>
inline u8x64 bits_at_4(u8x64 a, char mask) {
  PILOTFISH_BYTES(i) a.v[i] = static_cast<uint8_t>(((a.v[i] >> shift) << 4) & mask);
  return a;
}
inline u8x64 either(u8x64 a, u8x64 b) {
  PILOTFISH_BYTES(i) a.v[i] |= b.v[i];
  return a;
}

// acc[lane] += sum over the lane's four codes times the four activations at x. `dot4` may assume codes below 64,
// `dot4_wide` takes all of 0 … 255.
inline i32x16 dot4_wide(i32x16 acc, u8x64 codes, const int8_t* x) {
  PILOTFISH_LANES(i) {
    for (int t = 0; t < 4; t++) acc.v[i] += codes.v[4 * i + t] * x[t];
  }
  return acc;
}
inline i32x16 dot4(i32x16 acc, u8x64 codes, const int8_t* x) { return dot4_wide(acc, codes, x); }

#undef PILOTFISH_LANES
#undef PILOTFISH_BYTES

}  // namespace
