#include "attention.h"

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace quaver {
namespace {

// Floats that one head of a part leaves: largest score, Σ exp(score − largest), 14 unused, then Σ exp(…) · value [width].
constexpr int FOUND = LANES;

constexpr int KEYS = 4;  // keys whose scores are computed together

// Reads keys and values of one sequence and group, row after row.
struct Rows {
  const Pages& pages;
  const int32_t* table;
  int group;

  int64_t stride() const { return int64_t(pages.groups) * pages.width; }

  // The place of position `at`; those up to the end of its page follow at `stride`.
  int64_t place(int at) const {
    return ((int64_t(table[at / pages.page_size]) * pages.page_size + at % pages.page_size) * pages.groups + group) * pages.width;
  }

  int run(int at, int end) const { return std::min(end - at, pages.page_size - at % pages.page_size); }
};

// scores[head][i] (+)= q[head] · key[i] over 16 · VECTORS columns.
template <int HEADS, int VECTORS>
void add_scores(const float* q, int width, const uint16_t* keys, int64_t stride, int count, bool add, float* scores) {
  f32x16 query[HEADS][VECTORS];
  for (int h = 0; h < HEADS; ++h)
    for (int v = 0; v < VECTORS; ++v) query[h][v] = load(q + h * width + v * LANES);
  for (int i = 0; i < count; ++i, keys += stride) {
    f32x16 product[HEADS];
    for (int h = 0; h < HEADS; ++h) product[h] = splat(0.f);
    for (int v = 0; v < VECTORS; ++v) {
      const f32x16 key = load_bf16(keys + v * LANES);
      for (int h = 0; h < HEADS; ++h) product[h] += query[h][v] * key;
    }
    for (int h = 0; h < HEADS; ++h) {
      float& score = scores[h * PART + i];
      score = sum(product[h]) + (add ? score : 0.f);
    }
  }
}

// out[head] += Σ weights[head][i] · value[i] over 16 · VECTORS columns.
template <int HEADS, int VECTORS>
void add_values(const float* weights, const uint16_t* values, int64_t stride, int count, float* out, int64_t out_stride) {
  f32x16 total[HEADS][VECTORS];
  for (int h = 0; h < HEADS; ++h)
    for (int v = 0; v < VECTORS; ++v) total[h][v] = load(out + h * out_stride + v * LANES);
  for (int i = 0; i < count; ++i, values += stride)
    for (int v = 0; v < VECTORS; ++v) {
      const f32x16 value = load_bf16(values + v * LANES);
      for (int h = 0; h < HEADS; ++h) total[h][v] += splat(weights[h * PART + i]) * value;
    }
  for (int h = 0; h < HEADS; ++h)
    for (int v = 0; v < VECTORS; ++v) store(out + h * out_stride + v * LANES, total[h][v]);
}

// Calls step(columns, from) with 64, 32 and 16 columns until the width is covered.
template <class Step>
void over_width(int width, const Step& step) {
  int at = 0;
  for (; width - at >= 64; at += 64) step(std::integral_constant<int, 4>{}, at);
  for (; width - at >= 32; at += 32) step(std::integral_constant<int, 2>{}, at);
  for (; width - at >= 16; at += 16) step(std::integral_constant<int, 1>{}, at);
}

// One part of the context, positions [from, to), for HEADS heads of a group whose scaled queries are `q` [HEADS, width].
template <int HEADS>
void attend(const float* q, const Rows& rows, int from, int to, float* scores, float* found, float* weights, int64_t stride) {
  const int width = rows.pages.width, count = to - from;
  const int64_t found_stride = FOUND + width;
  for (int at = from; at < to;) {
    const int run = rows.run(at, to);
    const uint16_t* keys = rows.pages.keys + rows.place(at);
    over_width(width, [&](auto vectors, int column) {
      add_scores<HEADS, vectors>(q + column, width, keys + column, rows.stride(), run, column > 0, scores + at - from);
    });
    at += run;
  }
  for (int h = 0; h < HEADS; ++h) {
    float* score = scores + h * PART;
    const int padded = (count + LANES - 1) / LANES * LANES;
    std::fill(score + count, score + padded, -std::numeric_limits<float>::infinity());
    f32x16 most = load(score);
    for (int i = LANES; i < padded; i += LANES) most = max(most, load(score + i));
    const float peak = largest(most);
    f32x16 total = splat(0.f);
    for (int i = 0; i < padded; i += LANES) {
      const f32x16 e = exp(load(score + i) - splat(peak));
      store(score + i, e);
      total += e;
    }
    float* mine = found + h * found_stride;
    std::fill(mine, mine + found_stride, 0.f);
    mine[0] = peak;
    mine[1] = sum(total);
    if (weights) std::copy(score, score + count, weights + h * stride + from);
  }
  for (int at = from; at < to;) {
    const int run = rows.run(at, to);
    const uint16_t* values = rows.pages.values + rows.place(at);
    over_width(width, [&](auto vectors, int column) {
      add_values<HEADS, vectors>(scores + at - from, values + column, rows.stride(), run, found + FOUND + column, found_stride);
    });
    at += run;
  }
}

int first_seen(const Heads& heads, int position) {
  return heads.window > 0 ? std::max(0, position + 1 - heads.window) : 0;
}

}  // namespace

int decode_parts(int position) { return position / PART + 1; }

size_t decode_part_floats(const Heads& heads) { return size_t(heads.heads / heads.groups) * (FOUND + heads.width); }

size_t decode_part_scratch_bytes(const Heads& heads) {
  return sizeof(float) * (4 * PART + size_t(heads.heads / heads.groups) * heads.width);
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
  float* const scores = static_cast<float*>(scratch);
  float* const scaled = scores + 4 * PART;
  const float scale = 1.f / std::sqrt(float(width));
  for (int i = 0; i < share * width; i += LANES) store(scaled + i, load(q + int64_t(group) * share * width + i) * splat(scale));
  const Rows rows{pages, table, group};
  const auto attend_heads = [&](auto count, int h) {
    attend<count>(scaled + h * width, rows, from, to, scores, found + h * (FOUND + width),
                  weights ? weights + (int64_t(group) * share + h) * stride : nullptr, stride);
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
    float peak = -std::numeric_limits<float>::infinity(), total = 0;
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
