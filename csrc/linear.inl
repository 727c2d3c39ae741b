// Matrix products, written once over the sixteen lanes of a simd_*.h.
//
// A panel holds 16 output rows and a lane belongs to one of them, so no sum crosses lanes. Quantised weights: within a
// block all products are integers, whose sums have no order; blocks follow each other in file order. Float weights:
// four sums, each over every fourth input in order, added in a fixed way. What a row of x gives therefore does not
// depend on the rows beside it, on threads or on the instruction set.

namespace {

// Asking for each line a little ahead, spread over the arithmetic, overlaps the two: asking for a whole block at its
// start cost five rows of Q6_K 1.7 times the time. Nobody reads a line twice, so it need not displace what the caches
// hold.
inline u8x64 stream(const uint8_t* p) {
  __builtin_prefetch(p + kPrefetchBytes, 0, 0);
  return u8_load(p);
}

// acc += (d · scale) · sum, the end of every block.
inline f32x16 accumulate(f32x16 acc, f32x16 d, float scale, i32x16 sum) {
  return fma(mul(d, f32_set(scale)), to_f32(sum), acc);
}

// One block of x for a tile of rows, which stand one after the other.
template <int kBlock>
struct Tile {
  const int8_t* codes;
  const float* scales;
  const int16_t *sums16, *sums32;

