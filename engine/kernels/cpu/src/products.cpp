// Integer products: weights of 4 or 8 bits with int8 activations.
#include "lanes.h"
#include "matrix.h"
#include "products_tiles.h"

namespace quaver {
namespace {

constexpr int WEAVE = 4;    // rows whose dot products are computed side by side: a chain of eight additions waits for itself
constexpr int CHUNK = 128;  // rows whose activations stay in the second cache while panels pass

// WIDTH rows of a panel, from `part`, with ROWS rows of activations. The order of the sums depends on nothing else.
template <int BITS, int ROWS>
void lanes_product(const uint8_t* part, int scales, int blocks, const Activations& x, int row, float* out, int64_t stride) {
  constexpr int BLOCK_BYTES = 64 * BITS + 64;
  constexpr int WOVEN = ROWS < WEAVE ? ROWS : WEAVE;
  const int8_t* q = x.q + size_t(row) * x.cols;
  const size_t at = size_t(row) * blocks;
  Floats total[ROWS] = {};
  for (int b = 0; b < blocks; ++b, part += BLOCK_BYTES) {
    const Weights<BITS> weights(part);
    for (int at = 0; at < BLOCK_BYTES; at += 64) __builtin_prefetch(part + at + AHEAD);
    const Floats scale = halves(part + scales);
    const Floats base = halves(part + scales + 32);
#pragma GCC unroll 16
    for (int first = 0; first < ROWS; first += WOVEN) {
      decltype(weights.begin(0)) sums[WOVEN];
      for (int r = 0; r < WOVEN; ++r) sums[r] = weights.begin(x.start[at + size_t(first + r) * blocks + b]);
#pragma GCC unroll 8
      for (int i = 0; i < QUADS; ++i) {
        for (int r = 0; r < WOVEN; ++r) {
          sums[r] = weights.add(sums[r], i, q + size_t(first + r) * x.cols + b * BLOCK);
        }
      }
      for (int r = 0; r < WOVEN; ++r) {
        const size_t i = at + size_t(first + r) * blocks + b;
        const Floats dot = __builtin_convertvector(weights.end(sums[r]), Floats);
        total[first + r] += dot * (scale * x.scale[i]);
        total[first + r] += base * x.sum[i];
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) std::memcpy(out + r * stride, &total[r], sizeof total[r]);
}

template <int BITS, bool TILED, int ROWS = ROWS_AT_ONCE>
void panel_product(const uint8_t* panel, int blocks, const Activations& x, int row, int rows, float* out, int64_t stride) {
  for (; rows >= ROWS; rows -= ROWS, row += ROWS, out += ROWS * stride) {
#if defined(QUAVER_TILES)
    if constexpr (TILED && ROWS == TILED_ROWS) {
      tiles_product<BITS>(panel, blocks, x, row, out, stride);
      continue;
    }
#endif
    for (int lane = 0; lane < PANEL; lane += WIDTH) {
      lanes_product<BITS, ROWS>(panel + 4 * lane, 64 * BITS - 2 * lane, blocks, x, row, out + lane, stride);
    }
  }
  if constexpr (ROWS > 1) {
    if (rows) panel_product<BITS, TILED, ROWS / 2>(panel, blocks, x, row, rows, out, stride);
  }
}

template <bool TILED>
void panels_product(const Matrix& m, int panel, int panels, const Activations& x, int row, int rows, float* out,
                    int64_t stride) {
  const auto pass = m.bits == 8 ? panel_product<8, TILED> : panel_product<4, TILED>;
  for (int done = 0; done < rows; done += CHUNK) {
    const int now = rows - done < CHUNK ? rows - done : CHUNK;
    const uint8_t* data = m.data + m.panel_bytes() * panel;
    for (int p = 0; p < panels; ++p, data += m.panel_bytes()) {
      pass(data, m.blocks(), x, row + done, now, out + done * stride + p * PANEL, stride);
    }
  }
}

}  // namespace

void product(const Matrix& m, int panel, int panels, const Activations& x, int row, int rows, float* out, int64_t stride) {
#if defined(QUAVER_TILES)
  if (rows >= TILED_ROWS && has_wide_product()) {
    const Tiles tiles;
    return panels_product<true>(m, panel, panels, x, row, rows, out, stride);
  }
#endif
  panels_product<false>(m, panel, panels, x, row, rows, out, stride);
}

}  // namespace quaver

extern "C" {

// `buffer` holds activations as quaver_quantise left them for [count, cols].
void quaver_product(const quaver::Matrix* matrix, int panel, int panels, void* buffer, int count, int row, int rows,
                    float* out, int64_t stride) {
  const quaver::Activations x = quaver::activations_in(buffer, count, matrix->cols);
  quaver::product(*matrix, panel, panels, x, row, rows, out, stride);
}
}
