// Rotary positions, paged attention and what each head looks at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quaver {

// One layer's pages [pages, page size, groups, width], bf16. Owned by the pool that Python holds.
struct Pages {
  uint16_t* keys;
  uint16_t* values;
  int page_size, groups, width;
  const uint8_t* dead;  // [pages, page size], not 0: the slot holds no token, and nobody sees it; null: there are none
};

struct Heads {
  int heads, groups, width;  // heads % groups = 0, width % 16 = 0
  int window;                // positions a query sees, itself included; 0: all
  float norm_eps;
};

// What happens to q, k and v between the projection and the pages. Null pointers: not in this model.
struct Rotary {
  const float* bias;           // [(heads + 2 · groups) · width]
  const float* q_norm;         // [width], RMS norm of each head
  const float* k_norm;         // [width]
  const float* cos;            // [positions, width / 2], half-split rotation
  const float* sin;
};

// One token's qkv [(heads + 2 · groups) · width] fp32: adds bias, norms and rotates q and k in place, stores k and v at
// `slot` (page · page size + offset) as bf16. `group` −1: all; else only that key-value head and its query heads.
void rotate_and_store(float* qkv, const Heads&, const Rotary&, const Pages&, int position, int64_t slot, int group);

// Attention of one query token at `position` over its sequence, for one key-value head.
// `q` points to the token's qkv row; `out` [heads · width] fp32 receives heads of that group. `table` lists the pages.
// When `weights` is not null, it is [heads, stride] and receives the softmax weights of the group's heads over
// positions 0 … position (those outside the window, and dead ones, are 0). `scratch`: decode_scratch_bytes(position + 1), per thread.
size_t decode_scratch_bytes(const Heads&, int context);
void decode_attention(const float* q, const Heads&, const Pages&, const int32_t* table, int position, int group, float* out,
                      float* weights, int64_t stride, void* scratch);

// The same in two steps, so that threads can share a long context: decode_attention_part for every part in
// [0, decode_parts(position)), in any order, then decode_attention_merge. `parts` holds what the parts found:
// decode_parts(position) · decode_part_floats(heads) fp32, for one token and one group. Bit-identical to decode_attention.
constexpr int PART = 512;  // positions
int decode_parts(int position);
size_t decode_part_floats(const Heads&);
size_t decode_part_scratch_bytes(const Heads&);
void decode_attention_part(const float* q, const Heads&, const Pages&, const int32_t* table, int position, int group, int part,
                           float* parts, float* weights, int64_t stride, void* scratch);
void decode_attention_merge(const Heads&, int position, int group, const float* parts, float* out, float* weights,
                            int64_t stride);

// Causal attention of `count` query tokens at positions start …, for one key-value head and one block of QUERIES tokens.
// `qkv` is [count, qkv_stride] rows of rotated q; `out` [count, out_stride].
// Keys and values of the context may first be laid out for matrix tiles: prefill_prepare fills `layout` for one group, once,
// (prefill_layout_bytes, shared by all query blocks of that group); without matrix tiles it may be empty.
// Where the context has dead slots, tokens are counted without them: `rank` [start + count + 1] has the live ones before each
// position; null without dead slots. `scores.mass`, if not null, has the weights of queries at positions from `scores.from` on
// added to it, over all heads of the group: [start + count, rounded up to 32], by rank.
struct Scores {
  float* mass;
  int from;
};
constexpr int QUERIES = 32;
std::vector<int32_t> ranks(const Pages&, const int32_t* table, int context);
size_t prefill_layout_bytes(const Heads&, int context);
void prefill_prepare(const Heads&, const Pages&, const int32_t* table, int context, int group, void* layout);
size_t prefill_scratch_bytes(const Heads&, int context);
void prefill_attention(const float* qkv, int64_t qkv_stride, const Heads&, const Pages&, const int32_t* table, int start, int count,
                       int group, int block, const void* layout, const int32_t* rank, Scores scores, float* out,
                       int64_t out_stride, void* scratch);

// The five head signals of one token from its weights [heads, stride]: out [5, heads] in the order of HEAD_SIGNALS, NaN is absent.
// `length` counts the token itself. Definitions: reference.head_statistics.
void head_statistics(const float* weights, int64_t stride, int heads, int length, int prompt_length, float* out);

}  // namespace quaver
