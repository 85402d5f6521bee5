// A rung of the ladder: one step of the derivation, runnable and counted.
#pragma once

#include <array>
#include <cmath>
#include <span>
#include <string>

#include "ladder/memory.h"

namespace onepass::ladder {

/// One head: N queries and N keys of d numbers. Row i sees the keys i - left ... i + right (-1: no bound), with causal
/// none after i.
struct Problem {
  std::int64_t N = 0, d = 0;
  std::int64_t M = 0;        // elements of fast memory
  DType dtype = DType::f32;  // of slow memory
  bool causal = false;
  std::int64_t left = -1, right = -1;
  bool honest = false;          // tiles that really fit M, with S, m and l; else the papers' blocks
  std::int64_t Br = 0, Bc = 0;  // 0: chosen from M
  std::int64_t splits = 4;      // of the keys, for the split rung
  std::int64_t tile_sets = 1;   // honest tiles: the backward holds twice the tiles of the forward

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(d)); }
  std::int64_t first_key(std::int64_t i) const { return left < 0 ? 0 : max_of<std::int64_t>(0, i - left); }
  std::int64_t end_key(std::int64_t i) const {
    const std::int64_t end = right < 0 ? N : min_of(N, i + right + 1);
    return causal ? min_of(end, i + 1) : end;
  }
  bool sees(std::int64_t i, std::int64_t j) const { return first_key(i) <= j && j < end_key(i); }
};

/// Br query rows, Bc key rows; Tr and Tc blocks.
struct Blocks {
  std::int64_t Br = 0, Bc = 0;
  std::int64_t Tr(std::int64_t N) const { return N == 0 ? 0 : ceil_div(N, Br); }
  std::int64_t Tc(std::int64_t N) const { return N == 0 ? 0 : ceil_div(N, Bc); }
};

/// The papers' choice: Bc = ceil(M / 4d), Br = min(Bc, d), neither beyond N.
Blocks paper_blocks(std::int64_t M, std::int64_t d, std::int64_t N);
/// The largest Bc, with Br = min(Bc, d), such that 2 Br d + 2 Bc d + Br Bc + 2 Br <= M. Br = 0: not even one row fits.
Blocks honest_blocks(std::int64_t M, std::int64_t d, std::int64_t N);
Blocks blocks_of(const Problem& problem);

/// Everything in slow memory.
struct Arrays {
  std::array<std::vector<float>, kArrays> data;
  std::vector<float>& operator[](Array a) { return data[static_cast<std::size_t>(a)]; }
  const std::vector<float>& operator[](Array a) const { return data[static_cast<std::size_t>(a)]; }
};

/// Q, K, V, dO drawn from N(0,1) and rounded to the problem's type; outputs and statistics NaN. No N x N matrices.
Arrays make_arrays(const Problem& problem, std::uint64_t seed);

/// What a rung's ledger must say, in closed form. Exact for any N: where blocks do not divide N, Tr and Tc round up.
struct Totals {
  Elements moved;
  std::int64_t matmul_flops = 0, other_flops = 0, exps = 0;
  std::int64_t held_peak = 0;
};

struct Rung {
  int number;                     // its step of the story
  const char* name;               // "flash_v2"
  const char* title;              // one line
  const char* file;               // src/ladder/flash_v2.cc
  const char* formula;            // of the elements moved
  const Rung* forward = nullptr;  // of a backward rung: whose results it starts from
  bool tiled = true;              // its blocks depend on M
  bool squares = false;           // it keeps N x N matrices in slow memory
  std::int64_t processors = 1;    // that hold tiles at the same time, each in an M of its own
  void (*run)(const Problem& problem, Arrays& arrays, Ledger* ledger) = nullptr;  // ledger null: uncounted
  Totals (*totals)(const Problem& problem) = nullptr;

  bool backward() const { return forward != nullptr; }
};

/// All rungs, in the order of the story.
std::span<const Rung> rungs();

/// Makes the N x N matrices of a rung that has them, and runs the forward that a backward rung starts from, uncounted.
void prepare(const Rung& rung, const Problem& problem, Arrays& arrays);

/// The problem with what is particular to a rung filled in; run, totals and blocks_of take this one.
Problem for_rung(const Rung& rung, Problem problem);

/// The fast memory that holds a tile of one row: of Q, K, V and O; where everything must fit, a score, m and l too.
/// 0 where a rung has no such tiles.
std::int64_t least_memory(const Rung& rung, const Problem& problem);

/// Why the rung cannot run on this problem, or empty.
std::string refusal(const Rung& rung, const Problem& problem);

/// Of a ledger, where tiles must really fit: what is wrong, or empty.
std::string overrun(const Rung& rung, const Problem& problem, const Ledger& ledger);

/// Shorthand for the rung files.
template <class C>
Slow<C> slow(C count, Array a, Arrays& arrays, const Problem& p, std::int64_t cols) {
  return {count, a, arrays[a], cols, is_float32(a) ? DType::f32 : p.dtype};
}

#define ONEPASS_RUN_RUNG(function)                             \
  [](const Problem& problem, Arrays& arrays, Ledger* ledger) { \
    if (ledger != nullptr) {                                   \
      function(problem, arrays, Counting{ledger});             \
    } else {                                                   \
      function(problem, arrays, Silent{});                     \
    }                                                          \
  }

}  // namespace onepass::ladder
