// The list of rungs, their blocks, and what they start from.
#include "ladder/rungs.h"

#include <random>

namespace onepass::ladder {
namespace {

void size(Arrays& x, std::initializer_list<Array> arrays, std::int64_t rows, std::int64_t cols) {
  for (const Array a : arrays) x[a].assign(static_cast<std::size_t>(rows * cols), NAN);
}

}  // namespace

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
  Blocks b = p.honest ? honest_blocks(p.M / p.tile_sets, p.d, p.N) : paper_blocks(p.M, p.d, p.N);
  if (p.Br > 0) b.Br = min_of(p.Br, p.N);
  if (p.Bc > 0) b.Bc = min_of(p.Bc, p.N);
  return b;
}

Arrays make_arrays(const Problem& p, std::uint64_t seed) {
  Arrays x;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  for (const Array a : {Array::Q, Array::K, Array::V, Array::dO}) {
    x[a].resize(static_cast<std::size_t>(p.N * p.d));
    for (float& value : x[a]) {
      value = normal(random);
      if (p.dtype == DType::f16) value = f16_to_float(float_to_f16(value));
      if (p.dtype == DType::bf16) value = bf16_to_float(float_to_bf16(value));
    }
  }
  size(x, {Array::O, Array::dQ, Array::dK, Array::dV}, p.N, p.d);
  size(x, {Array::m, Array::l, Array::L, Array::D}, p.N, 1);
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

void prepare(const Rung& rung, const Problem& problem, Arrays& x) {
  const std::int64_t N = problem.N;
  if (rung.backward()) {
    Problem before = problem;  // any tiles serve here
    before.honest = false;
    before.M = max_of<std::int64_t>(problem.M, 4 * problem.d);
    prepare(*rung.forward, before, x);
    rung.forward->run(before, x, nullptr);
  }
  if (rung.squares && !rung.backward()) size(x, {Array::S, Array::P}, N, N);
  if (rung.squares && rung.backward()) size(x, {Array::dP, Array::dS}, N, N);
  if (rung.number == kSplitKeys.number) {
    size(x, {Array::Oi}, problem.splits * N, problem.d);
    size(x, {Array::Li}, problem.splits * N, 1);
  }
}

Problem for_rung(const Rung& rung, Problem problem) {
  problem.tile_sets = rung.backward() ? 2 : 1;
  return problem;
}

std::int64_t least_memory(const Rung& rung, const Problem& p) {
  return !rung.tiled ? 0 : p.honest ? p.tile_sets * (4 * p.d + 3) : 4 * p.d;
}

std::string refusal(const Rung& rung, const Problem& p) {
  const auto text = [](std::int64_t n) { return std::to_string(n); };
  if (p.d < 1) return "the head dimension must be 1 or more: got " + text(p.d) + "; nearest: 1";
  if (p.N < 0) return "the sequence length must be 0 or more: got " + text(p.N) + "; nearest: 0";
  if (p.splits < 1) return "the number of splits must be 1 or more: got " + text(p.splits) + "; nearest: 1";
  const std::int64_t least = least_memory(rung, p);
  if (p.M >= least) return "";
  return "fast memory must hold a tile of one row, " + text(least) + " elements for head dimension " + text(p.d) +
         ": got " + text(p.M) + " elements; nearest: " + text(least);
}

std::string overrun(const Rung& rung, const Problem& p, const Ledger& ledger) {
  if (!p.honest || !rung.tiled || ledger.held_peak <= rung.processors * p.M) return "";
  return std::string(rung.name) + " held " + std::to_string(ledger.held_peak) + " elements in " +
         std::to_string(rung.processors) + " fast memories of " + std::to_string(p.M);
}

}  // namespace onepass::ladder
