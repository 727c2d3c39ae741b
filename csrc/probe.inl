// What a core can do at most, which a forward is held against: dot products in registers, and reading memory.
#include <utility>

namespace {

// The codes are new to the compiler each time, and neighbours differ in their activations: else a product could be
// computed once. Indices of a pack instead of a loop, since GCC keeps an array in memory that a loop walks.
template <size_t... C>
int64_t dot_products(int64_t iterations, std::index_sequence<C...>) {
  alignas(64) uint8_t bytes[64] = {};
  alignas(64) int8_t x[16] = {};
  asm volatile("" : "+m"(bytes), "+m"(x));
  u8x64 codes = u8_load(bytes);
  i32x16 sums[] = {i32_set(static_cast<int32_t>(C))...};
  for (int64_t i = 0; i < iterations; i++) {
    asm volatile("" : "+m"(codes));
    ((sums[C] = dot4(sums[C], codes, x + 4 * (C % 4))), ...);
  }
  i32x16 total = i32_zero();
  ((total = add(total, sums[C])), ...);
  asm volatile("" : : "m"(total));
  return iterations * static_cast<int64_t>(sizeof...(C)) * 4 * kLanes;
}

// `iterations` of `Chains` dot products: independent sums, enough to hide the instruction's latency and few enough for
// the registers. Returns the multiply-accumulates done.
template <int Chains>
int64_t dot_products(int64_t iterations) {
  return dot_products(iterations, std::make_index_sequence<Chains>());
}

// Loads every byte once, in order, and returns how many; `size` is a multiple of 512.
int64_t read_memory(const uint8_t* data, int64_t size) {
  constexpr int kLoads = 8;
  if (size == 0) return 0;
  u8x64 seen[kLoads];
  for (int i = 0; i < kLoads; i++) seen[i] = u8_load(data);
  const uint8_t* p = data;
  for (; p < data + size; p += 64 * kLoads) {
    for (int i = 0; i < kLoads; i++) {
      __builtin_prefetch(p + 64 * i + kPrefetchBytes);
      seen[i] = either(seen[i], u8_load(p + 64 * i));
    }
  }
  for (int i = 1; i < kLoads; i++) seen[0] = either(seen[0], seen[i]);
  const u8x64 all = seen[0];
  asm volatile("" : : "m"(all));
  return p - data;
}

}  // namespace
