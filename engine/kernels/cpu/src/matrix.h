// Weights in blocks of 32 along the input, and their products with a few or many rows of activations.
//
// A matrix [rows, cols] computes y = W·x. It is cut into panels of 16 rows; in a panel, block after block,
// lie the 32 columns of the 16 rows and their scales, so that a product reads one stream:
//   8 bits: 8 × 64 bytes (quad q, row r, column 4q + i: byte 4r + i of load q), value + 128
//   4 bits: 4 × 64 bytes (low nibbles quads 0 … 3, high nibbles quads 4 … 7)
// and then f16 scale[16], f16 base[16]. w = scale · value + base: GGUF's Q8_0 (base 0), Q4_0 and Q4_1 fit without loss,
// Q4_1 and Q4_0 in 8 bits too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quaver {

constexpr int BLOCK = 32;
constexpr int PANEL = 16;

enum class Kind : int { F32 = 0, F16 = 1, BF16 = 2, Q4_0 = 3, Q4_1 = 4, Q8_0 = 5 };

struct Matrix {
  int rows = 0, cols = 0;  // as the model has them; rows are padded to whole panels with zeros, cols % 32 = 0
  int bits = 8;
  uint8_t* data = nullptr;  // 64-byte aligned, owned
  int panels() const { return (rows + PANEL - 1) / PANEL; }
  int blocks() const { return cols / BLOCK; }
  size_t block_bytes() const { return 64 * bits + 64; }
  size_t panel_bytes() const { return block_bytes() * blocks(); }
};

// Allocates a matrix of zeros. Throws std::bad_alloc.
Matrix make_matrix(int rows, int cols, int bits);
void free_matrix(Matrix&);

// Packs `count` rows stored as `kind` (row-contiguous, GGUF block layout for Q kinds) into rows [first, first + count).
// What the matrix's bits hold without loss is kept; anything else is quantised by the block's least and largest value (at
// 4 bits with a search for a better scale).
void pack_rows(Matrix&, int first, int count, Kind kind, const void* data);

// Row `row` as fp32 [cols]; for embeddings.
void unpack_row(const Matrix&, int row, float* out);

// int8 activations with a scale for each block of 32: x ≈ scale · q, |q| ≤ 127.
struct Activations {
  int rows = 0, cols = 0;
  int8_t* q = nullptr;       // [rows, cols]
  float* scale = nullptr;    // [rows, cols / 32]
  float* sum = nullptr;      // [rows, cols / 32], scale · Σ q over the block
  int32_t* start = nullptr;  // [rows, cols / 32], −128 · Σ q over the block: what a dot product with value + 128 starts from
};

// Bytes that Activations of this size need in one buffer, and the view onto it.
size_t activation_bytes(int rows, int cols);
Activations activations_in(void* buffer, int rows, int cols);

// Quantises columns [first, first + count) (multiples of 32) of one row. A block with NaN or an infinity makes its
// row's products NaN.
void quantise(const float* x, int first, int count, const Activations&, int row);

// Quantises what the 8 bits of `coarse` leave out of the same columns, so that coarse + rest have about 15 bits.
void quantise_rest(const float* x, int first, int count, const Activations& coarse, const Activations& rest, int row);

// out[r · stride + n] = Σ W[16 · panel + n, :] · x[row + r, :] for n in [0, 16 · panels), r in [0, rows).
// A row's results do not depend on `rows`: they are bit-identical in any batch.
void product(const Matrix&, int panel, int panels, const Activations&, int row, int rows, float* out, int64_t stride);

// The same with bf16 activations [rows, cols] (row stride = cols), for many rows; weights are rounded to bf16.
// Only where `has_wide_product()`. `scratch` is wide_scratch_bytes(matrix, panels), private to the calling thread,
// 64-byte aligned; `x` should be, too: tiles load rows of 64 bytes. Both products load the tile configuration they need and release it before they return.
bool has_wide_product();
size_t wide_scratch_bytes(const Matrix&, int panels);
void wide_product(const Matrix&, int panel, int panels, const uint16_t* x, int rows, float* out, int64_t stride, void* scratch);

}  // namespace quaver
