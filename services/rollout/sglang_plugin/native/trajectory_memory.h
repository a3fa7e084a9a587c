// The laws of specroll_core/memory.py. Sums are made in its order and in doubles, so that they are equal to the last bit.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "token_store.h"

namespace {

// What memory.py computes with. rest: [orders + 1].
struct MemoryConstants {
  int64_t orders;
  double back_off;
  const double* rest;
};

struct MemoryOptions {
  int64_t inside_starts, max_depth, walk;
  double floor;
};

struct Suggestion {
  int32_t token;
  double probability;
  int32_t order;
};

class TrajectoryMemory {
 public:
  struct Far {
    const TokenStore* store;
    double weight;
  };

  TrajectoryMemory(const TokenStore* own, std::vector<Far> far, const MemoryOptions& options,
                   const MemoryConstants& constants)
      : options(options), constants(constants), own(own), far(std::move(far)) {}

  const MemoryOptions options;

  // The last tokens, at most as many as can match.
  void stand_at(const int32_t* tokens, int64_t count) { context.assign(tokens, tokens + count); }

  // States as in Python: a token where nothing longer than it matches, else -1 - (its place in this round's).
  int32_t root() {
    states.clear();
    matches.clear();
    far_spans.clear();
    singles.clear();
    single_laws.clear();
    if (context.empty()) return add({NOTHING, {}, NOTHING, true});
    State state{context.back(), at_root(*own), NOTHING, true};
    if (!far.empty()) {
      state.far = int32_t(far_spans.size());
      for (const Far& other : far) far_spans.push_back(at_root(*other.store));
    }
    return add(state);
  }

  int32_t descend(int32_t from, int32_t token) {
    const State parent = from >= 0 ? State{from, {}, NOTHING, true} : states[-1 - from];
    State state{token, extend(*own, parent.token, token, parent.own, parent.inside), NOTHING,
                options.inside_starts != 0};
    const size_t start = far_spans.size();
    bool distant = false;
    for (size_t i = 0; i < far.size(); ++i) {
      const Span above = parent.far >= 0 ? far_spans[parent.far + i] : Span{};
      far_spans.push_back(extend(*far[i].store, parent.token, token, above, parent.inside));
      distant |= far_spans.back().count > 0;
    }
    if (distant)
      state.far = int32_t(start);
    else
      far_spans.resize(start);
    return state.inside && !state.own.count && !distant ? token : add(state);
  }

  // Reserved at present, beside the stores.
  int64_t bytes() const {
    return matches.capacity() * sizeof(Match) + states.capacity() * sizeof(State) +
           far_spans.capacity() * sizeof(Span) + singles.capacity() * sizeof(Single) +
           (single_laws.capacity() + law.capacity()) * sizeof(Suggestion) +
           (close.capacity() + distant.capacity()) * sizeof(Followed) + sizeof *this;
  }

  // What may follow at a state, in no order of merit but always the same one. Good until the next call.
  const std::vector<Suggestion>& children(int32_t at) {
    law.clear();
    if (at >= 0) {
      copy_single(at);
      return law;
    }
    const State state = states[-1 - at];
    const int64_t total = state.inside ? single(state.token).total : 0;
    close.clear();
    distant.clear();
    followed(*own, state.own, 1.0, close);
    if (state.far >= 0)
      for (size_t i = 0; i < far.size(); ++i)
        followed(*far[i].store, far_spans[state.far + i], far[i].weight, distant);
    if (!distant.empty())
      interpolate(state.token, total);
    else if (close.empty()) {
      if (state.inside) copy_single(state.token);
    } else if (total && close.size() == 1)
      law_of_one(state.token, close[0]);
    else
      interpolate(state.token, total);
    return law;
  }

 private:
  struct Match {  // packed: they are most of what a round holds
    uint32_t entry : 28, length : 4;
  };
  struct Span {
    int32_t begin = 0, count = 0;
  };
  // far: where the far stores' spans begin, NOTHING for none. inside: whether shorter matches count here.
  struct State {
    int32_t token;
    Span own;
    int32_t far;
    bool inside;
  };
  struct Followed {
    int32_t after, length;
    double weight;
  };
  // How often a token has a follower in its own store, and where in `single_laws` the law of order 1 behind it stands.
  struct Single {
    int32_t token;
    int64_t total;
    Span law;
  };

  int32_t add(const State& state) {
    states.push_back(state);
    return -int32_t(states.size());
  }

  // All entries at which two tokens or more of the context end.
  Span at_root(const TokenStore& store) {
    const size_t n = context.size();
    const TokenStore::Node* pair = n < 2 ? nullptr : store.pair(context[n - 2], context[n - 1]);
    Span span{int32_t(matches.size()), 0};
    if (pair) {
      store.each_entry(*pair, options.walk, [&](int32_t entry) {
        uint32_t length = 1;
        int32_t at = entry;
        while (length < n && (at = store.before[at]) >= 0 && store.token[at] == context[n - 1 - length])
          ++length;
        matches.push_back({uint32_t(entry), length});
      });
      span.count = int32_t(matches.size()) - span.begin;
    }
    return span;
  }

  // The matches one token further on. last: the parent's token.
  Span extend(const TokenStore& store, int32_t last, int32_t token, Span parent, bool inside) {
    Span span{int32_t(matches.size()), 0};
    const TokenStore::Node* pair = inside || parent.count ? store.pair(last, token) : nullptr;
    if (!pair) return span;
    store.each_entry(*pair, options.walk, [&](int32_t entry) {
      const int32_t before = store.before[entry];
      uint32_t length = inside ? 1 : 0;
      for (int32_t i = parent.begin; i < parent.begin + parent.count; ++i)
        if (int32_t(matches[i].entry) == before) {
          length = matches[i].length;
          break;
        }
      if (length) matches.push_back({uint32_t(entry), std::min(uint32_t(constants.orders), length + 1)});
    });
    span.count = int32_t(matches.size()) - span.begin;
    return span;
  }

