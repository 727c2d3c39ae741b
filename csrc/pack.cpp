// From a file's rows to panels of 16 (the same bits, in the order in which the kernels read them), or to float32.
// Loading a model spends its time here: codes are moved four at a time, as the words that they are in a panel.
#include <algorithm>
#include <cstring>

#include "half.h"
#include "kernels.h"

namespace {

// One row's block, taken apart. `codes` are as the panels hold them, offsets included.
struct Block {
  uint8_t codes[256];
  uint8_t scales[16], minima[8];
  uint8_t d[4], minimum[4];  // as the file has them: 2 bytes, or 4
};

void read_nibbles(const uint8_t* q, uint8_t* codes, int half) {
  for (int i = 0; i < half; i++) {
    codes[i] = q[i] & 15;
    codes[half + i] = q[i] >> 4;
  }
}

uint32_t read_word(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

void write_word(uint8_t* p, uint32_t word) { std::memcpy(p, &word, 4); }

constexpr uint32_t kLowNibbles = 0x0f0f0f0f, kLowBits = 0x01010101, kLowPairs = 0x03030303;

// The product puts bits 0 … 3 at 0, 8, 16 and 24.
uint32_t spread_bits(uint32_t four) { return (four * 0x00204081) & kLowBits; }

// 12 bytes with 8 scales and 8 minima of 6 bits.
void read_scales_and_minima(const uint8_t* packed, Block& b) {
  for (int j = 0; j < 4; j++) {
    b.scales[j] = packed[j] & 63;
    b.minima[j] = packed[4 + j] & 63;
    b.scales[4 + j] = static_cast<uint8_t>((packed[8 + j] & 15) | ((packed[j] >> 6) << 4));
    b.minima[4 + j] = static_cast<uint8_t>((packed[8 + j] >> 4) | ((packed[4 + j] >> 6) << 4));
  }
}

// 32 fifth bits, one after the other.
void read_fifth_bits(const uint8_t* p, uint8_t* codes) {
  for (int g = 0; g < 8; g++) {
    const uint32_t fifth = spread_bits(read_word(p) >> (4 * g) & 15);
    write_word(codes + 4 * g, read_word(codes + 4 * g) | fifth << 4);
  }
}

float read_float(WeightType type, const uint8_t* p) {
  if (type == WeightType::F32) {
    float value;
    std::memcpy(&value, p, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, p, 2);
  return type == WeightType::F16 ? half_to_float(half) : bf16_to_float(half);
}

void read_mlx_codes(const MlxShape& shape, const uint8_t* p, uint8_t* codes) {
  if (shape.bits == 8) {
    std::memcpy(codes, p, shape.group);
    return;
  }
  for (int i = 0; i < shape.group; i += 4, p += 2) {  // neighbours share a byte, the first in its low half
    const uint32_t two = (p[0] | static_cast<uint32_t>(p[1]) << 16);
    write_word(codes + i, (two | two << 4) & kLowNibbles);
  }
}

inline Block read_block(WeightType type, const uint8_t* p) {
  Block b;
  std::memcpy(b.d, p, 2);
  std::memset(b.minimum, 0, 2);  // where a type has none
  switch (type) {
    case WeightType::F32:
    case WeightType::F16:
    case WeightType::BF16: break;  // no codes
    case WeightType::Q4_0: read_nibbles(p + 2, b.codes, 16); break;
    case WeightType::Q4_1:
      std::memcpy(b.minimum, p + 2, 2);
      read_nibbles(p + 4, b.codes, 16);
      break;
    case WeightType::Q5_0:
      read_nibbles(p + 6, b.codes, 16);
      read_fifth_bits(p + 2, b.codes);
      break;
    case WeightType::Q5_1:
      std::memcpy(b.minimum, p + 2, 2);
      read_nibbles(p + 8, b.codes, 16);
      read_fifth_bits(p + 4, b.codes);
      break;
    case WeightType::Q8_0:
      for (int i = 0; i < 32; i++) b.codes[i] = static_cast<uint8_t>(p[2 + i] ^ 0x80);
      break;
    case WeightType::Q4_K:
      std::memcpy(b.minimum, p + 2, 2);
      read_scales_and_minima(p + 4, b);
      for (int c = 0; c < 4; c++) read_nibbles(p + 16 + 32 * c, b.codes + 64 * c, 32);
      break;
    case WeightType::Q5_K:
      std::memcpy(b.minimum, p + 2, 2);
      read_scales_and_minima(p + 4, b);
      for (int c = 0; c < 4; c++) read_nibbles(p + 48 + 32 * c, b.codes + 64 * c, 32);
      for (int j = 0; j < 8; j++) {
        for (int i = 0; i < 32; i++) b.codes[32 * j + i] |= static_cast<uint8_t>((p[16 + i] >> j & 1) << 4);
      }
      break;
    case WeightType::Q6_K:
      std::memcpy(b.d, p + 208, 2);
      std::memcpy(b.scales, p + 192, 16);
      for (int h = 0; h < 2; h++) {
        const uint8_t *low = p + 64 * h, *high = p + 128 + 32 * h;
        for (int i = 0; i < 32; i++) {
          uint8_t* codes = b.codes + 128 * h + i;
          codes[0] = static_cast<uint8_t>((low[i] & 15) | ((high[i] & 3) << 4));
          codes[32] = static_cast<uint8_t>((low[32 + i] & 15) | (((high[i] >> 2) & 3) << 4));
          codes[64] = static_cast<uint8_t>((low[i] >> 4) | (((high[i] >> 4) & 3) << 4));
          codes[96] = static_cast<uint8_t>((low[32 + i] >> 4) | (((high[i] >> 6) & 3) << 4));
        }
      }
      break;
    default: {
      const MlxShape shape = mlx_shape(type);
      std::memcpy(b.d, p, shape.scale_bytes);
      std::memcpy(b.minimum, p + shape.scale_bytes, shape.scale_bytes);
      read_mlx_codes(shape, p + 2 * shape.scale_bytes, b.codes);
    }
  }
  return b;
}

// 32 codes of one lane into [4][64]: groups 0 … 3 in low halves, 4 … 7 in high halves.
void put_nibbles(const uint8_t* codes, uint8_t* out) {
  for (int g = 0; g < 4; g++) {
    const uint32_t low = read_word(codes + 4 * g), high = read_word(codes + 16 + 4 * g);
    write_word(out + 64 * g, (low & kLowNibbles) | ((high & kLowNibbles) << 4));
  }
}

// The same with their fifth bits before them: [64] and [4][64].
void put_5_bits(const uint8_t* codes, uint8_t* out) {
  uint32_t bits = 0;
  for (int g = 0; g < 8; g++) bits |= ((read_word(codes + 4 * g) >> 4) & kLowBits) << g;
  write_word(out, bits);
  put_nibbles(codes, out + 64);
}

// 32 codes of one lane into [8][64].
void put_bytes(const uint8_t* codes, uint8_t* out) {
  for (int g = 0; g < 8; g++) write_word(out + 64 * g, read_word(codes + 4 * g));
}

inline void put_lane(WeightType type, const Block& b, int lane, uint8_t* out) {
  uint8_t* const words = out + 4 * lane;
  auto put_d_and_minimum = [&](int bytes) {
    std::memcpy(out + bytes * lane, b.d, bytes);
    std::memcpy(out + bytes * (kLanes + lane), b.minimum, bytes);
  };
  auto put_scales_and_minima = [&] {
    for (int j = 0; j < 8; j++) {
      out[64 + 16 * j + lane] = b.scales[j];
      out[192 + 32 * (j / 2) + 2 * lane + j % 2] = b.minima[j];
    }
  };
  switch (type) {
    case WeightType::F32:
    case WeightType::F16:
    case WeightType::BF16: break;  // pack_panel copies these
    case WeightType::Q4_0:
      std::memcpy(out + 2 * lane, b.d, 2);
      put_nibbles(b.codes, words + 32);
      break;
    case WeightType::Q4_1:
      put_d_and_minimum(2);
      put_nibbles(b.codes, words + 64);
      break;
    case WeightType::Q5_0:
      std::memcpy(out + 2 * lane, b.d, 2);
      put_5_bits(b.codes, words + 32);
      break;
    case WeightType::Q5_1:
      put_d_and_minimum(2);
      put_5_bits(b.codes, words + 64);
      break;
    case WeightType::Q8_0:
      std::memcpy(out + 2 * lane, b.d, 2);
      put_bytes(b.codes, words + 32);
      break;
    case WeightType::Q4_K:
      put_d_and_minimum(2);
      put_scales_and_minima();
      for (int j = 0; j < 8; j++) put_nibbles(b.codes + 32 * j, words + 320 + 256 * j);
      break;
    case WeightType::Q5_K:
      put_d_and_minimum(2);
      put_scales_and_minima();
      for (int j = 0; j < 8; j++) put_5_bits(b.codes + 32 * j, words + 320 + 320 * j);
      break;
    case WeightType::Q6_K:
      std::memcpy(out + 2 * lane, b.d, 2);
      for (int j = 0; j < 16; j++) {
        uint8_t *pair = out + 32 + 416 * (j / 2), *lines = pair + 32 + 192 * (j % 2) + 4 * lane;
        uint32_t codes[4], high = 0;
        for (int g = 0; g < 4; g++) {
          codes[g] = read_word(b.codes + 16 * j + 4 * g);
          high |= ((codes[g] >> 4) & kLowPairs) << (2 * g);
        }
        pair[2 * lane + j % 2] = b.scales[j];
        write_word(lines, (codes[0] & kLowNibbles) | ((codes[1] & kLowNibbles) << 4));
        write_word(lines + 64, (codes[2] & kLowNibbles) | ((codes[3] & kLowNibbles) << 4));
        write_word(lines + 128, high);
      }
      break;
    default: {
      const MlxShape shape = mlx_shape(type);
      put_d_and_minimum(shape.scale_bytes);
      for (int i = 0; i < shape.group; i += 32) {
        uint8_t* codes = words + 2 * kLanes * shape.scale_bytes + 2 * shape.bits * i;
        shape.bits == 4 ? put_nibbles(b.codes + i, codes) : put_bytes(b.codes + i, codes);
      }
    }
  }
}

}  // namespace

void dequantize_row(WeightType type, const uint8_t* row, int64_t k, float* out) {
  const BlockShape shape = block_shape(type);
  for (int64_t start = 0; start < k; start += shape.weights, row += shape.file_bytes, out += shape.weights) {
    if (shape.weights == 1) {
      *out = read_float(type, row);
      continue;
    }
    const Block b = read_block(type, row);
    const WeightType scale_type = type < WeightType::MLX4_32_F32 ? WeightType::F16 : mlx_shape(type).scale_type;
    const float d = read_float(scale_type, b.d), minimum = read_float(scale_type, b.minimum);
    for (int i = 0; i < shape.weights; i++) {
      const float code = b.codes[i];
      switch (type) {
        case WeightType::Q4_0: out[i] = d * (code - 8.0f); break;
        case WeightType::Q5_0: out[i] = d * (code - 16.0f); break;
        case WeightType::Q8_0: out[i] = d * (code - 128.0f); break;
        case WeightType::Q4_K:
        case WeightType::Q5_K: out[i] = d * b.scales[i / 32] * code - minimum * b.minima[i / 32]; break;
        case WeightType::Q6_K: out[i] = d * static_cast<int8_t>(b.scales[i / 16]) * (code - 32.0f); break;
        default: out[i] = d * code + minimum;
      }
    }
  }
}

void pack_panel(WeightType type, const uint8_t* rows, int64_t num_rows, int64_t k, int64_t panel, uint8_t* out) {
  const BlockShape shape = block_shape(type);
  const int64_t num_blocks = k / shape.weights, row_bytes = num_blocks * shape.file_bytes;
  const int num_lanes = static_cast<int>(std::min<int64_t>(kLanes, num_rows - panel * kLanes));
  rows += panel * kLanes * row_bytes;
  for (int64_t block = 0; block < num_blocks; block++, rows += shape.file_bytes, out += shape.panel_bytes) {
    for (int lane = 0; lane < num_lanes; lane++) {
      const uint8_t* p = rows + lane * row_bytes;
      if (shape.weights == 1) {
        std::memcpy(out + lane * shape.file_bytes, p, shape.file_bytes);
      } else {
        put_lane(type, read_block(type, p), lane, out);
      }
    }
  }
}
