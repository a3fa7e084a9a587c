// Trees of a batch, as specroll_core/tree.py builds them, and the stores and memories that they are grown from.
//
// A round is two calls, `specroll_grow` and `specroll_finish`: in between, the caller may cut the trees, before anything
// is drawn. Scores are made by the operations of the Python code, in its order: compile without contraction.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "grower.h"
#include "head_law.h"
#include "token_store.h"
#include "trajectory_memory.h"

namespace {

// Fields as in specroll_core/proposal.py: tokens, log_q, prior [rows, depths, ranks]; laws [rows, law_depths, columns] or
// null, with ids [columns] and inverse, both null where the columns are the vocabulary.
struct Proposal {
  const int64_t* tokens;
  const float *log_q, *prior;
  int64_t rows, depths, ranks;
  const float* laws;
  int64_t law_depths, columns;
  const int64_t *ids, *inverse;
};

// Fields as in `DraftTree`: [rows, nodes], ancestors [rows, nodes, nodes].
struct Trees {
  int64_t *tokens, *parents, *depths, *cells, *tail_cells;
  uint8_t *valid, *sampled, *ancestors;
  double* masses;
  float *steps, *paths;
};

// What is kept between a round's two calls.
struct Round {
  Proposal proposal;
  Scorer scorer;
  std::vector<Grower> growers;
};

void begin(Grower& grower, const Round& round, int64_t row, TrajectoryMemory* memory, int64_t pending, int budget,
           int64_t most, const GrowthOptions& options) {
  const Proposal& proposal = round.proposal;
  const int depths = int(proposal.depths);
  grower.begin(pending, budget, depths, &round.scorer, memory, int(proposal.law_depths), options);
  for (int d = 0; d < depths; ++d) {
    std::vector<Child>& list = grower.list(d);
    list.clear();
    const int64_t start = (row * depths + d) * proposal.ranks;
    for (int64_t i = start; i < start + proposal.ranks; ++i) {
      const Score score = round.scorer.from_head(proposal.log_q[i], proposal.prior[i], d + 1);
      list.push_back({proposal.tokens[i], score.c, score.cell, proposal.log_q[i]});
    }
    // A tree of `most` nodes cannot use more ranks than it has nodes beside the root.
    Grower::rank(list, size_t(most));
  }
}

// Draws every slot's token, parents before children.
void draw_slots(Grower& grower, const Proposal& proposal, int64_t row, const double* uniforms) {
  std::vector<int64_t> siblings;
  for (Nodes slots = grower.slots_to_draw(); !slots.empty(); slots = grower.slots_to_draw())
    for (const int slot : slots) {
      const int parent = grower.nodes[slot].parent;
      siblings.clear();
      for (int n = parent + 1; n < int(grower.nodes.size()); ++n) {
        if (n == slot || grower.nodes[n].parent != parent) continue;
        const int64_t token = grower.nodes[n].token;
        siblings.push_back(proposal.ids ? proposal.inverse[token] : token);
      }
      const int64_t level = row * proposal.law_depths + grower.nodes[slot].depth - 1;
      HeadLaw law(proposal.laws + level * proposal.columns, proposal.columns);
      double mass;
      const int64_t column = law.draw(siblings, uniforms[slot], &mass);
      grower.place_draw(slot, proposal.ids ? proposal.ids[column] : column, mass);
    }
}

// Writes one tree of `count` nodes and returns its depth.
int64_t write(const Grower& grower, int64_t count, int64_t row, const Trees& out) {
  const std::vector<Node>& nodes = grower.nodes;
  int64_t deepest = 0;
  double paths[64] = {1.0};
  for (int64_t n = 0; n < count; ++n) {
    const int64_t at = row * count + n;
    uint8_t* ancestors = out.ancestors + at * count;
    const bool there = n < int64_t(nodes.size()), valid = there && nodes[n].parent != UNUSED;
    if (valid && n) {
      paths[n] = paths[nodes[n].parent] * nodes[n].step;
      std::copy_n(ancestors - (n - nodes[n].parent) * count, count, ancestors);
    } else {
      std::fill_n(ancestors, count, uint8_t(0));
    }
    ancestors[n] = 1;
    out.tokens[at] = nodes[valid ? n : 0].token;
    out.parents[at] = valid ? nodes[n].parent : ROOT;
    out.depths[at] = valid ? nodes[n].depth : 0;
    out.cells[at] = valid ? nodes[n].cell : -1;
    out.tail_cells[at] = valid ? nodes[n].tail_cell : -1;
    out.valid[at] = valid;
    out.sampled[at] = valid && nodes[n].sampled;
    out.masses[at] = there ? nodes[n].mass : 0.0;
    out.steps[at] = valid ? float(nodes[n].step) : 0.f;
    out.paths[at] = valid ? float(paths[n]) : 0.f;
    deepest = std::max(deepest, out.depths[at]);
  }
  return deepest;
}

}  // namespace

