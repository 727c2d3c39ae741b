// Sixteen lanes on AVX2, FMA and F16C: two registers for each vector. See simd_portable.h. A variant with 256-bit VNNI
// defines PILOTFISH_DPBUSD and PILOTFISH_DPWSSD, the intrinsics of its encoding, before it includes this file.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kTileRows = 4;

struct f32x16 {
  __m256 lo, hi;
};
struct i32x16 {
  __m256i lo, hi;
};
struct u8x64 {
  __m256i lo, hi;
};

inline __m256i load256(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m128i load128(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m128i load64(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }

inline f32x16 f32_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline f32x16 f32_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f32x16 f32_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void f32_store(float* p, f32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline f32x16 add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline f32x16 sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline f32x16 div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline f32x16 larger(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline f32x16 smaller(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline f32x16 abs_max(f32x16 a, f32x16 b) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_max_ps(a.lo, _mm256_andnot_ps(sign, b.lo)), _mm256_max_ps(a.hi, _mm256_andnot_ps(sign, b.hi))};
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 to_f32(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline f32x16 f32_load_f16(const uint8_t* p) {
  return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 16))};
}
inline __m256 widen_bf16(__m128i a) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16));
}
inline f32x16 f32_load_bf16(const uint8_t* p) { return {widen_bf16(load128(p)), widen_bf16(load128(p + 16))}; }
inline void f16_store(uint8_t* p, f32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline __m256 quarters_added(f32x16 a, f32x16 b) {
  const __m256 first = _mm256_add_ps(a.lo, a.hi), second = _mm256_add_ps(b.lo, b.hi);
  return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31));
}
inline __m256 pairs_added(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
}
inline __m256 fold_eight(const f32x16* a) {
  const __m256 low = pairs_added(quarters_added(a[0], a[4]), quarters_added(a[1], a[5]));
  const __m256 high = pairs_added(quarters_added(a[2], a[6]), quarters_added(a[3], a[7]));
  return _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd));
}
inline f32x16 fold_sums(const f32x16* a) { return {fold_eight(a), fold_eight(a + 8)}; }

inline i32x16 round_to_i32(f32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }

inline i32x16 i32_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline i32x16 i32_set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline i32x16 add(i32x16 a, i32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline i32x16 mul(i32x16 a, i32x16 b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
inline __m256 times_power_of_two(__m256 a, __m256i n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(n, 23)));
}
inline f32x16 times_power_of_two(f32x16 a, i32x16 n) {
  return {times_power_of_two(a.lo, n.lo), times_power_of_two(a.hi, n.hi)};
}
inline void i8_store(int8_t* p, i32x16 a) {
  alignas(32) int32_t lanes[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), a.lo);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 8), a.hi);
  for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(lanes[i]);
}
inline int32_t i8_sum16(const int8_t* p) {
  // psadbw adds unsigned bytes: each code plus 128.
  const __m128i raised = _mm_xor_si128(load128(reinterpret_cast<const uint8_t*>(p)), _mm_set1_epi8(-128));
  const __m128i sums = _mm_sad_epu8(raised, _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}
inline i32x16 i32_load_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(load64(p)), _mm256_cvtepu8_epi32(load64(p + 8))};
}
inline i32x16 pairs_load_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi16(load128(p)), _mm256_cvtepu8_epi16(load128(p + 16))};
}
inline i32x16 pairs_load_i8(const uint8_t* p) {
  return {_mm256_cvtepi8_epi16(load128(p)), _mm256_cvtepi8_epi16(load128(p + 16))};
}
inline __m256i first_of_pairs(__m256i a) { return _mm256_srai_epi32(_mm256_slli_epi32(a, 16), 16); }
inline i32x16 first_of_pairs(i32x16 a) { return {first_of_pairs(a.lo), first_of_pairs(a.hi)}; }
inline i32x16 second_of_pairs(i32x16 a) { return {_mm256_srai_epi32(a.lo, 16), _mm256_srai_epi32(a.hi, 16)}; }

inline u8x64 u8_load(const uint8_t* p) { return {load256(p), load256(p + 32)}; }
inline u8x64 masked(__m256i lo, __m256i hi, char mask) {
  const __m256i bits = _mm256_set1_epi8(mask);
  return {_mm256_and_si256(lo, bits), _mm256_and_si256(hi, bits)};
}
template <int shift>
inline u8x64 bits_at_4(u8x64 a, char mask) {
  if constexpr (shift < 4) {
    return masked(_mm256_slli_epi16(a.lo, 4 - shift), _mm256_slli_epi16(a.hi, 4 - shift), mask);
  } else {
    return masked(_mm256_srli_epi16(a.lo, shift - 4), _mm256_srli_epi16(a.hi, shift - 4), mask);
  }
}
inline u8x64 low_nibbles(u8x64 a) { return masked(a.lo, a.hi, 15); }
inline u8x64 high_nibbles(u8x64 a) { return masked(_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4), 15); }
inline u8x64 either(u8x64 a, u8x64 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }

// One register of each dot product.
#if defined(PILOTFISH_DPBUSD)
inline __m256i dot_pairs(__m256i acc, __m256i a, __m256i pair) { return PILOTFISH_DPWSSD(acc, a, pair); }
inline __m256i dot4(__m256i acc, __m256i codes, __m256i four) { return PILOTFISH_DPBUSD(acc, codes, four); }
inline __m256i dot4_wide(__m256i acc, __m256i codes, __m256i four) { return PILOTFISH_DPBUSD(acc, codes, four); }
#else
inline __m256i dot_pairs(__m256i acc, __m256i a, __m256i pair) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(a, pair));
}
inline __m256i dot4(__m256i acc, __m256i codes, __m256i four) {
  // Codes below 64: the 16-bit sums of two products stay within 2 * 63 * 127, so nothing saturates.
  return dot_pairs(acc, _mm256_maddubs_epi16(codes, four), _mm256_set1_epi16(1));
}
inline __m256i dot4_wide(__m256i acc, __m256i codes, __m256i four) {
  // The even and the odd bytes of each pair as 16-bit numbers.
  const __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(codes, 8);
  const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), x_odd = _mm256_srai_epi16(four, 8);
  return _mm256_add_epi32(acc, _mm256_add_epi32(_mm256_madd_epi16(even, x_even), _mm256_madd_epi16(odd, x_odd)));
}
#endif

inline i32x16 dot_pairs(i32x16 acc, i32x16 a, const int16_t* x) {
  int32_t two;
  std::memcpy(&two, x, 4);
  const __m256i pair = _mm256_set1_epi32(two);
  return {dot_pairs(acc.lo, a.lo, pair), dot_pairs(acc.hi, a.hi, pair)};
}
inline __m256i broadcast4(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}
inline i32x16 dot4(i32x16 acc, u8x64 codes, const int8_t* x) {
  const __m256i four = broadcast4(x);
  return {dot4(acc.lo, codes.lo, four), dot4(acc.hi, codes.hi, four)};
}
inline i32x16 dot4_wide(i32x16 acc, u8x64 codes, const int8_t* x) {
  const __m256i four = broadcast4(x);
  return {dot4_wide(acc.lo, codes.lo, four), dot4_wide(acc.hi, codes.hi, four)};
}

}  // namespace
