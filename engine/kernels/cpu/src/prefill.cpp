// Causal attention of a chunk of a prompt, on vectors; the choice between those and tiles.
#include "prefill.h"

#include <type_traits>

namespace quaver::attention {
namespace {

// The layout: keys transposed, [chunks, width, CHUNK] fp32, then values [chunks · CHUNK, width] fp32.
// The scratch: queries [QUERIES, width], then scores [QUERIES, score_stride].
// Sums of ROWS queries, by two vectors of keys or by COLUMNS of the width, are held in registers.
constexpr int ROWS = N == 16 ? 8 : 4;

// scores[row][key] = q[row] · key for ROWS rows and one chunk of keys.
void score_chunk(const float* q, const float* keys, int width, float* scores, int64_t stride) {
  for (int at = 0; at < CHUNK; at += 2 * N) {
    Lanes total[ROWS][2] = {};
    for (int c = 0; c < width; ++c) {
      const Lanes left = load_lanes(keys + c * CHUNK + at), right = load_lanes(keys + c * CHUNK + at + N);
      for (int r = 0; r < ROWS; ++r) {
        total[r][0] += left * q[r * width + c];
        total[r][1] += right * q[r * width + c];
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int i = 0; i < 2; ++i) store_lanes(scores + r * stride + at + i * N, total[r][i]);
  }
}

// out[row] = scale[row] · Σ weights[row][i] · value[i] over COLUMNS columns, for the first `rows` of 4 rows.
template <int COLUMNS>
void blend_values(const float* weights, int64_t stride, const float* values, int width, int count, const float* scale, int rows,
                  float* out, int64_t out_stride) {
  constexpr int VECTORS = COLUMNS / N;
  Lanes total[4][VECTORS] = {};
  for (int i = 0; i < count; ++i, values += width) {
    Lanes value[VECTORS];
    for (int v = 0; v < VECTORS; ++v) value[v] = load_lanes(values + v * N);
    for (int r = 0; r < 4; ++r)
      for (int v = 0; v < VECTORS; ++v) total[r][v] += value[v] * weights[r * stride + i];
  }
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < VECTORS; ++v) store_lanes(out + r * out_stride + v * N, total[r][v] * scale[r]);
}

}  // namespace
}  // namespace quaver::attention

namespace quaver {

using namespace attention;

std::vector<int32_t> ranks(const Pages& pages, const int32_t* table, int context) {
  std::vector<int32_t> found(context + 1);
  for (int at = 0; at < context; ++at) {
    const int64_t slot = int64_t(table[at / pages.page_size]) * pages.page_size + at % pages.page_size;
    found[at + 1] = found[at] + !(pages.dead && pages.dead[slot]);
  }
  return found;
}

size_t prefill_layout_bytes(const Heads& heads, int context) {
  if (tiles_fit(heads)) return tiles_layout_bytes(heads, context);
  return 2 * sizeof(float) * padded(context) * heads.width;
}

void prefill_prepare(const Heads& heads, const Pages& pages, const int32_t* table, int context, int group, void* layout) {
  if (tiles_fit(heads)) return tiles_prepare(heads, pages, table, context, group, layout);
  const int width = heads.width, end = padded(context);
  float* const keys = static_cast<float*>(layout);
  float* const values = keys + int64_t(end) * width;
  LiveRows rows{pages, table, context, group};
  for (int at = 0; at < end; ++at) {
    float* const column = keys + int64_t(at / CHUNK) * width * CHUNK + at % CHUNK;
    float* const row = values + int64_t(at) * width;
    const int64_t from = rows.next();
    if (from < 0) {
      for (int c = 0; c < width; ++c) column[c * CHUNK] = row[c] = 0;
      continue;
    }
    for (int c = 0; c < width; ++c) column[c * CHUNK] = bf16_to_float(pages.keys[from + c]);
    for (int c = 0; c < width; c += LANES) store(row + c, load_bf16(pages.values + from + c));
  }
}

size_t prefill_scratch_bytes(const Heads& heads, int context) {
  if (tiles_fit(heads)) return tiles_scratch_bytes(heads, context);
  return sizeof(float) * QUERIES * (heads.width + score_stride(context));
}

void prefill_attention(const float* qkv, int64_t qkv_stride, const Heads& heads, const Pages& pages, const int32_t* table, int start,
                       int count, int group, int index, const void* layout, const int32_t* rank, Scores scored, float* out,
                       int64_t out_stride, void* scratch) {
  if (tiles_fit(heads))
    return tiles_attention(qkv, qkv_stride, heads, start, count, group, index, layout, rank, scored, out, out_stride, scratch);
  const Block block(heads, start, count, index, rank);
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
                                 [&](int at, Lanes weights) { store_lanes(row + at, weights); });
    }
    for (int r = block.scored(scored); r < block.rows; ++r)
      add_mass(scores + int64_t(r) * stride, block, inverse[r], scored.mass);
    for (int r = 0; r < block.rows; r += 4) {
      float* const to = out + (block.first + r) * out_stride + int64_t(head) * width;
      const auto blend = [&](auto columns, int c) {
        blend_values<columns>(scores + int64_t(r) * stride + block.from, stride, values + int64_t(block.from) * width + c, width,
                              block.to - block.from, inverse + r, std::min(4, block.rows - r), to + c, out_stride);
      };
      constexpr int most = N == 16 ? 64 : 16;
      int c = 0;
      for (; width - c >= most; c += most) blend(std::integral_constant<int, most>{}, c);
      for (; width - c >= 16; c += 16) blend(std::integral_constant<int, 16>{}, c);
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

// Unlike the C++ function it computes all groups and blocks, and ranks.
void quaver_prefill_attention(const float* qkv, int64_t qkv_stride, const quaver::Heads* heads, const quaver::Pages* pages,
                              const int32_t* table, int start, int count, void* layout, int scored_from, float* mass,
                              float* out, int64_t out_stride, void* scratch) {
  const std::vector<int32_t> rank = quaver::ranks(*pages, table, start + count);
  const int32_t* const live = pages->dead ? rank.data() : nullptr;
  for (int group = 0; group < heads->groups; ++group) {
    quaver::prefill_prepare(*heads, *pages, table, start + count, group, layout);
    for (int block = 0; block * quaver::QUERIES < count; ++block)
      quaver::prefill_attention(qkv, qkv_stride, *heads, *pages, table, start, count, group, block, layout, live,
                                {mass, scored_from}, out, out_stride, scratch);
  }
}
}
