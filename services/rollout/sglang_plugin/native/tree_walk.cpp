// The walk of specroll_core/host_walk.py for laws that have a temperature and no filter: from a node's logits to the
// token that is emitted there, without a tensor in between.
//
// Probabilities are exponentials of float32 numbers, as a softmax makes them; sums that decide are double. One request
// is one item of work.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

// Probabilities that are summed together before their sum is looked at.
constexpr int64_t BLOCK = 16 * WIDE;
// Below this a slot's mass outside its siblings is rounding of the head's law (specroll_core/verified.py).
constexpr double LEAST_MASS = 1e-9;

// One law over a vocabulary, not normalised, and the sums of its blocks.
struct Law {
  std::vector<float> weights;  // padded with zeros to whole blocks
  std::vector<double> blocks;
  int64_t size = 0;

  template <typename T>
  void read(const T* logits, int64_t vocab, float temperature) {
    size = vocab;
    weights.resize((vocab + BLOCK - 1) / BLOCK * BLOCK);
    blocks.resize(weights.size() / BLOCK);
    const int64_t whole = vocab / WIDE * WIDE;
    Floats most = Floats{} + NEVER;
    for (int64_t v = 0; v < whole; v += WIDE) {
      const Floats x = load(logits + v) / temperature;
      std::memcpy(&weights[v], &x, sizeof x);
      most = x > most ? x : most;
    }
    for (int64_t v = whole; v < int64_t(weights.size()); ++v)
      weights[v] = v < vocab ? to_float(logits[v]) / temperature : -std::numeric_limits<float>::infinity();
    float top = reduce(most, NEVER, [](float a, float b) { return b > a ? b : a; });
    for (int64_t v = whole; v < vocab; ++v) top = std::max(top, weights[v]);
    for (int64_t v = 0; v < int64_t(weights.size()); v += WIDE) {
      const Floats e = exponential(load(&weights[v]) - top);
      std::memcpy(&weights[v], &e, sizeof e);
    }
    for (size_t b = 0; b < blocks.size(); ++b) sum_block(b);
  }

  // All probability on the first of the largest logits.
  template <typename T>
  void read_greedy(const T* logits, int64_t vocab) {
    size = vocab;
    weights.assign((vocab + BLOCK - 1) / BLOCK * BLOCK, 0.f);
    blocks.assign(weights.size() / BLOCK, 0.0);
    int64_t best = 0;
    for (int64_t v = 1; v < vocab; ++v)
      if (to_float(logits[v]) > to_float(logits[best])) best = v;
    weights[best] = 1.f;
    blocks[best / BLOCK] = 1.0;
  }

  void sum_block(size_t b) {
    Floats sum = {};
    for (int64_t v = 0; v < BLOCK; v += WIDE) sum += load(&weights[b * BLOCK + v]);
    double total = 0;
    for (int i = 0; i < WIDE; ++i) total += sum[i];
    blocks[b] = total;
  }

  double total() const {
    double sum = 0;
    for (const double block : blocks) sum += block;
    return sum;
  }

  // The first token whose cumulative weight exceeds u of the total: never one of weight 0 where there is any other.
  int64_t draw(double u, double total) const {
    const double target = std::min(u * total, std::nextafter(total, 0.0));
    double sum = 0;
    size_t b = 0;
    while (b + 1 < blocks.size() && sum + blocks[b] <= target) sum += blocks[b++];
    // A block's own order of summation may leave the target beyond its end: its last token of positive weight takes it.
    int64_t last = -1;
    for (int64_t v = b * BLOCK; v < int64_t(b + 1) * BLOCK && v < size; ++v) {
      if (weights[v] > 0) last = v;
      sum += weights[v];
      if (sum > target && weights[v] > 0) return v;
    }
    for (int64_t v = int64_t(b) * BLOCK; last < 0 && v > 0;)
      if (weights[--v] > 0) last = v;
    return last < 0 ? size - 1 : last;
  }
};

struct Tree {
  const int64_t *tokens, *parents;
  const uint8_t *valid, *sampled;
  const double* masses;
  int nodes;
};

struct Heads {
  const float* laws;        // [depths, columns], null where there are none
  const int64_t* ids;       // [columns], null where the columns are the vocabulary
  const int64_t* inverse;   // [vocabulary], -1 for tokens that are no column
  int depths;
  int64_t columns;

  float of(const float* law, int64_t token) const {
    const int64_t column = ids ? inverse[token] : token;
    return column < 0 ? 0.f : law[column];
  }
};

struct Out {
  int64_t *tokens, *nodes;
  float *logprobs, *child_probs, *accept, *remainder;
  int64_t* length;
};

