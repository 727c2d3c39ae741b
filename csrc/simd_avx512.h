// Sixteen lanes on AVX-512 with VNNI: one register for each vector. The meaning of each function stands in
// simd_portable.h; all variants give the same bits.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kTileRows = 8;

struct f32x16 {
  __m512 v;
};
struct i32x16 {
  __m512i v;
};
struct u8x64 {
  __m512i v;
};

inline f32x16 f32_zero() { return {_mm512_setzero_ps()}; }
inline f32x16 f32_set(float x) { return {_mm512_set1_ps(x)}; }
inline f32x16 f32_load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void f32_store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
inline f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 larger(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline f32x16 smaller(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 abs_max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, _mm512_abs_ps(b.v))}; }
inline f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
inline f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline f32x16 f32_load_f16(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

inline f32x16 f32_load_bf16(const uint8_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void f16_store(uint8_t* p, f32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline __m512 halves_added(f32x16 a, f32x16 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xee));
}
inline __m512 pairs_added(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}
inline f32x16 fold_sums(const f32x16* a) {
  __m512 four[4];
  for (int i = 0; i < 4; i++) {
    const __m512 low = halves_added(a[i], a[i + 4]), high = halves_added(a[i + 8], a[i + 12]);
    four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  }
  const __m512 low = pairs_added(four[0], four[1]), high = pairs_added(four[2], four[3]);
  return {_mm512_add_ps(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xdd))};
}

inline i32x16 round_to_i32(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline i32x16 i32_zero() { return {_mm512_setzero_si512()}; }
inline i32x16 i32_set(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline i32x16 add(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline i32x16 mul(i32x16 a, i32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline int32_t i8_sum16(const int8_t* p) {
  // psadbw adds unsigned bytes: each code plus 128.
  const __m128i raised = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-128));
  const __m128i sums = _mm_sad_epu8(raised, _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}
inline i32x16 i32_load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline f32x16 times_power_of_two(f32x16 a, i32x16 n) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(n.v, 23)))};
}
inline void i8_store(int8_t* p, i32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
inline i32x16 pairs_load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline i32x16 pairs_load_i8(const uint8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline i32x16 first_of_pairs(i32x16 a) { return {_mm512_srai_epi32(_mm512_slli_epi32(a.v, 16), 16)}; }
inline i32x16 second_of_pairs(i32x16 a) { return {_mm512_srai_epi32(a.v, 16)}; }
inline i32x16 dot_pairs(i32x16 acc, i32x16 a, const int16_t* x) {
  int32_t two;
  std::memcpy(&two, x, 4);
  return {_mm512_dpwssd_epi32(acc.v, a.v, _mm512_set1_epi32(two))};
}

inline u8x64 u8_load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline u8x64 low_nibbles(u8x64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline u8x64 high_nibbles(u8x64 a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
template <int shift>
inline u8x64 bits_at_4(u8x64 a, char mask) {
  __m512i moved;
  if constexpr (shift < 4) {
    moved = _mm512_slli_epi16(a.v, 4 - shift);
  } else {
    moved = _mm512_srli_epi16(a.v, shift - 4);
  }
  return {_mm512_and_si512(moved, _mm512_set1_epi8(mask))};
}
inline u8x64 either(u8x64 a, u8x64 b) { return {_mm512_or_si512(a.v, b.v)}; }

// acc[lane] += sum of 4 products of unsigned codes and the 4 signed activations at x.
inline i32x16 dot4(i32x16 acc, u8x64 codes, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return {_mm512_dpbusd_epi32(acc.v, codes.v, _mm512_set1_epi32(four))};
}

inline i32x16 dot4_wide(i32x16 acc, u8x64 codes, const int8_t* x) { return dot4(acc, codes, x); }

}  // namespace
