// Dropout's random numbers: Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011). One counter gives eight keys of one query row a 16-bit lane each, so every backend draws the same mask.
#pragma once

#include "core/base.h"

namespace onepass {

struct PhiloxBlock {
  std::uint32_t word[4];
};

inline constexpr std::uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
inline constexpr std::uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;
inline constexpr int kPhiloxRounds = 7;

ONEPASS_INLINE PhiloxBlock philox(std::uint64_t seed, std::uint32_t c0, std::uint32_t c1, std::uint32_t c2,
                                  std::uint32_t c3) {
  std::uint32_t key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{kPhiloxMultiplier0} * c0;
    const std::uint64_t product1 = std::uint64_t{kPhiloxMultiplier1} * c2;
    c0 = static_cast<std::uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<std::uint32_t>(product1);
    c2 = static_cast<std::uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<std::uint32_t>(product0);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

/// Dropout of one problem. threshold == 0: no dropout. Score (i, j) of (batch b, query head h) is kept if its lane is
/// at least `threshold` = round(65536 p); kept weights are multiplied by `keep_scale` = 65536 / (65536 - threshold).
struct DropoutSpec {
  std::uint32_t threshold = 0;  // 0 ... 65536
  float keep_scale = 1;         // 0 where everything is dropped
  std::uint64_t seed = 0;
  std::uint32_t offset = 0;
  const std::int64_t* state = nullptr;  // seed and offset in memory; replaces the two above
};

/// The block for keys j/8*8 ... +7 of row i; `lane` picks key j's 16 bits out of it, low half of word 0 first.
ONEPASS_INLINE PhiloxBlock dropout_block(std::uint64_t seed, std::uint32_t offset, std::int64_t batch_head,
                                         std::int64_t i, std::int64_t j) {
  return philox(seed, static_cast<std::uint32_t>(j >> 3), static_cast<std::uint32_t>(i),
                static_cast<std::uint32_t>(batch_head), offset);
}
ONEPASS_INLINE std::uint32_t dropout_lane(const PhiloxBlock& block, std::int64_t j) {
  const int lane = static_cast<int>(j & 7);
  return (block.word[lane >> 1] >> (16 * (lane & 1))) & 0xffffu;
}

}  // namespace onepass
