// Sixteen-wide vectors that every compiler target can lower: AVX-512 to one register, AVX2 to two, NEON to four.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quaver {

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

inline f32x16 splat(float value) { return f32x16{} + value; }

inline f32x16 load(const float* from) {
  f32x16 v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, f32x16 v) { std::memcpy(to, &v, sizeof v); }

template <class To, class From>
inline To bits(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &v, sizeof to);
  return to;
}

inline f32x16 load_bf16(const uint16_t* from) {
  u16x16 v;
  std::memcpy(&v, from, sizeof v);
  return bits<f32x16>(__builtin_convertvector(v, u32x16) << 16);
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline void store_bf16(uint16_t* to, f32x16 value) {
  u32x16 u = bits<u32x16>(value);
  u32x16 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  u32x16 nan = bits<u32x16>(value != value);
  rounded = (rounded & ~nan) | (((u >> 16) | 0x40) & nan);
  u16x16 v = __builtin_convertvector(rounded, u16x16);
  std::memcpy(to, &v, sizeof v);
}

inline float bf16_to_float(uint16_t value) { return bits<float>(uint32_t(value) << 16); }

inline uint16_t float_to_bf16(float value) {
  uint32_t u = bits<uint32_t>(value);
  if (value != value) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// IEEE half precision, as GGUF files store scales.
inline f32x16 load_f16(const uint16_t* from) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  __m256 halves[2] = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)),
                      _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from + 1))};
  f32x16 v;
  std::memcpy(&v, halves, sizeof v);
  return v;
#else
  f32x16 v;
  for (int i = 0; i < LANES; ++i) {
    _Float16 h;
    std::memcpy(&h, from + i, sizeof h);
    v[i] = float(h);
  }
  return v;
#endif
}

inline f32x16 min(f32x16 a, f32x16 b) { return a < b ? a : b; }
inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
inline f32x16 abs(f32x16 a) { return bits<f32x16>(bits<u32x16>(a) & 0x7fffffff); }

inline float sum(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s[8], t[4];
  for (int i = 0; i < 8; ++i) s[i] = v[i] + v[i + 8];
  for (int i = 0; i < 4; ++i) t[i] = s[i] + s[i + 4];
  return (t[0] + t[2]) + (t[1] + t[3]);
#endif
}

inline float largest(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < LANES; ++i) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// Lanes [0, count) keep `v`, the others become `rest`.
inline f32x16 first(f32x16 v, int count, float rest) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < count ? v : splat(rest);
}

// e^x, relative error below 2e-7 on [-87, 88]; 0 below, +inf above, NaN for NaN.
inline f32x16 exp(f32x16 x) {
  const f32x16 log2e = splat(1.44269504088896341f);
  f32x16 clamped = min(max(x, splat(-88.f)), splat(89.f));
  f32x16 t = clamped * log2e;
  const f32x16 magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  f32x16 shifted = t + magic;
  f32x16 n = shifted - magic;
  f32x16 r = clamped - n * splat(0.693145751953125f);
  r = r - n * splat(1.428606765330187e-06f);
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.f);
  i32x16 exponent = bits<i32x16>(shifted) - bits<i32x16>(magic);
  // Two factors keep 2^n in range for n = 128 and for results near the smallest normal.
  i32x16 half = exponent >> 1;
  f32x16 a = bits<f32x16>((half + 127) << 23), b = bits<f32x16>((exponent - half + 127) << 23);
  f32x16 y = p * a * b;
  y = x < splat(-87.5f) ? splat(0.f) : y;
  y = x > splat(88.8f) ? splat(std::numeric_limits<float>::infinity()) : y;
  return x != x ? x : y;
}

// ln x for normal positive x, relative error below 3e-7; -inf for 0 and subnormals.
inline f32x16 log(f32x16 x) {
  u32x16 u = bits<u32x16>(x);
  i32x16 e = bits<i32x16>(u >> 23) - 126;
  f32x16 m = bits<f32x16>((u & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  i32x16 small = m < splat(0.707106781186547524f);
  e = e + small;  // a true lane is -1
  m = (small ? m + m : m) - splat(1.f);
  f32x16 z = m * m;
  f32x16 p = splat(7.0376836292e-2f);
  p = p * m + splat(-1.1514610310e-1f);
  p = p * m + splat(1.1676998740e-1f);
  p = p * m + splat(-1.2420140846e-1f);
  p = p * m + splat(1.4249322787e-1f);
  p = p * m + splat(-1.6668057665e-1f);
  p = p * m + splat(2.0000714765e-1f);
  p = p * m + splat(-2.4999993993e-1f);
  p = p * m + splat(3.3333331174e-1f);
  f32x16 n = __builtin_convertvector(e, f32x16);
  f32x16 y = p * m * z + n * splat(-2.12194440e-4f) - splat(0.5f) * z + m + n * splat(0.693359375f);
  return x < splat(1.17549435e-38f) ? splat(-std::numeric_limits<float>::infinity()) : y;
}

inline f32x16 silu(f32x16 x) { return x / (splat(1.f) + exp(-x)); }

}  // namespace quaver
