// Which ids of a row may be drawn and how likely each is: top-k, top-p and min-p. ops/sampling_reference.py says what it
// means, in numpy, and gives the same bits.
#pragma once
#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "float64.h"
#include "kernels.h"
#include "runtime.h"

namespace {

// Ascending keys are the order of likelihood: the larger value first, of equal ones the lower id.
inline uint64_t order_key(float value, int64_t id) {
  const float unsigned_zero = value + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &unsigned_zero, 4);
  bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;  // now in the values' order
  return static_cast<uint64_t>(~bits) << 32 | static_cast<uint32_t>(id);
}

inline int32_t id_of(uint64_t key) { return static_cast<int32_t>(key & 0xffffffffu); }

// Puts keys that are in the order of their ids in ascending order: a radix sort by the upper halves, which is stable.
inline void sort_by_likelihood(std::vector<uint64_t>& keys) {
  std::vector<uint64_t> sorted(keys.size());
  for (int shift = 32; shift < 64; shift += 8) {
    size_t starts[257] = {};
    for (const uint64_t key : keys) starts[(key >> shift & 255) + 1]++;
    std::partial_sum(starts, starts + 257, starts);
    for (const uint64_t key : keys) sorted[starts[key >> shift & 255]++] = key;
    keys.swap(sorted);
  }
}

// One row of logits, in parts whose largest values are known: a search looks into few of them.
class Row {
 public:
  Row(const Kernels& kernels, const float* x, int64_t size) : x_(x), size_(size), maxima_(ceil_div(size, kPart)) {
    const bool numbers = kernels.part_maxima(x, size, maxima_.data());
    largest_ = *std::max_element(maxima_.begin(), maxima_.end());
    sound_ = numbers && largest_ - largest_ == 0.0f;
  }

  // Whether there is no NaN, no +infinity, and anything above -infinity.
  bool is_sound() const { return sound_; }
  float largest() const { return largest_; }

  // The keys up to `edge`, in the order of their ids.
  void collect(uint64_t edge, std::vector<uint64_t>& keys) const {
    keys.clear();
    for (int64_t start = 0; start < size_; start += kPart) {
      if (order_key(maxima_[start / kPart], start) > edge) continue;
      for (int64_t i = start; i < std::min(size_, start + kPart); i++) {
        const uint64_t key = order_key(x_[i], i);
        if (key <= edge) keys.push_back(key);
      }
    }
  }

  // The first keys, ascending: at least `count`, or all there are.
  void first(int64_t count, std::vector<uint64_t>& keys) const {
    uint64_t edge = ~0ULL;
    if (count <= static_cast<int64_t>(maxima_.size())) {  // each part has a value as large as its largest
      std::vector<float> ordered = maxima_;
      std::nth_element(ordered.begin(), ordered.begin() + count - 1, ordered.end(), std::greater<float>());
      edge = order_key(ordered[count - 1], 0xffffffff);
    }
    collect(edge, keys);
    sort_by_likelihood(keys);
  }

 private:
  const float* x_;
  int64_t size_;
  std::vector<float> maxima_;
  float largest_;
  bool sound_;
};

// The sum of weights of ids that ascend: an id belongs to lane id mod 16.
inline double mass_of(const int32_t* ids, const double* weights, int64_t count) {
  double lanes[kLanes] = {};
  for (int64_t i = 0; i < count; i++) lanes[ids[i] % kLanes] += weights[i];
  return fold_lanes(lanes);
}

// Makes weights add up to 1.
inline void normalise(double* weights, int64_t count, double mass) {
  const double inverse = 1.0 / mass;
  for (int64_t i = 0; i < count; i++) weights[i] *= inverse;
}

// Ids and weights of keys in the order of their ids, and the sum of the weights.
inline double weigh_some(const std::vector<uint64_t>& keys, const float* x, const Temperature& temperature, int32_t* ids,
                         double* weights) {
  const int64_t count = static_cast<int64_t>(keys.size());
  for (int64_t i = 0; i < count; i++) {
    ids[i] = id_of(keys[i]);
    weights[i] = weight(temperature, x[ids[i]]);
  }
  return mass_of(ids, weights, count);
}

// See `distribution` in ops/sampling_reference.py: the number of ids that may be drawn, or -1 for a row that is not
// sound. ids and probs have room for the whole row.
inline int64_t distribution(const Kernels& kernels, const float* x, int64_t size, double temperature, int64_t top_k,
                            double top_p, double min_p, int32_t* ids, double* probs) {
  const Row row(kernels, x, size);
  if (!row.is_sound()) return -1;
  // So small a temperature leaves the largest logits alone, and 1 over a smaller one could be infinite.
  const Temperature scale = {row.largest(), 1.0 / std::max(temperature, 1e-300)};
  const bool some = 0 < top_k && top_k < size;
  std::vector<uint64_t> likeliest, kept;  // in the order of likelihood, and of ids
  double mass = 0.0;
  if (some) {
    row.first(top_k, likeliest);
    likeliest.resize(top_k);
    row.collect(likeliest.back(), kept);
    mass = weigh_some(kept, x, scale, ids, probs);
  } else {
    mass = kernels.weigh(x, size, scale, top_p < 1.0 ? nullptr : probs);
  }
  if (top_p < 1.0) {
    double sum = 0.0;
    size_t length = 0;
    for (int64_t enough = kPart; sum < top_p * mass; enough *= 8) {
      if (!some) row.first(enough, likeliest);
      for (; length < likeliest.size() && sum < top_p * mass; length++) sum += weight(scale, x[id_of(likeliest[length])]);
      if (some || length == static_cast<size_t>(size)) break;
    }
    row.collect(likeliest[length - 1], kept);
    mass = weigh_some(kept, x, scale, ids, probs);
  }
  const double least = std::max(min_p, kSmallestWeight);
  int64_t count = 0;
  if (!some && top_p >= 1.0) {
    count = kernels.keep(probs, size, least, ids);
  } else {
    for (int64_t i = 0; i < static_cast<int64_t>(kept.size()); i++) {
      ids[count] = ids[i];
      probs[count] = probs[i];
      count += probs[i] >= least;
    }
  }
  if (min_p > 0.0) mass = mass_of(ids, probs, count);
  normalise(probs, count, mass);
  return count;
}

// See `residual` in ops/sampling_reference.py: the number of ids left, 0 too where something is not finite. ids and probs
// have room for all of p.
inline int64_t residual(const int32_t* p_ids, const double* p, int64_t p_count, const int32_t* q_ids, const double* q,
                        int64_t q_count, int32_t* ids, double* probs) {
  int64_t count = 0;
  for (int64_t i = 0, j = 0; i < p_count; i++) {
    while (j < q_count && q_ids[j] < p_ids[i]) j++;
    const double left = p[i] - (j < q_count && q_ids[j] == p_ids[i] ? q[j] : 0.0);
    if (!(left - left == 0.0)) return 0;
    ids[count] = p_ids[i];
    probs[count] = left;
    count += left > 0.0;
  }
  normalise(probs, count, mass_of(ids, probs, count));
  return count;
}

// The ids of the first `count` keys; -1 for a row that is not sound.
inline int64_t largest(const Kernels& kernels, const float* x, int64_t size, int64_t count, int32_t* ids) {
  const Row row(kernels, x, size);
  if (!row.is_sound()) return -1;
  std::vector<uint64_t> keys;
  row.first(count, keys);
  keys.resize(std::min<size_t>(count, keys.size()));
  for (size_t i = 0; i < keys.size(); i++) ids[i] = id_of(keys[i]);
  return static_cast<int64_t>(keys.size());
}

}  // namespace
