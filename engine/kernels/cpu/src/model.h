// A model's weights and the one call that computes a step: layers, LM head, statistics.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "head.h"
#include "matrix.h"
#include "team.h"

namespace quaver {

// Mirrored by engine/kernels/cpu/library.py, like Batch and Outputs.
struct Config {
  int32_t vocab, hidden, layers, heads, groups, width, intermediate, positions, window, bits, head_bits, tied, threads;
  float norm_eps;
  float compensation;  // share of the activations' quantisation error that decode products take back, 0 … 1
};

// One step over T tokens. Span s is `count[s]` consecutive tokens of one sequence from place `offset[s]` of the batch and
// position `start[s]` on; its pages are tables[s · table_width …].
struct Batch {
  int32_t tokens, spans, table_width, rows, details, layers;
  const int32_t* token_ids;       // [T]
  const int64_t* slots;           // [T]
  const int32_t* offset;          // [spans]
  const int32_t* count;           // [spans]
  const int32_t* start;           // [spans]
  const int32_t* tables;          // [spans, table_width]
  const int32_t* row_tokens;      // [rows], places whose distribution is wanted
  const int32_t* detail_spans;    // [details], spans whose last token gets layer detail
  const int32_t* prompt_lengths;  // [details]
  const int32_t* detail_layers;   // [layers], ascending
  uint16_t* keys;                 // [model layers, pages, page size, groups, width] bf16
  uint16_t* values;
  int64_t layer_stride;           // elements between two layers' pages
  int32_t page_size;
  int32_t scored_layers;          // attention is scored in every one of so many layers, from the first on
  const int32_t* scored;          // [spans], position of the first query that is scored; null: none
  const uint8_t* dead;            // [pages, page size], not 0: the slot holds no token; null: all do
};

struct Outputs {
  RowStatistics* rows;    // [rows]
  float* const* keep;     // [rows], null or null entries: no logits wanted
  float* lens_entropy;    // [details, layers]
  float* heads;           // [details, 5, layers, heads]
  float* const* mass;     // [spans], null or null entries: not scored. Else [context], overwritten: what the scored queries of
                          // a prompt's span attend to, summed, of the mean over heads and scored layers
  float* hidden;          // [rows, hidden], after the final norm; null: not wanted
  double head_seconds;    // wall time of the LM head
  double detail_seconds;  // time of the head statistics, a thread's
};

enum class Part : int { QKV, OUTPUT, GATE, UP, DOWN, EMBEDDING, HEAD, ATTENTION_NORM, FEED_FORWARD_NORM, FINAL_NORM, QKV_BIAS, Q_NORM, K_NORM };

struct Layer {
  Matrix qkv, output, gate_up, down;
  std::vector<float> attention_norm, feed_forward_norm, bias, q_norm, k_norm;
};

// Memory that grows to the largest step so far and is kept; contents do not survive growing. One owner thread.
class Buffers {
 public:
  uint8_t* get(size_t index, size_t bytes);  // 64-byte aligned

 private:
  struct Buffer {
    std::unique_ptr<uint8_t[]> memory;
    size_t bytes = 0;
  };
  std::vector<Buffer> buffers_;
};

// Owns the packed weights. One step at a time.
class Model {
 public:
  // `cos` and `sin` [positions, width / 2] are copied. Throws std::invalid_argument for sizes that do not fit the blocks.
  Model(const Config&, const float* cos, const float* sin);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  void set_matrix(int layer, Part, int first, int count, Kind, const void* rows);
  void set_vector(int layer, Part, const float* values, int count);
  void step(const Batch&, Outputs&);
  void head_logits(const float* hidden, int rows, float* logits);  // [rows, hidden] after the final norm → [rows, vocabulary]

  const Matrix& head() const { return config.tied ? embedding : separate_head; }

  const Config config;
  const std::vector<float> cos, sin;
  Team team;
  std::vector<Layer> layers;
  std::vector<float> final_norm;
  Matrix embedding, separate_head;
  Buffers buffers;
};

}  // namespace quaver
