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

// A bit for each lane of `v` above `bound`.
inline uint32_t lanes_above(f32x16 v, float bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GT_OQ);
#elif defined(__AVX2__)
  __m256 half[2];
  std::memcpy(half, &v, sizeof v);
  const auto mask = [&](int i) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(half[i], _mm256_set1_ps(bound), _CMP_GT_OQ))); };
  return mask(0) | mask(1) << 8;
#else
  uint32_t found = 0;
  for (int i = 0; i < LANES; ++i) found |= uint32_t(v[i] > bound) << i;
  return found;
#endif
}

// The largest of a tile's values, NaN left out; −inf if there is nothing else.
inline float tile_largest(const float* z) {
  f32x16 m[4];
  for (f32x16& lanes : m) lanes = splat(-std::numeric_limits<float>::infinity());
  for (int i = 0; i < TILE; i += 4 * LANES)
    for (int j = 0; j < 4; ++j) m[j] = max(load(z + i + j * LANES), m[j]);
  return largest(max(max(m[0], m[1]), max(m[2], m[3])));
}

// Of softmax's unnormalised weights w = e^(z − largest): Σ w and Σ w · (z − largest).
struct Sums {
  float weight, expected;
};

inline Sums tile_sums(const float* z, float largest) {
  // A tile of nothing but −inf weighs next to nothing against any `largest`.
  const f32x16 from = splat(largest == -std::numeric_limits<float>::infinity() ? 0.f : largest);
  f32x16 weight{}, expected{};
  for (int i = 0; i < TILE; i += LANES) {
    const f32x16 x = floored(load(z + i) - from);
    const f32x16 w = exp_falling(x);
    weight += w;
    expected += w * x;
  }
  return {sum(weight), sum(expected)};
}

}  // namespace quaver