template <typename T>
void walk(const T* logits, int64_t vocab, float temperature, const Tree& tree, const Heads& heads,
          const double* uniforms, int levels, const Out& out) {
  thread_local Law law;
  thread_local std::vector<int> children;
  thread_local std::vector<float> before;
  thread_local std::vector<uint8_t> touched;
  int at = 0;
  for (int level = 0; level < levels; ++level) {
    const T* row = logits + at * vocab;
    if (temperature > 0)
      law.read(row, vocab, temperature);
    else
      law.read_greedy(row, vocab);
    const double whole = law.total();
    const auto p = [&](float weight) { return float(weight / whole); };
    children.clear();
    int slot = -1;
    double of_siblings = 0;
    for (int n = at + 1; n < tree.nodes; ++n) {
      if (!tree.valid[n] || tree.parents[n] != at) continue;
      children.push_back(n);
      const float here = p(law.weights[tree.tokens[n]]);
      if (tree.sampled[n]) {
        slot = n;
      } else {
        out.child_probs[n] = here;
        of_siblings += here;
      }
    }
    const double coin = uniforms[2 * level], u = uniforms[2 * level + 1];
    int64_t token;
    float chance;
    if (slot >= 0 && heads.laws && level < heads.depths) {
      const int64_t x = tree.tokens[slot];
      const float p_x = law.weights[x];
      const bool live = tree.masses[slot] > LEAST_MASS;
      const float* q = heads.laws + level * heads.columns;
      const float scale = live ? float(1.0 / tree.masses[slot]) : 0.f;
      double left = 1.0;
      before.clear();
      if (live) {
        // p becomes what is left of it: p - min(p, q_S) outside the siblings S, in the law's own unit.
        before.resize(heads.columns);
        touched.assign(law.blocks.size(), 0);
        const float unit = float(scale * whole);
        for (int64_t c = 0; c < heads.columns; ++c) {
          const int64_t v = heads.ids ? heads.ids[c] : c;
          before[c] = law.weights[v];
          law.weights[v] = std::max(0.f, before[c] - q[c] * unit);
          touched[v / BLOCK] = 1;
        }
        for (const int n : children)
          if (!tree.sampled[n]) {
            const int64_t v = tree.tokens[n], c = heads.ids ? heads.inverse[v] : v;
            if (c >= 0) law.weights[v] = before[c];
          }
        for (size_t b = 0; b < touched.size(); ++b)
          if (touched[b]) law.sum_block(b);
        left = law.total() / whole;
      }
      const double rest = left * whole;
      if (live && (coin * double(heads.of(q, x) * scale) < double(p(p_x)) || rest <= 0)) {
        token = x;
        chance = p(p_x);
      } else {
        token = law.draw(u, rest);
        const int64_t c = live ? (heads.ids ? heads.inverse[token] : token) : -1;
        chance = p(c >= 0 ? before[c] : law.weights[token]);
      }
      out.accept[slot] = float(std::clamp(1.0 - left, 0.0, 1.0));
      out.remainder[slot] = float(std::clamp(1.0 - of_siblings, 0.0, 1.0));
    } else {
      token = law.draw(u, whole);
      chance = p(law.weights[token]);
    }
    out.tokens[level] = token;
    out.nodes[level] = at;
    out.logprobs[level] = chance > 0 ? std::log(chance) : -std::numeric_limits<float>::infinity();
    *out.length = level + 1;
    const auto hit = std::find_if(children.begin(), children.end(), [&](int n) { return tree.tokens[n] == token; });
    if (hit == children.end()) return;
    at = *hit;
  }
}

}  // namespace

// The walks of `count` requests. Shapes as in specroll_core/verified.py and tree.py: logits [count * nodes, vocab];
// temperatures [count]; tokens, parents [count, nodes]; valid, sampled [count, nodes] bytes; masses [count, nodes]; laws
// [count, depths, columns] with ids and inverse, or null; uniforms [count, levels, 2]. The outputs [count, levels] and
// [count, nodes] hold what stands for nothing already.
extern "C" void specroll_tree_walk(int is_bfloat16, const void* logits, int64_t vocab, const float* temperatures,
                                   const int64_t* tokens, const int64_t* parents, const uint8_t* valid,
                                   const uint8_t* sampled, const double* masses, const float* laws, const int64_t* ids,
                                   const int64_t* inverse, int depths, int64_t columns, const double* uniforms,
                                   int count, int nodes, int levels, int64_t* out_tokens, int64_t* out_nodes,
                                   float* out_logprobs, int64_t* out_lengths, float* child_probs, float* accept,
                                   float* remainder, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && count > 1)
  for (int b = 0; b < count; ++b) {
    const int64_t n = int64_t(b) * nodes, l = int64_t(b) * levels;
    const Tree tree{tokens + n, parents + n, valid + n, sampled + n, masses + n, nodes};
    const Heads heads{laws ? laws + int64_t(b) * depths * columns : nullptr, ids, inverse, depths, columns};
    const Out out{out_tokens + l, out_nodes + l, out_logprobs + l, child_probs + n,
                  accept + n,     remainder + n, out_lengths + b};
    if (is_bfloat16)
      walk(static_cast<const bfloat16*>(logits) + n * vocab, vocab, temperatures[b], tree, heads, uniforms + 2 * l,
           levels, out);
    else
      walk(static_cast<const float*>(logits) + n * vocab, vocab, temperatures[b], tree, heads, uniforms + 2 * l, levels,
           out);
  }
}
