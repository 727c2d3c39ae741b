// What the module and the variants share: weight types, and one table of functions for each instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

// The order of pilotfish.types.WeightType.
enum class WeightType : int {
  F32, F16, BF16,
  Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
  Q4_K, Q5_K, Q6_K,
  MLX4_32_F32, MLX4_32_F16, MLX4_32_BF16,
  MLX4_64_F32, MLX4_64_F16, MLX4_64_BF16,
  MLX4_128_F32, MLX4_128_F16, MLX4_128_BF16,
  MLX8_32_F32, MLX8_32_F16, MLX8_32_BF16,
  MLX8_64_F32, MLX8_64_F16, MLX8_64_BF16,
  MLX8_128_F32, MLX8_128_F16, MLX8_128_BF16,
};

constexpr int kLanes = 16;            // output rows of a panel: one for each lane
constexpr int kMaxRows = 64;          // rows of x that share one reading of a panel
constexpr int kAttentionChunk = 512;  // positions of a context that are summed up together
constexpr int kMaxHeadDim = 512;

struct BlockShape {
  int weights;      // weights of a block along a row
  int file_bytes;   // bytes of one row's block in a file
  int panel_bytes;  // bytes of a block of all 16 rows, repacked
};

// Functions here are static, since each variant compiles them for its own instruction set.

// An MLX type taken apart: scale and bias stand for `group` weights, of type `scale_type`.
struct MlxShape {
  int bits, group;
  WeightType scale_type;
  int scale_bytes;
};

static constexpr MlxShape mlx_shape(WeightType type) {
  const int index = static_cast<int>(type) - static_cast<int>(WeightType::MLX4_32_F32);
  const WeightType scale_type = static_cast<WeightType>(index % 3);
  return {index < 9 ? 4 : 8, 32 << (index / 3 % 3), scale_type, scale_type == WeightType::F32 ? 4 : 2};
}

static constexpr BlockShape block_shape(WeightType type) {
  switch (type) {
    case WeightType::F32: return {1, 4, kLanes * 4};
    case WeightType::F16: return {1, 2, kLanes * 2};
    case WeightType::BF16: return {1, 2, kLanes * 2};
    case WeightType::Q4_0: return {32, 18, kLanes * 18};
    case WeightType::Q4_1: return {32, 20, kLanes * 20};
    case WeightType::Q5_0: return {32, 22, kLanes * 22};
    case WeightType::Q5_1: return {32, 24, kLanes * 24};
    case WeightType::Q8_0: return {32, 34, kLanes * 34};
    case WeightType::Q4_K: return {256, 144, kLanes * 148};
    case WeightType::Q5_K: return {256, 176, kLanes * 180};
    case WeightType::Q6_K: return {256, 210, kLanes * 210};
    default: {
      const MlxShape shape = mlx_shape(type);
      const int bytes = 2 * shape.scale_bytes + shape.group * shape.bits / 8;
      return {shape.group, bytes, kLanes * bytes};
    }
  }
}

// The length of the blocks in which x is quantised for a type's weights; 0 for those that meet x as it is.
static constexpr int input_block(WeightType type) {
  const int weights = block_shape(type).weights;
  return weights == 1 ? 0 : weights == 256 ? 256 : 32;
}

// What a matrix product reads of x: the values, or int8 codes with one scale for each block. One block of all rows
// stands before the next, as a panel meets them.
struct Activations {
  int64_t num_rows, k;
  int64_t block;             // 32 or 256, where there are codes
  const float* values;       // [num_rows, k]
  int8_t* codes;             // [k / block, num_rows, block]
  float* scales;             // [k / block, num_rows]
  int16_t *sums16, *sums32;  // [k / block, num_rows, block / 16 and block / 32]: sums of codes
};

struct Matrix {
  WeightType type;
  const uint8_t* packed;  // panel i starts at i · stride
  int64_t stride, num_outputs;
  const float* bias;  // [num_outputs], or null
};

// Where outputs go: row r of a matrix starts at data + r · stride.
struct Output {
  float* data;
  int64_t stride;
};

// Weights are read once, in order, and asked for so many bytes ahead.
constexpr int kPrefetchBytes = 3072;

