// What a round draws with: the numbers of specroll_core/randomness.py, bit for bit.

#include <cstdint>
#include <initializer_list>

namespace {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio, odd

// SplitMix64's output function.
uint64_t mix(uint64_t z) {
  z += GOLDEN;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

// The number at place `index`, from 1 on, of one seed, position and stream.
double uniform(uint64_t seed, int64_t position, int64_t stream, uint64_t index) {
  const uint64_t key = mix(mix(mix(seed) + uint64_t(position)) + uint64_t(stream));
  return double(mix(key + index * GOLDEN) >> 11) * 0x1p-53;
}

}  // namespace

// seeds, lengths: [count], the roots' positions. tree: [count, nodes]; walk: [count, levels, 2], coin and draw. Of the
// walk's streams the draw is the first number, as plain decoding draws it.
extern "C" void specroll_round_uniforms(const int64_t* seeds, const int64_t* lengths, int64_t count, int64_t nodes,
                                        int64_t levels, int64_t tree_stream, int64_t walk_stream, double* tree,
                                        double* walk) {
  for (int64_t b = 0; b < count; ++b) {
    for (int64_t n = 0; n < nodes; ++n) *tree++ = uniform(seeds[b], lengths[b], tree_stream, n + 1);
    for (int64_t level = 0; level < levels; ++level)
      for (const int index : {2, 1}) *walk++ = uniform(seeds[b], lengths[b] + level, walk_stream, index);
  }
}
