// Attention of one token over its pages: parts of the context, each with its own softmax, then merged.
#include <type_traits>

#include "softmax.h"

namespace quaver {

using namespace attention;

namespace {

// Floats that one head of a part leaves: largest score, Σ exp(score − largest), 14 unused, then Σ exp(…) · value [width].
constexpr int FOUND = LANES;

// Lane i of the result is the sum of v[i].
inline f32x16 sums(Lanes (&v)[LANES]) {
#if defined(__AVX512F__)
  // Of two vectors, folds the halves, quarters … of each onto one another and keeps both results in one.
#define FOLD(STEP, ...)                                                      \
  for (int i = 0; i < STEP; ++i) {                                           \
    const f32x16 a = v[i], b = v[i + STEP];                                  \
    const i32x16 from_b = (lane & STEP) != 0;                                \
    v[i] = (from_b ? b : a) + __builtin_shufflevector(a, b, __VA_ARGS__);    \
  }
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  FOLD(8, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)
  FOLD(4, 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27)
  FOLD(2, 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29)
  FOLD(1, 1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30)
#undef FOLD
  return v[0];
#else
  f32x16 found;
  for (int i = 0; i < LANES; ++i) {
    float total = 0;
    for (int j = 0; j < N / 2; ++j) total += v[i][j] + v[i][j + N / 2];
    found[i] = total;
  }
  return found;
#endif
}

// A vector of scores holds those of HEADS heads for KEYS keys: lane head · KEYS + key.
template <int HEADS>
constexpr int KEYS = HEADS == 1 ? 16 : HEADS == 2 ? 8 : 4;

constexpr int AHEAD = 16;  // rows that are fetched before their turn

inline void fetch(const uint16_t* row, int columns) {
  for (int c = 0; c < columns; c += 32) __builtin_prefetch(row + c);
}

// scores[i / KEYS] (+)= q[head] · key[i] over COLUMNS columns.
template <int HEADS, int COLUMNS>
void add_scores(const float* q, int width, const uint16_t* keys, const int64_t* place, int count, bool add, float* scores) {
  constexpr int BATCH = KEYS<HEADS>, VECTORS = COLUMNS / N;
  Lanes query[HEADS][VECTORS];
  for (int h = 0; h < HEADS; ++h)
    for (int v = 0; v < VECTORS; ++v) query[h][v] = load_lanes(q + h * width + v * N);
  for (int i = 0; i < count; i += BATCH, scores += LANES) {
    Lanes product[LANES] = {};
#pragma GCC unroll 16
    for (int k = 0; k < BATCH; ++k) {
      const uint16_t* const row = keys + place[i + k];
      fetch(keys + place[i + k + AHEAD], COLUMNS);
      for (int v = 0; v < VECTORS; ++v) {
        const Lanes key = load_lanes(row + v * N);
        for (int h = 0; h < HEADS; ++h) product[h * BATCH + k] += query[h][v] * key;
      }
    }
    const f32x16 total = sums(product);
    store(scores, add ? load(scores) + total : total);
  }
}

// out[head] = Σ weights[head][i] · value[i] over COLUMNS columns; `weights` are laid out as scores.
template <int HEADS, int COLUMNS>
void blend_values(const float* weights, const uint16_t* values, const int64_t* place, int count, float* out, int64_t out_stride) {
  constexpr int BATCH = KEYS<HEADS>, VECTORS = COLUMNS / N;
  Lanes total[HEADS][VECTORS] = {};
  const auto add = [&](int i, int k) {
    const uint16_t* const row = values + place[i + k];
    fetch(values + place[i + k + AHEAD], COLUMNS);
    for (int v = 0; v < VECTORS; ++v) {
      const Lanes value = load_lanes(row + v * N);
      for (int h = 0; h < HEADS; ++h) total[h][v] += value * weights[h * BATCH + k];
    }
  };
  int i = 0;
  for (; i + BATCH <= count; i += BATCH, weights += LANES)
    for (int k = 0; k < BATCH; ++k) add(i, k);
  for (int k = 0; k < count - i; ++k) add(i, k);
  for (int h = 0; h < HEADS; ++h)
    for (int v = 0; v < VECTORS; ++v) store_lanes(out + h * out_stride + v * N, total[h][v]);
}

// Calls step(columns, from) with 64, 32 and 16 columns until the width is covered.
template <class Step>
void over_width(int width, const Step& step) {
  int at = 0;
  for (; width - at >= 64; at += 64) step(std::integral_constant<int, 64>{}, at);
  for (; width - at >= 32; at += 32) step(std::integral_constant<int, 32>{}, at);
  for (; width - at >= 16; at += 16) step(std::integral_constant<int, 16>{}, at);
}

// What one part of the context, positions [from, to), needs besides the pages.
struct Part {
  const bool whole;  // every position is there
  const int length;
  int count = 0;                        // positions that are there
  int64_t place[PART + LANES + AHEAD];  // where the row of each begins; past the end, the last one's again
  int16_t position[PART];               // which it is, from `from` on; set unless whole
  alignas(64) float scores[4 * PART + LANES];

