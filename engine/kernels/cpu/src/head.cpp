#include "head.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <vector>

#include "tile.h"

namespace quaver {

using namespace tile;

namespace {

constexpr int TILE_PANELS = TILE / PANEL;
constexpr int ROWS = 16;               // rows of one product: their logits stay in the first cache
constexpr int STRIDE = TILE + 16;      // not a power of two: rows would fall on each other in the cache

// A logit and its token as one number: larger is a larger logit, then a smaller id. 0 is below all of them.
// NaN counts as −inf, so that every token has a place.
uint64_t key_of(float value, int id) {
  const uint32_t u = bits<uint32_t>(value == value ? value + 0.f : -INFINITE);  // + 0: −0 becomes 0
  const uint32_t ordered = u >> 31 ? ~u : u | 0x80000000u;
  return uint64_t(ordered) << 32 | uint32_t(~id);
}

float value_of(uint64_t key) {
  const uint32_t ordered = uint32_t(key >> 32);
  return bits<float>(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}

int id_of(uint64_t key) { return int(~uint32_t(key)); }

// `top` [TOP] is descending and keeps its largest keys; top[−1] is the largest of all numbers.
void insert(uint64_t* top, uint64_t key) {
  typedef uint64_t u64x8 __attribute__((vector_size(64)));
  for (int i = TOP - 8; i >= 0; i -= 8) {
    u64x8 here, before;
    std::memcpy(&here, top + i, sizeof here);
    std::memcpy(&before, top + i - 1, sizeof before);
    const u64x8 shifted = before < key ? before : u64x8{} + key;
    here = here > shifted ? here : shifted;
    std::memcpy(top + i, &here, sizeof here);
  }
}

// Offers a tile of `count` tokens from `first` on. Ids rise from call to call, so a tie with the last place loses.
void offer(uint64_t* top, const float* z, int first, int count, float largest) {
  static_assert(TOP % WIDTH == 0);
  const uint64_t& last = top[TOP - 1];
  int i = 0;
  for (; i < count && !last; ++i) insert(top, key_of(z[i], first + i));
  float bound = value_of(last);
  if (!(largest > bound)) return;
  for (; i < count; i += WIDTH) {
    for (uint32_t found = mask(load(z + i) > bound); found; found &= found - 1) {
      const int place = i + __builtin_ctz(found);
      insert(top, key_of(z[place], first + place));
    }
    bound = value_of(last);
  }
}

// The scratch of a pass. Sums of a tile are kept by tile, and merged in the order of tiles: a row's statistics depend
// neither on the number of threads nor on which of them had a tile, nor on the other rows.
class Scratch {
 public:
  Scratch(void* memory, const Matrix& head, int rows, int top_rows, int threads)
      : tiles((head.panels() + TILE_PANELS - 1) / TILE_PANELS),
        padded((rows + WIDTH - 1) / WIDTH * WIDTH),
        top_rows_(top_rows),
        sums_(static_cast<float*>(memory)),
        logits_(sums_ + size_t(tiles) * 3 * padded),
        tops_(reinterpret_cast<uint64_t*>(logits_ + size_t(threads) * 2 * ROWS * STRIDE)) {}

  static constexpr int PLACES = 8 + TOP;  // eight before the first place; the last of them is for insert

  static size_t bytes(const Matrix& head, int rows, int top_rows, int threads) {
    const Scratch at(nullptr, head, rows, top_rows, threads);
    return sizeof(float) * (size_t(at.tiles) * 3 * at.padded + size_t(threads) * 2 * ROWS * STRIDE) +
           sizeof(uint64_t) * size_t(threads) * top_rows * PLACES;
  }

  // [padded] each: the largest logit of a tile, Σ w, Σ w · (z − largest).
  float* largest(int tile) const { return sums_ + size_t(tile) * 3 * padded; }
  float* weight(int tile) const { return largest(tile) + padded; }
  float* expected(int tile) const { return weight(tile) + padded; }
  float* logits(int thread) const { return logits_ + size_t(thread) * 2 * ROWS * STRIDE; }  // and as many of `rest`
  uint64_t* top(int thread, int row) const { return tops_ + (size_t(thread) * top_rows_ + row) * PLACES + 8; }

  const int tiles, padded;

 private:
  const int top_rows_;
  float *const sums_, *const logits_;
  uint64_t* const tops_;
};

// Entropy and lse of rows [row, row + WIDTH) from the tiles' sums.
void merge_sums(const Scratch& at, int row, int rows, RowStatistics* out) {
  Floats m = all(-INFINITE);
  for (int tile = 0; tile < at.tiles; ++tile) m = max(load(at.largest(tile) + row), m);
  Floats weight{}, expected{}, lost{}, astray{};
  for (int tile = 0; tile < at.tiles; ++tile) {
    const Floats x = floored(load(at.largest(tile) + row) - m);
    const Floats share = exp_falling(x), w = load(at.weight(tile) + row);
    // Kahan's sums: what the last addition lost is given to the next.
    const Floats dw = share * w - lost, de = share * (load(at.expected(tile) + row) + x * w) - astray;
    const Floats new_weight = weight + dw, new_expected = expected + de;
    lost = (new_weight - weight) - dw;
    astray = (new_expected - expected) - de;
    weight = new_weight;
    expected = new_expected;
  }
  for (int i = 0; i < WIDTH && row + i < rows; ++i) {
    const double log_weight = std::log(double(weight[i]));
    out[row + i].lse = float(double(m[i]) + log_weight);
    out[row + i].entropy = float(log_weight - double(expected[i]) / double(weight[i]));
  }
}

void merge_tops(const Scratch& at, int row, int threads, RowStatistics& out) {
  uint64_t* top = at.top(0, row);
  for (int thread = 1; thread < threads; ++thread)
    for (int i = 0; i < TOP; ++i) insert(top, at.top(thread, row)[i]);
  for (int i = 0; i < TOP; ++i) {
    out.ids[i] = top[i] ? id_of(top[i]) : -1;
    out.values[i] = top[i] ? value_of(top[i]) : -INFINITE;
  }
}

}  // namespace

size_t head_scratch_bytes(const Matrix& head, int rows, int top_rows, int threads) {
  return Scratch::bytes(head, rows, top_rows, threads);
}

void head_pass(Team& team, int thread, const Matrix& head, const Activations& x, const Activations& rest, int top_rows,
               float* const* keep, RowStatistics* out, void* scratch) {
  const Scratch at(scratch, head, x.rows, top_rows, team.size());
  for (int row = 0; row < top_rows; ++row) {
    std::fill_n(at.top(thread, row), TOP, 0);
    at.top(thread, row)[-1] = UINT64_MAX;
  }

  const auto account = [&](int tile, int row, float* z) {
    const int first = tile * TILE, count = std::min(TILE, head.rows - first);
    std::fill(z + count, z + TILE, -INFINITE);
    const float m = tile_largest(z);
    const Sums sums = tile_sums(z, m);
    at.largest(tile)[row] = m;
    at.weight(tile)[row] = sums.weight;
    at.expected(tile)[row] = sums.expected;
    if (row >= top_rows) return;
    offer(at.top(thread, row), z, first, count, m);
    if (keep && keep[row]) std::memcpy(keep[row] + first, z, sizeof(float) * count);
  };

  team.loop(at.tiles, [&](int tile) {
    const int panel = tile * TILE_PANELS, panels = std::min(TILE_PANELS, head.panels() - panel);
    float* logits = at.logits(thread);
    for (int row = 0; row < x.rows; row += ROWS) {
      const int rows = std::min(ROWS, x.rows - row);
      product(head, panel, panels, x, row, rows, logits, STRIDE);
      const int fine = std::min(rows, top_rows - row);
      if (fine > 0) {
        float* more = logits + ROWS * STRIDE;
        product(head, panel, panels, rest, row, fine, more, STRIDE);
        for (int r = 0; r < fine; ++r)
          for (int i = r * STRIDE; i < r * STRIDE + panels * PANEL; i += WIDTH) store(logits + i, load(logits + i) + load(more + i));
      }
      for (int r = 0; r < rows; ++r) account(tile, row + r, logits + r * STRIDE);
    }
  });
  const int groups = at.padded / WIDTH;
  team.loop(groups + top_rows, [&](int task) {
    if (task < groups) merge_sums(at, task * WIDTH, x.rows, out);
    else merge_tops(at, task - groups, team.size(), out[task - groups]);
  });
}

}  // namespace quaver

extern "C" {

// One pass over rows `x` [rows, head->cols] on a team of its own, `repeats` times; returns the seconds of the fastest.
double quaver_head_pass(const quaver::Matrix* head, const float* x, int rows, int top_rows, int threads, int repeats,
                        float* const* keep, quaver::RowStatistics* out) {
  using namespace quaver;
  std::vector<uint8_t> input(activation_bytes(rows, head->cols) + 64);
  std::vector<uint8_t> scratch(head_scratch_bytes(*head, rows, top_rows, threads) + 64);
  const auto aligned = [](std::vector<uint8_t>& v) {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(v.data()) + 63) / 64 * 64);
  };
  std::vector<uint8_t> more(activation_bytes(top_rows, head->cols) + 64);
  const Activations coarse = activations_in(aligned(input), rows, head->cols);
  const Activations rest = activations_in(aligned(more), top_rows, head->cols);
  for (int row = 0; row < rows; ++row) {
    const float* values = x + size_t(row) * head->cols;
    quantise(values, 0, head->cols, coarse, row);
    if (row < top_rows) quantise_rest(values, 0, head->cols, coarse, rest, row);
  }
  Team team(threads);
  double fastest = INFINITY;
  for (int i = 0; i < repeats; ++i) {
    const auto began = std::chrono::steady_clock::now();
    team.run([&](int thread) { head_pass(team, thread, *head, coarse, rest, top_rows, keep, out, aligned(scratch)); });
    fastest = std::min(fastest, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  return fastest;
}
}
