#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "head.h"
#include "tile.h"

namespace quaver {

using namespace tile;

namespace {

int whole_tiles(int vocabulary) { return (vocabulary + TILE - 1) / TILE * TILE; }

float tile_sum(const float* v) {
  Floats s{};
  for (int i = 0; i < TILE; i += WIDTH) s += load(v + i);
  return sum(s);
}

// weights = e^((z − largest) · scale), 0 for logits that far below; padded to whole tiles with zeros. Returns their sum.
double fill(float* weights, const float* logits, int vocabulary, float largest_logit, float scale) {
  double total = 0;
  for (int tile = 0; tile < vocabulary; tile += TILE) {
    for (int i = tile; i < tile + TILE; i += WIDTH) {
      const Floats z = i < vocabulary ? load(logits + i, vocabulary - i, -INFINITE) : all(-INFINITE);
      const Floats x = (z - all(largest_logit)) * all(scale);
      const Floats w = exp_falling(floored(x));
      store(weights + i, x < all(-86.f) ? all(0.f) : w);
    }
    total += tile_sum(weights + tile);
  }
  return total;
}

// How many of n values (n % WIDTH = 0) exceed a bound, and their sum.
struct Above {
  double mass = 0;
  int64_t count = 0;
};

Above above(const float* v, int n, float bound) {
  Above result;
  for (int tile = 0; tile < n; tile += TILE) {
    Floats mass{};
    Ints count{};
    for (int i = tile; i < std::min(n, tile + TILE); i += WIDTH) {
      const Floats w = load(v + i);
      const Ints in = w > all(bound);
      mass += in ? w : all(0.f);
      count -= in;
    }
    result.mass += sum(mass);
    result.count += int64_t(sum(__builtin_convertvector(count, Floats)));
  }
  return result;
}

// Weights in which a cut is looked for: n values (n % WIDTH = 0), filled up with zeros, and the bits of their extremes.
struct Pool {
  float* values;
  int n;
  int32_t least, most;
};

// Copies what lies in (low, high] of n weights to `to`, which may be `from`.
Pool gather(const float* from, int n, float low, float high, float* to) {
  Floats least = all(INFINITE), most = all(-1.f);
  int kept = 0;
  for (int i = 0; i < n; i += WIDTH) {
    const Floats w = load(from + i);
    const Ints in = (w > all(low)) & (w <= all(high));
    least = min(in ? w : all(INFINITE), least);
    most = max(in ? w : all(-1.f), most);
#if defined(__AVX512F__)
    const uint32_t kept_lanes = mask(in);
    store(to + kept, (Floats)_mm512_maskz_compress_ps(kept_lanes, (__m512)w));
    kept += __builtin_popcount(kept_lanes);
#else
    for (int j = 0; j < WIDTH; ++j) {
      to[kept] = w[j];
      kept -= in[j];
    }
#endif
  }
  store(to + kept, Floats{});
  return {to, (kept + WIDTH - 1) / WIDTH * WIDTH, bits<int32_t>(-largest(-least)), bits<int32_t>(largest(most))};
}

// The smallest set of the largest weights that reaches a target: everything above `least`, and what `before` leaves room for.
struct Cut {
  float least;
  double before;  // measure of what lies above `least`; below the target
};

// Halves the range of bit patterns in which the cut lies (weights in [0, 1] are ordered as their bits are), and keeps but
// the weights of that range. `measure` is Above::mass or Above::count. What lies up to `floor` is known not to be needed.
template <class Measure>
Cut find_cut(const float* weights, int n, float* memory, double target, float floor, Measure Above::*measure) {
  Pool pool = gather(weights, n, floor, 1.f, memory);
  int32_t low = pool.least - 1, high = pool.most;
  double before = 0;
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    const double reached = before + double(above(pool.values, pool.n, bits<float>(middle)).*measure);
    if (reached < target) {
      high = middle;
      before = reached;
    } else {
      low = middle;
    }
    pool = gather(pool.values, pool.n, bits<float>(low), bits<float>(high), memory);
    if (pool.n == 0) break;
    low = std::max(low, pool.least - 1);
    high = std::min(high, pool.most);
  }
  return {bits<float>(high), before};
}

// Zeroes the weights below `least`, and the last of those that equal it beyond `equals`. Returns the sum of the rest.
double drop(float* weights, int n, float least, double equals) {
  double surplus = -equals, total = 0;
  for (int tile = 0; tile < n; tile += TILE) {
    Floats equal{};
    for (int i = tile; i < tile + TILE; i += WIDTH) {
      const Floats w = load(weights + i);
      store(weights + i, w >= all(least) ? w : all(0.f));
      equal += w == all(least) ? all(1.f) : all(0.f);
    }
    surplus += sum(equal);
    total += tile_sum(weights + tile);
  }
  for (int i = n; surplus > 0 && i-- > 0;)
    if (weights[i] == least) {
      weights[i] = 0;
      total -= least;
      --surplus;
    }
  return total;
}

// The first token at which the running sum exceeds `target`; never one without weight.
int draw(const float* weights, int vocabulary, double target) {
  double before = 0;
  int last = vocabulary - 1;
  for (int tile = 0; tile < vocabulary; tile += TILE) {
    const double after = before + tile_sum(weights + tile);
    if (after > target) {
      for (int i = tile; i < std::min(vocabulary, tile + TILE); ++i) {
        if (!(weights[i] > 0)) continue;
        before += weights[i];
        last = i;
        if (before > target) return i;
      }
    }
    before = after;
  }
  return last;
}

}  // namespace

