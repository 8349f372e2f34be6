#include "prefill.h"

#include <type_traits>

namespace quaver {
namespace {

// The layout: keys transposed, [chunks, width, CHUNK] fp32, then values [chunks · CHUNK, width] fp32.
// The scratch: queries [QUERIES, width], then scores [QUERIES, score_stride].
constexpr int ROWS = 4;  // queries whose sums are held in registers

static_assert(CHUNK == 2 * LANES && QUERIES % ROWS == 0);

// scores[row][key] = q[row] · key for ROWS rows and one chunk of keys.
void score_chunk(const float* q, const float* keys, int width, float* scores, int64_t stride) {
  f32x16 total[ROWS][2];
  for (int r = 0; r < ROWS; ++r) total[r][0] = total[r][1] = splat(0.f);
  for (int c = 0; c < width; ++c, keys += CHUNK) {
    const f32x16 left = load(keys), right = load(keys + LANES);
    for (int r = 0; r < ROWS; ++r) {
      const f32x16 x = splat(q[r * width + c]);
      total[r][0] += x * left;
      total[r][1] += x * right;
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    store(scores + r * stride, total[r][0]);
    store(scores + r * stride + LANES, total[r][1]);
  }
}

// out[row] = scale[row] · Σ weights[row][i] · value[i] over 16 · VECTORS columns, for the first `rows` of ROWS rows.
template <int VECTORS>
void blend_values(const float* weights, int64_t stride, const float* values, int width, int count, const float* scale, int rows,
                  float* out, int64_t out_stride) {
  f32x16 total[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) total[r][v] = splat(0.f);
  for (int i = 0; i < count; ++i, values += width) {
    f32x16 value[VECTORS];
    for (int v = 0; v < VECTORS; ++v) value[v] = load(values + v * LANES);
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < VECTORS; ++v) total[r][v] += splat(weights[r * stride + i]) * value[v];
  }
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < VECTORS; ++v) store(out + r * out_stride + v * LANES, total[r][v] * splat(scale[r]));
}

}  // namespace

size_t prefill_layout_bytes(const Heads& heads, int context) {
  if (tiles_fit(heads)) return tiles_layout_bytes(heads, context);
  return 2 * sizeof(float) * padded(context) * heads.width;
}

void prefill_prepare(const Heads& heads, const Pages& pages, const int32_t* table, int context, int group, void* layout) {
  if (tiles_fit(heads)) return tiles_prepare(heads, pages, table, context, group, layout);
  const int width = heads.width, end = padded(context);
  float* const keys = static_cast<float*>(layout);
  float* const values = keys + int64_t(end) * width;
  for (int at = 0; at < end; ++at) {
    float* const column = keys + int64_t(at / CHUNK) * width * CHUNK + at % CHUNK;
    float* const row = values + int64_t(at) * width;
    if (at >= context) {
      for (int c = 0; c < width; ++c) column[c * CHUNK] = row[c] = 0;
      continue;
    }
    const int64_t from = row_of(pages, table, at, group);
    for (int c = 0; c < width; ++c) column[c * CHUNK] = bf16_to_float(pages.keys[from + c]);
    for (int c = 0; c < width; c += LANES) store(row + c, load_bf16(pages.values + from + c));
  }
}

size_t prefill_scratch_bytes(const Heads& heads, int context) {
  if (tiles_fit(heads)) return tiles_scratch_bytes(heads, context);
  return sizeof(float) * QUERIES * (heads.width + score_stride(context));
}

void prefill_attention(const float* qkv, int64_t qkv_stride, const Heads& heads, const Pages& pages, const int32_t* table, int start,
                       int count, int group, int index, const void* layout, float* out, int64_t out_stride, void* scratch) {
  if (tiles_fit(heads))
    return tiles_attention(qkv, qkv_stride, heads, start, count, group, index, layout, out, out_stride, scratch);
  const Block block(heads, start, count, index);
  const int width = heads.width, share = heads.heads / heads.groups, stride = score_stride(start + count);
  const float* const keys = static_cast<const float*>(layout);
  const float* const values = keys + int64_t(padded(start + count)) * width;
  float* const q = static_cast<float*>(scratch);
  float* const scores = q + QUERIES * width;
  const float scale = 1.f / std::sqrt(float(width));
  const int rows = (block.rows + ROWS - 1) / ROWS * ROWS;
  for (int head = group * share; head < (group + 1) * share; ++head) {
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < width; c += LANES)
        store(q + r * width + c, r < block.rows ? load(qkv + (block.first + r) * qkv_stride + head * width + c) : splat(0.f));
    for (int at = block.from; at < block.to; at += CHUNK)
      for (int r = 0; r < rows; r += ROWS)
        score_chunk(q + r * width, keys + int64_t(at) * width, width, scores + int64_t(r) * stride + at, stride);
    float inverse[QUERIES] = {};
    for (int r = 0; r < block.rows; ++r) {
      float* const row = scores + int64_t(r) * stride;
      inverse[r] = 1.f / softmax(row, block, block.seen_from(heads, r), block.seen_to(r), scale,
                                 [&](int at, f32x16 weights) { store(row + at, weights); });
    }
    for (int r = 0; r < rows; r += ROWS) {
      float* const to = out + (block.first + r) * out_stride + int64_t(head) * width;
      const float* const weights = scores + int64_t(r) * stride + block.from;
      const auto blend = [&](auto vectors, int c) {
        blend_values<vectors>(weights, stride, values + int64_t(block.from) * width + c, width, block.to - block.from, inverse + r,
                              std::min(ROWS, block.rows - r), to + c, out_stride);
      };
      int c = 0;
      for (; width - c >= 64; c += 64) blend(std::integral_constant<int, 4>{}, c);
      for (; width - c >= 16; c += 16) blend(std::integral_constant<int, 1>{}, c);
    }
  }
}

}  // namespace quaver

extern "C" {

size_t quaver_prefill_layout_bytes(const quaver::Heads* heads, int context) {
  return quaver::prefill_layout_bytes(*heads, context);
}

void quaver_prefill_prepare(const quaver::Heads* heads, const quaver::Pages* pages, const int32_t* table, int context, int group,
                            void* layout) {
  quaver::prefill_prepare(*heads, *pages, table, context, group, layout);
}

size_t quaver_prefill_scratch_bytes(const quaver::Heads* heads, int context) {
  return quaver::prefill_scratch_bytes(*heads, context);
}

// Unlike the C++ function it computes all groups and blocks.
void quaver_prefill_attention(const float* qkv, int64_t qkv_stride, const quaver::Heads* heads, const quaver::Pages* pages,
                              const int32_t* table, int start, int count, void* layout, float* out, int64_t out_stride,
                              void* scratch) {
  for (int group = 0; group < heads->groups; ++group) {
    quaver::prefill_prepare(*heads, *pages, table, start + count, group, layout);
    for (int block = 0; block * quaver::QUERIES < count; ++block)
      quaver::prefill_attention(qkv, qkv_stride, *heads, *pages, table, start, count, group, block, layout, out, out_stride, scratch);
  }
}
}
