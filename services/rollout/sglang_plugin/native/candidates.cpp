// From heads' logits to their laws and the likeliest tokens, as `propose_from_logits` (specroll_core/proposal.py): one pass
// of a row through the cache where PyTorch makes seven tensors of a batch's rows.
//
// Probabilities are exponentials of float32 numbers, as a softmax makes them; their sum is a double.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

// Columns whose maximum is looked at before they are.
constexpr int64_t BLOCK = 4 * WIDE;

float largest(Floats x) {
  return reduce(x, NEVER, [](float a, float b) { return b > a ? b : a; });
}

struct Row {
  std::vector<float> most;  // by block, of the law
  std::vector<float> ranked;
  std::vector<int64_t> found;

  // law [columns]: softmax(logits / temperature).
  template <typename T>
  void normalise(const T* logits, int64_t columns, float temperature, float* law) {
    const int64_t whole = columns / WIDE * WIDE;
    Floats wide = Floats{} + NEVER;
    for (int64_t c = 0; c < whole; c += WIDE) {
      const Floats x = load(logits + c) / temperature;
      std::memcpy(law + c, &x, sizeof x);
      wide = x > wide ? x : wide;
    }
    float top = largest(wide);
    for (int64_t c = whole; c < columns; ++c) top = std::max(top, law[c] = to_float(logits[c]) / temperature);
    double total = 0;
    for (int64_t begin = 0; begin < whole; begin += BLOCK) {
      Floats sum = {};
      for (int64_t c = begin; c < std::min(begin + BLOCK, whole); c += WIDE) {
        const Floats e = exponential(load(law + c) - top);
        std::memcpy(law + c, &e, sizeof e);
        sum += e;
      }
      total += reduce(sum, 0.f, [](float a, float b) { return a + b; });
    }
    if (whole < columns) {
      Floats rest = Floats{} + NEVER;
      for (int64_t c = whole; c < columns; ++c) rest[c - whole] = law[c] - top;
      rest = exponential(rest);
      for (int64_t c = whole; c < columns; ++c) total += law[c] = rest[c - whole];
    }
    const float scale = float(1 / total);
    most.clear();
    for (int64_t begin = 0; begin < columns; begin += BLOCK) {
      const int64_t end = std::min(begin + BLOCK, columns), wides = begin + (end - begin) / WIDE * WIDE;
      wide = Floats{} + NEVER;
      for (int64_t c = begin; c < wides; c += WIDE) {
        const Floats p = load(law + c) * scale;
        std::memcpy(law + c, &p, sizeof p);
        wide = p > wide ? p : wide;
      }
      most.push_back(largest(wide));
      for (int64_t c = wides; c < end; ++c) most.back() = std::max(most.back(), law[c] *= scale);
    }
  }

  // The `width` likeliest columns, the lower one first where two are equally likely.
  const std::vector<int64_t>& rank(const float* law, int64_t columns, int64_t width) {
    // So many blocks hold one column each that is as likely as this: what is less is not among the likeliest.
    float least = -1;
    if (int64_t(most.size()) > width) {
      ranked = most;
      std::nth_element(ranked.begin(), ranked.begin() + width - 1, ranked.end(), std::greater<float>());
      least = ranked[width - 1];
    }
    found.clear();
    for (size_t b = 0; b < most.size(); ++b)
      if (!(most[b] < least))
        for (int64_t c = b * BLOCK; c < std::min(int64_t(b + 1) * BLOCK, columns); ++c)
          if (!(law[c] < least)) found.push_back(c);
    const auto better = [&](int64_t a, int64_t b) { return law[a] > law[b] || (law[a] == law[b] && a < b); };
    std::partial_sort(found.begin(), found.begin() + width, found.end(), better);
    return found;
  }
};

}  // namespace

// logits [rows * heads, columns]; temperatures [rows], 0 read as 1; ids [columns], or null where the columns are the
// vocabulary. laws: as the logits, float32; tokens, log_q [rows * heads, width], with width at most columns.
extern "C" void specroll_candidates(int is_bfloat16, const void* logits, int64_t rows, int64_t heads, int64_t columns,
                                    const float* temperatures, const int64_t* ids, int64_t width, float* laws,
                                    int64_t* tokens, float* log_q, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * heads * columns >= 1 << 17)
  for (int64_t r = 0; r < rows * heads; ++r) {
    thread_local Row row;
    const float temperature = temperatures[r / heads] > 0 ? temperatures[r / heads] : 1.f;
    float* law = laws + r * columns;
    if (is_bfloat16)
      row.normalise(static_cast<const bfloat16*>(logits) + r * columns, columns, temperature, law);
    else
      row.normalise(static_cast<const float*>(logits) + r * columns, columns, temperature, law);
    const std::vector<int64_t>& best = row.rank(law, columns, width);
    for (int64_t i = 0; i < width; ++i) {
      tokens[r * width + i] = ids ? ids[best[i]] : best[i];
      log_q[r * width + i] = std::log(std::max(law[best[i]], std::numeric_limits<float>::min()));
    }
  }
}
