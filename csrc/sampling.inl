// The passes over a whole vocabulary that sampling needs; what is selected in between stands in sampling.h.
//
// The loops over a part are plain scalar code without branches, which compilers turn into each variant's vectors.

#include "float64.h"

namespace {

// The largest value of each part of kPart. False where there is a NaN.
bool part_maxima(const float* x, int64_t size, float* maxima) {
  f32x16 poison = f32_zero();
  for (int64_t start = 0; start < size; start += kPart) {
    maxima[start / kPart] = largest_of(x + start, size - start < kPart ? size - start : kPart, poison);
  }
  return fold_sum(poison) == 0.0f;
}

double weigh(const float* x, int64_t size, const Temperature& temperature, double* weights) {
  alignas(64) double lanes[kLanes] = {}, block[kPart];
  for (int64_t start = 0; start < size; start += kPart) {
    const int64_t length = size - start < kPart ? size - start : kPart;
    if (length < kPart) std::memset(block, 0, sizeof block);  // adds nothing to the lanes
    for (int64_t i = 0; i < length; i++) block[i] = weight(temperature, x[start + i]);
    for (int i = 0; i < kPart; i += kLanes) {
      for (int lane = 0; lane < kLanes; lane++) lanes[lane] += block[i + lane];
    }
    if (weights != nullptr) std::memcpy(weights + start, block, length * sizeof(double));
  }
  return fold_lanes(lanes);
}

int64_t keep(double* weights, int64_t size, double least, int32_t* token_ids) {
  int64_t count = 0;
  for (int64_t start = 0; start < size; start += kPart) {
    const int64_t length = size - start < kPart ? size - start : kPart;
    alignas(64) double block[kPart];
    std::memcpy(block, weights + start, length * sizeof(double));
    int64_t passing = 0;
    for (int64_t i = 0; i < length; i++) passing += block[i] >= least;
    if (passing == length) {
      std::memcpy(weights + count, block, length * sizeof(double));
      for (int64_t i = 0; i < length; i++) token_ids[count + i] = static_cast<int32_t>(start + i);
      count += length;
      continue;
    }
    for (int64_t i = 0; i < length && passing > 0; i++) {
      weights[count] = block[i];
      token_ids[count] = static_cast<int32_t>(start + i);
      count += block[i] >= least;
    }
  }
  return count;
}

int64_t gumbel_argmax(const int32_t* token_ids, const double* probs, int64_t count, uint64_t stream) {
  int64_t best = 0;
  double best_score = -__builtin_inf(), bound = 0.0;
  for (int64_t start = 0; start < count; start += kPart) {
    const int64_t length = count - start < kPart ? count - start : kPart;
    const double* p = probs + start;
    alignas(64) double u[kPart];
    for (int64_t i = 0; i < length; i++) u[i] = uniform(hash(stream, static_cast<uint32_t>(token_ids[start + i])));
    // Since -log u >= 1 - u, log p - log(-log u) is at most log(p / (1 - u)): few ids need their logarithms.
    uint64_t hopeful = 0;
    for (int64_t i = 0; i < length; i++) hopeful |= p[i] >= bound * (1.0 - u[i]);
    if (!hopeful) continue;
    for (int64_t i = 0; i < length; i++) {
      if (p[i] < bound * (1.0 - u[i])) continue;
      const double waiting = -logarithm(u[i]), score = logarithm(p[i]) - logarithm(waiting);
      if (score > best_score) {
        best = start + i;
        best_score = score;
        bound = p[i] / waiting * (1.0 - 0x1p-20);  // lower by more than any rounding
      }
    }
  }
  return best;
}

}  // namespace