  // The matches that have a next token.
  void followed(const TokenStore& store, Span span, double weight, std::vector<Followed>& out) const {
    for (int32_t i = span.begin; i < span.begin + span.count; ++i) {
      const int32_t after = store.following[matches[i].entry];
      if (after >= 0) out.push_back({after, int32_t(matches[i].length), weight});
    }
  }

  Single single(int32_t token) {
    for (const Single& known : singles)
      if (known.token == token) return known;
    Single made{token, 0, {int32_t(single_laws.size()), 0}};
    if (const TokenStore::Node* all = own->pair(token, NOTHING)) {
      made.total = all->count;
      const double scale = 1 / (made.total + constants.back_off);
      const double least = options.floor * (made.total + constants.back_off);
      own->each_follower(token, [&](const TokenStore::Node& pair) {
        if (pair.count >= least) single_laws.push_back({pair.second, pair.count * scale, 1});
      });
      made.law.count = int32_t(single_laws.size()) - made.law.begin;
    }
    singles.push_back(made);
    return made;
  }

  void copy_single(int32_t token) {
    const Single of = single(token);
    law.assign(single_laws.begin() + of.law.begin, single_laws.begin() + of.law.begin + of.law.count);
  }

  // The law in general. singles: own occurrences of the token, which all count for order 1 and are in the pairs' counts;
  // 0 where that order does not count.
  void interpolate(int32_t token, int64_t singles) {
    own_counts.assign(constants.orders + 1, 0.0);
    far_counts.assign(constants.orders + 1, 0.0);
    for (const Followed& match : close) own_counts[match.length] += 1;
    for (const Followed& match : distant) far_counts[match.length] += match.weight;
    weigh(double(singles ? singles : int64_t(close.size())));
    for (const Followed& match : distant) {
      Suggestion& at = of(match.after);
      at.probability = at.probability + match.weight * far_weights[match.length];
      at.order = std::max(at.order, match.length);
    }
    const double lowest = singles ? own_weights[1] : 0.0;
    for (const Followed& match : close) {
      Suggestion& at = of(match.after);
      at.probability = at.probability + own_weights[match.length] - lowest;
      at.order = std::max(at.order, match.length);
    }
    if (singles) {
      const size_t matched = law.size();
      for (Suggestion& at : law)
        if (const TokenStore::Node* pair = own->pair(token, at.token)) at.probability += lowest * pair->count;
      if (lowest * singles >= options.floor) {
        const double least = options.floor / lowest;
        own->each_follower(token, [&](const TokenStore::Node& pair) {
          const auto is_it = [&](const Suggestion& at) { return at.token == pair.second; };
          if (pair.count >= least && std::none_of(law.begin(), law.begin() + matched, is_it))
            law.push_back({pair.second, lowest * pair.count, 1});
        });
      }
    }
    const auto unlikely = [&](const Suggestion& at) { return !(at.probability >= options.floor); };
    law.erase(std::remove_if(law.begin(), law.end(), unlikely), law.end());
  }

  Suggestion& of(int32_t token) {
    for (Suggestion& at : law)
      if (at.token == token) return at;
    law.push_back({token, 0.0, 0});
    return law.back();
  }

  // W_m of own positions and of others', from their numbers by match length; `first` is N_1.
  void weigh(double first) {
    own_weights.assign(constants.orders + 1, 0.0);
    far_weights.assign(constants.orders + 1, 0.0);
    double left = 1.0, own_sum = 0.0, far_sum = 0.0;
    for (int64_t n = constants.orders; n > 0; --n) {
      own_sum = n == 1 ? first : own_sum + own_counts[n];
      if (own_sum != 0) {
        own_weights[n] = left / (own_sum + constants.back_off);
        left = constants.back_off * own_weights[n];
      }
      if (n > 1) {
        far_sum += far_counts[n];
        if (far_sum != 0) {
          far_weights[n] = left / (far_sum + constants.back_off);
          left = constants.back_off * far_weights[n];
        }
      }
    }
    for (int64_t n = 1; n <= constants.orders; ++n) {
      own_weights[n] += own_weights[n - 1];
      far_weights[n] += far_weights[n - 1];
    }
  }

  // The most frequent case in closed form: one match, whose every order above 1 lessens the share of the rest.
  void law_of_one(int32_t token, const Followed& match) {
    const double rest = constants.rest[match.length], least = options.floor / rest;
    const Single of = single(token);
    for (int32_t i = of.law.begin; i < of.law.begin + of.law.count; ++i) {
      const Suggestion& at = single_laws[i];
      if (at.probability >= least && at.token != match.after) law.push_back({at.token, at.probability * rest, 1});
    }
    const double times = rest * own->pair(token, match.after)->count;
    law.push_back({match.after, 1 - rest + times / (of.total + constants.back_off), match.length});
  }

  const MemoryConstants constants;
  const TokenStore* own;
  const std::vector<Far> far;
  std::vector<int32_t> context;
  // Of this round.
  std::vector<State> states;
  std::vector<Match> matches;
  std::vector<Span> far_spans;
  std::vector<Single> singles;
  std::vector<Suggestion> single_laws;
  // Of one call.
  std::vector<Suggestion> law;
  std::vector<Followed> close, distant;
  std::vector<double> own_counts, far_counts, own_weights, far_weights;
};

}  // namespace
