// Products of many bf16 rows on matrix tiles.
#include "matrix.h"
#include "simd.h"
#include "tiles.h"

#if defined(QUAVER_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quaver {

#if defined(QUAVER_TILES)

namespace {

constexpr int TILE = 16;                 // rows of a tile; a row is 64 bytes
constexpr size_t TILE_BYTES = 16 * 64;   // one panel's block of weights: 16 pairs of columns × 16 rows

typedef uint16_t u16x32 __attribute__((vector_size(64)));

// Tiles 0 … 3: results (activations 0 with weights 0, 0 with 1, 1 with 0, 1 with 1), 4 and 5: activations, 6 and 7: weights.
void configure(int first, int second) {
  TileShapes shapes;
  const int rows[8] = {first, first, second, second, first, second, TILE, TILE};
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, rows[tile], 64);
  shapes.load();
}

// Columns 4q + i and 4q + i + 1 of 16 rows, from the bytes i and i + 1 of their quads, as pairs of bf16.
__m512i pairs(__m512i quads, int i, f32x16 scale, f32x16 least) {
  const __m512i byte = _mm512_set1_epi32(255);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(quads, 8 * i), byte);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(quads, 8 * i + 8), byte);
  const f32x16 a = f32x16(_mm512_cvtepi32_ps(even)) * scale + least, b = f32x16(_mm512_cvtepi32_ps(odd)) * scale + least;
  const u16x32 woven = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(__m512i(woven), (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
}

// One block of a panel as a tile: row j holds columns 2j and 2j + 1 of the panel's 16 rows.
template <int BITS>
void widen(const uint8_t* block, uint8_t* tile) {
  const f32x16 scale = load_f16(reinterpret_cast<const uint16_t*>(block + 64 * BITS));
  const f32x16 base = load_f16(reinterpret_cast<const uint16_t*>(block + 64 * BITS + 32));
  const f32x16 least = BITS == 8 ? base - scale * splat(128) : base;
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int q = 0; q < 8; ++q) {
    __m512i quads = _mm512_loadu_si512(block + 64 * (BITS == 8 ? q : q % 4));
    if (BITS == 4) quads = _mm512_and_si512(q < 4 ? quads : _mm512_srli_epi16(quads, 4), nibble);
    _mm512_storeu_si512(tile + 128 * q, pairs(quads, 0, scale, least));
    _mm512_storeu_si512(tile + 128 * q + 64, pairs(quads, 2, scale, least));
  }
}

// Up to 32 rows (tiles as configured; SECOND: more than 16) with one panel or two.
template <bool SECOND>
void tiles_product(const uint8_t* weights, int blocks, const uint16_t* x, float* out, int64_t stride, bool two) {
  const int64_t cols = int64_t(blocks) * BLOCK, bytes = stride * 4;
  const uint8_t* weights_of_second = weights + TILE_BYTES * blocks;
  float* lower = out + TILE * stride;
  _tile_zero(0);
  _tile_zero(1);
  if (SECOND) _tile_zero(2);
  if (SECOND) _tile_zero(3);
  for (int b = 0; b < blocks; ++b, weights += TILE_BYTES, weights_of_second += TILE_BYTES, x += BLOCK) {
    _tile_loadd(6, weights, 64);
    _tile_loadd(4, x, cols * 2);
    _tile_dpbf16ps(0, 4, 6);
    if (two) _tile_loadd(7, weights_of_second, 64);
    if (two) _tile_dpbf16ps(1, 4, 7);
    if (SECOND) _tile_loadd(5, x + TILE * cols, cols * 2);
    if (SECOND) _tile_dpbf16ps(2, 5, 6);
    if (SECOND && two) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, bytes);
  if (two) _tile_stored(1, out + PANEL, bytes);
  if (SECOND) _tile_stored(2, lower, bytes);
  if (SECOND && two) _tile_stored(3, lower + PANEL, bytes);
}

bool ask_for_tiles() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

}  // namespace

bool has_wide_product() {
  static const bool granted = ask_for_tiles();  // for the whole process
  return granted;
}

size_t wide_scratch_bytes(const Matrix& m, int panels) { return TILE_BYTES * m.blocks() * panels; }

void wide_product(const Matrix& m, int panel, int panels, const uint16_t* x, int rows, float* out, int64_t stride,
                  void* scratch) {
  auto* tiles = static_cast<uint8_t*>(scratch);
  const size_t panel_step = TILE_BYTES * m.blocks();
  const uint8_t* block = m.data + m.panel_bytes() * panel;
  const auto unpack = m.bits == 8 ? widen<8> : widen<4>;
  for (int i = 0; i < panels * m.blocks(); ++i, block += m.block_bytes()) unpack(block, tiles + TILE_BYTES * i);

  int configured = 0;
  for (int row = 0; row < rows; row += 2 * TILE) {
    const int now = rows - row < 2 * TILE ? rows - row : 2 * TILE;
    if (now != configured) configure(now < TILE ? now : TILE, now < TILE ? 0 : now - TILE);
    configured = now;
    const auto pass = now > TILE ? tiles_product<true> : tiles_product<false>;
    for (int p = 0; p < panels; p += 2) {
      pass(tiles + panel_step * p, m.blocks(), x + int64_t(row) * m.cols, out + row * stride + p * PANEL, stride,
           p + 1 < panels);
    }
  }
  _tile_release();
}

#else

bool has_wide_product() { return false; }
size_t wide_scratch_bytes(const Matrix&, int) { return 0; }
void wide_product(const Matrix&, int, int, const uint16_t*, int, float*, int64_t, void*) {}

#endif

}  // namespace quaver

extern "C" {

int quaver_has_wide_product() { return quaver::has_wide_product(); }

size_t quaver_wide_scratch_bytes(const quaver::Matrix* matrix, int panels) {
  return quaver::wide_scratch_bytes(*matrix, panels);
}

void quaver_wide_product(const quaver::Matrix* matrix, int panel, int panels, const uint16_t* x, int rows, float* out,
                         int64_t stride, void* scratch) {
  quaver::wide_product(*matrix, panel, panels, x, rows, out, stride, scratch);
}
}
