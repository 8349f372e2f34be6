// What the portable and the tiled prefill share, and the tiled one's functions.
#pragma once

#include <algorithm>

#include "attention.h"
#include "simd.h"

namespace quaver {

constexpr int CHUNK = 32;  // keys; the context is padded to whole chunks of zeros

inline int padded(int context) { return (context + CHUNK - 1) / CHUNK * CHUNK; }

// Floats between score rows: off a power of two, so that rows do not crowd into the same cache sets.
inline int score_stride(int context) { return padded(context) + LANES; }

// One block of queries: the tokens [first, first + rows) of the chunk, and the keys [from, to) that any of them sees.
struct Block {
  int first, rows, position, from, to;

  Block(const Heads& heads, int start, int count, int block)
      : first(block * QUERIES), rows(std::min(QUERIES, count - first)), position(start + first), from(0), to(padded(position + rows)) {
    if (heads.window > 0) from = std::max(0, position + 1 - heads.window) / CHUNK * CHUNK;
  }

  // Keys that row `row` sees: [seen_from, seen_to).
  int seen_from(const Heads& heads, int row) const {
    return heads.window > 0 ? std::max(0, position + row + 1 - heads.window) : 0;
  }
  int seen_to(int row) const { return position + row + 1; }
};

// Lanes whose key, from `at` on, lies in [from, to); the others are −inf.
inline f32x16 only(f32x16 scores, int at, int from, int to) {
  if (at >= from && at + LANES <= to) return scores;
  const i32x16 key = i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + at;
  return (key >= from) & (key < to) ? scores : splat(-std::numeric_limits<float>::infinity());
}

// Turns one row of scores over the block's keys into exp(scale · (score − largest)), 0 where the row does not see, and
// passes each vector of them to `put(at, weights)` in ascending order. Returns their sum.
template <class Put>
float softmax(const float* scores, const Block& block, int from, int to, float scale, const Put& put) {
  f32x16 most = splat(-std::numeric_limits<float>::infinity());
  for (int at = from / LANES * LANES; at < to; at += LANES) most = max(most, only(load(scores + at), at, from, to));
  const f32x16 peak = splat(largest(most));
  f32x16 total = splat(0.f);
  for (int at = block.from; at < block.to; at += LANES) {
    if (at + LANES <= from || at >= to) {
      put(at, splat(0.f));
      continue;
    }
    const f32x16 weight = exp((only(load(scores + at), at, from, to) - peak) * splat(scale));
    put(at, weight);
    total += weight;
  }
  return sum(total);
}

// A row of keys or values of one sequence and group.
inline int64_t row_of(const Pages& pages, const int32_t* table, int at, int group) {
  const int64_t slot = int64_t(table[at / pages.page_size]) * pages.page_size + at % pages.page_size;
  return (slot * pages.groups + group) * pages.width;
}

// Prefill by matrix tiles. The same contract as in attention.h.
bool tiles_fit(const Heads&);
size_t tiles_layout_bytes(const Heads&, int context);
void tiles_prepare(const Heads&, const Pages&, const int32_t* table, int context, int group, void* layout);
size_t tiles_scratch_bytes(const Heads&, int context);
void tiles_attention(const float* qkv, int64_t qkv_stride, const Heads&, int start, int count, int group, int block,
                     const void* layout, float* out, int64_t out_stride, void* scratch);

}  // namespace quaver
