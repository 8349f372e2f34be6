// The order of a step: which loops the team runs, over which buffers. Barriers lie only where one loop reads
// what another thread wrote in the loop before.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include "model.h"
#include "simd.h"

namespace quaver {

namespace {

constexpr int WIDE = 48;    // from this many tokens on, and with any prompt, products take bf16 through matrix tiles where there are some
// Attention's products take 16-bit activations: 8 bits and all of the rest. Its inputs have the outliers that hurt most.
constexpr float ATTENTION_SHARE = 1;
constexpr int PRIVATE = 2;  // up to this many tokens every thread prepares inputs for itself rather than wait
constexpr int NARROW_TILE = 24, WIDE_TILE = 4;  // panels of one task, at most; multiples of PAIR
constexpr int MANY = 4;                         // tasks for each thread that need no further division
constexpr int PAIR = 2 * BLOCK / PANEL;         // panels that hold 32 rows of gate and the 32 rows of up

enum Buffer { RESIDUAL, PROJECTED, ATTENDED, INPUT, HIDDEN, LAYOUT, PARTS, WEIGHTS, LENS, HEAD_INPUT, HEAD_SCRATCH, PER_THREAD };

using Clock = std::chrono::steady_clock;

double since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }
int ceil_div(int a, int b) { return (a + b - 1) / b; }
size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

void rms_norm(const float* x, const std::vector<float>& weight, int n, float eps, float* out) {
  f32x16 total{};
  for (int i = 0; i < n; i += LANES) total += load(x + i) * load(x + i);
  const f32x16 scale = splat(1.f / std::sqrt(sum(total) / n + eps));
  for (int i = 0; i < n; i += LANES) store(out + i, load(x + i) * scale * load(weight.data() + i));
}

void add(const float* from, int n, float* to) {
  int i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load(to + i) + load(from + i));
  for (; i < n; ++i) to[i] += from[i];
}

// The rows a product reads: bf16 for matrix tiles, else int8, and a second set that holds what the first leaves out, of
// which the product takes back a share.
struct Input {
  uint16_t* wide = nullptr;
  Activations rows, rest;
  int cols;
  float share;
};

class Step {
 public:
  Step(Model& model, const Batch& batch, const Outputs& outputs);
  void run(int thread);
  void report(Outputs& outputs) const;

 private:
  struct Thread {  // memory of one thread
    float *tile, *line;
    uint8_t* input;
    void *attention, *wide;
    double detail_seconds = 0;
  };

  void layer(int index, int thread);
  void attend(int layer, bool sampled, int thread);
  void rotate(int layer, int span, int group);
  void decode(int layer, int span, int group, bool sampled, float* to, int thread);
  void decode_part(int layer, int number, int group, bool sampled, int thread);
  void merge_parts(int span, int group, bool sampled);
  float* weights_of(int span, bool sampled) const;
  void prefill(int layer, int number, int block, int group, int thread);
  void explain(int sampled, int detail, int thread);
  void head(int thread);

  template <class Use, class Extra>
  void multiply(const Matrix&, const Input&, int unit, int thread, const Use&, int extras, const Extra&);
  template <class Use>
  void multiply(const Matrix& w, const Input& in, int unit, int thread, const Use& use) {
    multiply(w, in, unit, thread, use, 0, [](int) {});
  }
  template <class Row>
  Input prepare(int cols, float share, int thread, const Row& row);
  void set(const Input&, const float* values, int first, int count, int row);

