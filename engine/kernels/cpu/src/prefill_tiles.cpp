// Causal attention of a chunk of a prompt on matrix tiles: q and the weights are rounded to bf16, sums are fp32.
#include "matrix.h"
#include "prefill.h"
#include "tiles.h"

namespace quaver::attention {

#if defined(QUAVER_TILES)

namespace {

// A tile is 16 rows of 64 bytes. One that is the right factor of a product has, in row i, the pairs (2i, 2i + 1) of
// its 16 columns.
constexpr int TILE = 512;      // bf16
constexpr int ROW_BYTES = 64;

typedef uint32_t pairs __attribute__((vector_size(64)));

// The layout: keys [chunks, width / 32, 2] tiles (32 of the width by 16 keys), then values [chunks, width / 16] tiles
// (32 keys by 16 of the width).
// The scratch: queries [QUERIES, width] bf16, one result [QUERIES, 32] fp32, then scores [QUERIES, score_stride] fp32; a row of
// weights, bf16, replaces the first half of its scores.
struct Scratch {
  uint16_t* q;
  float* result;
  float* scores;

  Scratch(void* at, int width)
      : q(static_cast<uint16_t*>(at)), result(reinterpret_cast<float*>(q + QUERIES * width)), scores(result + QUERIES * 32) {}
};

inline void put_bf16(uint16_t* to, f32x16 v) {
  const auto rounded = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(to, &rounded, sizeof rounded);
}

// Makes all eight tiles whole; released at the end.
struct Tiles {
  Tiles() {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, 16, ROW_BYTES);
    shapes.load();
  }
  ~Tiles() { _tile_release(); }
};

// The compiler does not know that a tile load reads memory: what was stored must be there before.
inline void settle() { asm volatile("" ::: "memory"); }

// scores[0 … 31][0 … 31] = q · keys of one chunk.
void score_chunk(const uint16_t* q, const uint16_t* keys, int width, float* scores, int64_t stride) {
  settle();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int c = 0; c < width; c += 32, keys += 2 * TILE) {
    _tile_loadd(4, q + c, 2 * width);
    _tile_loadd(5, q + 16 * width + c, 2 * width);
    _tile_loadd(6, keys, ROW_BYTES);
    _tile_loadd(7, keys + TILE, ROW_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, scores, 4 * stride);
  _tile_stored(1, scores + 16, 4 * stride);
  _tile_stored(2, scores + 16 * stride, 4 * stride);
  _tile_stored(3, scores + 16 * stride + 16, 4 * stride);
}

// result [QUERIES, 32] = weights · values over `chunks` chunks; `values` are two neighbouring tiles of the first.
void blend_values(const uint16_t* weights, int64_t stride, const uint16_t* values, int width, int chunks, float* result) {
  settle();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < chunks; ++i, weights += CHUNK, values += CHUNK * width) {
    _tile_loadd(4, weights, 2 * stride);
    _tile_loadd(5, weights + 16 * stride, 2 * stride);
    _tile_loadd(6, values, ROW_BYTES);
    _tile_loadd(7, values + TILE, ROW_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, result, 128);
  _tile_stored(1, result + 16, 128);
  _tile_stored(2, result + 16 * 32, 128);
  _tile_stored(3, result + 16 * 32 + 16, 128);
}

// The width's columns [c, c + 16) of two rows as pairs.
pairs zip(const uint16_t* low, const uint16_t* high) {
  u16x16 a, b;
  std::memcpy(&a, low, sizeof a);
  std::memcpy(&b, high, sizeof b);
  return __builtin_convertvector(a, pairs) | (__builtin_convertvector(b, pairs) << 16);
}

}  // namespace

bool tiles_fit(const Heads& heads) { return heads.width % 32 == 0 && has_wide_product(); }

size_t tiles_layout_bytes(const Heads& heads, int context) { return 2 * sizeof(uint16_t) * padded(context) * heads.width; }