  Tile(const Activations& x, int64_t row, int64_t block) {
    const int64_t place = block * x.num_rows + row;
    codes = x.codes + place * kBlock;
    scales = x.scales + place;
    sums16 = x.sums16 + place * (kBlock / 16);
    sums32 = x.sums32 + place * (kBlock / 32);
  }
};
using Tile32 = Tile<32>;
using Tile256 = Tile<256>;

// Codes 4g … 4g + 3 and 16 + 4g … of 32: low and high halves of one line.
template <int R, int kBlock>
inline void dot_line(const Tile<kBlock>& x, int first, u8x64 low, u8x64 high, i32x16* dot) {
  for (int r = 0; r < R; r++) {
    dot[r] = dot4(dot[r], low, x.codes + kBlock * r + first);
    dot[r] = dot4(dot[r], high, x.codes + kBlock * r + first + 16);
  }
}

// d f16[16], 8 groups of four codes [64], offset by 128
struct PanelQ8_0 {
  static constexpr WeightType type = WeightType::Q8_0;
  template <int R>
  static inline void block(const uint8_t* p, const Tile32& x, f32x16* acc) {
    i32x16 dot[R];
    for (int r = 0; r < R; r++) dot[r] = i32_set(-128 * static_cast<int32_t>(x.sums32[r]));
    for (int g = 0; g < 8; g++) {
      const u8x64 w = stream(p + 32 + 64 * g);
      for (int r = 0; r < R; r++) dot[r] = dot4_wide(dot[r], w, x.codes + 32 * r + 4 * g);
    }
    const f32x16 d = f32_load_f16(p);
    for (int r = 0; r < R; r++) acc[r] = accumulate(acc[r], d, x.scales[r], dot[r]);
  }
};

// d f16[16], minimum f16[16], nibbles [4][64]
struct PanelQ4_1 {
  static constexpr WeightType type = WeightType::Q4_1;
  template <int R>
  static inline void block(const uint8_t* p, const Tile32& x, f32x16* acc) {
    i32x16 dot[R];
    for (int r = 0; r < R; r++) dot[r] = i32_zero();
    for (int g = 0; g < 4; g++) {
      const u8x64 both = stream(p + 64 + 64 * g);
      dot_line<R>(x, 4 * g, low_nibbles(both), high_nibbles(both), dot);
    }
    const f32x16 d = f32_load_f16(p), minimum = f32_load_f16(p + 32);
    for (int r = 0; r < R; r++) {
      acc[r] = accumulate(acc[r], d, x.scales[r], dot[r]);
      acc[r] = accumulate(acc[r], minimum, x.scales[r], i32_set(x.sums32[r]));
    }
  }
};

// d f16[16], fifth bits [64] (bit g of a byte belongs to group g), nibbles [4][64]; codes are offset by 16
struct PanelQ5_0 {
  static constexpr WeightType type = WeightType::Q5_0;
  template <int g, int R>
  static inline void line(const uint8_t* p, const Tile32& x, u8x64 fifth, i32x16* dot) {
    const u8x64 both = stream(p + 96 + 64 * g);
    dot_line<R>(x, 4 * g, either(low_nibbles(both), bits_at_4<g>(fifth, 0x10)),
                either(high_nibbles(both), bits_at_4<g + 4>(fifth, 0x10)), dot);
  }
  template <int R>
  static inline void block(const uint8_t* p, const Tile32& x, f32x16* acc) {
    const u8x64 fifth = stream(p + 32);
    i32x16 dot[R];
    for (int r = 0; r < R; r++) dot[r] = i32_set(-16 * static_cast<int32_t>(x.sums32[r]));
    line<0, R>(p, x, fifth, dot);
    line<1, R>(p, x, fifth, dot);
    line<2, R>(p, x, fifth, dot);
    line<3, R>(p, x, fifth, dot);
    const f32x16 d = f32_load_f16(p);
    for (int r = 0; r < R; r++) acc[r] = accumulate(acc[r], d, x.scales[r], dot[r]);
  }
};

// d f16[16], dmin f16[16], scales u8[8][16], pairs of minima u8[4][16][2], nibbles [8][4][64]
struct PanelQ4_K {
  static constexpr WeightType type = WeightType::Q4_K;
  template <int R>
  static inline void block(const uint8_t* p, const Tile256& x, f32x16* acc) {
    const uint8_t *scales = p + 64, *minima = p + 192, *codes = p + 320;
    i32x16 sum[R];
    for (int r = 0; r < R; r++) sum[r] = i32_zero();
    for (int j = 0; j < 4; j++) {
      const auto pairs = pairs_load_u8(minima + 32 * j);
      for (int r = 0; r < R; r++) sum[r] = dot_pairs(sum[r], pairs, x.sums32 + 8 * r + 2 * j);
    }
    const f32x16 dmin = f32_load_f16(p + 32);
    for (int r = 0; r < R; r++) {
      acc[r] = fnma(mul(dmin, f32_set(x.scales[r])), to_f32(sum[r]), acc[r]);
      sum[r] = i32_zero();
    }
    for (int j = 0; j < 8; j++) {
      i32x16 dot[R];
      for (int r = 0; r < R; r++) dot[r] = i32_zero();
      for (int g = 0; g < 4; g++) {
        const u8x64 both = stream(codes + 256 * j + 64 * g);
        dot_line<R>(x, 32 * j + 4 * g, low_nibbles(both), high_nibbles(both), dot);
      }
      const i32x16 scale = i32_load_u8(scales + 16 * j);
      for (int r = 0; r < R; r++) sum[r] = add(sum[r], mul(dot[r], scale));
    }
    const f32x16 d = f32_load_f16(p);
    for (int r = 0; r < R; r++) acc[r] = accumulate(acc[r], d, x.scales[r], sum[r]);
  }
};

// d f16[16]; 8 pairs of sub-blocks: scales i8[16][2], then for each of the two nibbles [2][64] and high bits [64]: one
// sequential stream. Codes are offset by 32.
struct PanelQ6_K {
  static constexpr WeightType type = WeightType::Q6_K;
  template <int R>
  static inline void sub_block(const uint8_t* p, const Tile256& x, int first, i32x16 scale, i32x16* sum) {
    const u8x64 nibbles0 = stream(p), nibbles1 = stream(p + 64), high = stream(p + 128);
    const u8x64 w0 = either(low_nibbles(nibbles0), bits_at_4<0>(high, 0x30)),
                w1 = either(high_nibbles(nibbles0), bits_at_4<2>(high, 0x30)),
                w2 = either(low_nibbles(nibbles1), bits_at_4<4>(high, 0x30)),
                w3 = either(high_nibbles(nibbles1), bits_at_4<6>(high, 0x30));
    for (int r = 0; r < R; r++) {
      const int8_t* codes = x.codes + 256 * r + first;
      i32x16 dot = dot4(i32_zero(), w0, codes);
      dot = dot4(dot, w1, codes + 4);
      dot = dot4(dot, w2, codes + 8);
      dot = dot4(dot, w3, codes + 12);
      sum[r] = add(sum[r], mul(dot, scale));
    }
  }
  template <int R>
  static inline void block(const uint8_t* p, const Tile256& x, f32x16* acc) {
    const f32x16 d = f32_load_f16(p);
    p += 32;
    i32x16 sum[R], offset[R];
    for (int r = 0; r < R; r++) sum[r] = offset[r] = i32_zero();
    for (int j = 0; j < 8; j++, p += 416) {
      const auto scales = pairs_load_i8(p);
      for (int r = 0; r < R; r++) offset[r] = dot_pairs(offset[r], scales, x.sums16 + 16 * r + 2 * j);
      sub_block<R>(p + 32, x, 32 * j, first_of_pairs(scales), sum);
      sub_block<R>(p + 224, x, 32 * j + 16, second_of_pairs(scales), sum);
    }
    for (int r = 0; r < R; r++) {
      const i32x16 total = add(sum[r], mul(offset[r], i32_set(-32)));
      acc[r] = accumulate(acc[r], d, x.scales[r], total);
    }
  }
};

// Sums of R rows over the blocks first … last - 1 of one panel.
template <class Panel, int R>
inline void tile_blocks(const uint8_t* panel, const Activations& x, int64_t row, int64_t first, int64_t last, float* acc) {
  constexpr BlockShape shape = block_shape(Panel::type);
  f32x16 sums[R];
  for (int r = 0; r < R; r++) sums[r] = f32_load(acc + kLanes * r);
  for (int64_t block = first; block < last; block++) {
    Panel::template block<R>(panel + block * shape.panel_bytes, Tile<shape.weights>(x, row, block), sums);
  }
  for (int r = 0; r < R; r++) f32_store(acc + kLanes * r, sums[r]);
}

template <class Panel, int R = kTileRows>
inline void tile_of(int64_t num_rows, const uint8_t* panel, const Activations& x, int64_t row, int64_t first,
                    int64_t last, float* acc) {
  if (num_rows == R) return tile_blocks<Panel, R>(panel, x, row, first, last, acc);
  if constexpr (R > 1) tile_of<Panel, R - 1>(num_rows, panel, x, row, first, last, acc);
}

// One panel times rows first_row … of x; acc is [num_rows][16]. Where the rows need several tiles, each 256 weights are
// used by all of them before the next, so that they are read once.
template <class Panel>
void panel_rows(const uint8_t* panel, const Activations& x, int64_t first_row, int64_t num_rows, float* acc) {
  const int64_t num_blocks = x.k / x.block, num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  const int64_t step = num_tiles == 1 ? num_blocks : 256 / x.block;
  std::memset(acc, 0, num_rows * kLanes * sizeof(float));
  for (int64_t first = 0; first < num_blocks; first += step) {
    const int64_t last = first + step < num_blocks ? first + step : num_blocks;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
      const int64_t start = num_rows * tile / num_tiles, stop = num_rows * (tile + 1) / num_tiles;
      tile_of<Panel>(stop - start, panel, x, first_row + start, first, last, acc + kLanes * start);
    }
  }
}

