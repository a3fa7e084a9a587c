// The ring and index of specroll_core/memory_store.py: the same entries, in the same orders.
//
// An entry takes at most 24 bytes in columns and, with its token and its pair both new, two nodes of 32 and their
// buckets: with vectors that double less than 300 bytes, where BYTES_PER_ENTRY allows 512.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr int32_t NOTHING = -1;

class TokenStore {
 public:
  // Of a pair of tokens: its entries, oldest first. With second = NOTHING of one token: the pairs that it begins, in the
  // order in which they came up.
  struct Node {
    int32_t first, second;
    int32_t head, tail;      // entries, or nodes
    int32_t count;           // of entries, also of all pairs
    int32_t previous, next;  // among the pairs of one token
    int32_t chain;           // in a bucket, or in the list of free nodes
  };

  explicit TokenStore(int64_t capacity) : capacity(capacity), buckets(16, NOTHING) {}

  // Adds a token behind entry `after` (NOTHING: a stream begins) and returns its entry.
  int32_t append(int32_t added, int32_t after) {
    const int32_t entry = int32_t(written++ % capacity);
    if (int64_t(token.size()) < capacity) {
      token.push_back(added);
      following.push_back(NOTHING);
      before.push_back(after);
      successor.push_back(NOTHING);
      older.push_back(NOTHING);
      newer.push_back(NOTHING);
    } else {
      forget(entry);
      token[entry] = added;
      before[entry] = after;
      following[entry] = successor[entry] = NOTHING;
    }
    if (after >= 0) {
      following[after] = added;
      successor[after] = entry;
      list(token[after], added, entry);
    }
    return entry;
  }

  const Node* pair(int32_t first, int32_t second) const {
    const int32_t at = find(first, second);
    return at < 0 ? nullptr : &nodes[at];
  }

  // Calls f with each pair that `first` begins, in the order in which they came up.
  template <typename F>
  void each_follower(int32_t first, F f) const {
    const Node* all = pair(first, NOTHING);
    for (int32_t at = all ? all->head : NOTHING; at >= 0; at = nodes[at].next) f(nodes[at]);
  }

  // Calls f with the newest `most` entries of a pair, oldest first.
  template <typename F>
  void each_entry(const Node& pair, int64_t most, F f) const {
    int32_t entry = pair.head;
    if (most < pair.count) {
      entry = pair.tail;
      for (int64_t i = 1; i < most; ++i) entry = older[entry];
    }
    for (; entry >= 0; entry = newer[entry]) f(entry);
  }

  // Calls f with each token that begins a pair, in no order.
  template <typename F>
  void each_first(F f) const {
    for (const int32_t bucket : buckets)
      for (int32_t at = bucket; at >= 0; at = nodes[at].chain)
        if (nodes[at].second == NOTHING) f(nodes[at].first);
  }

  // Reserved at present.
  int64_t bytes() const {
    int64_t entries = 0;
    for (const auto* column : {&token, &following, &before, &successor, &older, &newer, &buckets})
      entries += column->capacity();
    return entries * sizeof(int32_t) + nodes.capacity() * sizeof(Node);
  }

  const int64_t capacity;
  int64_t written = 0;
  std::vector<int32_t> token, following, before;

 private:
  size_t bucket(int32_t first, int32_t second) const {
    const uint64_t key = uint64_t(uint32_t(first)) << 32 | uint32_t(second);
    return size_t((key ^ key >> 29) * 0x9E3779B97F4A7C15u >> 32) & (buckets.size() - 1);
  }

  int32_t find(int32_t first, int32_t second) const {
    int32_t at = buckets[bucket(first, second)];
    while (at >= 0 && (nodes[at].first != first || nodes[at].second != second)) at = nodes[at].chain;
    return at;
  }

  int32_t make(int32_t first, int32_t second) {
    int32_t at = unused;
    if (at >= 0) {
      unused = nodes[at].chain;
    } else {
      at = int32_t(nodes.size());
      nodes.emplace_back();
      if (nodes.size() > buckets.size()) spread();
    }
    int32_t& place = buckets[bucket(first, second)];
    nodes[at] = {first, second, NOTHING, NOTHING, 0, NOTHING, NOTHING, place};
    place = at;
    return at;
  }

  // Twice as many buckets. The last node is not in one yet.
  void spread() {
    std::vector<int32_t> chained;
    for (const int32_t bucket : buckets)
      for (int32_t at = bucket; at >= 0; at = nodes[at].chain) chained.push_back(at);
    buckets.assign(2 * buckets.size(), NOTHING);
    for (const int32_t at : chained) {
      int32_t& place = buckets[bucket(nodes[at].first, nodes[at].second)];
      nodes[at].chain = place;
      place = at;
    }
  }

  void drop(int32_t at) {
    int32_t* place = &buckets[bucket(nodes[at].first, nodes[at].second)];
    while (*place != at) place = &nodes[*place].chain;
    *place = nodes[at].chain;
    nodes[at].chain = unused;
    unused = at;
  }

  void list(int32_t first, int32_t second, int32_t entry) {
    int32_t all = find(first, NOTHING);
    if (all < 0) all = make(first, NOTHING);
    int32_t at = find(first, second);
    if (at < 0) {
      at = make(first, second);
      const int32_t last = nodes[all].tail;
      nodes[at].previous = last;
      (last < 0 ? nodes[all].head : nodes[last].next) = at;
      nodes[all].tail = at;
    }
    Node& pair = nodes[at];
    older[entry] = pair.tail;
    newer[entry] = NOTHING;
    (pair.tail < 0 ? pair.head : newer[pair.tail]) = entry;
    pair.tail = entry;
    ++pair.count;
    ++nodes[all].count;
  }

  // Takes the oldest entry out of the index: the pair that it begins. The pair that it ends went before it.
  void forget(int32_t entry) {
    const int32_t ending = successor[entry];
    if (ending < 0) return;
    before[ending] = NOTHING;
    const int32_t all = find(token[entry], NOTHING), at = find(token[entry], token[ending]);
    Node& pair = nodes[at];
    const int32_t earlier = older[ending], later = newer[ending];
    (earlier < 0 ? pair.head : newer[earlier]) = later;
    (later < 0 ? pair.tail : older[later]) = earlier;
    --nodes[all].count;
    if (--pair.count) return;
    (pair.previous < 0 ? nodes[all].head : nodes[pair.previous].next) = pair.next;
    (pair.next < 0 ? nodes[all].tail : nodes[pair.next].previous) = pair.previous;
    drop(at);
    if (!nodes[all].count) drop(all);
  }

  std::vector<int32_t> successor;     // by entry: the next one of its stream
  std::vector<int32_t> older, newer;  // by entry: its neighbours in the list of its pair
  std::vector<Node> nodes;
  std::vector<int32_t> buckets;  // a power of two of them
  int32_t unused = NOTHING;
};

}  // namespace
