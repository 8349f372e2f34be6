// Blocks of pages as bytes and back; engine/kv/int8.py says what a block is.
#include <algorithm>
#include <vector>

#include "simd.h"

namespace quaver {
namespace {

constexpr float LARGEST = 127.f * 65504.f;  // magnitude that has a scale

// Where the parts of a block lie: codes are bytes, scales are halves at any address.
template <class Byte>
struct Block {
  Byte *keys, *values, *key_scales, *value_scales;

  Block(Byte* start, int tokens, int layers, int row)
      : keys(start),
        values(keys + int64_t(layers) * tokens * row),
        key_scales(values + int64_t(layers) * tokens * row),
        value_scales(key_scales + int64_t(layers) * row * 2) {}
};

// The smallest half that is not below `largest` / 127.
uint16_t scale_of(float largest) {
  const float exact = largest / 127.f;
  const uint16_t nearest = float_to_half(exact);
  return nearest + (half_to_float(nearest) < exact);
}

// Sizes of bf16 numbers are ordered as their bits are.
inline uint16_t size_of(uint16_t bf16) { return bf16 & 0x7fff; }

// Stores the scale and returns what to divide by.
float put_scale(uint8_t* to, uint16_t largest) {
  const uint16_t half = scale_of(bf16_to_float(largest));
  std::memcpy(to, &half, sizeof half);
  return half ? half_to_float(half) : 1.f;
}

float get_scale(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof half);
  return half_to_float(half);
}

// ⌊value / scale + ½⌋. There is no product here that could be contracted with the sum.
inline int8_t encode(uint16_t value, float scale) {
  const float shifted = bf16_to_float(value) / scale + 0.5f;
  const int whole = int(shifted);
  return int8_t(whole - (shifted < float(whole)));
}

// The product is exact: 7 bits by 11.
inline uint16_t decode(int8_t code, float scale) {
  const uint32_t u = bits<uint32_t>(float(code) * scale);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

bool pack_keys(const uint16_t* pages, const int64_t* slots, int tokens, int row, uint8_t* codes, uint8_t* scales,
               std::vector<uint16_t>& largest, std::vector<float>& divisors) {
  uint16_t* __restrict const most = largest.data();
  float* __restrict const by = divisors.data();
  std::fill(most, most + row, 0);
  for (int i = 0; i < tokens; ++i) {
    const uint16_t* __restrict const from = pages + slots[i] * row;
    for (int c = 0; c < row; ++c) {  // by value: std::max's references keep the loop from being vectors
      const uint16_t size = size_of(from[c]), before = most[c];
      most[c] = size > before ? size : before;
    }
  }
  for (int c = 0; c < row; ++c) {
    if (!(bf16_to_float(most[c]) <= LARGEST)) return false;
    by[c] = put_scale(scales + 2 * c, most[c]);
  }
  for (int i = 0; i < tokens; ++i) {
    const uint16_t* const from = pages + slots[i] * row;
    int8_t* __restrict const to = reinterpret_cast<int8_t*>(codes) + int64_t(i) * row;
    for (int c = 0; c < row; ++c) to[c] = encode(from[c], by[c]);
  }
  return true;
}

bool pack_values(const uint16_t* pages, const int64_t* slots, int tokens, int row, uint8_t* codes, uint8_t* scales) {
  for (int i = 0; i < tokens; ++i) {
    const uint16_t* const from = pages + slots[i] * row;
    uint16_t most = 0;
    for (int c = 0; c < row; ++c) most = std::max(most, size_of(from[c]));
    if (!(bf16_to_float(most) <= LARGEST)) return false;
    const float by = put_scale(scales + 2 * i, most);
    int8_t* __restrict const to = reinterpret_cast<int8_t*>(codes) + int64_t(i) * row;
    for (int c = 0; c < row; ++c) to[c] = encode(from[c], by);
  }
  return true;
}

}  // namespace
}  // namespace quaver

extern "C" {

// The rows of `tokens` slots of every layer, `layer_stride` numbers from one to the next, into a block without its bitmap.
// Returns 0, leaving anything in `block`, when a magnitude has no scale.
int quaver_pack_block(const uint16_t* keys, const uint16_t* values, int64_t layer_stride, const int64_t* slots, int tokens,
                      int layers, int row, uint8_t* block) {
  using namespace quaver;
  const Block to(block, tokens, layers, row);
  std::vector<uint16_t> largest(row);
  std::vector<float> divisors(row);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const int64_t codes = layer * tokens * row;
    if (!pack_keys(keys + layer * layer_stride, slots, tokens, row, to.keys + codes, to.key_scales + 2 * layer * row, largest,
                   divisors))
      return 0;
    if (!pack_values(values + layer * layer_stride, slots, tokens, row, to.values + codes, to.value_scales + 2 * layer * tokens))
      return 0;
  }
  return 1;
}

void quaver_unpack_block(uint16_t* keys, uint16_t* values, int64_t layer_stride, const int64_t* slots, int tokens, int layers,
                         int row, const uint8_t* block) {
  using namespace quaver;
  const Block from(block, tokens, layers, row);
  std::vector<float> channels(row);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const float* __restrict const scales = channels.data();
    for (int c = 0; c < row; ++c) channels[c] = get_scale(from.key_scales + 2 * (layer * row + c));
    for (int i = 0; i < tokens; ++i) {
      const int64_t at = (layer * tokens + i) * row;
      const int8_t* const codes = reinterpret_cast<const int8_t*>(from.keys + at);
      uint16_t* __restrict const to = keys + layer * layer_stride + slots[i] * row;
      for (int c = 0; c < row; ++c) to[c] = decode(codes[c], scales[c]);
    }
    for (int i = 0; i < tokens; ++i) {
      const int64_t at = (layer * tokens + i) * row;
      const int8_t* const codes = reinterpret_cast<const int8_t*>(from.values + at);
      const float scale = get_scale(from.value_scales + 2 * (layer * tokens + i));
      uint16_t* __restrict const to = values + layer * layer_stride + slots[i] * row;
      for (int c = 0; c < row; ++c) to[c] = decode(codes[c], scale);
    }
  }
}
}
