#include <cmath>

#include "softmax.h"

namespace quaver {

using namespace attention;

namespace {

constexpr int SPAN = 256;  // positions whose logarithms of the mean are held at once
constexpr float NORMAL = 1.17549435e-38f;

inline Lanes load_first(const float* from, int count) {
  if (count >= N) return load_lanes(from);
  float padded[N] = {};
  std::memcpy(padded, from, count * sizeof(float));
  return load_lanes(padded);
}

inline Lanes keep(Ints mask, Lanes v) { return bits<Lanes>(bits<Ints>(v) & mask); }

// ln x of normal x > 0, absolute error below 2e-7 + 1e-7 · |ln x|. With x = 2^e · m and m around 1 it is
// e · ln 2 + 2 · artanh((m − 1) / (m + 1)).
inline Lanes log_normal(Lanes x) {
  const Ints above = bits<Ints>(x) - 0x3f3504f3;  // the bits of √½
  const Ints exponent = above >> 23;
  const Lanes m = bits<Lanes>((above & 0x007fffff) + 0x3f3504f3);
  const Lanes s = (m - 1.f) / (m + 1.f), z = s * s;
  const Lanes series = 2.f + z * (0.66666667f + z * (0.4f + z * (0.28571429f + z * 0.22222222f)));
  return __builtin_convertvector(exponent, Lanes) * 0.69314718f + s * series;
}

inline float divergence(float p, float mean) { return p > 0 && mean > 0 ? p * (std::log(p) - std::log(mean)) : 0.f; }

}  // namespace

void head_statistics(const float* weights, int64_t stride, int heads, int length, int prompt_length, float* out) {
  constexpr float absent = std::numeric_limits<float>::quiet_NaN();
  float* const divergences = out;            // while summing: Σ p·(ln p − ln p̄) over positions ≥ 1
  float* const masses = out + heads;         // Σ p over positions ≥ 1
  float* const prompts = out + 4 * heads;    // Σ p over positions 1 … prompt length − 1
  std::fill(out, out + 5 * heads, 0.f);
  float mean_sink = 0;
  for (int head = 0; head < heads; ++head) mean_sink += weights[head * stride] / float(heads);

  alignas(64) float log_mean[SPAN];
  for (int start = 0; start < length; start += SPAN) {
    const int end = std::min(length, start + SPAN);
    for (int at = start; at < end; at += N) {
      Lanes total{};
      for (int head = 0; head < heads; ++head) total += load_first(weights + head * stride + at, end - at);
      store_lanes(log_mean + at - start, log_normal(total) - std::log(float(heads)));
    }
    for (int head = 0; head < heads; ++head) {
      Lanes kl{}, mass{}, prompt{};
      for (int at = start; at < end; at += N) {
        Lanes p = load_first(weights + head * stride + at, end - at);
        if (at == 0) p = keep(lane_numbers() > 0, p);
        // A weight too small to have a logarithm here adds nothing. Where p is normal, so is the heads' total.
        kl += keep(~(p < NORMAL), p * (log_normal(p) - load_lanes(log_mean + at - start)));
        mass += p;
        prompt += keep(lane_numbers() < prompt_length - at, p);
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