  Input view(uint8_t* memory, int rows, int cols, float share) const;
  size_t input_bytes(int rows, int cols) const;
  int last_position(int span) const { return b.start[span] + b.count[span] - 1; }
  int last_token(int span) const { return b.offset[span] + b.count[span] - 1; }
  bool decodes(int span) const { return b.count[span] == 1; }
  // Query blocks of a prompt's span with queries that are scored, the last ones.
  int scored_blocks(int span) const {
    if (!out.mass || !out.mass[span] || b.scored[span] > last_position(span)) return 0;
    return ceil_div(b.count[span], QUERIES) - std::max(b.scored[span] - b.start[span], 0) / QUERIES;
  }
  int64_t mass_stride(int span) const { return ceil_div(last_position(span) + 1, QUERIES) * QUERIES; }
  void score(int number) const;
  const int32_t* table(int span) const { return b.tables + size_t(span) * b.table_width; }
  float* projected(int token) const { return qkv + size_t(token) * qkv_cols; }
  Pages pages(int layer, int span) const {
    return {b.keys + layer * b.layer_stride, b.values + layer * b.layer_stride, b.page_size, c.groups, c.width, holed[span] ? b.dead : nullptr};
  }
  bool is_dead(int span, int position) const {
    return holed[span] && b.dead[int64_t(table(span)[position / b.page_size]) * b.page_size + position % b.page_size];
  }
  Rotary rotary(int layer) const {
    const Layer& l = m.layers[layer];
    const auto data = [](const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); };
    return {data(l.bias), data(l.q_norm), data(l.k_norm), m.cos.data(), m.sin.data()};
  }

  Model& m;
  const Config& c;
  const Batch& b;
  const Outputs& out;  // heads and kept logits are written as they come, the rest by `report`
  Team& team;
  const Heads heads;
  const bool wide;
  const int qkv_cols, attended_cols;
  float *x, *qkv, *attended;
  uint8_t *input, *hidden, *layout;
  std::vector<int> prefills;                // spans of more than one token
  std::vector<int> decoding;                // the others
  std::vector<size_t> layouts;              // [prefills · groups], offsets into `layout`
  std::vector<std::pair<int, int>> tokens;  // (token, span) of the prefills
  std::vector<std::pair<int, int>> blocks;  // (place in prefills, query block), the longest contexts first
  std::vector<std::pair<int, int>> shares;  // (span, part) of the decodes, where threads share long contexts; else empty
  std::vector<float*> parts;                // [spans], what the parts of a shared decode found, group after group
  std::vector<int> detail_of;               // [spans], −1: none
  std::vector<int> prompt_details;          // spans of `prefills` with detail
  std::vector<char> holed;                  // [spans], whether the context has dead slots
  std::vector<std::vector<int32_t>> live;   // [prefills], ranks; empty without dead slots
  std::vector<std::vector<float>> mass;     // [prefills], [scored blocks, groups, mass_stride]; empty: not scored
  int lens_layers = 0;
  float *weights = nullptr, *lens = nullptr;
  int64_t weights_stride = 0;
  Activations head_rows, head_rest;
  std::vector<RowStatistics> statistics;
  void* head_scratch;
  std::vector<Thread> threads;
  Clock::time_point head_began;
};