void tiles_prepare(const Heads& heads, const Pages& pages, const int32_t* table, int context, int group, void* layout) {
  const int width = heads.width, end = padded(context);
  static const uint16_t zeros[1024] = {};
  uint16_t* keys = static_cast<uint16_t*>(layout);
  uint16_t* values = keys + int64_t(end) * width;
  LiveRows rows{pages, table, context, group};
  for (int at = 0; at < end; at += CHUNK) {
    const uint16_t *key[CHUNK], *value[CHUNK];
    for (int i = 0; i < CHUNK; ++i) {
      const int64_t row = rows.next();
      key[i] = row < 0 ? zeros : pages.keys + row;
      value[i] = row < 0 ? zeros : pages.values + row;
    }
    for (int c = 0; c < width; c += 32)
      for (int half = 0; half < CHUNK; half += 16, keys += TILE)
        for (int i = 0; i < 16; ++i)
          for (int pair = 0; pair < 16; ++pair)
            std::memcpy(keys + (pair * 16 + i) * 2, key[half + i] + c + 2 * pair, sizeof(uint32_t));
    for (int c = 0; c < width; c += 16, values += TILE)
      for (int pair = 0; pair < 16; ++pair) {
        const pairs row = zip(value[2 * pair] + c, value[2 * pair + 1] + c);
        std::memcpy(values + pair * 32, &row, sizeof row);
      }
  }
}

size_t tiles_scratch_bytes(const Heads& heads, int context) {
  return QUERIES * (sizeof(uint16_t) * heads.width + sizeof(float) * (32 + score_stride(context)));
}

void tiles_attention(const float* qkv, int64_t qkv_stride, const Heads& heads, int start, int count, int group, int index,
                     const void* layout, const int32_t* rank, Scores scored, float* out, int64_t out_stride, void* scratch) {
  const Block block(heads, start, count, index, rank);
  const int width = heads.width, share = heads.heads / heads.groups, stride = score_stride(start + count);
  const uint16_t* const keys = static_cast<const uint16_t*>(layout);
  const uint16_t* const values = keys + int64_t(padded(start + count)) * width;
  const Scratch mine(scratch, width);
  const float scale = 1.f / std::sqrt(float(width));
  const Tiles tiles;
  for (int head = group * share; head < (group + 1) * share; ++head) {
    for (int r = 0; r < QUERIES; ++r)
      for (int c = 0; c < width; c += LANES)
        put_bf16(mine.q + r * width + c,
                   r < block.rows ? load(qkv + (block.first + r) * qkv_stride + head * width + c) : splat(0.f));
    for (int at = block.from; at < block.to; at += CHUNK)
      score_chunk(mine.q, keys + int64_t(at) * width, width, mine.scores + at, stride);
    float inverse[QUERIES];
    for (int r = 0; r < block.rows; ++r) {
      float* const row = mine.scores + int64_t(r) * stride;
      uint16_t* const weights = reinterpret_cast<uint16_t*>(row);
      inverse[r] = 1.f / softmax(row, block, block.seen_from(heads, r), block.seen_to(r), scale,
                                 [&](int at, Lanes weight) { put_bf16(weights + at, weight); });
    }
    for (int r = block.scored(scored); r < block.rows; ++r)
      add_mass(reinterpret_cast<const uint16_t*>(mine.scores + int64_t(r) * stride), block, inverse[r], scored.mass);
    const uint16_t* const weights = reinterpret_cast<const uint16_t*>(mine.scores);
    for (int c = 0; c < width; c += 32) {
      blend_values(weights + block.from, 2 * stride, values + int64_t(block.from) * width + c / 16 * TILE, width,
                   (block.to - block.from) / CHUNK, mine.result);
      for (int r = 0; r < block.rows; ++r) {
        float* const to = out + (block.first + r) * out_stride + int64_t(head) * width + c;
        store(to, load(mine.result + r * 32) * splat(inverse[r]));
        store(to + LANES, load(mine.result + r * 32 + LANES) * splat(inverse[r]));
      }
    }
  }
}

#else

bool tiles_fit(const Heads&) { return false; }
size_t tiles_layout_bytes(const Heads&, int) { return 0; }
void tiles_prepare(const Heads&, const Pages&, const int32_t*, int, int, void*) {}
size_t tiles_scratch_bytes(const Heads&, int) { return 0; }
void tiles_attention(const float*, int64_t, const Heads&, int, int, int, int, const void*, const int32_t*, Scores, float*, int64_t,
                     void*) {}

#endif

}  // namespace quaver::attention