  Part(const Pages& pages, const int32_t* table, int group, int from, int to) : whole(!pages.dead), length(to - from) {
    const int64_t step = int64_t(pages.groups) * pages.width;
    for (int i = 0; i < length;) {
      const int at = from + i, offset = at % pages.page_size, run = std::min(length - i, pages.page_size - offset);
      int64_t slot = int64_t(table[at / pages.page_size]) * pages.page_size + offset;
      int64_t row = slot * step + int64_t(group) * pages.width;
      if (whole) {
        for (const int end = i + run; i < end; ++i, row += step) place[count++] = row;
      } else {
        for (const int end = i + run; i < end; ++i, ++slot, row += step) {
          if (pages.dead[slot]) continue;
          position[count] = int16_t(i);
          place[count++] = row;
        }
      }
    }
    if (count) std::fill(place + count, place + count + LANES + AHEAD, place[count - 1]);
  }
};

// What a part leaves in which nobody is there.
void leave_nothing(int heads, int width, int length, float* found, float* weights, int64_t stride) {
  for (int h = 0; h < heads; ++h) {
    std::fill_n(found + h * (FOUND + width), FOUND + width, 0.f);
    found[h * (FOUND + width)] = -INFINITE;
    if (weights) std::fill_n(weights + h * stride, length, 0.f);
  }
}

// HEADS heads of a group, whose scaled queries are `q` [HEADS, width], over one part. `weights`, if wanted, gets
// exp(score − largest), as yet without the divisor.
template <int HEADS>
void attend(const float* q, const Pages& pages, Part& part, float* found, float* weights, int64_t stride) {
  constexpr int BATCH = KEYS<HEADS>;
  const int width = pages.width, count = part.count, vectors = (count + BATCH - 1) / BATCH;
  const int64_t found_stride = FOUND + width;
  float* const scores = part.scores;
  over_width(width, [&](auto columns, int c) {
    add_scores<HEADS, columns>(q + c, width, pages.keys + c, part.place, count, c > 0, scores);
  });
  float* const last = scores + (vectors - 1) * LANES;
  for (int k = count - (vectors - 1) * BATCH; k < BATCH; ++k)
    for (int h = 0; h < HEADS; ++h) last[h * BATCH + k] = -INFINITE;

  float peak[LANES], total[LANES];  // of each lane
  for (int lane = 0; lane < LANES; lane += N) {
    Lanes most = all(-INFINITE);
    for (int i = 0; i < vectors; ++i) most = larger(load_lanes(scores + i * LANES + lane), most);
    store_lanes(peak + lane, most);
  }
  for (int h = 0; h < HEADS; ++h) std::fill_n(peak + h * BATCH, BATCH, *std::max_element(peak + h * BATCH, peak + (h + 1) * BATCH));
  for (int lane = 0; lane < LANES; lane += N) {
    const Lanes least = load_lanes(peak + lane);
    Lanes added{};
    for (int i = 0; i < vectors; ++i) {
      const Lanes weight = exp2_falling((load_lanes(scores + i * LANES + lane) - least) * LOG2_E);
      store_lanes(scores + i * LANES + lane, weight);
      added += weight;
    }
    store_lanes(total + lane, added);
  }
  for (int h = 0; h < HEADS; ++h) {
    float* const mine = found + h * found_stride;
    mine[0] = peak[h * BATCH];
    mine[1] = 0;
    for (int k = 0; k < BATCH; ++k) mine[1] += total[h * BATCH + k];
    if (!weights) continue;
    float* const to = weights + h * stride;
    if (!part.whole) std::fill_n(to, part.length, 0.f);
    for (int i = 0; i < count; ++i) to[part.whole ? i : part.position[i]] = scores[i / BATCH * LANES + h * BATCH + i % BATCH];
  }
  over_width(width, [&](auto columns, int c) {
    blend_values<HEADS, columns>(scores, pages.values + c, part.place, count, found + FOUND + c, found_stride);
  });
}

int first_seen(const Heads& heads, int position) {
  return heads.window > 0 ? std::max(0, position + 1 - heads.window) : 0;
}

}  // namespace

int decode_parts(int position) { return position / PART + 1; }

size_t decode_part_floats(const Heads& heads) { return size_t(heads.heads / heads.groups) * (FOUND + heads.width); }

size_t decode_part_scratch_bytes(const Heads& heads) {
  return sizeof(float) * size_t(heads.heads / heads.groups) * heads.width;
}

size_t decode_scratch_bytes(const Heads& heads, int context) {
  return decode_part_scratch_bytes(heads) + sizeof(float) * decode_part_floats(heads) * decode_parts(context - 1);
}

void decode_attention_part(const float* q, const Heads& heads, const Pages& pages, const int32_t* table, int position, int group,
                           int part, float* parts, float* weights, int64_t stride, void* scratch) {
  const int share = heads.heads / heads.groups, width = heads.width;
  const int from = std::max(part * PART, first_seen(heads, position)), to = std::min((part + 1) * PART, position + 1);
  float* found = parts + part * decode_part_floats(heads);
  if (from >= to) return;  // wholly outside the window; the merge passes it over
  float* const scaled = static_cast<float*>(scratch);
  const float scale = 1.f / std::sqrt(float(width));
  for (int i = 0; i < share * width; i += LANES) store(scaled + i, load(q + int64_t(group) * share * width + i) * splat(scale));
  Part mine(pages, table, group, from, to);
  if (weights) weights += int64_t(group) * share * stride + from;
  if (!mine.count) return leave_nothing(share, width, mine.length, found, weights, stride);
  const auto attend_heads = [&](auto count, int h) {
    attend<count>(scaled + h * width, pages, mine, found + h * (FOUND + width), weights ? weights + h * stride : nullptr, stride);
  };
  int h = 0;
  for (; share - h >= 4; h += 4) attend_heads(std::integral_constant<int, 4>{}, h);
  if (share - h == 3) attend_heads(std::integral_constant<int, 3>{}, h);
  if (share - h == 2) attend_heads(std::integral_constant<int, 2>{}, h);
  if (share - h == 1) attend_heads(std::integral_constant<int, 1>{}, h);
}

void decode_attention_merge(const Heads& heads, int position, int group, const float* parts, float* out, float* weights,
                            int64_t stride) {
  const int share = heads.heads / heads.groups, width = heads.width, count = decode_parts(position);
  const int seen = first_seen(heads, position);
  const size_t part_floats = decode_part_floats(heads);
  for (int h = 0; h < share; ++h) {
    const float* const mine = parts + h * (FOUND + width);
    const int64_t head = int64_t(group) * share + h;
    float peak = -INFINITE, total = 0;
    for (int i = seen / PART; i < count; ++i) peak = std::max(peak, mine[i * part_floats]);
    for (int i = seen / PART; i < count; ++i)
      total += std::exp(mine[i * part_floats] - peak) * mine[i * part_floats + 1];
    float* const to = out + head * width;
    std::fill(to, to + width, 0.f);
    if (weights) std::fill(weights + head * stride, weights + head * stride + seen, 0.f);
    for (int i = seen / PART; i < count; ++i) {
      const float* const part = mine + i * part_floats;
      const f32x16 share_of_part = splat(std::exp(part[0] - peak) / total);
      for (int c = 0; c < width; c += LANES) store(to + c, load(to + c) + load(part + FOUND + c) * share_of_part);
      if (!weights) continue;
      const int from = std::max(i * PART, seen), end = std::min((i + 1) * PART, position + 1);
      for (int at = from; at < end; ++at) weights[head * stride + at] *= share_of_part[0];
    }
  }
}

void decode_attention(const float* q, const Heads& heads, const Pages& pages, const int32_t* table, int position, int group,
                      float* out, float* weights, int64_t stride, void* scratch) {
  float* const parts = static_cast<float*>(scratch) + decode_part_scratch_bytes(heads) / sizeof(float);
  for (int part = first_seen(heads, position) / PART; part < decode_parts(position); ++part)
    decode_attention_part(q, heads, pages, table, position, group, part, parts, weights, stride, scratch);
  decode_attention_merge(heads, position, group, parts, out, weights, stride);
}

}  // namespace quaver

