// Attention of few queries over a paged pool: decode, and verification of trees.
//
// A request's queries, and the query heads that share a key head, are rows of one problem, so that a key is read and
// converted once for all of them. Scores, softmax and sums are float32. One item of work is a request and key head or,
// where there are fewer of these than threads, a share of its rows.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

// Keys between one that is read and one that is asked for.
constexpr int AHEAD = 2 * WIDE;

// Sixteen vectors become their own transpose: in each round the first half is interleaved with the second.
inline void transpose(Words (&rows)[WIDE]) {
  static_assert(WIDE == 16, "four rounds, and the indices below");
  for (int round = 0; round < 4; ++round) {
    Words next[WIDE];
    for (int i = 0; i < 8; ++i) {
      const Words a = rows[i], b = rows[i + 8];
      next[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      next[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int i = 0; i < WIDE; ++i) rows[i] = next[i];
  }
}

// out[d][j] = dimension d of the key at slots[j], for `count` keys; the rest is 0.
template <typename T, int D>
inline void read_keys(const T* pool, int64_t stride, const int32_t* slots, int count, float (*out)[WIDE]) {
  constexpr int EACH = sizeof(Words) / sizeof(T);  // dimensions in a vector
  for (int at = 0; at < D; at += EACH) {
    Words rows[WIDE] = {};
    for (int j = 0; j < count; ++j) std::memcpy(&rows[j], pool + slots[j] * stride + at, sizeof rows[j]);
    transpose(rows);
    for (int w = 0; w < WIDE; ++w) {
      if constexpr (sizeof(T) == 4) {
        std::memcpy(out[at + w], &rows[w], sizeof rows[w]);
      } else {
        const Words first = rows[w] << 16, second = rows[w] & 0xffff0000u;  // the first dimension is the lower half
        std::memcpy(out[at + 2 * w], &first, sizeof first);
        std::memcpy(out[at + 2 * w + 1], &second, sizeof second);
      }
    }
  }
}

// Asks for rows of the pool that will be read soon: they lie apart, and no processor guesses where.
template <typename T, int D>
inline void fetch(const T* pool, int64_t stride, const int32_t* slots, int64_t count) {
  constexpr int LINE = 64 / sizeof(T);
  for (int64_t j = 0; j < count; ++j)
    for (int d = 0; d < D; d += LINE) __builtin_prefetch(pool + slots[j] * stride + d);
}

// The scores of R rows against a tile of keys.
template <int D, int R>
inline void score(const float* q, const float (*keys)[WIDE], float* scores, int64_t width) {
  Floats sums[R] = {};
  for (int d = 0; d < D; ++d) {
    const Floats key = load(keys[d]);
    for (int r = 0; r < R; ++r) sums[r] += q[r * D + d] * key;
  }
  for (int r = 0; r < R; ++r) std::memcpy(scores + r * width, &sums[r], sizeof sums[r]);
}

// Adds `count` values, weighted, to the sums of R rows.
template <typename T, int D, int R>
inline void add_values(const float* weights, int64_t width, const T* pool, int64_t stride, const int32_t* slots,
                       int count, float* out) {
  constexpr int PART = R > 4 ? 2 : D / WIDE;  // vectors of a row at a time, so that all sums stay in registers
  for (int at = 0; at < D; at += PART * WIDE) {
    Floats sums[R][PART];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < PART; ++v) sums[r][v] = load(out + r * D + at + v * WIDE);
    for (int j = 0; j < count; ++j) {
      const T* value = pool + slots[j] * stride + at;
      for (int v = 0; v < PART; ++v) {
        const Floats x = load(value + v * WIDE);
        for (int r = 0; r < R; ++r) sums[r][v] += weights[r * width + j] * x;
      }
    }
    for (int r = 0; r < R; ++r) std::memcpy(out + r * D + at, sums[r], sizeof sums[r]);
  }
}

// Softmax over a row of whole vectors, whose end is filled with NEVER.
void softmax(float* row, int64_t width) {
  Floats most = load(row), sum = {};
  for (int64_t j = WIDE; j < width; j += WIDE) {
    const Floats x = load(row + j);
    most = x > most ? x : most;
  }
  const float top = reduce(most, NEVER, [](float a, float b) { return b > a ? b : a; });
  for (int64_t j = 0; j < width; j += WIDE) {
    const Floats e = exponential(load(row + j) - top);
    sum += e;
    std::memcpy(row + j, &e, sizeof e);
  }
  const float scale = 1.f / reduce(sum, 0.f, [](float a, float b) { return a + b; });
  for (int64_t j = 0; j < width; j += WIDE) {
    const Floats share = load(row + j) * scale;
    std::memcpy(row + j, &share, sizeof share);
  }
}

// Calls f(first row, number of rows as a compile-time constant) for blocks of at most 8 rows.
template <typename F>
inline void in_blocks(int rows, F&& f) {
  int r = 0;
  for (; r + 8 <= rows; r += 8) f(r, std::integral_constant<int, 8>());
  switch (rows - r) {
    case 1: return f(r, std::integral_constant<int, 1>());
    case 2: return f(r, std::integral_constant<int, 2>());
    case 3: return f(r, std::integral_constant<int, 3>());
    case 4: return f(r, std::integral_constant<int, 4>());
    case 5: return f(r, std::integral_constant<int, 5>());
    case 6: return f(r, std::integral_constant<int, 6>());
    case 7: return f(r, std::integral_constant<int, 7>());
  }
}

template <typename T, int D>
void attend(const T* q, const T* keys, const T* values, T* out, const int32_t* table, int64_t table_stride,
            const int64_t* requests, const int64_t* lengths, const uint8_t* trees, int count, int nodes, int heads,
            int key_heads, float scale, int threads) {
  const int group = heads / key_heads, rows = group * nodes;
  const int64_t stride = int64_t(key_heads) * D;
  const int problems = count * key_heads;
  const int shares = std::clamp((2 * threads + problems - 1) / problems, 1, threads > 1 ? rows : 1);
  const int share_rows = (rows + shares - 1) / shares;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (int item = 0; item < problems * shares; ++item) {
    const int share = item % shares, head = item / shares % key_heads, b = item / shares / key_heads;
    const int first = share * share_rows, mine = std::min(share_rows, rows - first);
    if (mine <= 0) continue;
    const int32_t* slots = table + requests[b] * table_stride;
    const int64_t prefix = lengths[b], length = prefix + (trees ? nodes : 0);
    const int64_t width = (length + WIDE - 1) / WIDE * WIDE;
    thread_local std::vector<float> scratch;
    scratch.resize(mine * (2 * D + width));
    float *const x = scratch.data(), *const sums = x + mine * D, *const scores = sums + mine * D;
    float tile[D][WIDE];

    // Row r is query r / group of the request, query head r % group of the key head.
    const auto place = [&](int r) {
      return ((int64_t(b) * nodes + (first + r) / group) * heads + head * group + (first + r) % group) * D;
    };
    for (int r = 0; r < mine; ++r)
      for (int d = 0; d < D; ++d) x[r * D + d] = to_float(q[place(r) + d]) * scale;
    for (int64_t at = 0; at < length; at += WIDE) {
      const int n = int(std::min<int64_t>(WIDE, length - at));
      fetch<T, D>(keys + head * D, stride, slots + at + AHEAD, std::clamp<int64_t>(length - at - AHEAD, 0, WIDE));
      read_keys<T, D>(keys + head * D, stride, slots + at, n, tile);
      in_blocks(mine, [&](int r, auto R) { score<D, R.value>(x + r * D, tile, scores + r * width + at, width); });
    }
    for (int r = 0; r < mine; ++r) {
      float* row = scores + r * width;
      if (trees) {
        const uint8_t* seen = trees + (int64_t(b) * nodes + (first + r) / group) * nodes;
        for (int n = 0; n < nodes; ++n)
          if (!seen[n]) row[prefix + n] = NEVER;
      }
      std::fill(row + length, row + width, NEVER);
      softmax(row, width);
    }
    std::fill(sums, sums + mine * D, 0.f);
    for (int64_t at = 0; at < length; at += WIDE) {
      const int n = int(std::min<int64_t>(WIDE, length - at));
      fetch<T, D>(values + head * D, stride, slots + at + AHEAD, std::clamp<int64_t>(length - at - AHEAD, 0, WIDE));
      in_blocks(mine, [&](int r, auto R) {
        add_values<T, D, R.value>(scores + r * width + at, width, values + head * D, stride, slots + at, n,
                                    sums + r * D);
      });
    }
    for (int r = 0; r < mine; ++r)
      for (int d = 0; d < D; ++d) store(sums[r * D + d], out + place(r) + d);
  }
}

template <typename T>
int dispatch(int dim, const void* q, const void* keys, const void* values, void* out, const int32_t* table,
             int64_t table_stride, const int64_t* requests, const int64_t* lengths, const uint8_t* trees, int count,
             int nodes, int heads, int key_heads, float scale, int threads) {
  const auto call = [&](auto D) {
    attend<T, D.value>(static_cast<const T*>(q), static_cast<const T*>(keys), static_cast<const T*>(values),
                       static_cast<T*>(out), table, table_stride, requests, lengths, trees, count, nodes, heads,
                       key_heads, scale, threads);
    return 0;
  };
  switch (dim) {
    case 32: return call(std::integral_constant<int, 32>());
    case 64: return call(std::integral_constant<int, 64>());
    case 96: return call(std::integral_constant<int, 96>());
    case 128: return call(std::integral_constant<int, 128>());
    default: return 1;
  }
}

}  // namespace

// q, out: [requests * nodes, heads, dim]; keys, values: [slots, key heads, dim]; table: [rows, table_stride] int32, the
// slot of each position; requests: [count] int64 rows of it; lengths: [count] int64, the keys that every query sees;
// trees: [count, nodes, nodes], not 0 where a node sees another one at the `nodes` positions after these, or null where
// there are none. Returns 0, or 1 for a size of head that it was not made for.
extern "C" int specroll_tree_attention(int is_bfloat16, int dim, const void* q, const void* keys, const void* values,
                                       void* out, const int32_t* table, int64_t table_stride, const int64_t* requests,
                                       const int64_t* lengths, const uint8_t* trees, int count, int nodes, int heads,
                                       int key_heads, float scale, int threads) {
  const auto run = is_bfloat16 ? dispatch<bfloat16> : dispatch<float>;
  return run(dim, q, keys, values, out, table, table_stride, requests, lengths, trees, count, nodes, heads, key_heads,
             scale, threads);
}
