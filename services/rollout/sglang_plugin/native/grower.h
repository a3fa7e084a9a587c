// Growing one request's tree: `Sketch` and `Grower` of specroll_core/growth.py, decision for decision.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

#include "scorer.h"
#include "trajectory_memory.h"

namespace {

// Parent of the root, and of a node number that is not in use.
constexpr int ROOT = -1, UNUSED = -2;
// The state at a node that the memory was not asked about.
constexpr int32_t UNKNOWN = INT32_MAX;

// `TreeOptions` without its switch for sampled children.
struct GrowthOptions {
  int64_t max_depth, chain;
  double min_tail;
};

struct Child {
  int64_t token;
  double c;
  int64_t cell;
  double log_q;
};

struct Node {
  int64_t token;
  int parent = UNUSED, depth = 0;
  double step = 1.0;
  int64_t cell = -1, tail_cell = -1;
  double log_q = 0.0;
  bool sampled = false, drawn = false;
  double mass = 0.0;
  int32_t state = UNKNOWN;
};

using Nodes = std::vector<int>;

class Grower {
 public:
  std::vector<Node> nodes;  // node 0 is the pending token; parents come before children

  // depths: of the lists. memory: may be null. law_depth: deepest level that has a law to draw from.
  void begin(int64_t pending, int budget, int depths, const Scorer* of, TrajectoryMemory* path, int depth_of_laws,
             const GrowthOptions& given) {
    nodes.assign(budget, Node{pending});
    nodes[0].parent = ROOT;
    lists.resize(depths);
    scorer = of;
    memory = path;
    law_depth = depth_of_laws;
    options = given;
    max_depth = int(std::min(options.max_depth, std::max<int64_t>(depths, memory ? memory->options.max_depth : 0)));
  }

  // The candidates of one depth, best first of at most `most`.
  std::vector<Child>& list(int depth) { return lists[depth]; }
  static void rank(std::vector<Child>& list, size_t most) {
    std::stable_sort(list.begin(), list.end(), [](const Child& a, const Child& b) { return a.c > b.c; });
    if (list.size() > most) list.resize(most);
  }

  // The numbers of all nodes but the root.
  Nodes all() const {
    Nodes numbers;
    for (int n = 1; n < int(nodes.size()); ++n) numbers.push_back(n);
    return numbers;
  }

  // Puts the best nodes below `top` under the given ascending numbers, as many as there are.
  void grow(int top, const Nodes& numbers) {
    if (memory && top == 0) nodes[0].state = memory->root();
    const int chain = top == 0 ? int(options.chain) : 0;
    int chain_end = top, newest = top;
    heap.clear();
    suggested.resize(std::max(suggested.size(), nodes.size()));
    for (auto& of : suggested) of.clear();
    scores.assign(nodes.size(), 1.0);
    for (const int n : numbers) nodes[n].parent = UNUSED;
    for (const int n : numbers) {
      // The newest node is opened only now: the last one never is.
      const int below_newest = nodes[newest].depth + 1;
      if (below_newest <= max_depth) {
        if (memory && below_newest <= memory->options.max_depth) {
          Node& at = nodes[newest];
          if (newest != top) at.state = memory->descend(nodes[at.parent].state, int32_t(at.token));
          suggest(at.state, below_newest, suggested[newest]);
        }
        const std::vector<Child>& extra = suggested[newest];
        if (!extra.empty()) push({-scores[newest] * extra[0].c, newest, SUGGESTED, 0});
        if (below_newest <= int(lists.size())) push_shared(newest, 0);
        if (newest == chain_end && below_newest <= chain) put_first(newest);
      }
      if (heap.empty()) break;
      std::pop_heap(heap.begin(), heap.end(), std::greater<Entry>());
      const auto [score, parent, which, rank] = heap.back();
      heap.pop_back();
      const int depth = nodes[parent].depth + 1;
      const Child& taken = which == SHARED ? lists[depth - 1][rank] : suggested[parent][rank];
      Node& node = nodes[n];
      node.token = taken.token;
      node.step = taken.c;
      node.cell = taken.cell;
      node.log_q = taken.log_q;
      node.parent = parent;
      node.depth = depth;
      node.sampled = node.drawn = false;
      node.tail_cell = -1;
      scores[n] = scores[parent] * taken.c;
      if (which == SHARED)
        push_shared(parent, rank + 1);
      else if (rank + 1 < int(suggested[parent].size()))
        push({-scores[parent] * suggested[parent][rank + 1].c, parent, SUGGESTED, rank + 1});
      if (parent == chain_end && depth <= chain) chain_end = n;
      newest = n;
    }
  }

  // Forgets all nodes but the first ones.
  void keep(size_t count) {
    if (nodes.size() > count) nodes.resize(count);
  }