Step::Step(Model& model, const Batch& batch, const Outputs& outputs)
    : m(model),
      c(model.config),
      b(batch),
      out(outputs),
      team(model.team),
      heads{c.heads, c.groups, c.width, c.window, c.norm_eps},
      wide((batch.tokens >= WIDE || batch.tokens > batch.spans) && has_wide_product()),
      qkv_cols((c.heads + 2 * c.groups) * c.width),
      attended_cols(c.heads * c.width),
      detail_of(batch.spans, -1),
      holed(batch.spans, false) {
  const int T = b.tokens, widest = std::max(c.hidden, attended_cols);
  x = reinterpret_cast<float*>(m.buffers.get(RESIDUAL, size_t(T) * c.hidden * 4));
  qkv = reinterpret_cast<float*>(m.buffers.get(PROJECTED, size_t(T) * qkv_cols * 4));
  attended = reinterpret_cast<float*>(m.buffers.get(ATTENDED, size_t(T) * attended_cols * 4));
  input = m.buffers.get(INPUT, input_bytes(T, widest));
  hidden = m.buffers.get(HIDDEN, input_bytes(T, c.intermediate));

  for (int d = 0; d < b.details; ++d) detail_of[b.detail_spans[d]] = d;
  int longest = 1, explained = 1;
  size_t layout_bytes = 0;
  for (int s = 0; s < b.spans; ++s) {
    const int context = last_position(s) + 1;
    for (int at = 0; b.dead && at <= b.start[s] && !holed[s]; at += b.page_size) {
      const uint8_t* const page = b.dead + int64_t(table(s)[at / b.page_size]) * b.page_size;
      holed[s] = std::any_of(page, page + b.page_size, [](uint8_t dead) { return dead; });
    }
    longest = std::max(longest, context);
    if (detail_of[s] >= 0) explained = std::max(explained, context);
    if (decodes(s)) {
      decoding.push_back(s);
      continue;
    }
    if (detail_of[s] >= 0) prompt_details.push_back(s);
    for (int g = 0; g < c.groups; ++g) {
      layouts.push_back(layout_bytes);
      layout_bytes += aligned(prefill_layout_bytes(heads, context));
    }
    for (int i = 0; i < b.count[s]; ++i) tokens.emplace_back(b.offset[s] + i, s);
    for (int block = 0; block < ceil_div(b.count[s], QUERIES); ++block) blocks.emplace_back(int(prefills.size()), block);
    prefills.push_back(s);
    live.push_back(holed[s] ? ranks(pages(0, s), table(s), context) : std::vector<int32_t>());
    mass.emplace_back(size_t(scored_blocks(s)) * c.groups * mass_stride(s));
  }
  std::stable_sort(blocks.begin(), blocks.end(), [&](const auto& one, const auto& other) {
    return b.start[prefills[one.first]] + one.second * QUERIES > b.start[prefills[other.first]] + other.second * QUERIES;
  });
  layout = m.buffers.get(LAYOUT, layout_bytes);

  // Few long contexts would leave threads idle; a part's result does not depend on who computed it.
  if (int(decoding.size()) * c.groups < MANY * team.size() && longest > PART) {
    size_t floats = 0;
    std::vector<size_t> at(b.spans);
    for (int s : decoding) {
      const int count = decode_parts(last_position(s));
      for (int part = 0; part < count; ++part) shares.emplace_back(s, part);
      at[s] = floats;
      floats += size_t(count) * decode_part_floats(heads) * c.groups;
    }
    float* memory = reinterpret_cast<float*>(m.buffers.get(PARTS, floats * 4));
    for (size_t start : at) parts.push_back(memory + start);
  }

  if (b.details) {
    // The last layer's lens is the model's own distribution, which the rows have already.
    lens_layers = b.layers - (b.layers && b.detail_layers[b.layers - 1] == c.layers - 1);
    weights_stride = ceil_div(explained, LANES) * LANES;
    weights = reinterpret_cast<float*>(m.buffers.get(WEIGHTS, size_t(b.details) * c.heads * weights_stride * 4));
    lens = reinterpret_cast<float*>(m.buffers.get(LENS, size_t(lens_layers) * b.details * c.hidden * 4));
  }
  const int count = b.rows + lens_layers * b.details;
  const size_t head_bytes = aligned(activation_bytes(count, c.hidden));
  uint8_t* head_input = m.buffers.get(HEAD_INPUT, head_bytes + activation_bytes(b.rows, c.hidden));
  head_rows = activations_in(head_input, count, c.hidden);
  head_rest = activations_in(head_input + head_bytes, b.rows, c.hidden);
  head_scratch = m.buffers.get(HEAD_SCRATCH, head_scratch_bytes(m.head(), count, b.rows, team.size()));
  statistics.resize(count);

  const size_t tile = aligned(size_t(T) * (wide ? WIDE_TILE : NARROW_TILE) * PANEL * 4 * 2);
  const size_t line = aligned(size_t(std::max(widest, c.intermediate)) * 4);
  const size_t attention = aligned(std::max(decode_scratch_bytes(heads, longest), prefills.empty() ? 0 : prefill_scratch_bytes(heads, longest)));
  size_t unpacked = 0;
  if (wide)
    for (const Matrix* w : {&m.layers[0].qkv, &m.layers[0].output, &m.layers[0].gate_up, &m.layers[0].down})
      unpacked = std::max(unpacked, aligned(wide_scratch_bytes(*w, WIDE_TILE)));
  for (int t = 0; t < team.size(); ++t) {
    uint8_t* memory = m.buffers.get(PER_THREAD + t, tile + line + attention + unpacked + input_bytes(PRIVATE, widest));
    Thread own;
    own.tile = reinterpret_cast<float*>(memory);
    own.line = reinterpret_cast<float*>(memory += tile);
    own.attention = memory += line;
    own.wide = memory += attention;
    own.input = memory += unpacked;
    threads.push_back(own);
  }
}

