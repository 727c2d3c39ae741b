// What the module and the variants share: weight types, and one table of functions for each instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

enum class WeightType : int { Q8_0 = 0, Q4_1 = 1, Q5_0 = 2, Q4_K = 3, Q6_K = 4 };

constexpr int kLanes = 16;  // output rows of a panel: one for each lane
constexpr int kMaxRows = 64;

struct BlockShape {
  int weights;         // weights of a block along a row
  int file_bytes;      // bytes of one row's block in a file
  int panel_bytes;     // bytes of a block of all 16 rows, repacked
  int sum_weights;     // activations for each sum that the block's offset needs: never fewer than 16
};

constexpr BlockShape block_shape(WeightType type) {
  switch (type) {
    case WeightType::Q8_0: return {32, 34, kLanes * 34, 32};
    case WeightType::Q4_1: return {32, 20, kLanes * 20, 32};
    case WeightType::Q5_0: return {32, 22, kLanes * 22, 32};
    case WeightType::Q4_K: return {256, 144, kLanes * 148, 32};
    case WeightType::Q6_K: return {256, 210, kLanes * 210, 16};
  }
  return {};
}

// x as int8 with one scale for each block: codes int8 [num_rows, k], scales float [num_rows, k / block],
// sums int16 [num_rows, k / sum_weights].
struct Activations {
  int8_t* codes;
  float* scales;
  int16_t* sums;
  int64_t k;
};

// One layer's cache and what of it each sequence holds; see ForwardBatch in model/batch.py.
struct AttentionBatch {
  const float* keys;  // [num_pages, page_size, num_kv_heads, head_dim], and so are values
  const float* values;
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int32_t* seq_lens;         // [num_seqs]
  const int32_t* page_table;       // [num_seqs, max_pages]
  int64_t num_seqs, max_pages, page_size, num_heads, num_kv_heads, head_dim;
};

// Where new rows stand, and the layer's cache that takes their keys and values.
struct RotaryBatch {
  const int32_t *positions, *slot_mapping;  // [num_rows]
  const float *cos, *sin;                   // [num_positions, head_dim / 2]
  float *keys, *values;                     // [num_slots, num_kv_heads, head_dim]
  int32_t* filled;                          // [num_pages]: slots written of each page
  int64_t num_rows, page_size, num_heads, num_kv_heads, head_dim;
};

struct Kernels {
  const char* name;
  void (*quantize)(const float* x, int64_t num_rows, WeightType type, const Activations& out);
  // y [num_rows, num_outputs]: the columns of panels first … last - 1 of the packed matrix, 16 each.
  void (*linear)(WeightType type, const uint8_t* packed, int64_t first, int64_t last, const Activations& x,
                 int64_t num_rows, float* y, int64_t num_outputs);
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t num_rows, int64_t size, float* y);
  void (*silu_mul)(const float* gate, const float* up, int64_t num_rows, int64_t size, float* y);
  void (*rotary_write)(const RotaryBatch& batch, const float* q, const float* k, const float* v, float* rotated_q);
  // One query row and one key/value head: the query heads that share it. `scores` holds num_heads / num_kv_heads rows
  // of at least seq_len, rounded up to 16.
  void (*attention)(const AttentionBatch& batch, const float* q, int64_t sequence, int64_t row, int64_t kv_head,
                    float* scores, float* y);
};

extern const Kernels kPortable;
#if defined(PILOTFISH_X86)
extern const Kernels kAvx2, kAvx512;
#endif

// Rearranges file rows (all of one type, num_rows of k weights) into panels; rows beyond num_rows are zero.
void pack_panel(WeightType type, const uint8_t* rows, int64_t num_rows, int64_t k, int64_t panel, uint8_t* out);
