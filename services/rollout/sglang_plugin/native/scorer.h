// The scorer of specroll_core/scorer.py, over its own counts.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

struct Edges {
  const double* at;
  int64_t count;

  // How many edges are at most x.
  int64_t bin(double x) const { return std::upper_bound(at, at + count, x) - at; }
  // The same among numbers of float32, as a tensor holds them.
  int64_t bin_float(float x) const {
    return std::upper_bound(at, at + count, x, [](float x, double edge) { return x < float(edge); }) - at;
  }
};

struct Score {
  double c;
  int64_t cell;
};

// The fields of `ScorerTables`. counts, tail_counts: [2, cells], hits and trials. powers: by depth, the last one for all
// deeper.
struct Scorer {
  Edges log_q, memory, order, depth, tail_mass;
  const double *counts, *tail_counts;
  int64_t cells, tail_cells;
  const double* powers;
  int64_t power_count;
  double prior_trials, head_cap, memory_share, tail_share, no_log_q;

  int64_t cell(int64_t log_q_bin, int64_t memory_bin, int64_t order_bin, int64_t depth_bin) const {
    return ((log_q_bin * (memory.count + 1) + memory_bin) * (order.count + 1) + order_bin) * (depth.count + 1) +
           depth_bin;
  }

  // A candidate of heads alone. prior: its closed form, which PyTorch has computed in float32, as is the rest here.
  Score from_head(float log_q_here, float prior, int64_t depth_here) const {
    const int64_t at = cell(log_q.bin_float(log_q_here), 0, 0, depth.bin(double(depth_here)));
    const float weight = float(prior_trials);
    return {(float(counts[at]) + weight * prior) / (float(counts[cells + at]) + weight), at};
  }

  // A candidate that heads, memory or both suggest; depth 1 is below the root.
  Score score(double log_q_here, double probability, int64_t order_here, int64_t depth_here) const {
    const int64_t at = cell(log_q.bin(log_q_here), memory.bin(probability), order.bin(double(order_here)),
                            depth.bin(double(depth_here)));
    const double head = std::exp(log_q_here * powers[std::min(depth_here, power_count) - 1]);
    const double prior = 1 - (1 - std::min(head, head_cap)) * (1 - memory_share * probability);
    return {(counts[at] + prior_trials * prior) / (counts[cells + at] + prior_trials), at};
  }

  // A sampled child: mass is the head's outside its siblings, remainder 1 - the sum of their c.
  Score tail(int64_t depth_here, double mass, double remainder) const {
    const int64_t at = depth.bin(double(depth_here)) * (tail_mass.count + 1) + tail_mass.bin(mass);
    const double share = (tail_counts[at] + prior_trials * tail_share) / (tail_counts[tail_cells + at] + prior_trials);
    return {std::max(0.0, remainder) * std::min(1.0, share), at};
  }
};

}  // namespace
