// The checksum of a packed block in memory; engine/kv/checksum.py says what it catches.
#include <bit>
#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 8;  // chains that do not wait for each other
constexpr int STRIPE = LANES * int(sizeof(uint64_t));
constexpr uint64_t ODD = 0x9E3779B97F4A7C15u;

// One-to-one in either argument. The rotation lets a difference in the top bit spread too.
inline uint64_t mix(uint64_t state, uint64_t word) { return std::rotl((state ^ word) * ODD, 29); }

}  // namespace

extern "C" uint64_t quaver_checksum(const uint8_t* data, int64_t bytes) {
  uint64_t lanes[LANES];
  for (int i = 0; i < LANES; ++i) lanes[i] = i;
  uint64_t words[LANES];
  int64_t at = 0;
  for (; at + STRIPE <= bytes; at += STRIPE) {
    std::memcpy(words, data + at, STRIPE);
    for (int i = 0; i < LANES; ++i) lanes[i] = mix(lanes[i], words[i]);
  }
  uint64_t state = uint64_t(bytes);
  for (int i = 0; i < LANES; ++i) state = mix(state, lanes[i]);
  for (; at < bytes; ++at) state = mix(state, data[at]);
  return state;
}