void Step::run(int thread) {
  team.loop(b.tokens, [&](int t) { unpack_row(m.embedding, b.token_ids[t], x + size_t(t) * c.hidden); });
  for (int i = 0; i < c.layers; ++i) layer(i, thread);
  if (!b.rows) return;
  if (thread == 0) head_began = Clock::now();
  head(thread);
}

void Step::report(Outputs& outputs) const {
  std::copy_n(statistics.begin(), b.rows, outputs.rows);
  outputs.head_seconds = b.rows ? since(head_began) : 0;
  outputs.detail_seconds = 0;
  // The rows of a layer are explained side by side; one alone is waited for.
  for (const Thread& thread : threads) outputs.detail_seconds += thread.detail_seconds / std::clamp(b.details, 1, team.size());
  for (int d = 0; d < b.details; ++d) {
    for (int i = 0; i < lens_layers; ++i)
      outputs.lens_entropy[d * b.layers + i] = statistics[b.rows + i * b.details + d].entropy;
    const int32_t* row = std::find(b.row_tokens, b.row_tokens + b.rows, last_token(b.detail_spans[d]));
    if (lens_layers < b.layers) outputs.lens_entropy[d * b.layers + lens_layers] = statistics[row - b.row_tokens].entropy;
  }
  for (int number = 0; number < int(prefills.size()); ++number) score(number);
}

// Sums what the blocks and groups of a scored span have found, and puts it where each token is.
void Step::score(int number) const {
  if (mass[number].empty()) return;
  const int span = prefills[number];
  const int64_t stride = mass_stride(span);
  std::vector<float> total(stride);
  for (size_t from = 0; from < mass[number].size(); from += stride) add(mass[number].data() + from, int(stride), total.data());
  const float share = 1.f / float(c.heads * ceil_div(c.layers, b.scored_layers));
  for (int at = 0; at <= last_position(span); ++at)
    out.mass[span][at] = is_dead(span, at) ? 0.f : total[live[number].empty() ? at : live[number][at]] * share;
}

