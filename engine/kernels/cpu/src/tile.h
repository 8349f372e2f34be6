// Vectors of the width that the machine has, and softmax's sums over a vocabulary, tile by tile: a tile's sums are short
// enough for fp32, those of the whole are kept in double.
//
// (Compilers lower arithmetic on wider vectors than the machine's well, but comparisons lane by lane.)
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quaver {
namespace tile {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int TILE = 256;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));

inline Floats all(float value) { return Floats{} + value; }

inline Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Up to WIDTH values; lanes past `count` are `rest`.
inline Floats load(const float* from, int count, float rest) {
  if (count >= WIDTH) return load(from);
  Floats v = all(rest);
  if (count > 0) std::memcpy(&v, from, sizeof(float) * count);
  return v;
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

template <class To, class From>
To bits(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &v, sizeof to);
  return to;
}

// Where one of them is NaN: `b`.
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }

#if defined(__AVX512F__)
inline float sum(Floats v) { return _mm512_reduce_add_ps((__m512)v); }
inline float largest(Floats v) { return _mm512_reduce_max_ps((__m512)v); }
#else
inline float sum(Floats v) {
  float s = 0;
  for (int i = 0; i < WIDTH / 2; ++i) s += v[i] + v[i + WIDTH / 2];
  return s;
}

inline float largest(Floats v) {
  float m = v[0];
  for (int i = 1; i < WIDTH; ++i) m = v[i] > m ? v[i] : m;
  return m;
}
#endif

// A bit for each true lane of a comparison.
inline uint32_t mask(Ints v) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)v, (__m512i)v);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)v);
#elif defined(__x86_64__)
  return _mm_movemask_ps((__m128)v);
#else
  uint32_t found = 0;
  for (int i = 0; i < WIDTH; ++i) found |= uint32_t(v[i] & 1) << i;
  return found;
#endif
}

// e^x for x <= 0, relative error below 2e-7. To be given nothing below −86 (see floored): e^−86 is what no sum that holds a 1
// notices, and so neither 0 · (−inf) nor a denormal ever arises. NaN stays NaN.
inline Floats exp_falling(Floats x) {
  const Floats magic = all(12582912.f);  // 1.5 · 2^23: adding it rounds to an integer
  const Floats shifted = x * 1.44269504088896341f + magic;
  const Floats n = shifted - magic;
  Floats r = x - n * 0.693145751953125f;
  r = r - n * 1.428606765330187e-06f;
  Floats p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

inline Floats floored(Floats x) { return max(all(-86.f), x); }

// The largest of a tile's values, NaN left out; −inf if there is nothing else.
inline float tile_largest(const float* z) {
  Floats m[4];
  for (Floats& lanes : m) lanes = all(-INFINITE);
  for (int i = 0; i < TILE; i += 4 * WIDTH)
    for (int j = 0; j < 4; ++j) m[j] = max(load(z + i + j * WIDTH), m[j]);
  return largest(max(max(m[0], m[1]), max(m[2], m[3])));
}

// Of softmax's unnormalised weights w = e^(z − largest): Σ w and Σ w · (z − largest).
struct Sums {
  float weight, expected;
};

inline Sums tile_sums(const float* z, float largest) {
  // A tile of nothing but −inf weighs next to nothing against any `largest`.
  const Floats from = all(largest == -INFINITE ? 0.f : largest);
  Floats weight{}, expected{};
  for (int i = 0; i < TILE; i += WIDTH) {
    const Floats x = floored(load(z + i) - from);
    const Floats w = exp_falling(x);
    weight += w;
    expected += w * x;
  }
  return {sum(weight), sum(expected)};
}

}  // namespace tile
}  // namespace quaver
