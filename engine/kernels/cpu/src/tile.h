// Sums over a vocabulary, tile by tile: a tile's sums are short enough for fp32, whole ones are kept in double.
#pragma once

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace quaver {

constexpr int TILE = 256;

// e^x for x <= 0, relative error below 2e-7. Below −86 it stays at e^−86, which no sum that holds a 1 notices: so neither
// 0 · (−inf) nor a denormal ever arises. NaN stays NaN.
inline f32x16 exp_falling(f32x16 x) {
  const f32x16 magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 shifted = x * splat(1.44269504088896341f) + magic;
  const f32x16 n = shifted - magic;
  f32x16 r = x - n * splat(0.693145751953125f);
  r = r - n * splat(1.428606765330187e-06f);
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.f);
  return bits<f32x16>(bits<i32x16>(p) + (bits<i32x16>(shifted) << 23));
}

// What exp_falling takes: `x` no lower than −86, NaN kept.
inline f32x16 floored(f32x16 x) { return splat(-86.f) > x ? splat(-86.f) : x; }

// Up to 16 values; lanes past `count` are `rest`.
inline f32x16 load_some(const float* from, int count, float rest) {
  if (count >= LANES) return load(from);
  f32x16 v = splat(rest);
  std::memcpy(&v, from, sizeof(float) * count);
  return v;
}

// The largest of `vectors` · 16 values, NaN left out; −inf if there is nothing else.
inline float largest_of(const float* z, int vectors) {
  f32x16 m = splat(-std::numeric_limits<float>::infinity());
  for (int i = 0; i < vectors; ++i) m = max(load(z + i * LANES), m);
  return largest(m);
}

// Of softmax's unnormalised weights w = e^(z − largest): Σ w and Σ w · (z − largest).
struct Sums {
  float weight, expected;
};

inline Sums tile_sums(const float* z, int vectors, float largest) {
  // A tile of nothing but −inf weighs next to nothing against any `largest`.
  const f32x16 from = splat(largest == -std::numeric_limits<float>::infinity() ? 0.f : largest);
  f32x16 weight{}, expected{};
  for (int i = 0; i < vectors; ++i) {
    const f32x16 x = floored(load(z + i * LANES) - from);
    const f32x16 w = exp_falling(x);
    weight += w;
    expected += w * x;
  }
  return {sum(weight), sum(expected)};
}

}  // namespace quaver
