// What the integer product asks of an instruction set: WIDTH rows of a panel at once.
//
// Weights<BITS> holds WIDTH rows of one block, quad by quad; dot() adds their products with 32 int8 activations.
#pragma once

#include "matrix.h"
#include "simd.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace quaver {

constexpr int QUADS = BLOCK / 4;

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

  Ints dot(const int8_t* x, int32_t start) const {
    __m512i total = BITS == 8 ? _mm512_set1_epi32(start) : _mm512_setzero_si512();
    for (int i = 0; i < QUADS; ++i) total = _mm512_dpbusd_epi32(total, quad[i], _mm512_set1_epi32(quad_at(x, i)));
    return Ints(total);
  }
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

  Ints dot(const int8_t* x, int32_t) const {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i total = _mm256_setzero_si256();
    for (int i = 0; i < QUADS; ++i) {
      const __m256i from = _mm256_set1_epi32(quad_at(x, i));
      if (BITS == 4) {  // eight sums of two products stay within 8 · 2 · 15 · 127 < 2^15
        total = _mm256_add_epi16(total, _mm256_maddubs_epi16(quad[i], from));
      } else {  // 2 · 128 · 127 < 2^15; |weight| is unsigned, its sign goes to the activation
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(quad[i]), _mm256_sign_epi8(from, quad[i]));
        total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, ones));
      }
    }
    return Ints(BITS == 4 ? _mm256_madd_epi16(total, ones) : total);
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

  Ints dot(const int8_t* x, int32_t) const {
    const int8x16_t low = vld1q_s8(x), high = vld1q_s8(x + 16);
    int32x4_t total = vdotq_laneq_s32(vdupq_n_s32(0), quad[0], low, 0);
    total = vdotq_laneq_s32(total, quad[1], low, 1);
    total = vdotq_laneq_s32(total, quad[2], low, 2);
    total = vdotq_laneq_s32(total, quad[3], low, 3);
    total = vdotq_laneq_s32(total, quad[4], high, 0);
    total = vdotq_laneq_s32(total, quad[5], high, 1);
    total = vdotq_laneq_s32(total, quad[6], high, 2);
    return Ints(vdotq_laneq_s32(total, quad[7], high, 3));
  }
};

#else

constexpr int WIDTH = 4, ROWS_AT_ONCE = 4;
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

inline Floats halves(const uint8_t* from) {
  Floats v;
  for (int lane = 0; lane < WIDTH; ++lane) {
    _Float16 half;
    std::memcpy(&half, from + 2 * lane, sizeof half);
    v[lane] = float(half);
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

  Ints dot(const int8_t* x, int32_t) const {
    Ints total;
    for (int r = 0; r < WIDTH; ++r) {
      int32_t value = 0;
      for (int i = 0; i < BLOCK; ++i) value += int32_t(lane[r][i]) * x[i];
      total[r] = value;
    }
    return total;
  }
};

#endif

}  // namespace quaver