void Step::layer(int index, int thread) {
  const Layer& l = m.layers[index];
  const int32_t* end = b.detail_layers + (b.details ? b.layers : 0);
  const int32_t* found = std::find(b.detail_layers, end, index);
  const int sampled = found == end ? -1 : int(found - b.detail_layers);
  const auto add_to_residual = [&](int first, int cols, const float* tile, int64_t stride) {
    for (int t = 0; t < b.tokens; ++t) add(tile + t * stride, cols, x + size_t(t) * c.hidden + first);
  };

  const Input normed = prepare(c.hidden, ATTENTION_SHARE, thread, [&](int t, float* line) {
    rms_norm(x + size_t(t) * c.hidden, l.attention_norm, c.hidden, c.norm_eps, line);
    return line;
  });
  multiply(l.qkv, normed, 2, thread, [&](int first, int cols, const float* tile, int64_t stride) {
    for (int t = 0; t < b.tokens; ++t) std::memcpy(projected(t) + first, tile + t * stride, size_t(cols) * 4);
  });
  attend(index, sampled >= 0, thread);
  const Input context = prepare(attended_cols, ATTENTION_SHARE, thread, [&](int t, float*) { return attended + size_t(t) * attended_cols; });
  multiply(l.output, context, 2, thread, add_to_residual, sampled < 0 ? 0 : b.details,
           [&](int detail) { explain(sampled, detail, thread); });

  const Input again = prepare(c.hidden, c.compensation, thread, [&](int t, float* line) {
    rms_norm(x + size_t(t) * c.hidden, l.feed_forward_norm, c.hidden, c.norm_eps, line);
    return line;
  });
  const Input inner = view(hidden, b.tokens, c.intermediate, c.compensation);
  multiply(l.gate_up, again, PAIR, thread, [&](int first, int cols, const float* tile, int64_t stride) {
    float h[BLOCK];
    for (int at = 0; at < cols; at += 2 * BLOCK) {
      for (int t = 0; t < b.tokens; ++t) {
        const float *gate = tile + t * stride + at, *up = gate + BLOCK;
        for (int i = 0; i < BLOCK; i += LANES) store(h + i, silu(load(gate + i)) * load(up + i));
        set(inner, h, (first + at) / 2, BLOCK, t);
      }
    }
  });
  multiply(l.down, inner, 2, thread, add_to_residual);
  if (sampled >= 0 && sampled < lens_layers && thread == 0)  // the residual is next written three barriers from here
    for (int d = 0; d < b.details; ++d)
      std::memcpy(lens + size_t(sampled * b.details + d) * c.hidden, x + size_t(last_token(b.detail_spans[d])) * c.hidden, size_t(c.hidden) * 4);
}

// Runs `use(first column, columns, tile, stride)` on the products of all panels, `unit` or a multiple at a time,
// and the `extras` tasks beside them.
template <class Use, class Extra>
void Step::multiply(const Matrix& w, const Input& in, int unit, int thread, const Use& use, int extras, const Extra& extra) {
  const int share = ceil_div(w.panels(), unit * team.size() * 4);
  const int most = std::max((wide ? WIDE_TILE : NARROW_TILE) / unit, 1);
  const int step = unit * std::min(share, most);
  float* tile = threads[thread].tile;
  team.loop(extras + ceil_div(w.panels(), step), [&](int task) {
    if (task < extras) return extra(task);
    const int panel = (task - extras) * step, panels = std::min(step, w.panels() - panel);
    const int64_t stride = panels * PANEL, size = stride * b.tokens;
    if (in.wide) {
      wide_product(w, panel, panels, in.wide, b.tokens, tile, stride, threads[thread].wide);
    } else {
      product(w, panel, panels, in.rows, 0, b.tokens, tile, stride);
    }
    if (!in.wide && in.share > 0) {
      product(w, panel, panels, in.rest, 0, b.tokens, tile + size, stride);
      for (int64_t i = 0; i < size; i += LANES) store(tile + i, load(tile + i) + splat(in.share) * load(tile + size + i));
    }
    use(panel * PANEL, std::min(int(stride), w.rows - panel * PANEL), tile, stride);
  });
}

// Makes an input of row(token, line) for every token; the returned one may be read by this thread at once.
template <class Row>
Input Step::prepare(int cols, float share, int thread, const Row& row) {
  if (b.tokens <= PRIVATE) {
    const Input own = view(threads[thread].input, b.tokens, cols, share);
    for (int t = 0; t < b.tokens; ++t) set(own, row(t, threads[thread].line), 0, cols, t);
    return own;
  }
  const Input shared = view(input, b.tokens, cols, share);
  team.loop(b.tokens, [&](int t) { set(shared, row(t, threads[thread].line), 0, cols, t); });
  return shared;
}

// Sets columns [first, first + count) of one row of an input.
void Step::set(const Input& in, const float* values, int first, int count, int row) {
  if (in.wide) {
    uint16_t* to = in.wide + size_t(row) * in.cols + first;
    for (int i = 0; i < count; i += LANES) store_bf16(to + i, load(values + i));
    return;
  }
  quantise(values - first, first, count, in.rows, row);
  if (in.share > 0) quantise_rest(values - first, first, count, in.rows, in.rest, row);
}

