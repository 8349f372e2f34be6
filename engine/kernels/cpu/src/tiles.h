// Matrix tiles: 16 rows of 64 bytes, whose shapes each product sets before its first and gives up after its last.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define QUAVER_TILES 1

#include <cstdint>
#include <immintrin.h>

namespace quaver {

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // A tile of no rows is not there.
  void set(int tile, int count, int bytes) {
    rows[tile] = uint8_t(count);
    row_bytes[tile] = uint16_t(count ? bytes : 0);
  }

  // GCC 12's header says that eight bytes are read: without the barrier the stores of the others may be dropped.
  void load() const {
    asm volatile("" ::"m"(*this));
    _tile_loadconfig(this);
  }
};

}  // namespace quaver

#endif
