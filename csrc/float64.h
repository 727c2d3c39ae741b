// Scalar functions that sampling and log-sum-exp stand on: exponential and logarithm in float64, and a hash.
//
// Plain IEEE products and sums without a fused one, so a compiler may run them in any number of lanes and every CPU gives
// the same bits; so does numpy (ops/sampling_reference.py).
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

inline uint64_t bits_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  return bits;
}

inline double from_bits(uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, 8);
  return x;
}

// Below every weight but 0.
constexpr double kSmallestWeight = 1e-300;

// e^y for y <= 0, within 4 units in the last place; 0 for y <= -650, a magnitude at which no float64 sum could feel it.
// e^0 is 1.
inline double exponential_or_zero(double y) {
  constexpr double kSmallest = -650.0, kShift = 6755399441055744.0;  // 1.5 · 2^52: adding it rounds to an integer
  const double kept = y > kSmallest ? y : kSmallest;
  const double shifted = kept * 1.4426950408889634 + kShift, n = shifted - kShift;
  // ln 2 in two parts, the first exact in few bits.
  const double r = (kept - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  // Taylor's series to r^12, in groups that do not wait for each other.
  const double square = r * r, fourth = square * square;
  const double low = (1.0 + r) + square * (0.5 + r * (1.0 / 6));
  const double middle = (1.0 / 24 + r * (1.0 / 120)) + square * (1.0 / 720 + r * (1.0 / 5040));
  const double high = (1.0 / 40320 + r * (1.0 / 362880)) + square * (1.0 / 3628800 + r * (1.0 / 39916800));
  const double p = low + fourth * (middle + fourth * (high + fourth * (1.0 / 479001600)));
  const double result = from_bits(bits_of(p) + (bits_of(shifted) << 52));
  return kept > kSmallest ? result : 0.0;
}

// The likelihood of a logit beside that of the largest one, which is 1.
inline double weight(const Temperature& temperature, float logit) {
  return exponential_or_zero((static_cast<double>(logit) - temperature.largest) * temperature.inverse);
}

// The tree that adds up the lanes of a sum.
inline double fold_lanes(double* lanes) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// ln x for normal x > 0, within some units in float64's last place: 2 atanh((m - 1) / (m + 1)) + n ln 2 where x = m 2^n
// and m is near 1.
inline double logarithm(double x) {
  int64_t n = static_cast<int64_t>(bits_of(x) >> 52) - 1023;
  double m = from_bits((bits_of(x) & 0xfffffffffffffULL) | 0x3ff0000000000000ULL);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    n++;
  }
  const double z = (m - 1.0) / (m + 1.0), square = z * z;
  double series = 0.0;
  for (int i = 21; i >= 1; i -= 2) series = series * square + 1.0 / i;
  return static_cast<double>(n) * 0.69314718055994531 + 2.0 * z * series;
}

// Output number `index` of the generator SplitMix64 that starts at `state` (Steele, Lea and Flood 2014, "Fast splittable
// pseudorandom number generators"): a hash of the two.
inline uint64_t hash(uint64_t state, uint64_t index) {
  uint64_t z = state + (index + 1) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

// (h + 1/2) · 2^-52 with the upper 52 bits h of a hash: above 0 and below 1, and exact, which 53 bits would not be.
inline double uniform(uint64_t hashed) { return from_bits((hashed >> 12) | 0x3ff0000000000000ULL) - (1.0 - 0x1p-53); }

}  // namespace
