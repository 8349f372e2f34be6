#include "attention.h"
#include "simd.h"

namespace quaver {
namespace {

// RMS norm of one head, in place; as many heads as `count`.
void norm_heads(float* x, int count, int width, const float* weight, float eps) {
  for (int head = 0; head < count; ++head, x += width) {
    f32x16 squares = splat(0.f);
    for (int i = 0; i < width; i += LANES) squares += load(x + i) * load(x + i);
    const float scale = 1.f / std::sqrt(sum(squares) / float(width) + eps);
    for (int i = 0; i < width; i += LANES) store(x + i, load(x + i) * splat(scale) * load(weight + i));
  }
}

void rotate_heads(float* x, int count, int half, const float* __restrict cos, const float* __restrict sin) {
  for (int head = 0; head < count; ++head, x += 2 * half) {
    float* __restrict first = x;
    float* __restrict second = x + half;
    for (int i = 0; i < half; ++i) {
      const float a = first[i], b = second[i];
      first[i] = a * cos[i] - b * sin[i];
      second[i] = b * cos[i] + a * sin[i];
    }
  }
}

}  // namespace

void rotate_and_store(float* qkv, const Heads& heads, const Rotary& rotary, const Pages& pages, int position, int64_t slot,
                      int group) {
  const int width = heads.width, half = width / 2;
  const int from = group < 0 ? 0 : group, groups = group < 0 ? heads.groups : 1;
  const int queries = heads.heads / heads.groups * groups;
  const int first_query = heads.heads / heads.groups * from;
  const int64_t q_at = int64_t(first_query) * width;
  const int64_t k_at = int64_t(heads.heads + from) * width;
  const int64_t v_at = k_at + int64_t(heads.groups) * width;
  if (rotary.bias) {
    const auto add = [&](int64_t at, int count) {
      for (int64_t i = at; i < at + int64_t(count) * width; i += LANES) store(qkv + i, load(qkv + i) + load(rotary.bias + i));
    };
    add(q_at, queries);
    add(k_at, groups);
    add(v_at, groups);
  }
  if (rotary.q_norm) norm_heads(qkv + q_at, queries, width, rotary.q_norm, heads.norm_eps);
  if (rotary.k_norm) norm_heads(qkv + k_at, groups, width, rotary.k_norm, heads.norm_eps);
  const float* cos = rotary.cos + int64_t(position) * half;
  const float* sin = rotary.sin + int64_t(position) * half;
  rotate_heads(qkv + q_at, queries, half, cos, sin);
  rotate_heads(qkv + k_at, groups, half, cos, sin);
  const int64_t to = (slot * pages.groups + from) * width;
  for (int64_t i = 0; i < int64_t(groups) * width; i += LANES) {
    store_bf16(pages.keys + to + i, load(qkv + k_at + i));
    store_bf16(pages.values + to + i, load(qkv + v_at + i));
  }
}

}  // namespace quaver

extern "C" void quaver_rotate_and_store(float* qkv, const quaver::Heads* heads, const quaver::Rotary* rotary,
                                        const quaver::Pages* pages, int position, int64_t slot, int group) {
  quaver::rotate_and_store(qkv, *heads, *rotary, *pages, position, slot, group);
}