template <WeightType type>
inline f32x16 load_weights(const uint8_t* p) {
  if constexpr (type == WeightType::F16) return f32_load_f16(p);
  if constexpr (type == WeightType::BF16) return f32_load_bf16(p);
  return f32_load(reinterpret_cast<const float*>(p));
}

// Float weights [k][16].
template <WeightType type, int R>
inline void dense_tile(const uint8_t* panel, const Activations& x, int64_t row, float* acc) {
  constexpr int bytes = block_shape(type).panel_bytes;
  f32x16 sums[4][R];
  for (int part = 0; part < 4; part++) {
    for (int r = 0; r < R; r++) sums[part][r] = f32_zero();
  }
  const float* values = x.values + row * x.k;
  int64_t i = 0;
  for (; i + 4 <= x.k; i += 4) {
    for (int part = 0; part < 4; part++) {
      const uint8_t* p = panel + (i + part) * bytes;
      __builtin_prefetch(p + kPrefetchBytes, 0, 0);
      const f32x16 w = load_weights<type>(p);
      for (int r = 0; r < R; r++) sums[part][r] = fma(w, f32_set(values[r * x.k + i + part]), sums[part][r]);
    }
  }
  for (int part = 0; i + part < x.k; part++) {
    const f32x16 w = load_weights<type>(panel + (i + part) * bytes);
    for (int r = 0; r < R; r++) sums[part][r] = fma(w, f32_set(values[r * x.k + i + part]), sums[part][r]);
  }
  for (int r = 0; r < R; r++) {
    f32_store(acc + kLanes * r, add(add(sums[0][r], sums[2][r]), add(sums[1][r], sums[3][r])));
  }
}