// The rows of one forward and what they see; see ForwardBatch in model/batch.py. A row of qkv holds its query heads, then
// its key heads, then its value heads.
struct AttentionBatch {
  const int32_t *positions, *slot_mapping;  // [num_rows]
  const int32_t* page_table;                // [num_seqs, max_pages]
  const float *cos, *sin;                   // [num_positions, head_dim / 2]
  int64_t num_rows, max_pages, page_size, num_heads, num_kv_heads, head_dim;

  int64_t row_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

// One layer's cache.
struct LayerCache {
  uint16_t *keys, *values;  // float16 [num_pages, page_size, num_kv_heads, head_dim]
  int32_t* filled;          // [num_pages]: slots written of each page
};

constexpr int64_t kPart = 64;  // logits whose largest is known: a search looks into few of these

// How logits become likelihoods: (logit - largest) · inverse is the exponent.
struct Temperature {
  double largest, inverse;
};

struct Kernels {
  const char* name;
  // One row: x += delta where there is one, y = x / sqrt(mean(x²) + eps) · weight.
  void (*add_rms_norm)(float* x, const float* delta, const float* weight, float eps, int64_t size, float* y);
  // Fills in the blocks first … last - 1 of all rows, or of one.
  void (*quantize)(const Activations& x, int64_t first_block, int64_t last_block, int64_t first_row, int64_t last_row);
  // The outputs of panels first … last - 1 of the packed matrix, 16 each.
  void (*linear)(const Matrix& matrix, int64_t first, int64_t last, const Activations& x, const Output& y);
  // The same for silu(gate · x) · (up · x).
  void (*gated_linear)(const Matrix& gate, const Matrix& up, int64_t first, int64_t last, const Activations& gate_x,
                       const Activations& up_x, const Output& y);
  // Rotates the query and key heads of one row in place, and writes its keys and values into the cache.
  void (*rotary_write)(const AttentionBatch& batch, const LayerCache& cache, int64_t row, float* qkv);
  // The query heads q [num_heads / num_kv_heads, head_dim] of one row that share a key/value head, over one chunk of
  // the context of a sequence. Per head: the largest score, the sum of exp(score - largest), and the sum of values so
  // weighted [head_dim]. `scratch` holds the heads, filled up to lanes, and for each head kAttentionChunk + 16² floats.
  void (*attention_chunk)(const AttentionBatch& batch, const LayerCache& cache, const float* q, int64_t sequence,
                          int64_t kv_head, int64_t first, int64_t last, float* scratch, float* largest, float* sums,
                          float* weighted);
  // Puts the chunks of one head together, in their order: y [head_dim].
  void (*attention_merge)(int64_t num_chunks, int64_t head_dim, const float* largest, const float* sums,
                          const float* weighted, int64_t stride, float* y);
  // The first of the largest values; -1 where there is a NaN, +infinity, or nothing above -infinity.
  int64_t (*argmax)(const float* x, int64_t size);
  float (*log_sum_exp)(const float* x, int64_t size);
  // The largest of each kPart values; false where there is a NaN.
  bool (*part_maxima)(const float* x, int64_t size, float* maxima);
  // The weights of all logits, stored where there is a place for them, and their sum over 16 lanes.
  double (*weigh)(const float* x, int64_t size, const Temperature& temperature, double* weights);
  // Moves the weights that are at least `least` to the front, in their order, and says of which ids they are: how many.
  int64_t (*keep)(double* weights, int64_t size, double least, int32_t* token_ids);
  // The place of the first largest log p + noise; see ops/sampling_reference.py.
  int64_t (*gumbel_argmax)(const int32_t* token_ids, const double* probs, int64_t count, uint64_t stream);
  // What the machine can do; see probe.inl.
  int64_t (*dot_products)(int64_t iterations);
  int64_t (*read_memory)(const uint8_t* data, int64_t size);
};

extern const Kernels kPortable;
#if defined(PILOTFISH_X86)
extern const Kernels kAvx2, kAvxVnni, kAvx512, kAvx512Vl;
#endif

// Rearranges file rows (all of one type, num_rows of k weights) into panels; rows beyond num_rows are zero.
void pack_panel(WeightType type, const uint8_t* rows, int64_t num_rows, int64_t k, int64_t panel, uint8_t* out);
// One file row as float32 [k].
void dequantize_row(WeightType type, const uint8_t* row, int64_t k, float* out);