extern "C" {

size_t quaver_decode_scratch_bytes(const quaver::Heads* heads, int context) {
  return quaver::decode_scratch_bytes(*heads, context);
}

void quaver_decode_attention(const float* q, const quaver::Heads* heads, const quaver::Pages* pages, const int32_t* table,
                             int position, int group, float* out, float* weights, int64_t stride, void* scratch) {
  quaver::decode_attention(q, *heads, *pages, table, position, group, out, weights, stride, scratch);
}

size_t quaver_decode_part_floats(const quaver::Heads* heads) { return quaver::decode_part_floats(*heads); }

size_t quaver_decode_part_scratch_bytes(const quaver::Heads* heads) { return quaver::decode_part_scratch_bytes(*heads); }

int quaver_decode_parts(int position) { return quaver::decode_parts(position); }

void quaver_decode_attention_part(const float* q, const quaver::Heads* heads, const quaver::Pages* pages, const int32_t* table,
                                  int position, int group, int part, float* parts, float* weights, int64_t stride,
                                  void* scratch) {
  quaver::decode_attention_part(q, *heads, *pages, table, position, group, part, parts, weights, stride, scratch);
}

void quaver_decode_attention_merge(const quaver::Heads* heads, int position, int group, const float* parts, float* out,
                                   float* weights, int64_t stride) {
  quaver::decode_attention_merge(*heads, position, group, parts, out, weights, stride);
}
}
