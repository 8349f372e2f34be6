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

// Sizes of bf16 numbers are ordered as their bits are.
inline uint16_t size_of(uint16_t bf16) { return bf16 & 0x7fff; }

// By value: std::max's references keep loops from being vectors.
inline uint16_t larger(uint16_t a, uint16_t b) { return a > b ? a : b; }

// The smallest half that is not below `value`, which is from 0 to 65504.
inline uint16_t half_from(float value) {
  const float small = std::min(value, 1.f) * 0x1p24f;  // in units of the smallest half
  const int whole = int(small);
  return value < 0x1p-14f ? whole + (float(whole) < small) : (bits<uint32_t>(value) - 0x38000000 + 0x1fff) >> 13;
}

// Of the sizes `largest`: their scales, and what to multiply by. False when one has no scale.
bool put_scales(const uint16_t* __restrict largest, int count, uint16_t* __restrict halves, float* __restrict factors,
                uint8_t* scales) {
  uint16_t most = 0;
  for (int i = 0; i < count; ++i) most = larger(most, largest[i]);
  if (!(bf16_to_float(most) <= LARGEST)) return false;
  for (int i = 0; i < count; ++i) {
    const uint16_t half = halves[i] = half_from(bf16_to_float(largest[i]) / 127.f);
    factors[i] = 1.f / (half ? half_to_float(half) : 1.f);
  }
  std::memcpy(scales, halves, count * sizeof *halves);
  return true;
}

// A function of its own: where it is inlined, compilers forget that its arrays are apart.
[[gnu::noinline]] void grow(uint16_t* __restrict largest, const uint16_t* __restrict from, int count) {
  for (int i = 0; i < count; ++i) largest[i] = larger(largest[i], size_of(from[i]));
}

uint16_t largest_of(const uint16_t* from, int count) {
  uint16_t most = 0;
  for (int i = 0; i < count; ++i) most = larger(most, size_of(from[i]));
  return most;
}

float get_scale(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof half);
  return half_to_float(half);
}

// The nearest whole number, ties to even. There is no sum with which the product could be contracted.
inline int8_t encode(uint16_t value, float by) { return int8_t(int(__builtin_rintf(bf16_to_float(value) * by))); }

// The product is exact: 7 bits by 11.
inline uint16_t decode(int8_t code, float scale) {
  const uint32_t u = bits<uint32_t>(float(code) * scale);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// What packing needs of memory beside the block: room for a layer's scales.
struct Scratch {
  std::vector<uint16_t> largest, halves;
  std::vector<float> factors;

  explicit Scratch(int count) : largest(count), halves(count), factors(count) {}
};

bool pack_keys(const uint16_t* pages, const int64_t* slots, int tokens, int row, int8_t* codes, uint8_t* scales, Scratch& of) {
  std::fill_n(of.largest.begin(), row, 0);
  for (int i = 0; i < tokens; ++i) grow(of.largest.data(), pages + slots[i] * row, row);
  if (!put_scales(of.largest.data(), row, of.halves.data(), of.factors.data(), scales)) return false;
  const float* __restrict const by = of.factors.data();
  for (int i = 0; i < tokens; ++i) {
    const uint16_t* const from = pages + slots[i] * row;
    int8_t* __restrict const to = codes + int64_t(i) * row;
    for (int c = 0; c < row; ++c) to[c] = encode(from[c], by[c]);
  }
  return true;
}

bool pack_values(const uint16_t* pages, const int64_t* slots, int tokens, int row, int8_t* codes, uint8_t* scales, Scratch& of) {
  for (int i = 0; i < tokens; ++i) of.largest[i] = largest_of(pages + slots[i] * row, row);
  if (!put_scales(of.largest.data(), tokens, of.halves.data(), of.factors.data(), scales)) return false;
  for (int i = 0; i < tokens; ++i) {
    const uint16_t* const from = pages + slots[i] * row;
    int8_t* __restrict const to = codes + int64_t(i) * row;
    const float by = of.factors[i];
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
  Scratch scratch(std::max(row, tokens));
  for (int64_t layer = 0; layer < layers; ++layer) {
    const int64_t at = layer * layer_stride, codes = layer * tokens * row;
    if (!pack_keys(keys + at, slots, tokens, row, reinterpret_cast<int8_t*>(to.keys + codes), to.key_scales + 2 * layer * row,
                   scratch) ||
        !pack_values(values + at, slots, tokens, row, reinterpret_cast<int8_t*>(to.values + codes),
                     to.value_scales + 2 * layer * tokens, scratch))
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
