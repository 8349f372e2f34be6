// What decode and prefill share: vectors of the machine's own width, and weights from scores.
#pragma once

#include <algorithm>

#include "attention.h"
#include "simd.h"

namespace quaver::attention {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// The widest vectors that are one register; N lanes.
#if defined(__AVX512F__)
typedef f32x16 Lanes;
typedef i32x16 Ints;
#elif defined(__AVX2__)
typedef float Lanes __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
#else
typedef float Lanes __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
#endif
constexpr int N = sizeof(Lanes) / sizeof(float);

inline Lanes all(float value) { return Lanes{} + value; }

inline Ints lane_numbers() {
  constexpr int numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Ints v;
  std::memcpy(&v, numbers, sizeof v);
  return v;
}

inline Lanes load_lanes(const float* from) {
  Lanes v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline Lanes load_lanes(const uint16_t* bf16) {
  typedef uint16_t Halves __attribute__((vector_size(2 * N)));
  typedef uint32_t Words __attribute__((vector_size(4 * N)));
  Halves v;
  std::memcpy(&v, bf16, sizeof v);
  return bits<Lanes>(__builtin_convertvector(v, Words) << 16);
}

inline void store_lanes(float* to, Lanes v) { std::memcpy(to, &v, sizeof v); }

inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

#if !defined(__AVX512F__)  // there simd.h has them
inline float largest(Lanes v) {
  float m = v[0];
  for (int i = 1; i < N; ++i) m = std::max(m, v[i]);
  return m;
}

inline float sum(Lanes v) {
  float total = 0;
  for (int i = 0; i < N; ++i) total += v[i];
  return total;
}
#endif

constexpr float LOG2_E = 1.44269504088896341f;

// 2^x for x ≤ 0, relative error below 2e-7; 0 below −126, NaN stays NaN.
inline Lanes exp2_falling(Lanes x) {
  const Ints lost = x < -126.f;
  const Lanes kept = x < -126.f ? all(-126.f) : x;
  const Lanes magic = all(12582912.f);  // 1.5 · 2^23: adding it rounds to an integer
  const Lanes shifted = kept + magic;
  const Lanes r = kept - (shifted - magic);
  Lanes p = all(1.326472382e-03f);
  p = p * r + 9.671512991e-03f;
  p = p * r + 5.550733581e-02f;
  p = p * r + 2.402224243e-01f;
  p = p * r + 6.931470037e-01f;
  p = p * r + 1.f;
  return bits<Lanes>((bits<Ints>(p) + (bits<Ints>(shifted) << 23)) & ~lost);
}

// A row of a sequence's keys or values, from the start of the pages.
inline int64_t row_of(const Pages& pages, const int32_t* table, int at, int group) {
  const int64_t slot = int64_t(table[at / pages.page_size]) * pages.page_size + at % pages.page_size;
  return (slot * pages.groups + group) * pages.width;
}

// The rows of a sequence's first `context` tokens in order, without dead ones; −1 once there is none left.
struct LiveRows {
  const Pages& pages;
  const int32_t* table;
  const int context, group;
  int at = 0;

  int64_t next() {
    while (pages.dead && at < context && pages.dead[int64_t(table[at / pages.page_size]) * pages.page_size + at % pages.page_size]) ++at;
    return at < context ? row_of(pages, table, at++, group) : -1;
  }
};

}  // namespace quaver::attention