extern "C" {

void* specroll_store_new(int64_t capacity) { return new TokenStore(capacity); }

void specroll_store_free(TokenStore* store) { delete store; }

// Adds a run of tokens behind entry `after` and returns the last one's entry.
int64_t specroll_store_extend(TokenStore* store, const int32_t* tokens, int64_t count, int64_t after) {
  for (int64_t i = 0; i < count; ++i) after = store->append(tokens[i], int32_t(after));
  return after;
}

// The last `count` tokens up to an entry, newest first. Returns how many are remembered.
int64_t specroll_store_run(const TokenStore* store, int64_t entry, int64_t count, int32_t* out) {
  int64_t found = 0;
  for (; entry >= 0 && found < count; entry = store->before[entry]) out[found++] = store->token[entry];
  return found;
}

// The ring, [entries] each.
void specroll_store_columns(const TokenStore* store, int32_t* token, int32_t* following, int32_t* before) {
  std::copy(store->token.begin(), store->token.end(), token);
  std::copy(store->following.begin(), store->following.end(), following);
  std::copy(store->before.begin(), store->before.end(), before);
}

// The index, [entries, 3]: first token, second token, entry. Returns how many there are.
int64_t specroll_store_pairs(const TokenStore* store, int32_t* out) {
  int64_t found = 0;
  store->each_first([&](int32_t first) {
    store->each_follower(first, [&](const TokenStore::Node& pair) {
      store->each_entry(pair, store->capacity, [&](int32_t entry) {
        for (const int32_t x : {pair.first, pair.second, entry}) out[found++] = x;
      });
    });
  });
  return found / 3;
}

int64_t specroll_store_bytes(const TokenStore* store) { return store->bytes(); }

// far, weights: [count].
void* specroll_memory_new(const TokenStore* own, const TokenStore* const* far, const double* weights, int64_t count,
                          const MemoryOptions* options, const MemoryConstants* constants) {
  std::vector<TrajectoryMemory::Far> stores;
  for (int64_t i = 0; i < count; ++i) stores.push_back({far[i], weights[i]});
  return new TrajectoryMemory(own, stores, *options, *constants);
}

void specroll_memory_free(TrajectoryMemory* memory) { delete memory; }

void specroll_memory_stand_at(TrajectoryMemory* memory, const int32_t* tokens, int64_t count) {
  memory->stand_at(tokens, count);
}

int64_t specroll_memory_root(TrajectoryMemory* memory) { return memory->root(); }

int64_t specroll_memory_descend(TrajectoryMemory* memory, int64_t state, int64_t token) {
  return memory->descend(int32_t(state), int32_t(token));
}

// `found` names the suggestions until the next call. Returns how many there are.
int64_t specroll_memory_children(TrajectoryMemory* memory, int64_t state, const Suggestion** found) {
  const std::vector<Suggestion>& law = memory->children(int32_t(state));
  *found = law.data();
  return int64_t(law.size());
}

int64_t specroll_memory_bytes(const TrajectoryMemory* memory) { return memory->bytes(); }

void* specroll_round_new() { return new Round; }

void specroll_round_free(Round* round) { delete round; }

// Grows the shapes. memories, pending, budgets: [rows], a memory may be null; nodes: of the widest tree. scores: [rows,
// nodes - 1], P(emitted) of what was found beside the root, in that order; found: [rows], how many. All that `proposal`
// and `scorer` point at must stay until `specroll_finish` has returned.
void specroll_grow(Round* round, const Proposal* proposal, const Scorer* scorer, const GrowthOptions* options,
                   TrajectoryMemory* const* memories, const int64_t* pending, const int64_t* budgets, int64_t nodes,
                   double* scores, int64_t* found) {
  round->proposal = *proposal;
  round->scorer = *scorer;
  if (int64_t(round->growers.size()) < proposal->rows) round->growers.resize(proposal->rows);
  for (int64_t row = 0; row < proposal->rows; ++row) {
    Grower& grower = round->growers[row];
    begin(grower, *round, row, memories[row], pending[row], int(budgets[row]), nodes, *options);
    grower.grow(0, grower.all());
    double paths[64] = {1.0};
    int64_t n = 1;
    for (; n < budgets[row] && grower.nodes[n].parent != UNUSED; ++n) {
      paths[n] = paths[grower.nodes[n].parent] * grower.nodes[n].step;
      scores[row * (nodes - 1) + n - 1] = paths[n];
    }
    found[row] = n - 1;
  }
}

// Cuts the trees to `nodes` nodes and draws their sampled children. uniforms: [rows, stride]; deterministic: [rows],
// requests that get no sampled children; null where none gets any. Returns the deepest depth.
int64_t specroll_finish(Round* round, int64_t nodes, const double* uniforms, int64_t stride,
                        const uint8_t* deterministic, const Trees* out) {
  const Proposal& proposal = round->proposal;
  int64_t deepest = 0;
  for (int64_t row = 0; row < proposal.rows; ++row) {
    Grower& grower = round->growers[row];
    grower.keep(size_t(nodes));
    if (deterministic && proposal.laws && !deterministic[row]) {
      grower.choose_slots(grower.all());
      draw_slots(grower, proposal, row, uniforms + row * stride);
    }
    deepest = std::max(deepest, write(grower, nodes, row, *out));
  }
  return deepest;
}

}  // extern "C"
