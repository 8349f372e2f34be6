// The configuration of matrix tiles. Whoever computes with tiles sets it first and releases it last: it belongs to the thread.
#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <cstdint>

namespace quaver {

constexpr int TILE_ROWS = 16;  // at most; a row is 64 bytes

// Tiles 0 … 3: results of `first` (0, 1) and `second` rows (2, 3), 4 and 5: the left factors, 6 and 7: the right ones.
inline void configure_tiles(int first, int second) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const int rows[8] = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS};
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = uint8_t(rows[tile]);
    config.row_bytes[tile] = rows[tile] ? 64 : 0;
  }
  _tile_loadconfig(&config);
}

}  // namespace quaver

#endif
