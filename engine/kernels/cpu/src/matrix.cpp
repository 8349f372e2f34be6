// Storage of weights: allocation, packing, unpacking; quantised activations.
#include "matrix.h"

#include <cstdlib>
#include <initializer_list>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "simd.h"

namespace quaver {
namespace {

constexpr size_t HUGE_PAGE = 2 << 20;
constexpr float LEAST_MAGNITUDE = 1e-30f;  // below it a block is zero: the inverse of its scale would overflow

uint16_t half_at(const void* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof half);
  return half;
}

size_t source_block_bytes(Kind kind) {
  switch (kind) {
    case Kind::F32: return 4 * BLOCK;
    case Kind::F16:
    case Kind::BF16: return 2 * BLOCK;
    case Kind::Q4_0: return 2 + BLOCK / 2;
    case Kind::Q4_1: return 4 + BLOCK / 2;
    case Kind::Q8_0: return 2 + BLOCK;
  }
  return 0;
}

// One block of any source as fp32.
void widen(Kind kind, const uint8_t* from, float* w) {
  const uint8_t* q = from + source_block_bytes(kind) - (kind == Kind::Q8_0 ? BLOCK : BLOCK / 2);
  const float scale = half_to_float(half_at(from));
  const float least = kind == Kind::Q4_1 ? half_to_float(half_at(from + 2)) : -8 * scale;
  switch (kind) {
    case Kind::F32: std::memcpy(w, from, sizeof(float) * BLOCK); break;
    case Kind::F16:
      for (int i = 0; i < BLOCK; ++i) w[i] = half_to_float(half_at(from + 2 * i));
      break;
    case Kind::BF16:
      for (int i = 0; i < BLOCK; ++i) w[i] = bf16_to_float(half_at(from + 2 * i));
      break;
    case Kind::Q4_0:
    case Kind::Q4_1:
      for (int i = 0; i < BLOCK / 2; ++i) {
        w[i] = scale * float(q[i] & 15) + least;
        w[i + BLOCK / 2] = scale * float(q[i] >> 4) + least;
      }
      break;
    case Kind::Q8_0:
      for (int i = 0; i < BLOCK; ++i) w[i] = scale * float(int8_t(q[i]));
      break;
  }
}

// One row's share of a packed block: its bytes (one for each column at 8 bits, for columns i and i + 16 at 4) and scales.
struct Packed {
  uint8_t bytes[BLOCK];
  uint16_t scale, base;
};

f32x16 nearest(f32x16 v) {
  const f32x16 magic = splat(12582912.f);  // 1.5 · 2^23: adding it rounds to an integer
  return (v + magic) - magic;
}

Packed quantise_to_8(const float* w) {
  Packed out = {};
  const f32x16 a = load(w), b = load(w + LANES);
  const float lowest = -largest(max(-a, -b)), highest = largest(max(a, b));
  out.scale = float_to_half((highest - lowest) / 254);
  out.base = float_to_half((highest + lowest) / 2);
  const float scale = half_to_float(out.scale), base = half_to_float(out.base);
  const f32x16 inverse = splat(scale > 0 ? 1 / scale : 0);
  for (int i = 0; i < 2; ++i) {
    const f32x16 q = nearest(max(min(((i ? b : a) - splat(base)) * inverse, splat(127)), splat(-127))) + splat(128);
    for (int lane = 0; lane < LANES; ++lane) out.bytes[i * LANES + lane] = uint8_t(q[lane]);
  }
  return out;
}

// Scale and least value of 16 levels, with the levels u of a block's halves and the squared error.
struct Levels {
  uint16_t scale, least;
  f32x16 a, b;
  float error;
};

Levels levels(f32x16 a, f32x16 b, float scale, float least) {
  Levels out;
  out.scale = float_to_half(scale);
  out.least = float_to_half(least);
  scale = half_to_float(out.scale);
  const f32x16 inverse = splat(scale > 0 ? 1 / scale : 0), base = splat(half_to_float(out.least));
  out.a = nearest(min(max((a - base) * inverse, splat(0)), splat(15)));
  out.b = nearest(min(max((b - base) * inverse, splat(0)), splat(15)));
  const f32x16 ea = out.a * splat(scale) + base - a, eb = out.b * splat(scale) + base - b;
  out.error = sum(ea * ea + eb * eb);
  return out;
}

// From the plain division of [lowest, highest] into 15 steps and from some narrower and wider ones: the least-squares
// scale and least value for their levels, whichever leaves the smallest squared error.
Packed quantise_to_4(const float* w) {
  const f32x16 a = load(w), b = load(w + LANES);
  const float lowest = -largest(max(-a, -b)), highest = largest(max(a, b)), total = sum(a + b);
  Levels best = levels(a, b, (highest - lowest) / 15, lowest);
  for (const float steps : {15.f, 13.5f, 14.f, 14.5f, 15.5f, 16.f}) {
    const float inverse = highest > lowest ? steps / (highest - lowest) : 0;
    const f32x16 u = nearest(min((a - splat(lowest)) * splat(inverse), splat(15)));
    const f32x16 v = nearest(min((b - splat(lowest)) * splat(inverse), splat(15)));
    const float first = sum(u + v), second = sum(u * u + v * v), mixed = sum(u * a + v * b);
    const float spread = BLOCK * second - first * first;
    if (spread <= 0) continue;
    const float scale = (BLOCK * mixed - first * total) / spread;
    const Levels found = levels(a, b, scale, (total - scale * first) / BLOCK);
    if (found.error < best.error) best = found;
  }
  Packed out = {};
  out.scale = best.scale;
  out.base = best.least;
  for (int lane = 0; lane < LANES; ++lane) out.bytes[lane] = uint8_t(int(best.a[lane]) | int(best.b[lane]) << 4);
  return out;
}

Packed pack_to_8(Kind kind, const uint8_t* from) {
  Packed out = {};
  out.scale = half_at(from);
  if (kind == Kind::Q8_0) {
    for (int i = 0; i < BLOCK; ++i) out.bytes[i] = from[2 + i] ^ 128;
  } else if (kind == Kind::Q4_0) {
    for (int i = 0; i < BLOCK / 2; ++i) {
      out.bytes[i] = 120 + (from[2 + i] & 15);
      out.bytes[i + BLOCK / 2] = 120 + (from[2 + i] >> 4);
    }
  } else if (kind == Kind::Q4_1) {
    out.base = half_at(from + 2);
    for (int i = 0; i < BLOCK / 2; ++i) {
      out.bytes[i] = 128 + (from[4 + i] & 15);
      out.bytes[i + BLOCK / 2] = 128 + (from[4 + i] >> 4);
    }
  } else {
    float w[BLOCK];
    widen(kind, from, w);
    out = quantise_to_8(w);
  }
  return out;
}

Packed pack_to_4(Kind kind, const uint8_t* from) {
  Packed out = {};
  out.scale = half_at(from);
  if (kind == Kind::Q4_1) {
    out.base = half_at(from + 2);
    std::memcpy(out.bytes, from + 4, BLOCK / 2);
  } else if (kind == Kind::Q4_0) {
    out.base = float_to_half(-8 * half_to_float(out.scale));
    std::memcpy(out.bytes, from + 2, BLOCK / 2);
  } else {
    float w[BLOCK];
    widen(kind, from, w);
    out = quantise_to_4(w);
  }
  return out;
}

// A row's bytes lie in its lane of `bits` loads of 64 bytes.
void put(uint8_t* block, int bits, int lane, const Packed& packed) {
  for (int load = 0; load < bits; ++load) std::memcpy(block + 64 * load + 4 * lane, packed.bytes + 4 * load, 4);
  std::memcpy(block + 64 * bits + 2 * lane, &packed.scale, 2);
  std::memcpy(block + 64 * bits + 32 + 2 * lane, &packed.base, 2);
}

uint8_t* panel_of(const Matrix& m, int row) { return m.data + m.panel_bytes() * (row / PANEL); }

size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Matrix make_matrix(int rows, int cols, int bits) {
  Matrix m{rows, cols, bits};
  const size_t bytes = m.panel_bytes() * m.panels(), unit = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
  const size_t whole = (bytes + unit - 1) / unit * unit;
  m.data = static_cast<uint8_t*>(std::aligned_alloc(unit, whole ? whole : unit));
  if (!m.data) throw std::bad_alloc();
#if defined(__linux__)
  if (unit == HUGE_PAGE) madvise(m.data, whole, MADV_HUGEPAGE);  // only a hint
#endif
  std::memset(m.data, 0, bytes);
  return m;
}

void free_matrix(Matrix& m) {
  std::free(m.data);
  m.data = nullptr;
}

void pack_rows(Matrix& m, int first, int count, Kind kind, const void* data) {
  const auto* from = static_cast<const uint8_t*>(data);
  const size_t step = source_block_bytes(kind);
  for (int row = first; row < first + count; ++row) {
    uint8_t* block = panel_of(m, row);
    for (int b = 0; b < m.blocks(); ++b, from += step, block += m.block_bytes()) {
      put(block, m.bits, row % PANEL, m.bits == 8 ? pack_to_8(kind, from) : pack_to_4(kind, from));
    }
  }
}

void unpack_row(const Matrix& m, int row, float* out) {
  const uint8_t* block = panel_of(m, row) + 4 * (row % PANEL);
  for (int b = 0; b < m.blocks(); ++b, block += m.block_bytes(), out += BLOCK) {
    const uint8_t* scales = block + 64 * m.bits - 2 * (row % PANEL);
    const float scale = half_to_float(half_at(scales));
    const float base = half_to_float(half_at(scales + 32)) - (m.bits == 8 ? 128 * scale : 0);
    for (int load = 0; load < m.bits; ++load) {
      for (int i = 0; i < 4; ++i) {
        const int byte = block[64 * load + i], c = 4 * load + i;
        out[c] = scale * float(m.bits == 8 ? byte : byte & 15) + base;
        if (m.bits == 4) out[c + BLOCK / 2] = scale * float(byte >> 4) + base;
      }
    }
  }
}

size_t activation_bytes(int rows, int cols) {
  return whole_lines(size_t(rows) * cols) + 3 * whole_lines(size_t(rows) * (cols / BLOCK) * 4);
}

Activations activations_in(void* buffer, int rows, int cols) {
  auto* at = static_cast<uint8_t*>(buffer);
  const size_t values = whole_lines(size_t(rows) * cols), scales = whole_lines(size_t(rows) * (cols / BLOCK) * 4);
  return {rows, cols, reinterpret_cast<int8_t*>(at), reinterpret_cast<float*>(at + values),
          reinterpret_cast<float*>(at + values + scales), reinterpret_cast<int32_t*>(at + values + 2 * scales)};
}

void quantise(const float* x, int first, int count, const Activations& to, int row) {
  int8_t* q = to.q + size_t(row) * to.cols + first;
  const size_t at = size_t(row) * (to.cols / BLOCK) + first / BLOCK;
  x += first;
  for (int b = 0; b < count / BLOCK; ++b, x += BLOCK, q += BLOCK) {
    const f32x16 u = load(x), v = load(x + LANES);
    const float magnitude = largest(max(abs(u), abs(v)));
    const float check = sum(u * splat(0) + v * splat(0));  // NaN if any value is not finite
    const bool usable = check == 0 && magnitude > LEAST_MAGNITUDE;
    const float inverse = usable ? 127 / magnitude : 0;
    const float scale = usable ? magnitude / 127 : check;
    const i32x16 i = __builtin_convertvector(nearest(usable ? u * splat(inverse) : splat(0)), i32x16);
    const i32x16 j = __builtin_convertvector(nearest(usable ? v * splat(inverse) : splat(0)), i32x16);
    const i8x16 low = __builtin_convertvector(i, i8x16), high = __builtin_convertvector(j, i8x16);
    std::memcpy(q, &low, sizeof low);
    std::memcpy(q + LANES, &high, sizeof high);
    const int total = int(sum(__builtin_convertvector(i + j, f32x16)));  // below 2^24: exact in any order
    to.scale[at + b] = scale;
    to.sum[at + b] = scale * float(total);
    to.start[at + b] = -128 * total;
  }
}

void quantise_rest(const float* x, int first, int count, const Activations& coarse, const Activations& rest, int row) {
  for (int c = first; c < first + count; c += BLOCK) {
    const int8_t* q = coarse.q + size_t(row) * coarse.cols + c;
    const float scale = coarse.scale[size_t(row) * (coarse.cols / BLOCK) + c / BLOCK];
    float left[BLOCK];
    for (int i = 0; i < BLOCK; ++i) left[i] = x[c + i] - scale * float(q[i]);
    quantise(left - c, c, BLOCK, rest, row);
  }
}

}  // namespace quaver

extern "C" {

// Null when there is no memory for it.
quaver::Matrix* quaver_matrix(int rows, int cols, int bits) {
  try {
    return new quaver::Matrix(quaver::make_matrix(rows, cols, bits));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void quaver_matrix_free(quaver::Matrix* matrix) {
  quaver::free_matrix(*matrix);
  delete matrix;
}

void quaver_pack_rows(quaver::Matrix* matrix, int first, int count, int kind, const void* data) {
  quaver::pack_rows(*matrix, first, count, quaver::Kind(kind), data);
}

void quaver_unpack_row(const quaver::Matrix* matrix, int row, float* out) { quaver::unpack_row(*matrix, row, out); }

size_t quaver_activation_bytes(int rows, int cols) { return quaver::activation_bytes(rows, cols); }

// Whole rows [rows, cols] into a buffer of activation_bytes(rows, cols).
void quaver_quantise(const float* x, int rows, int cols, void* buffer) {
  const quaver::Activations to = quaver::activations_in(buffer, rows, cols);
  for (int row = 0; row < rows; ++row) quaver::quantise(x + size_t(row) * cols, 0, cols, to, row);
}
}
