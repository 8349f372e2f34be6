#include <algorithm>
#include <cmath>
#include <limits>

#include "attention.h"
#include "simd.h"

namespace quaver {
namespace {

constexpr int SPAN = 256;  // positions whose logarithms of the mean are held at once
constexpr float NORMAL = 1.17549435e-38f;

inline f32x16 load_first(const float* from, int count) {
  if (count >= LANES) return load(from);
  float padded[LANES] = {};
  std::memcpy(padded, from, count * sizeof(float));
  return load(padded);
}

inline f32x16 keep(i32x16 mask, f32x16 v) { return bits<f32x16>(bits<i32x16>(v) & mask); }

inline float divergence(float p, float mean) { return p > 0 && mean > 0 ? p * (std::log(p) - std::log(mean)) : 0.f; }

// What is summed of one head's weights after position 0.
struct Sums {
  float divergence = 0, mass = 0, prompt = 0;
};

}  // namespace

void head_statistics(const float* weights, int64_t stride, int heads, int length, int prompt_length, float* out) {
  const float absent = std::numeric_limits<float>::quiet_NaN();
  float* const divergences = out;            // while summing: Σ p·(ln p − ln p̄) over positions ≥ 1
  float* const masses = out + heads;         // Σ p over positions ≥ 1
  float* const prompts = out + 4 * heads;    // Σ p over positions 1 … prompt length − 1
  std::fill(out, out + 5 * heads, 0.f);
  float mean_sink = 0;
  for (int head = 0; head < heads; ++head) mean_sink += weights[head * stride] / float(heads);

  alignas(64) float log_mean[SPAN];
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int start = 0; start < length; start += SPAN) {
    const int end = std::min(length, start + SPAN);
    for (int at = start; at < end; at += LANES) {
      f32x16 total = splat(0.f);
      for (int head = 0; head < heads; ++head) total += load_first(weights + head * stride + at, end - at);
      store(log_mean + at - start, log(total * splat(1.f / float(heads))));
    }
    for (int head = 0; head < heads; ++head) {
      f32x16 kl = splat(0.f), mass = splat(0.f), prompt = splat(0.f);
      for (int at = start; at < end; at += LANES) {
        f32x16 p = load_first(weights + head * stride + at, end - at);
        if (at == 0) p = keep(lane > 0, p);
        const f32x16 mean = load(log_mean + at - start);
        // A weight too small to have a logarithm here adds nothing; where p is normal, so is the mean, up to 1/heads.
        kl += keep((p >= NORMAL) & (mean > -88.f), p * (log(p) - mean));
        mass += p;
        prompt += keep(lane < prompt_length - at, p);
      }
      divergences[head] += sum(kl);
      masses[head] += sum(mass);
      prompts[head] += sum(prompt);
    }
  }

  float mean_rest = 0;
  for (int head = 0; head < heads; ++head) mean_rest += masses[head] / float(heads);
  const int generated = length - prompt_length;
  for (int head = 0; head < heads; ++head) {
    const float* p = weights + head * stride;
    const float rest = masses[head];
    const float kl = divergences[head] + divergence(p[0], mean_sink);
    const float nonsink = divergences[head] - divergence(rest, mean_rest);
    const float on_prompt = prompts[head] + (prompt_length > 0 ? p[0] : 0.f);
    const float per_prompt = on_prompt / float(prompt_length);
    const float per_generated = std::max(p[0] + rest - on_prompt, 0.f) / float(generated);
    out[head] = std::max(kl, 0.f);
    out[heads + head] = std::max(nonsink, 0.f);
    out[2 * heads + head] = p[0];
    out[3 * heads + head] = length < 2 ? absent : p[length - 2];
    out[4 * heads + head] = generated < 1 ? absent : per_prompt / (per_prompt + per_generated);
  }
}

}  // namespace quaver

extern "C" void quaver_head_statistics(const float* weights, int64_t stride, int heads, int length, int prompt_length, float* out) {
  quaver::head_statistics(weights, stride, heads, length, prompt_length, out);
}
