// The list of rungs, their blocks, and what they start from.
#include "ladder/rungs.h"

#include <random>

namespace onepass::ladder {

Blocks paper_blocks(std::int64_t M, std::int64_t d, std::int64_t N) {
  if (d <= 0 || N <= 0) return {};
  const std::int64_t Bc = min_of(ceil_div(M, 4 * d), N);
  return {min_of(Bc, d), Bc};
}

Blocks honest_blocks(std::int64_t M, std::int64_t d, std::int64_t N) {
  if (d <= 0 || N <= 0) return {};
  std::int64_t Bc = 0;
  for (std::int64_t step = std::int64_t{1} << 30; step > 0; step /= 2) {  // the largest Bc that fits, bit by bit
    const std::int64_t tried = Bc + step, Br = min_of(tried, d);
    if (tried <= N && 2 * Br * d + 2 * tried * d + Br * tried + 2 * Br <= M) Bc = tried;
  }
  return {min_of(Bc, d), Bc};
}

Blocks blocks_of(const Problem& p) {
  return p.honest ? honest_blocks(p.M / p.tile_sets, p.d, p.N) : paper_blocks(p.M, p.d, p.N);
}

Arrays make_arrays(const Problem& p, std::uint64_t seed) {
  Arrays x;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const auto at = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  for (const Array a : {Array::Q, Array::K, Array::V, Array::dO}) {
    x[a].resize(at(p.N * p.d));
    for (float& value : x[a]) {
      value = normal(random);
      if (p.dtype == DType::f16) value = f16_to_float(float_to_f16(value));
      if (p.dtype == DType::bf16) value = bf16_to_float(float_to_bf16(value));
    }
  }
  for (const Array a : {Array::O, Array::dQ, Array::dK, Array::dV}) x[a].resize(at(p.N * p.d), NAN);
  for (const Array a : {Array::S, Array::P, Array::dP, Array::dS}) x[a].resize(at(p.N * p.N), NAN);
  for (const Array a : {Array::m, Array::l, Array::L, Array::D}) x[a].resize(at(p.N), NAN);
  return x;
}

std::span<const Rung> rungs() {
  static const Rung list[] = {kNaive,
                              kStandard,
                              kThreePass,
                              kTwoPass,
                              kTwoPassAttention,
                              kOnePassKeys,
                              kOnePassTiles,
                              kFlashV1,
                              kFlashV2,
                              kFlashV2Skipping,
                              kSplitKeys,
                              kBackwardStandard,
                              kBackwardV1,
                              kBackwardV1Statistics,
                              kBackwardV2,
                              kBackwardV2Parallel};
  return list;
}

void prepare(const Rung& rung, const Problem& problem, Arrays& arrays) {
  if (!rung.backward) return;
  kStandard.run(problem, arrays, nullptr);  // O and P
  Problem tiles = problem;                  // any tiles serve here
  tiles.honest = false;
  tiles.M = max_of<std::int64_t>(problem.M, 4 * problem.d);
  kFlashV2.run(tiles, arrays, nullptr);  // O and L
  kFlashV1.run(tiles, arrays, nullptr);  // O, m and l
}

Problem for_rung(const Rung& rung, Problem problem) {
  problem.tile_sets = rung.backward ? 2 : 1;
  return problem;
}

std::string refusal(const Rung& rung, const Problem& p) {
  if (p.N < 0 || p.d < 1) return "N must be 0 or more and d 1 or more";
  if (p.splits < 1) return "the number of splits must be 1 or more";
  if (!rung.tiled || p.N == 0) return "";
  const Blocks b = blocks_of(p);
  if (b.Br < 1 || b.Bc < 1) {
    const std::int64_t least = p.honest ? p.tile_sets * (4 * p.d + 3) : 1;
    return "fast memory of " + std::to_string(p.M) +
           " elements holds no tile of one row; the least for d = " + std::to_string(p.d) + " is " +
           std::to_string(least);
  }
  return "";
}

}  // namespace onepass::ladder
