// Matrix products, written once over the sixteen lanes of a simd_*.h.
//
// A panel holds 16 output rows and a lane belongs to one of them, so no sum crosses lanes. Quantised weights: within a
// block all products are integers, whose sums have no order; blocks follow each other in file order. Float weights:
// four sums, each over every fourth input in order, added in a fixed way. What a row of x gives therefore does not
// depend on the rows beside it, on threads or on the instruction set.

namespace {

template <class Panel, int R = kTileRows>
inline void tile_of(int64_t num_rows, const Panel& kind, const uint8_t* panel, const Activations& x, int64_t row,
                    int64_t first, int64_t last, float* acc) {
  if (num_rows == R) {
    f32x16 sums[R];
    for (int r = 0; r < R; r++) sums[r] = f32_load(acc + kLanes * r);
    add_blocks<R>(kind, panel, x, row, first, last, sums);
    for (int r = 0; r < R; r++) f32_store(acc + kLanes * r, sums[r]);
  } else if constexpr (R > 1) {
    tile_of<Panel, R - 1>(num_rows, kind, panel, x, row, first, last, acc);
  }
}

// One panel times rows first_row … of x; acc is [num_rows][16]. Where the rows need several tiles, each 256 weights are
// used by all of them before the next, so that they are read once.
template <class Panel>
void panel_rows(const Panel& kind, const uint8_t* panel, const Activations& x, int64_t first_row, int64_t num_rows,
                float* acc) {
  const int64_t num_blocks = x.k / kind.shape.weights, num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  const int64_t step = num_tiles == 1 ? num_blocks : 256 / kind.shape.weights;
  std::memset(acc, 0, num_rows * kLanes * sizeof(float));
  for (int64_t first = 0; first < num_blocks; first += step) {
    const int64_t last = first + step < num_blocks ? first + step : num_blocks;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
      const int64_t start = num_rows * tile / num_tiles, stop = num_rows * (tile + 1) / num_tiles;
      tile_of(stop - start, kind, panel, x, first_row + start, first, last, acc + kLanes * start);
    }
  }
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
      const f32x16 w = load_floats(type, p);
      for (int r = 0; r < R; r++) sums[part][r] = fma(w, f32_set(values[r * x.k + i + part]), sums[part][r]);
    }
  }
  for (int part = 0; i + part < x.k; part++) {
    const f32x16 w = load_floats(type, panel + (i + part) * bytes);
    for (int r = 0; r < R; r++) sums[part][r] = fma(w, f32_set(values[r * x.k + i + part]), sums[part][r]);
  }
  for (int r = 0; r < R; r++) {
    f32_store(acc + kLanes * r, add(add(sums[0][r], sums[2][r]), add(sums[1][r], sums[3][r])));
  }
}

// Four sums for each row: what the registers hold.
constexpr int kDenseRows = kTileRows == 8 ? 5 : 3;

template <WeightType type, int R = kDenseRows>
void dense_rows(const uint8_t* panel, const Activations& x, int64_t first_row, int64_t num_rows, float* acc) {
  int64_t row = 0;
  for (; row + R <= num_rows; row += R) dense_tile<type, R>(panel, x, first_row + row, acc + kLanes * row);
  if constexpr (R > 1) dense_rows<type, R - 1>(panel, x, first_row + row, num_rows - row, acc + kLanes * row);
}

void panel_product(WeightType type, const uint8_t* panel, const Activations& x, int64_t first_row, int64_t num_rows,
                   float* acc) {
  auto with = [&](const auto& kind) { panel_rows(kind, panel, x, first_row, num_rows, acc); };
  switch (type) {
    case WeightType::F32: return dense_rows<WeightType::F32>(panel, x, first_row, num_rows, acc);
    case WeightType::F16: return dense_rows<WeightType::F16>(panel, x, first_row, num_rows, acc);
    case WeightType::BF16: return dense_rows<WeightType::BF16>(panel, x, first_row, num_rows, acc);
    case WeightType::Q4_0: return with(PanelOffset<WeightType::Q4_0, 4>());
    case WeightType::Q4_1: return with(PanelMinimum<WeightType::Q4_1, 4>());
    case WeightType::Q5_0: return with(PanelOffset<WeightType::Q5_0, 5>());
    case WeightType::Q5_1: return with(PanelMinimum<WeightType::Q5_1, 5>());
    case WeightType::Q8_0: return with(PanelOffset<WeightType::Q8_0, 8>());
    case WeightType::Q4_K: return with(PanelK<WeightType::Q4_K, 4>());
    case WeightType::Q5_K: return with(PanelK<WeightType::Q5_K, 5>());
    case WeightType::Q6_K: return with(PanelQ6_K());
    default: return mlx_shape(type).bits == 4 ? with(PanelMlx<4>(type)) : with(PanelMlx<8>(type));
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
