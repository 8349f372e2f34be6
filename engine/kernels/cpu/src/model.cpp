#include "model.h"

#include <algorithm>
#include <stdexcept>

#include "simd.h"

namespace quaver {

namespace {

// Rows of gate and up alternate by blocks of 32, so that one task has both halves of whole blocks.
constexpr int HALF = BLOCK;

std::vector<float> copy(const float* from, size_t count) { return from ? std::vector<float>(from, from + count) : std::vector<float>(); }

}  // namespace

Model::Model(const Config& c, const float* cosines, const float* sines)
    : config(c),
      cos(copy(cosines, size_t(c.positions) * c.width / 2)),
      sin(copy(sines, size_t(c.positions) * c.width / 2)),
      team(c.threads),
      layers(c.layers) {
  if (c.hidden % BLOCK || c.intermediate % BLOCK || (c.heads * c.width) % BLOCK || c.width % LANES || c.heads % c.groups)
    throw std::invalid_argument("sizes");
  const int qkv = (c.heads + 2 * c.groups) * c.width;
  for (Layer& layer : layers) {
    layer.qkv = make_matrix(qkv, c.hidden, c.bits);
    layer.output = make_matrix(c.hidden, c.heads * c.width, c.bits);
    layer.gate_up = make_matrix(2 * c.intermediate, c.hidden, c.bits);
    layer.down = make_matrix(c.hidden, c.intermediate, c.bits);
  }
  embedding = make_matrix(c.vocab, c.hidden, c.head_bits);
  if (!c.tied) separate_head = make_matrix(c.vocab, c.hidden, c.head_bits);
}

Model::~Model() {
  for (Layer& layer : layers)
    for (Matrix* m : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) free_matrix(*m);
  free_matrix(embedding);
  free_matrix(separate_head);
}

void Model::set_matrix(int layer, Part part, int first, int count, Kind kind, const void* rows) {
  const auto pack_half = [&](int half, size_t row_bytes) {
    for (int row = 0; row < count; row += HALF) {
      const int at = first + row;
      pack_rows(layers[layer].gate_up, at / HALF * 2 * HALF + half * HALF, HALF, kind,
                static_cast<const uint8_t*>(rows) + row * row_bytes);
    }
  };
  const auto row_bytes = [&](int cols) -> size_t {
    switch (kind) {
      case Kind::F32: return size_t(cols) * 4;
      case Kind::F16:
      case Kind::BF16: return size_t(cols) * 2;
      case Kind::Q4_0: return size_t(cols) / BLOCK * 18;
      case Kind::Q4_1: return size_t(cols) / BLOCK * 20;
      case Kind::Q8_0: return size_t(cols) / BLOCK * 34;
    }
    throw std::invalid_argument("kind");
  };
  switch (part) {
    case Part::QKV: return pack_rows(layers[layer].qkv, first, count, kind, rows);
    case Part::OUTPUT: return pack_rows(layers[layer].output, first, count, kind, rows);
    case Part::GATE: return pack_half(0, row_bytes(config.hidden));
    case Part::UP: return pack_half(1, row_bytes(config.hidden));
    case Part::DOWN: return pack_rows(layers[layer].down, first, count, kind, rows);
    case Part::EMBEDDING: return pack_rows(embedding, first, count, kind, rows);
    case Part::HEAD: return pack_rows(separate_head, first, count, kind, rows);
    default: throw std::invalid_argument("part");
  }
}

void Model::set_vector(int layer, Part part, const float* values, int count) {
  std::vector<float> v = copy(values, count);
  switch (part) {
    case Part::ATTENTION_NORM: layers[layer].attention_norm = v; break;
    case Part::FEED_FORWARD_NORM: layers[layer].feed_forward_norm = v; break;
    case Part::FINAL_NORM: final_norm = v; break;
    case Part::QKV_BIAS: layers[layer].bias = v; break;
    case Part::Q_NORM: layers[layer].q_norm = v; break;
    case Part::K_NORM: layers[layer].k_norm = v; break;
    default: throw std::invalid_argument("part");
  }
}

uint8_t* Buffers::get(size_t index, size_t bytes) {
  if (buffers_.size() <= index) buffers_.resize(index + 1);
  Buffer& buffer = buffers_[index];
  if (buffer.bytes < bytes || !buffer.memory) {
    buffer = {};
    buffer.memory.reset(new uint8_t[bytes + 64]);
    buffer.bytes = bytes;
  }
  const auto address = reinterpret_cast<uintptr_t>(buffer.memory.get());
  return reinterpret_cast<uint8_t*>((address + 63) / 64 * 64);
}

}  // namespace quaver

extern "C" {

quaver::Model* quaver_model_create(const quaver::Config* config, const float* cos, const float* sin) {
  try {
    return new quaver::Model(*config, cos, sin);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void quaver_model_destroy(quaver::Model* model) { delete model; }

void quaver_model_matrix(quaver::Model* model, int layer, int part, int first, int count, int kind, const void* rows) {
  model->set_matrix(layer, static_cast<quaver::Part>(part), first, count, static_cast<quaver::Kind>(kind), rows);
}

void quaver_model_vector(quaver::Model* model, int layer, int part, const float* values, int count) {
  model->set_vector(layer, static_cast<quaver::Part>(part), values, count);
}

// 0, or 1 when memory is short; nothing but the step's own pages is written then.
int quaver_step(quaver::Model* model, const quaver::Batch* batch, quaver::Outputs* outputs) {
  try {
    model->step(*batch, *outputs);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// 0, or 1 when memory is short.
int quaver_head(quaver::Model* model, const float* hidden, int rows, float* logits) {
  try {
    model->head_logits(hidden, rows, logits);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// Tokens [rows] of logits [rows, vocabulary]; temperature 0 takes the largest.
void quaver_draw(quaver::Model* model, const float* logits, int rows, int vocabulary, const float* temperature, const int32_t* top_k,
                 const float* top_p, const double* points, int32_t* tokens) {
  const size_t own = quaver::sample_scratch_bytes(vocabulary);
  uint8_t* scratch = model->buffers.get(0, own * model->team.size());
  model->team.run([&](int thread) {
    model->team.loop(rows, [&](int r) {
      const float* row = logits + size_t(r) * vocabulary;
      tokens[r] = temperature[r] == 0 ? int32_t(std::max_element(row, row + vocabulary) - row)
                                      : quaver::sample(row, vocabulary, temperature[r], top_k[r], top_p[r], points[r], scratch + own * thread);
    });
  });
}

// reference.token_statistics: found [rows, 5].
void quaver_rows_statistics(quaver::Model* model, const float* logits, int rows, int vocabulary, const int32_t* tokens, float* found) {
  model->team.run([&](int) {
    model->team.loop(rows, [&](int r) {
      quaver::token_statistics(logits + size_t(r) * vocabulary, vocabulary, tokens[r], found + size_t(r) * 5);
    });
  });
}
}