Input Step::view(uint8_t* memory, int rows, int cols, float share) const {
  Input in;
  in.cols = cols;
  in.share = share;
  if (wide) {
    in.wide = reinterpret_cast<uint16_t*>(memory);
  } else {
    in.rows = activations_in(memory, rows, cols);
    if (share > 0) in.rest = activations_in(memory + aligned(activation_bytes(rows, cols)), rows, cols);
  }
  return in;
}

size_t Step::input_bytes(int rows, int cols) const {
  return wide ? aligned(size_t(rows) * cols * 2) : 2 * aligned(activation_bytes(rows, cols));
}

// With `sampled`, the weights of the heads stay in `weights` for the detail rows; those of a prompt are one query more.
void Step::attend(int layer, bool sampled, int thread) {
  if (!prefills.empty()) {
    team.loop(int(tokens.size()), [&](int i) {
      const auto [token, span] = tokens[i];
      const int position = b.start[span] + token - b.offset[span];
      rotate_and_store(projected(token), heads, rotary(layer), pages(layer, span), position, b.slots[token], -1);
    });
    team.loop(int(prefills.size()) * c.groups, [&](int i) {
      const int span = prefills[i / c.groups];
      prefill_prepare(heads, pages(layer, span), table(span), last_position(span) + 1, i % c.groups, layout + layouts[i]);
    });
  }
  const int decodes = int(decoding.size()) * c.groups, count = shares.empty() ? decodes : int(shares.size()) * c.groups;
  if (!shares.empty()) team.loop(decodes, [&](int i) { rotate(layer, decoding[i / c.groups], i % c.groups); });
  const int first = int(blocks.size()) * c.groups, second = first + (sampled ? int(prompt_details.size()) * c.groups : 0);
  team.loop(second + count, [&](int i) {
    const int group = i % c.groups;
    if (i < first) return prefill(layer, blocks[i / c.groups].first, blocks[i / c.groups].second, group, thread);
    if (i < second) {
      const int span = prompt_details[(i - first) / c.groups];
      return decode(layer, span, group, true, threads[thread].line, thread);
    }
    if (!shares.empty()) return decode_part(layer, (i - second) / c.groups, group, sampled, thread);
    const int span = decoding[(i - second) / c.groups];
    rotate(layer, span, group);
    decode(layer, span, group, sampled, attended + size_t(b.offset[span]) * attended_cols, thread);
  });
  if (!shares.empty()) team.loop(decodes, [&](int i) { merge_parts(decoding[i / c.groups], i % c.groups, sampled); });
}

void Step::rotate(int layer, int span, int group) {
  const int token = b.offset[span];
  rotate_and_store(projected(token), heads, rotary(layer), pages(layer, span), b.start[span], b.slots[token], group);
}

// Where the heads' weights of a detail row go; null for other rows and layers.
float* Step::weights_of(int span, bool sampled) const {
  const int detail = detail_of[span];
  return detail < 0 || !sampled ? nullptr : weights + size_t(detail) * c.heads * weights_stride;
}

void Step::decode_part(int layer, int number, int group, bool sampled, int thread) {
  const auto [span, part] = shares[number];
  float* found = parts[span] + size_t(group) * decode_parts(last_position(span)) * decode_part_floats(heads);
  decode_attention_part(projected(last_token(span)), heads, pages(layer, span), table(span), last_position(span), group, part, found,
                        weights_of(span, sampled), weights_stride, threads[thread].attention);
}

void Step::merge_parts(int span, int group, bool sampled) {
  const float* found = parts[span] + size_t(group) * decode_parts(last_position(span)) * decode_part_floats(heads);
  decode_attention_merge(heads, last_position(span), group, found, attended + size_t(last_token(span)) * attended_cols,
                         weights_of(span, sampled), weights_stride);
}

void Step::decode(int layer, int span, int group, bool sampled, float* to, int thread) {
  decode_attention(projected(last_token(span)), heads, pages(layer, span), table(span), last_position(span), group, to,
                   weights_of(span, sampled), weights_stride, threads[thread].attention);
}

