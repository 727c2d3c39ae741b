// The two 16-bit floats of model files as float32, and float16 from it, in plain C++.
#pragma once
#include <math.h>

#include <cstdint>
#include <cstring>

namespace {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half >> 15) << 31, exponent = (half >> 10) & 31, fraction = half & 1023;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (fraction << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  } else {  // subnormal: fraction * 2^-24, exact in float32
    const float value = ldexpf(static_cast<float>(fraction), -24);
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// bfloat16 is the upper half of float32.
inline float bf16_to_float(uint16_t upper) {
  const uint32_t bits = static_cast<uint32_t>(upper) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// To the nearest float16, ties to even; beyond the largest to infinity.
inline uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x1ff));
  if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);
  uint32_t kept, dropped, half;  // the fraction's bits that stay, those that go, and the middle between two results
  if (magnitude >= 0x38800000) {
    kept = (magnitude - 0x38000000) >> 13, dropped = magnitude & 0x1fff, half = 0x1000;
  } else {  // subnormal: in units of 2^-24
    const uint32_t shift = 126 - (magnitude >> 23), fraction = (magnitude & 0x7fffff) | 0x800000;
    if (shift > 24) return static_cast<uint16_t>(sign);
    kept = fraction >> shift, dropped = fraction & ((1u << shift) - 1), half = 1u << (shift - 1);
  }
  kept += dropped > half || (dropped == half && (kept & 1));
  return static_cast<uint16_t>(sign | kept);
}

}  // namespace
