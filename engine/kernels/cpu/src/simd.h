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

// IEEE half precision, as GGUF files store scales; by hand, as compilers differ on whether C++ has the type.
inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half & 0x7c00, rest = uint32_t(half & 0x7fff) << 13;
  const uint32_t normal = rest + (exponent == 0x7c00 ? 224u << 23 : 112u << 23);
  const uint32_t small = bits<uint32_t>(float(half & 0x3ff) * 0x1p-24f);
  return bits<float>((exponent ? normal : small) | sign);
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_half(float value) {
  const uint32_t u = bits<uint32_t>(value), sign = (u >> 16) & 0x8000, size = u & 0x7fffffff;
  if (size > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to 2^16 or more
  // Below 2^-14 a half counts units of 2^-24, as a float does next to one half.
  if (size < 0x38800000) return uint16_t(sign | (bits<uint32_t>(bits<float>(size) + 0.5f) - 0x3f000000));
  return uint16_t(sign | ((size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13));
}

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
    uint16_t half;
    std::memcpy(&half, from + i, sizeof half);
    v[i] = half_to_float(half);
  }
  return v;
#endif
}

// Compilers lower arithmetic on vectors wider than the machine's well, but comparisons and choices lane by lane (twenty times
// slower). Functions that have any are written for the machine's own width, and applied part by part.
#if defined(__AVX512F__)
constexpr int NATIVE = 16;
#elif defined(__AVX2__)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif
typedef float f32xn __attribute__((vector_size(4 * NATIVE)));
typedef int32_t i32xn __attribute__((vector_size(4 * NATIVE)));
typedef uint32_t u32xn __attribute__((vector_size(4 * NATIVE)));

template <class Function, class... Whole>
inline f32x16 by_parts(const Function& function, const Whole&... whole) {
  f32x16 result;
  for (size_t at = 0; at < sizeof result; at += sizeof(f32xn)) {
    const auto part = [at](const f32x16& v) {
      f32xn p;
      std::memcpy(&p, reinterpret_cast<const char*>(&v) + at, sizeof p);
      return p;
    };
    const f32xn p = function(part(whole)...);
    std::memcpy(reinterpret_cast<char*>(&result) + at, &p, sizeof p);
  }
  return result;
}

inline f32x16 min(f32x16 a, f32x16 b) {
  return by_parts([](f32xn x, f32xn y) { return x < y ? x : y; }, a, b);
}
inline f32x16 max(f32x16 a, f32x16 b) {
  return by_parts([](f32xn x, f32xn y) { return x > y ? x : y; }, a, b);
}
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

inline f32xn exp_part(f32xn x) {
  const f32xn low = f32xn{} - 88.f, high = f32xn{} + 89.f;
  f32xn clamped = x > low ? x : low;
  clamped = clamped < high ? clamped : high;
  const f32xn magic = f32xn{} + 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const f32xn shifted = clamped * 1.44269504088896341f + magic;
  const f32xn n = shifted - magic;
  f32xn r = clamped - n * 0.693145751953125f;
  r = r - n * 1.428606765330187e-06f;
  f32xn p = f32xn{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  const i32xn exponent = (i32xn)shifted - (i32xn)magic;
  // Two factors keep 2^n in range for n = 128 and for results near the smallest normal.
  const i32xn half = exponent >> 1;
  f32xn y = p * (f32xn)((half + 127) << 23) * (f32xn)((exponent - half + 127) << 23);
  y = x < -87.5f ? f32xn{} : y;
  y = x > 88.8f ? f32xn{} + std::numeric_limits<float>::infinity() : y;
  return x != x ? x : y;
}

// e^x, relative error below 2e-7 on [-87, 88]; 0 below, +inf above, NaN for NaN.
inline f32x16 exp(f32x16 x) { return by_parts(exp_part, x); }

inline f32xn log_part(f32xn x) {
  i32xn e = (i32xn)((u32xn)x >> 23) - 126;
  f32xn m = (f32xn)(((u32xn)x & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  const i32xn small = m < 0.707106781186547524f;
  e = e + small;  // a true lane is -1
  m = (small ? m + m : m) - 1.f;
  const f32xn z = m * m;
  f32xn p = f32xn{} + 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const f32xn n = __builtin_convertvector(e, f32xn);
  const f32xn y = p * m * z + n * -2.12194440e-4f - 0.5f * z + m + n * 0.693359375f;
  return x < 1.17549435e-38f ? f32xn{} - std::numeric_limits<float>::infinity() : y;
}

// ln x for normal positive x, relative error below 3e-7; -inf for 0 and subnormals.
inline f32x16 log(f32x16 x) { return by_parts(log_part, x); }

inline f32x16 silu(f32x16 x) {
  return by_parts([](f32xn v) { return v / (1.f + exp_part(-v)); }, x);
}

}  // namespace quaver
