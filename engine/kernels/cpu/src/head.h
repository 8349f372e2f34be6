// The LM head: statistics of every row's distribution from one pass over the vocabulary, and draws from it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matrix.h"
#include "team.h"

namespace quaver {

constexpr int TOP = 32;

// Per row. Natural logarithms, temperature 1.
struct RowStatistics {
  float lse;        // log Σ exp z
  float entropy;    // lse − Σ p·z
  int32_t ids[TOP]; // the largest logits, descending, ties by the smaller id; a smaller vocabulary leaves −1 and −inf
  float values[TOP];
};

// One pass over the vocabulary for all rows of `x`. Called inside team.run by every thread.
// `top_rows`: the first that many rows get ids and values (emitting rows); of the others, lens rows, only lse and entropy are written.
// `rest`, of `top_rows` rows, is added to the first rows of x: what their 8 bits leave out, for logits as good as the
// weights. A row's results depend neither on the other rows nor on the number of threads.
// `keep` [top_rows] is null or, for each row, null or a [vocabulary] buffer that receives its logits; nothing else is ever written out.
// `scratch`: head_scratch_bytes(...), 64-byte aligned, shared by the team.
size_t head_scratch_bytes(const Matrix& head, int rows, int top_rows, int threads);
void head_pass(Team&, int thread, const Matrix& head, const Activations& x, const Activations& rest, int top_rows, float* const* keep, RowStatistics* out, void* scratch);

// Statistics of logits that are there: out like reference.token_statistics [5]: surprisal, confidence, margin, rank, entropy.
void token_statistics(const float* logits, int vocabulary, int token, float* out);

// Draws as reference.draw does: temperature 0 takes the first of the largest, top_k 0 = off, top_p 1 = off, `point` uniform in [0, 1).
// `scratch`: sample_scratch_bytes(vocabulary), per thread.
size_t sample_scratch_bytes(int vocabulary);
int sample(const float* logits, int vocabulary, float temperature, int top_k, float top_p, double point, void* scratch);

}  // namespace quaver