void Step::prefill(int layer, int number, int block, int group, int thread) {
  const int span = prefills[number], token = b.offset[span];
  const int scored = block - (ceil_div(b.count[span], QUERIES) - scored_blocks(span));
  Scores scores{nullptr, 0};
  if (scored >= 0 && layer % b.scored_layers == 0)
    scores = {mass[number].data() + (int64_t(scored) * c.groups + group) * mass_stride(span), b.scored[span]};
  prefill_attention(projected(token), qkv_cols, heads, pages(layer, span), table(span), b.start[span], b.count[span], group, block,
                    layout + layouts[number * c.groups + group], live[number].empty() ? nullptr : live[number].data(), scores,
                    attended + size_t(token) * attended_cols, attended_cols, threads[thread].attention);
}

// Writes the five signals of one detail row's heads at one sampled layer.
void Step::explain(int sampled, int detail, int thread) {
  const auto began = Clock::now();
  std::vector<float> found(5 * c.heads);
  const int length = last_position(b.detail_spans[detail]) + 1;
  head_statistics(weights + size_t(detail) * c.heads * weights_stride, weights_stride, c.heads, length, b.prompt_lengths[detail],
                  found.data());
  if (length > 1 && is_dead(b.detail_spans[detail], length - 2)) std::fill_n(&found[3 * c.heads], c.heads, std::numeric_limits<float>::quiet_NaN());
  for (int signal = 0; signal < 5; ++signal)
    std::memcpy(out.heads + ((size_t(detail) * 5 + signal) * b.layers + sampled) * c.heads, &found[size_t(signal) * c.heads], size_t(c.heads) * 4);
  threads[thread].detail_seconds += since(began);
}

void Step::head(int thread) {
  team.loop(int(statistics.size()), [&](int r) {
    const float* from = r < b.rows ? x + size_t(b.row_tokens[r]) * c.hidden : lens + size_t(r - b.rows) * c.hidden;
    rms_norm(from, m.final_norm, c.hidden, c.norm_eps, threads[thread].line);
    quantise(threads[thread].line, 0, c.hidden, head_rows, r);
    if (r < b.rows) quantise_rest(threads[thread].line, 0, c.hidden, head_rows, head_rest, r);
    if (r < b.rows && out.hidden) std::memcpy(out.hidden + size_t(r) * c.hidden, threads[thread].line, size_t(c.hidden) * 4);
  });
  head_pass(team, thread, m.head(), head_rows, head_rest, b.rows, out.keep, statistics.data(), head_scratch);
}

}  // namespace

void Model::step(const Batch& batch, Outputs& outputs) {
  Step step(*this, batch, outputs);
  team.run([&](int thread) { step.run(thread); });
  step.report(outputs);
}

void Model::head_logits(const float* hidden, int rows, float* logits) {
  uint8_t* memory = buffers.get(HEAD_INPUT, 2 * aligned(activation_bytes(rows, config.hidden)));
  const Activations coarse = activations_in(memory, rows, config.hidden);
  const Activations rest = activations_in(memory + aligned(activation_bytes(rows, config.hidden)), rows, config.hidden);
  void* scratch = buffers.get(HEAD_SCRATCH, head_scratch_bytes(head(), rows, rows, team.size()));
  std::vector<RowStatistics> statistics(rows);
  std::vector<float*> keep(rows);
  for (int r = 0; r < rows; ++r) keep[r] = logits + size_t(r) * config.vocab;
  team.run([&](int thread) {
    team.loop(rows, [&](int r) {
      const float* line = hidden + size_t(r) * config.hidden;
      quantise(line, 0, config.hidden, coarse, r);
      quantise_rest(line, 0, config.hidden, coarse, rest, r);
    });
    head_pass(team, thread, head(), coarse, rest, rows, keep.data(), statistics.data(), scratch);
  });
}

}  // namespace quaver