  // Among `numbers`, makes last children sampled where that is accepted more often than they are.
  void choose_slots(const Nodes& numbers) {
    // By parent: its last child, and the sums of c and q over the others.
    struct Last {
      int node = -1;
      double c = 0.0, q = 0.0;
    };
    std::vector<Last> last(nodes.size());
    for (const int n : numbers) {
      if (nodes[n].parent == UNUSED) continue;
      Last& of = last[nodes[n].parent];
      if (of.node >= 0) {
        of.c += nodes[of.node].step;
        of.q += std::exp(nodes[of.node].log_q);
      }
      of.node = n;
    }
    for (const Last& of : last) {
      if (of.node < 0 || nodes[of.node].depth > law_depth) continue;
      Node& node = nodes[of.node];
      const Score tail = scorer->tail(node.depth, 1.0 - of.q, 1.0 - of.c);
      if (tail.c > std::max(node.step, options.min_tail)) {
        node.sampled = true;
        node.step = tail.c;
        node.cell = -1;
        node.tail_cell = tail.cell;
      }
    }
  }

  // Slots that can be drawn now, none of them below another one where what stands there depends on its token.
  Nodes slots_to_draw() const {
    Nodes slots;
    std::vector<uint8_t> covered(nodes.size(), 0);
    for (int n = 1; n < int(nodes.size()); ++n) {
      const Node& node = nodes[n];
      if (node.parent == UNUSED) continue;
      const bool to_draw = node.sampled && !node.drawn;
      if (to_draw && !covered[node.parent]) slots.push_back(n);
      covered[n] = covered[node.parent] || (to_draw && memory);
    }
    return slots;
  }

  // Sets a slot's token and chooses anew what stands below it, inside its own node numbers.
  void place_draw(int slot, int64_t token, double mass) {
    Node& node = nodes[slot];
    node.token = token;
    node.mass = mass;
    node.drawn = true;
    if (!memory) return;  // the lists do not depend on the path: the same nodes would be chosen
    const Nodes reserved = below(slot);
    if (reserved.empty()) return;
    if (node.depth < memory->options.max_depth)
      node.state = memory->descend(nodes[node.parent].state, int32_t(token));
    grow(slot, reserved);
    choose_slots(reserved);
  }

 private:
  static constexpr int SHARED = 0, SUGGESTED = 1;
  using Entry = std::tuple<double, int, int, int>;  // -score, parent, list, rank

  void push(const Entry& entry) {
    heap.push_back(entry);
    std::push_heap(heap.begin(), heap.end(), std::greater<Entry>());
  }

  // The first candidate of the shared list, from `rank` on, that the memory does not suggest as well.
  void push_shared(int parent, int rank) {
    const std::vector<Child>&shared = lists[nodes[parent].depth], &extra = suggested[parent];
    const auto is_suggested = [&](const Child& child) {
      return std::any_of(extra.begin(), extra.end(), [&](const Child& other) { return other.token == child.token; });
    };
    while (rank < int(shared.size()) && is_suggested(shared[rank])) ++rank;
    if (rank < int(shared.size())) push({-scores[parent] * shared[rank].c, parent, SHARED, rank});
  }

  // Lets the best child of `parent` be taken before all else.
  void put_first(int parent) {
    auto best = heap.end();
    for (auto at = heap.begin(); at != heap.end(); ++at)
      if (std::get<1>(*at) == parent && (best == heap.end() || *at < *best)) best = at;
    if (best == heap.end()) return;
    std::get<0>(*best) = -2.0;
    std::make_heap(heap.begin(), heap.end(), std::greater<Entry>());
  }

  // The memory's children of a state, scored and best first.
  void suggest(int32_t state, int depth, std::vector<Child>& out) {
    for (const Suggestion& found : memory->children(state)) {
      double log_q = scorer->no_log_q;
      if (depth <= int(lists.size()))
        for (const Child& child : lists[depth - 1])
          if (child.token == found.token) log_q = child.log_q;
      const Score score = scorer->score(log_q, found.probability, found.order, depth);
      out.push_back({found.token, score.c, score.cell, log_q});
    }
    rank(out, out.size());
  }

  Nodes below(int top) const {
    Nodes found;
    std::vector<uint8_t> inside(nodes.size(), 0);
    inside[top] = 1;
    for (int n = top + 1; n < int(nodes.size()); ++n)
      if (nodes[n].parent >= 0 && inside[nodes[n].parent]) {
        inside[n] = 1;
        found.push_back(n);
      }
    return found;
  }

  std::vector<std::vector<Child>> lists;  // by depth
  const Scorer* scorer = nullptr;
  TrajectoryMemory* memory = nullptr;
  int law_depth = 0, max_depth = 0;
  GrowthOptions options{};
  // Of one call of `grow`, by node.
  std::vector<std::vector<Child>> suggested;
  std::vector<double> scores;
  std::vector<Entry> heap;
};

}  // namespace
