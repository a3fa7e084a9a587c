// One token drawn from a head's law outside a few tokens: the rule of `draw_outside` (specroll_core/law.py).
//
// All sums are doubles; their order differs from PyTorch's, and so may their last digits.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// A law over the columns of the proposal vocabulary. probabilities: not negative.
class HeadLaw {
 public:
  HeadLaw(const float* probabilities, int64_t columns) : law(probabilities), columns(columns) {}

  // outside: columns that are not drawn, each once. u: in [0, 1). Returns a column that is none of them and whose
  // probability is not 0; where `mass`, what they leave, is 0 it means nothing.
  int64_t draw(const std::vector<int64_t>& outside, double u, double* mass) {
    const int64_t count = (columns + BLOCK - 1) / BLOCK;
    sums.resize(count);
    double total = 0;
    for (int64_t b = 0; b < count; ++b) total += sums[b] = sum(block(b, outside));
    *mass = total;
    // Rounding may put the target at the total; the last token of positive probability takes it.
    const double target = std::min(u * total, std::nextafter(total, 0.0));
    double before = 0;
    int64_t b = 0;
    while (b + 1 < count && before + sums[b] <= target) before += sums[b++];
    for (; b >= 0; --b) {
      const float* here = block(b, outside);
      int64_t last = -1;
      for (int64_t i = 0; i < BLOCK; ++i) {
        if (here[i] <= 0) continue;
        last = i;
        before += here[i];
        if (before > target) break;
      }
      if (last >= 0) return b * BLOCK + last;
    }
    return 0;
  }

 private:
  // Probabilities that are summed together before their sum is looked at.
  static constexpr int64_t BLOCK = 256;

  // A block's probabilities, 0 at the columns outside and beyond the end.
  const float* block(int64_t b, const std::vector<int64_t>& outside) {
    const int64_t begin = b * BLOCK, size = std::min(BLOCK, columns - begin);
    const bool whole = size == BLOCK && std::none_of(outside.begin(), outside.end(),
                                                     [&](int64_t c) { return c >= begin && c < begin + BLOCK; });
    if (whole) return law + begin;
    std::memcpy(patched, law + begin, size * sizeof(float));
    std::fill(patched + size, patched + BLOCK, 0.f);
    for (const int64_t c : outside)
      if (c >= begin && c < begin + size) patched[c - begin] = 0.f;
    return patched;
  }

  static double sum(const float* block) {
    constexpr int LANES = 8;
    double lanes[LANES] = {};
    for (int64_t i = 0; i < BLOCK; i += LANES)
      for (int lane = 0; lane < LANES; ++lane) lanes[lane] += block[i + lane];
    double total = 0;
    for (const double lane : lanes) total += lane;
    return total;
  }

  const float* law;
  const int64_t columns;
  std::vector<double> sums;
  float patched[BLOCK];
};

}  // namespace
