// How each type of quantised weights lies in a panel, and what its blocks add to the sums of a tile of rows: see
// linear.inl.

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

template <int g, int R, int kBlock>
inline void dot_line_of_5_bits(const uint8_t* p, const Tile<kBlock>& x, int first, u8x64 fifth, i32x16* dot) {
  const u8x64 both = stream(p + 64 * g);
  dot_line<R>(x, first + 4 * g, either(low_nibbles(both), bits_at_4<g>(fifth, 0x10)),
              either(high_nibbles(both), bits_at_4<g + 4>(fifth, 0x10)), dot);
}

// 32 codes of kBits, met by those of x from `first` on. 4: nibbles [4][64]. 5: before them the fifth bits [64], of which
// bit g of a byte belongs to group g. 8: groups of four codes [8][64].
template <int kBits, int R, int kBlock>
inline void dot_32(const uint8_t* p, const Tile<kBlock>& x, int first, i32x16* dot) {
  if constexpr (kBits == 4) {
    for (int g = 0; g < 4; g++) {
      const u8x64 both = stream(p + 64 * g);
      dot_line<R>(x, first + 4 * g, low_nibbles(both), high_nibbles(both), dot);
    }
  } else if constexpr (kBits == 5) {
    const u8x64 fifth = stream(p);
    dot_line_of_5_bits<0, R>(p + 64, x, first, fifth, dot);
    dot_line_of_5_bits<1, R>(p + 64, x, first, fifth, dot);
    dot_line_of_5_bits<2, R>(p + 64, x, first, fifth, dot);
    dot_line_of_5_bits<3, R>(p + 64, x, first, fifth, dot);
  } else {
    for (int g = 0; g < 8; g++) {
      const u8x64 w = stream(p + 64 * g);
      for (int r = 0; r < R; r++) dot[r] = dot4_wide(dot[r], w, x.codes + kBlock * r + first + 4 * g);
    }
  }
}

// d f16[16], codes of kBits, offset by half of what they can say: Q4_0, Q5_0, Q8_0.
template <WeightType kType, int kBits>
struct PanelOffset {
  static constexpr BlockShape shape = block_shape(kType);
  template <int R>
  static inline void block(const uint8_t* p, const Tile32& x, f32x16* acc) {
    i32x16 dot[R];
    for (int r = 0; r < R; r++) dot[r] = i32_set(-(1 << (kBits - 1)) * static_cast<int32_t>(x.sums32[r]));
    dot_32<kBits, R>(p + 32, x, 0, dot);
    const f32x16 d = f32_load_f16(p);
    for (int r = 0; r < R; r++) acc[r] = accumulate(acc[r], d, x.scales[r], dot[r]);
  }
};

// d f16[16], minimum f16[16], codes of kBits: Q4_1, Q5_1.
template <WeightType kType, int kBits>
struct PanelMinimum {
  static constexpr BlockShape shape = block_shape(kType);
  template <int R>
  static inline void block(const uint8_t* p, const Tile32& x, f32x16* acc) {
    i32x16 dot[R];
    for (int r = 0; r < R; r++) dot[r] = i32_zero();
    dot_32<kBits, R>(p + 64, x, 0, dot);
    const f32x16 d = f32_load_f16(p), minimum = f32_load_f16(p + 32);
    for (int r = 0; r < R; r++) {
      acc[r] = accumulate(acc[r], d, x.scales[r], dot[r]);
      acc[r] = accumulate(acc[r], minimum, x.scales[r], i32_set(x.sums32[r]));
    }
  }
};

// d f16[16], dmin f16[16], scales u8[8][16], pairs of minima u8[4][16][2], eight times 32 codes of kBits: Q4_K, Q5_K.
template <WeightType kType, int kBits>
struct PanelK {
  static constexpr BlockShape shape = block_shape(kType);
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
      dot_32<kBits, R>(codes + 64 * kBits * j, x, 32 * j, dot);
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
  static constexpr BlockShape shape = block_shape(WeightType::Q6_K);
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

// Groups of MLX: scale [16], bias [16], and for each 32 weights of the group codes of kBits. How long a group is and what
// type its scales have is asked while running: each type as a template would be compiled nine times as often.
template <int kBits>
struct PanelMlx {
  BlockShape shape;
  MlxShape mlx;

  explicit PanelMlx(WeightType type) : shape(block_shape(type)), mlx(mlx_shape(type)) {}
};

inline f32x16 load_floats(WeightType type, const uint8_t* p) {
  if (type == WeightType::F16) return f32_load_f16(p);
  if (type == WeightType::BF16) return f32_load_bf16(p);
  return f32_load(reinterpret_cast<const float*>(p));
}

// Sums of R rows over the blocks first … last - 1 of one panel.
template <int R, class Panel>
inline void add_blocks(const Panel&, const uint8_t* panel, const Activations& x, int64_t row, int64_t first, int64_t last,
                       f32x16* sums) {
  constexpr BlockShape shape = Panel::shape;
  for (int64_t block = first; block < last; block++) {
    Panel::template block<R>(panel + block * shape.panel_bytes, Tile<shape.weights>(x, row, block), sums);
  }
}

template <int R, int kBits>
inline void add_blocks(const PanelMlx<kBits>& kind, const uint8_t* panel, const Activations& x, int64_t row,
                       int64_t first, int64_t last, f32x16* sums) {
  const int64_t parts = kind.mlx.group / 32;
  const uint8_t* p = panel + first * kind.shape.panel_bytes;
  for (int64_t part = first * parts; part < last * parts;) {
    const f32x16 scale = load_floats(kind.mlx.scale_type, p);
    const f32x16 bias = load_floats(kind.mlx.scale_type, p + kLanes * kind.mlx.scale_bytes);
    p += 2 * kLanes * kind.mlx.scale_bytes;
    for (const int64_t stop = part + parts; part < stop; part++, p += 64 * kBits) {
      const Tile32 tile(x, row, part);
      i32x16 dot[R];
      for (int r = 0; r < R; r++) dot[r] = i32_zero();
      dot_32<kBits, R>(p, tile, 0, dot);
      for (int r = 0; r < R; r++) {
        sums[r] = accumulate(sums[r], scale, tile.scales[r], dot[r]);
        sums[r] = accumulate(sums[r], bias, tile.scales[r], i32_set(tile.sums32[r]));
      }
    }
  }
}

}  // namespace