template <WeightType type>
void dense_rows(const uint8_t* panel, const Activations& x, int64_t first_row, int64_t num_rows, float* acc) {
  int64_t row = 0;
  for (; row + 3 <= num_rows; row += 3) dense_tile<type, 3>(panel, x, first_row + row, acc + kLanes * row);
  for (; row < num_rows; row++) dense_tile<type, 1>(panel, x, first_row + row, acc + kLanes * row);
}

void panel_product(WeightType type, const uint8_t* panel, const Activations& x, int64_t first_row, int64_t num_rows,
                   float* acc) {
  switch (type) {
    case WeightType::Q8_0: return panel_rows<PanelQ8_0>(panel, x, first_row, num_rows, acc);
    case WeightType::Q4_1: return panel_rows<PanelQ4_1>(panel, x, first_row, num_rows, acc);
    case WeightType::Q5_0: return panel_rows<PanelQ5_0>(panel, x, first_row, num_rows, acc);
    case WeightType::Q4_K: return panel_rows<PanelQ4_K>(panel, x, first_row, num_rows, acc);
    case WeightType::Q6_K: return panel_rows<PanelQ6_K>(panel, x, first_row, num_rows, acc);
    case WeightType::F32: return dense_rows<WeightType::F32>(panel, x, first_row, num_rows, acc);
    case WeightType::F16: return dense_rows<WeightType::F16>(panel, x, first_row, num_rows, acc);
    case WeightType::BF16: return dense_rows<WeightType::BF16>(panel, x, first_row, num_rows, acc);
  }
}

// Rows first_row … of one panel's outputs, the bias added: [num_rows][16]. Lanes beyond the matrix are zero.
void panel_outputs(const Matrix& matrix, int64_t panel, const Activations& x, int64_t first_row, int64_t num_rows,
                   float* out) {
  panel_product(matrix.type, matrix.packed + panel * matrix.stride, x, first_row, num_rows, out);
  if (matrix.bias == nullptr) return;
  const f32x16 bias = f32_load_up_to(matrix.bias + panel * kLanes, matrix.num_outputs - panel * kLanes);
  for (int64_t r = 0; r < num_rows; r++) f32_store(out + kLanes * r, add(f32_load(out + kLanes * r), bias));
}

// Runs `outputs` for some panels and rows, and stores what it gives. Several panels are stored at once: a row of many
// outputs is far from the next in memory, and worth touching only for more than one line.
template <class Outputs>
void for_panels(int64_t num_outputs, int64_t first, int64_t last, int64_t num_rows, const Output& y,
                Outputs outputs) {
  constexpr int64_t kAtOnce = 4;
  alignas(64) float out[kAtOnce][kMaxRows * kLanes];
  for (int64_t row = 0; row < num_rows; row += kMaxRows) {
    const int64_t count = num_rows - row < kMaxRows ? num_rows - row : kMaxRows;
    for (int64_t start = first; start < last; start += kAtOnce) {
      const int64_t panels = last - start < kAtOnce ? last - start : kAtOnce;
      for (int64_t i = 0; i < panels; i++) outputs(start + i, row, count, out[i]);
      for (int64_t r = 0; r < count; r++) {
        for (int64_t i = 0; i < panels; i++) {
          const int64_t column = (start + i) * kLanes;
          f32_store_up_to(y.data + (row + r) * y.stride + column, num_outputs - column, f32_load(out[i] + kLanes * r));
        }
      }
    }
  }
}

void linear(const Matrix& matrix, int64_t first, int64_t last, const Activations& x, const Output& y) {
  for_panels(matrix.num_outputs, first, last, x.num_rows, y, [&](int64_t panel, int64_t row, int64_t count, float* out) {
    panel_outputs(matrix, panel, x, row, count, out);
  });
}

void gated_linear(const Matrix& gate, const Matrix& up, int64_t first, int64_t last, const Activations& gate_x,
                  const Activations& up_x, const Output& y) {
  for_panels(gate.num_outputs, first, last, gate_x.num_rows, y, [&](int64_t panel, int64_t row, int64_t count, float* out) {
    alignas(64) float factors[kMaxRows * kLanes];
    panel_outputs(gate, panel, gate_x, row, count, out);
    panel_outputs(up, panel, up_x, row, count, factors);
    for (int64_t r = 0; r < count; r++) {
      f32_store(out + kLanes * r, silu_mul(f32_load(out + kLanes * r), f32_load(factors + kLanes * r)));
    }
  });
}

}  // namespace