size_t sample_scratch_bytes(int vocabulary) { return sizeof(float) * (2 * size_t(whole_tiles(vocabulary)) + WIDTH); }

int sample(const float* logits, int vocabulary, float temperature, int top_k, float top_p, double point, void* scratch) {
  if (temperature <= 0) return int(std::max_element(logits, logits + vocabulary) - logits);
  const int n = whole_tiles(vocabulary);
  float *weights = static_cast<float*>(scratch), *pool = weights + n;
  Floats m = all(-INFINITE);
  for (int i = 0; i < vocabulary; i += WIDTH) m = max(load(logits + i, vocabulary - i, -INFINITE), m);
  double total = fill(weights, logits, vocabulary, largest(m), 1 / std::max(temperature, 1e-30f));
  if (!(total > 0)) return vocabulary - 1;  // nothing but NaN or −inf
  if (top_k > 0 && top_k < vocabulary) {
    const Cut cut = find_cut(weights, n, pool, top_k, 0.f, &Above::count);
    total = drop(weights, n, cut.least, n);
  }
  if (top_p < 1) {
    const double target = top_p * total;
    const float floor = float((1 - top_p) * total / vocabulary * 0.999);
    const Cut cut = find_cut(weights, n, pool, target, floor, &Above::mass);
    total = drop(weights, n, cut.least, std::max(1.0, std::ceil((target - cut.before) / cut.least)));
  }
  return draw(weights, vocabulary, point * total);
}

void token_statistics(const float* logits, int vocabulary, int token, float* out) {
  Floats lead = all(-INFINITE), second = lead;
  for (int i = 0; i < vocabulary; i += WIDTH) {
    const Floats z = load(logits + i, vocabulary - i, -INFINITE);
    second = max(min(z, lead), second);
    lead = max(z, lead);
  }
  float best[2] = {-INFINITE, -INFINITE};
  for (int i = 0; i < WIDTH; ++i)
    for (float value : {lead[i], second[i]}) {
      best[1] = std::max(best[1], std::min(best[0], value));
      best[0] = std::max(best[0], value);
    }
  const Floats top = all(best[0]), chosen = all(logits[token]);
  double total = 0, expected = 0, better = 0;
  for (int tile = 0; tile < vocabulary; tile += TILE) {
    Floats weight{}, mean{}, larger{};
    for (int i = tile; i < std::min(vocabulary, tile + TILE); i += WIDTH) {
      const Floats z = load(logits + i, vocabulary - i, -INFINITE), x = floored(z - top), w = exp_falling(x);
      weight += w;
      mean += w * x;
      larger += z > chosen ? all(1.f) : all(0.f);
    }
    total += sum(weight);
    expected += sum(mean);
    better += sum(larger);
  }
  const double surprisal = std::log(total) - (double(logits[token]) - best[0]);
  out[0] = float(surprisal);
  out[1] = float(std::exp(-surprisal));
  out[2] = float((1 - std::exp(double(best[1]) - best[0])) / total);
  out[3] = float(better + 1);
  out[4] = float(std::log(total) - expected / total);
}

}  // namespace quaver

extern "C" {

// Rows of logits [rows, vocabulary]; `out` [rows, 5].
void quaver_token_statistics(const float* logits, int rows, int vocabulary, const int32_t* tokens, float* out) {
  for (int row = 0; row < rows; ++row)
    quaver::token_statistics(logits + size_t(row) * vocabulary, vocabulary, tokens[row], out + size_t(row) * 5);
}

// Rows of logits [rows, vocabulary]; one token each to `out`.
void quaver_sample(const float* logits, int rows, int vocabulary, const float* temperature, const int32_t* top_k,
                   const float* top_p, const double* point, int32_t* out) {
  thread_local std::vector<uint8_t> scratch;  // fresh memory would cost as much as a draw
  scratch.resize(std::max(scratch.size(), quaver::sample_scratch_bytes(vocabulary)));
  for (int row = 0; row < rows; ++row)
    out[row] = quaver::sample(logits + size_t(row) * vocabulary, vocabulary, temperature[row], top_k[row], top_p[row],
                              point[row], scratch.data());
}
}
