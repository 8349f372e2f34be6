// The integer product of 16 rows with a panel on matrix tiles: the same sums in the same order as on lanes.
#pragma once

#include "lanes.h"
#include "tiles.h"

#if defined(QUAVER_TILES)

namespace quaver {

constexpr int TILED_ROWS = 16;  // fewer take as long on tiles as on lanes

// While one lives, its thread's tiles have the shapes of this product: 0 and 3: sums, 1 and 4: activations, 2 and 5: weights.
class Tiles {
 public:
  Tiles() {
    TileShapes shapes;
    for (int tile = 0; tile < 6; tile += 3) {
      shapes.set(tile, TILED_ROWS, 4 * PANEL);
      shapes.set(tile + 1, TILED_ROWS, BLOCK);
      shapes.set(tile + 2, QUADS, 4 * PANEL);
    }
    shapes.load();
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int BITS>
void tiles_product(const uint8_t* panel, int blocks, const Activations& x, int row, float* out, int64_t stride) {
  constexpr int BLOCK_BYTES = 64 * BITS + 64, RUN = 8;
  alignas(64) uint8_t weights[RUN][QUADS][64];
  alignas(64) int32_t dots[RUN][TILED_ROWS][PANEL];
  const int8_t* q = x.q + size_t(row) * x.cols;
  const size_t at = size_t(row) * blocks;
  const __m512i sign = _mm512_set1_epi8(BITS == 8 ? -128 : 0);
  Floats total[TILED_ROWS] = {};
  for (int done = 0; done < blocks; done += RUN, panel += RUN * BLOCK_BYTES) {
    const int run = blocks - done < RUN ? blocks - done : RUN;
    for (int b = 0; b < run; ++b) {
      const Weights<BITS> block(panel + b * BLOCK_BYTES);
      for (int at = 0; at < BLOCK_BYTES; at += 64) __builtin_prefetch(panel + b * BLOCK_BYTES + at + AHEAD);
      for (int i = 0; i < QUADS; ++i) _mm512_store_si512(weights[b][i], _mm512_xor_si512(block.quad[i], sign));
    }
    for (int b = 0; b < run; b += 2, q += 2 * BLOCK) {
      _tile_zero(0);
      _tile_loadd(1, q, x.cols);
      _tile_loadd(2, weights[b], 64);
      _tile_dpbssd(0, 1, 2);
      if (b + 1 < run) {
        _tile_zero(3);
        _tile_loadd(4, q + BLOCK, x.cols);
        _tile_loadd(5, weights[b + 1], 64);
        _tile_dpbssd(3, 4, 5);
        _tile_stored(3, dots[b + 1], 4 * PANEL);
      }
      _tile_stored(0, dots[b], 4 * PANEL);
    }
    for (int b = 0; b < run; ++b) {
      const uint8_t* scales = panel + b * BLOCK_BYTES + 64 * BITS;
      const Floats scale = halves(scales), base = halves(scales + 32);
#pragma GCC unroll 16
      for (int r = 0; r < TILED_ROWS; ++r) {
        const size_t i = at + size_t(r) * blocks + done + b;
        const Ints dot = Ints(_mm512_load_si512(dots[b][r]));
        total[r] += __builtin_convertvector(dot, Floats) * (scale * x.scale[i]);
        total[r] += base * x.sum[i];
      }
    }
  }
  for (int r = 0; r < TILED_ROWS; ++r) std::memcpy(out + r * stride, &total[r], sizeof total[r]);
}

}  // namespace quaver

#endif
