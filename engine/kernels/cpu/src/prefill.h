// What the portable and the tiled prefill share, and the tiled one's functions.
#pragma once

#include "softmax.h"

namespace quaver::attention {

constexpr int CHUNK = 32;  // keys; the context is padded to whole chunks of zeros

inline int padded(int context) { return (context + CHUNK - 1) / CHUNK * CHUNK; }

// Floats between score rows: off a power of two, so that rows do not crowd into the same cache sets.
inline int score_stride(int context) { return padded(context) + LANES; }

// One block of queries: the tokens [first, first + rows) of the chunk, and the keys [from, to) that any of them sees.
// Keys are counted without dead ones.
struct Block {
  const int32_t* rank;
  int first, rows, position, from, to;

  Block(const Heads& heads, int start, int count, int block, const int32_t* live)
      : rank(live), first(block * QUERIES), rows(std::min(QUERIES, count - first)), position(start + first) {
    from = seen_from(heads, 0) / CHUNK * CHUNK;
    to = padded(seen_to(rows - 1));
  }

  // Keys that row `row` sees: [seen_from, seen_to).
  int seen_from(const Heads& heads, int row) const {
    return heads.window > 0 ? before(std::max(0, position + row + 1 - heads.window)) : 0;
  }
  int seen_to(int row) const { return before(position + row + 1); }

  // The first row that is scored.
  int scored(const Scores& scores) const { return scores.mass ? std::clamp(scores.from - position, 0, rows) : rows; }

 private:
  int before(int at) const { return rank ? rank[at] : at; }
};

// Adds a row's weights over the block's keys, times `scale`, to the mass.
template <class Weight>
void add_mass(const Weight* weights, const Block& block, float scale, float* mass) {
  for (int at = block.from; at < block.to; at += N) store_lanes(mass + at, load_lanes(mass + at) + load_lanes(weights + at) * scale);
}

// Sets the chunk of scores from `at` on to −inf outside [from, to).
inline void hide(float* scores, int at, int from, int to) {
  for (int i = at; i < at + CHUNK; i += N) {
    const Ints key = lane_numbers() + i;
    store_lanes(scores + i, (key >= from) & (key < to) ? load_lanes(scores + i) : all(-INFINITE));
  }
}

// Turns the row's scores over the block's keys into exp(scale · (score − largest)), 0 where the row does not see, and
// passes each vector of them to `put(at, weights)` in ascending order. Overwrites scores that are not seen. Returns their sum.
template <class Put>
float softmax(float* scores, const Block& block, int from, int to, float scale, const Put& put) {
  static_assert(CHUNK % (2 * N) == 0);
  const int first = from / CHUNK * CHUNK, last = padded(to);
  hide(scores, first, from, to);
  hide(scores, last - CHUNK, from, to);
  Lanes most[2] = {all(-INFINITE), all(-INFINITE)};
  for (int at = first; at < last; at += 2 * N)
    for (int i = 0; i < 2; ++i) most[i] = larger(load_lanes(scores + at + i * N), most[i]);
  const float factor = scale * LOG2_E, offset = largest(larger(most[0], most[1])) * factor;
  Lanes total[2] = {};
  for (int at = block.from; at < first; at += N) put(at, Lanes{});
  for (int at = first; at < last; at += 2 * N)
    for (int i = 0; i < 2; ++i) {
      const Lanes weight = exp2_falling(load_lanes(scores + at + i * N) * factor - offset);
      put(at + i * N, weight);
      total[i] += weight;
    }
  for (int at = last; at < block.to; at += N) put(at, Lanes{});
  return sum(total[0] + total[1]);
}

// Prefill by matrix tiles. The same contract as in attention.h.
bool tiles_fit(const Heads&);
size_t tiles_layout_bytes(const Heads&, int context);
void tiles_prepare(const Heads&, const Pages&, const int32_t* table, int context, int group, void* layout);
size_t tiles_scratch_bytes(const Heads&, int context);
void tiles_attention(const float* qkv, int64_t qkv_stride, const Heads&, int start, int count, int group, int block,
                     const void* layout, const int32_t* rank, Scores, float* out, int64_t out_stride, void* scratch);

}  // namespace quaver::attention
