// What the integer product asks of an instruction set: WIDTH rows of a panel at once.
//
// Weights<BITS> holds WIDTH rows of one block, quad by quad. A dot product with 32 int8 activations begins with their
// `start`, adds the eight quads and ends as 32-bit sums, so that a caller can weave those of several activations.
#pragma once

#include "matrix.h"
#include "simd.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace quaver {

constexpr int QUADS = BLOCK / 4;
constexpr int AHEAD = 4096;  // bytes: weights are asked for that long before their turn

inline int32_t quad_at(const int8_t* x, int quad) {
  int32_t value;
  std::memcpy(&value, x + 4 * quad, sizeof value);
  return value;
}

#if defined(__AVX512VNNI__)

constexpr int WIDTH = 16, ROWS_AT_ONCE = 16;
typedef f32x16 Floats;
typedef i32x16 Ints;

inline Floats halves(const uint8_t* from) { return load_f16(reinterpret_cast<const uint16_t*>(from)); }

template <int BITS>
struct Weights {
  __m512i quad[QUADS];

  explicit Weights(const uint8_t* block) {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int i = 0; i < BITS; ++i) {
      const __m512i v = _mm512_loadu_si512(block + 64 * i);
      quad[i] = BITS == 8 ? v : _mm512_and_si512(v, nibble);
      if (BITS == 4) quad[i + 4] = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
    }
  }

  static Ints begin(int32_t start) { return Ints{} + (BITS == 8 ? start : 0); }

  Ints add(Ints total, int i, const int8_t* x) const {
    return Ints(_mm512_dpbusd_epi32(__m512i(total), quad[i], _mm512_set1_epi32(quad_at(x, i))));
  }

  static Ints end(Ints total) { return total; }
};

#elif defined(__AVX2__)

constexpr int WIDTH = 8, ROWS_AT_ONCE = 4;
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));

inline Floats halves(const uint8_t* from) { return Floats(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from))); }

template <int BITS>
struct Weights {
  __m256i quad[QUADS];  // at 8 bits signed: value, not value + 128

  explicit Weights(const uint8_t* block) {
    const __m256i nibble = _mm256_set1_epi8(15), sign = _mm256_set1_epi8(-128);
    for (int i = 0; i < BITS; ++i) {
      const __m256i v = _mm256_loadu_si256((const __m256i*)(block + 64 * i));
      quad[i] = BITS == 8 ? _mm256_xor_si256(v, sign) : _mm256_and_si256(v, nibble);
      if (BITS == 4) quad[i + 4] = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
    }
  }

  static __m256i begin(int32_t) { return _mm256_setzero_si256(); }

  __m256i add(__m256i total, int i, const int8_t* x) const {
    const __m256i from = _mm256_set1_epi32(quad_at(x, i));
    // Eight sums of two products stay within 8 · 2 · 15 · 127 < 2^15.
    if (BITS == 4) return _mm256_add_epi16(total, _mm256_maddubs_epi16(quad[i], from));
    // 2 · 128 · 127 < 2^15; |weight| is unsigned, its sign goes to the activation.
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(quad[i]), _mm256_sign_epi8(from, quad[i]));
    return _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }

  static Ints end(__m256i total) {
    return Ints(BITS == 4 ? _mm256_madd_epi16(total, _mm256_set1_epi16(1)) : total);
  }
};

#elif defined(__ARM_FEATURE_DOTPROD)

constexpr int WIDTH = 4, ROWS_AT_ONCE = 8;
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

inline Floats halves(const uint8_t* from) {
  return Floats(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from)))));
}

template <int BITS>
struct Weights {
  int8x16_t quad[QUADS];  // at 8 bits signed: value, not value + 128

  explicit Weights(const uint8_t* block) {
    for (int i = 0; i < BITS; ++i) {
      const uint8x16_t v = vld1q_u8(block + 64 * i);
      quad[i] = vreinterpretq_s8_u8(BITS == 8 ? veorq_u8(v, vdupq_n_u8(128)) : vandq_u8(v, vdupq_n_u8(15)));
      if (BITS == 4) quad[i + 4] = vreinterpretq_s8_u8(vshrq_n_u8(v, 4));
    }
  }

  static int32x4_t begin(int32_t) { return vdupq_n_s32(0); }

  int32x4_t add(int32x4_t total, int i, const int8_t* x) const {
    return vdotq_s32(total, quad[i], vreinterpretq_s8_s32(vdupq_n_s32(quad_at(x, i))));
  }

  static Ints end(int32x4_t total) { return Ints(total); }
};

#else

constexpr int WIDTH = 4, ROWS_AT_ONCE = 4;
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

inline Floats halves(const uint8_t* from) {
  Floats v;
  for (int lane = 0; lane < WIDTH; ++lane) {
    uint16_t half;
    std::memcpy(&half, from + 2 * lane, sizeof half);
    v[lane] = half_to_float(half);
  }
  return v;
}

template <int BITS>
struct Weights {
  int16_t lane[WIDTH][BLOCK];

  explicit Weights(const uint8_t* block) {
    for (int r = 0; r < WIDTH; ++r) {
      for (int i = 0; i < 4 * BITS; ++i) {
        const uint8_t byte = block[64 * (i / 4) + 4 * r + i % 4];
        lane[r][i] = BITS == 8 ? int16_t(byte - 128) : int16_t(byte & 15);
        if (BITS == 4) lane[r][i + BLOCK / 2] = byte >> 4;
      }
    }
  }

  static Ints begin(int32_t) { return Ints{}; }

  Ints add(Ints total, int i, const int8_t* x) const {
    for (int r = 0; r < WIDTH; ++r) {
      for (int c = 4 * i; c < 4 * i + 4; ++c) total[r] += int32_t(lane[r][c]) * x[c];
    }
    return total;
  }

  static Ints end(Ints total) { return total; }
};

#endif

}  // namespace quaver
