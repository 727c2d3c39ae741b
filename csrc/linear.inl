// Matrix product with quantised weights, written once over the sixteen lanes of a simd_*.h.
//
// A panel holds 16 output rows and a lane belongs to one of them, so no sum crosses lanes. Within a block all products
// are integers, whose sums have no order; blocks follow each other in file order. What a row of x gives therefore does
// not depend on the rows beside it, on threads or on the instruction set.

namespace {

// Weights are read once, in order. Asking for each line a little ahead, spread over the arithmetic, overlaps the two:
// asking for a whole block at its start cost five rows of Q6_K 1.7 times the time.
constexpr int kPrefetchBytes = 3072;

inline u8x64 stream(const uint8_t* p) {
  __builtin_prefetch(p + kPrefetchBytes);
  return u8_load(p);
}

template <int R>
struct Tile {
  const int8_t* codes[R];
  const int16_t* sums[R];
  float scales[R];

  Tile(const Activations& x, int64_t row, int64_t block, int weights, int sum_weights) {
    for (int r = 0; r < R; r++) {
      codes[r] = x.codes + (row + r) * x.k + block * weights;
      sums[r] = x.sums + (row + r) * (x.k / sum_weights) + block * (weights / sum_weights);
      scales[r] = x.scales[(row + r) * (x.k / weights) + block];
    }
  }
};

// acc += (d · scale) · sum, the end of every block.
inline f32x16 accumulate(f32x16 acc, f32x16 d, float scale, i32x16 sum) {
  return fma(mul(d, f32_set(scale)), to_f32(sum), acc);
}

// d f16[16], 8 groups of four codes [64], offset by 128
struct PanelQ8_0 {
  static constexpr WeightType type = WeightType::Q8_0;
  template <int R>
  static inline void block(const uint8_t* p, const Tile<R>& x, f32x16* acc) {
    i32x16 dot[R];
    for (int r = 0; r < R; r++) dot[r] = i32_set(-128 * static_cast<int32_t>(x.sums[r][0]));
    for (int g = 0; g < 8; g++) {
      const u8x64 w = stream(p + 32 + 64 * g);
      for (int r = 0; r < R; r++) dot[r] = dot4_wide(dot[r], w, x.codes[r] + 4 * g);
    }
    const f32x16 d = f32_load_f16(p);
    for (int r = 0; r < R; r++) acc[r] = accumulate(acc[r], d, x.scales[r], dot[r]);
  }
};

// The eight groups of a block of 32 from four loads: low halves are groups 0 … 3, high halves 4 … 7.
inline void load_nibbles(const uint8_t* p, u8x64* w) {
  for (int g = 0; g < 4; g++) {
    const u8x64 both = stream(p + 64 * g);
    w[g] = low_nibbles(both);
    w[g + 4] = high_nibbles(both);
  }
}

template <int R>
inline i32x16 dot32(i32x16 dot, const u8x64* w, const int8_t* x) {
  for (int g = 0; g < 8; g++) dot = dot4(dot, w[g], x + 4 * g);
  return dot;
}

// d f16[16], minimum f16[16], nibbles [4][64]
struct PanelQ4_1 {
  static constexpr WeightType type = WeightType::Q4_1;
  template <int R>
  static inline void block(const uint8_t* p, const Tile<R>& x, f32x16* acc) {
    u8x64 w[8];
    load_nibbles(p + 64, w);
    const f32x16 d = f32_load_f16(p), minimum = f32_load_f16(p + 32);
    for (int r = 0; r < R; r++) {
      acc[r] = accumulate(acc[r], d, x.scales[r], dot32<R>(i32_zero(), w, x.codes[r]));
      acc[r] = accumulate(acc[r], minimum, x.scales[r], i32_set(x.sums[r][0]));
    }
  }
};

// d f16[16], fifth bits [64] (bit g of a byte belongs to group g), nibbles [4][64]; codes are offset by 16
struct PanelQ5_0 {
  static constexpr WeightType type = WeightType::Q5_0;
  template <int R>
  static inline void block(const uint8_t* p, const Tile<R>& x, f32x16* acc) {
    const u8x64 fifth = stream(p + 32);
    u8x64 w[8];
    load_nibbles(p + 96, w);
    w[0] = either(w[0], bit_at_4<0>(fifth));
    w[1] = either(w[1], bit_at_4<1>(fifth));
    w[2] = either(w[2], bit_at_4<2>(fifth));
    w[3] = either(w[3], bit_at_4<3>(fifth));
    w[4] = either(w[4], bit_at_4<4>(fifth));
    w[5] = either(w[5], bit_at_4<5>(fifth));
    w[6] = either(w[6], bit_at_4<6>(fifth));
    w[7] = either(w[7], bit_at_4<7>(fifth));
    const f32x16 d = f32_load_f16(p);
    for (int r = 0; r < R; r++) {
      const i32x16 start = i32_set(-16 * static_cast<int32_t>(x.sums[r][0]));
      acc[r] = accumulate(acc[r], d, x.scales[r], dot32<R>(start, w, x.codes[r]));
    }
  }
};

// d f16[16], dmin f16[16], scales u8[8][16], pairs of minima u8[4][16][2], nibbles [8][4][64]
struct PanelQ4_K {
  static constexpr WeightType type = WeightType::Q4_K;
  template <int R>
  static inline void block(const uint8_t* p, const Tile<R>& x, f32x16* acc) {
    const uint8_t *scales = p + 64, *minima = p + 192, *codes = p + 320;
    i32x16 sum[R], low[R];
    for (int r = 0; r < R; r++) sum[r] = low[r] = i32_zero();
    for (int j = 0; j < 8; j++) {
      u8x64 w[8];
      load_nibbles(codes + 256 * j, w);
      const i32x16 scale = i32_load_u8(scales + 16 * j);
      for (int r = 0; r < R; r++) {
        sum[r] = add(sum[r], mul(dot32<R>(i32_zero(), w, x.codes[r] + 32 * j), scale));
      }
    }
    for (int j = 0; j < 4; j++) {
      const auto pairs = pairs_load_u8(minima + 32 * j);
      for (int r = 0; r < R; r++) {
        int32_t two_sums;
        std::memcpy(&two_sums, x.sums[r] + 2 * j, 4);
        low[r] = dot_pairs(low[r], pairs, two_sums);
      }
    }
    const f32x16 d = f32_load_f16(p), dmin = f32_load_f16(p + 32);
    for (int r = 0; r < R; r++) {
      acc[r] = accumulate(acc[r], d, x.scales[r], sum[r]);
      acc[r] = fnma(mul(dmin, f32_set(x.scales[r])), to_f32(low[r]), acc[r]);
    }
  }
};

// d f16[16]; 16 sub-blocks of scale i8[16], nibbles [2][64], high bits [64]: one sequential stream. Codes are offset by 32
struct PanelQ6_K {
  static constexpr WeightType type = WeightType::Q6_K;
  template <int R>
  static inline void block(const uint8_t* p, const Tile<R>& x, f32x16* acc) {
    const f32x16 d = f32_load_f16(p);
    p += 32;
    i32x16 sum[R];
    for (int r = 0; r < R; r++) sum[r] = i32_zero();
    for (int j = 0; j < 16; j++, p += 208) {
      const i32x16 scale = i32_load_i8(p);
      const u8x64 first = stream(p + 16), second = stream(p + 80), high = stream(p + 144);
      const u8x64 w0 = either(low_nibbles(first), two_bits_at_4<0>(high)),
                  w1 = either(high_nibbles(first), two_bits_at_4<2>(high)),
                  w2 = either(low_nibbles(second), two_bits_at_4<4>(high)),
                  w3 = either(high_nibbles(second), two_bits_at_4<6>(high));
      for (int r = 0; r < R; r++) {
        const int8_t* codes = x.codes[r] + 16 * j;
        i32x16 dot = i32_set(-32 * static_cast<int32_t>(x.sums[r][j]));
        dot = dot4(dot, w0, codes);
        dot = dot4(dot, w1, codes + 4);
        dot = dot4(dot, w2, codes + 8);
        dot = dot4(dot, w3, codes + 12);
        sum[r] = add(sum[r], mul(dot, scale));
      }
    }
    for (int r = 0; r < R; r++) acc[r] = accumulate(acc[r], d, x.scales[r], sum[r]);
  }
};

constexpr int kTileRows = 4;  // rows for which an unpacked block is used at once: what the registers hold

template <class Panel, int R>
inline void tile_block(const uint8_t* p, const Activations& x, int64_t row, int64_t block, float* acc) {
  constexpr BlockShape shape = block_shape(Panel::type);
  const Tile<R> tile(x, row, block, shape.weights, shape.sum_weights);
  f32x16 sums[R];
  for (int r = 0; r < R; r++) sums[r] = f32_load(acc + kLanes * r);
  Panel::template block<R>(p, tile, sums);
  for (int r = 0; r < R; r++) f32_store(acc + kLanes * r, sums[r]);
}

template <class Panel>
void panel_rows(const uint8_t* p, const Activations& x, int64_t first_row, int64_t num_rows, float* acc) {
  constexpr BlockShape shape = block_shape(Panel::type);
  for (int64_t block = 0; block < x.k / shape.weights; block++, p += shape.panel_bytes) {
    int64_t r = 0;
    for (; r + kTileRows <= num_rows; r += kTileRows) {
      tile_block<Panel, kTileRows>(p, x, first_row + r, block, acc + kLanes * r);
    }
    switch (num_rows - r) {
      case 3: tile_block<Panel, 3>(p, x, first_row + r, block, acc + kLanes * r); break;
      case 2: tile_block<Panel, 2>(p, x, first_row + r, block, acc + kLanes * r); break;
      case 1: tile_block<Panel, 1>(p, x, first_row + r, block, acc + kLanes * r); break;
    }
  }
}

template <class Panel>
void linear_panels(const uint8_t* packed, int64_t first, int64_t last, const Activations& x, int64_t num_rows, float* y,
                   int64_t num_outputs) {
  constexpr BlockShape shape = block_shape(Panel::type);
  const int64_t panel_bytes = x.k / shape.weights * shape.panel_bytes;
  for (int64_t panel = first; panel < last; panel++) {
    const int64_t columns = num_outputs - panel * kLanes < kLanes ? num_outputs - panel * kLanes : kLanes;
    for (int64_t row = 0; row < num_rows; row += kMaxRows) {
      const int64_t count = num_rows - row < kMaxRows ? num_rows - row : kMaxRows;
      alignas(64) float acc[kMaxRows * kLanes] = {};
      panel_rows<Panel>(packed + panel * panel_bytes, x, row, count, acc);
      for (int64_t r = 0; r < count; r++) {
        std::memcpy(y + (row + r) * num_outputs + panel * kLanes, acc + kLanes * r, columns * sizeof(float));
      }
    }
  }
}

void linear(WeightType type, const uint8_t* packed, int64_t first, int64_t last, const Activations& x, int64_t num_rows,
            float* y, int64_t num_outputs) {
  switch (type) {
    case WeightType::Q8_0: return linear_panels<PanelQ8_0>(packed, first, last, x, num_rows, y, num_outputs);
    case WeightType::Q4_1: return linear_panels<PanelQ4_1>(packed, first, last, x, num_rows, y, num_outputs);
    case WeightType::Q5_0: return linear_panels<PanelQ5_0>(packed, first, last, x, num_rows, y, num_outputs);
    case WeightType::Q4_K: return linear_panels<PanelQ4_K>(packed, first, last, x, num_rows, y, num_outputs);
    case WeightType::Q6_K: return linear_panels<PanelQ6_K>(packed, first, last, x, num_rows, y, num_outputs);
  }
}

// One block of x to codes −127 … 127. A NaN or an infinity makes the scale NaN, and with it every output of its row.
inline float quantize_block(const float* x, int weights, int8_t* codes) {
  f32x16 largest = f32_zero(), poison = f32_zero();
  for (int i = 0; i < weights; i += kLanes) {
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
  for (int i = 0; i < weights; i += kLanes) {
    i8_store(codes + i, round_to_i32(mul(f32_load(x + i), f32_set(inverse))));
  }
  return most / 127.0f;
}

void quantize(const float* x, int64_t num_rows, WeightType type, const Activations& out) {
  const BlockShape shape = block_shape(type);
  const int64_t num_blocks = num_rows * out.k / shape.weights;
  for (int64_t block = 0; block < num_blocks; block++) {
    out.scales[block] = quantize_block(x + block * shape.weights, shape.weights, out.codes + block * shape.weights);
  }
  for (int64_t i = 0; i < num_rows * out.k / shape.sum_weights; i++) {
    int32_t sum = 0;
    for (int j = 0; j < shape.sum_weights; j++) sum += out.codes[i * shape.sum_weights + j];
    out.sums[i] = static_cast<int16_t>(sum);
  }
}

}  // namespace
