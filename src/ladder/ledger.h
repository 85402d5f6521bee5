// The ledger: what a rung moves between slow memory (HBM, DRAM) and fast memory (shared memory, cache), and computes.
// Rungs touch slow memory only through Slow, and hold what they load in Tile (memory.h): nothing moves uncounted.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/half.h"

namespace onepass::ladder {

/// Oi and Li: partial results of a part of the keys.
enum class Array : int { Q, K, V, O, dO, dQ, dK, dV, S, P, dS, dP, m, l, L, D, Oi, Li, kCount };
inline constexpr int kArrays = static_cast<int>(Array::kCount);
inline constexpr const char* kArrayNames[kArrays] = {"Q", "K",  "V",  "O", "dO", "dQ", "dK", "dV", "S",
                                                     "P", "dS", "dP", "m", "l",  "L",  "D",  "Oi", "Li"};
/// Statistics and partial results are float32 whatever the type of the rest.
inline constexpr bool is_float32(Array a) {
  return a >= Array::m;
}

/// Elements moved: of the storage type, and float32 ones.
struct Elements {
  std::int64_t stored = 0, float32 = 0;
  std::int64_t bytes(DType dtype) const { return stored * dtype_size(dtype) + 4 * float32; }
  bool operator==(const Elements&) const = default;
};

/// One transfer of rows [row, row + rows), for pictures of the order of the loops.
struct Touch {
  Array array;
  bool write;
  std::int64_t row, rows;
};

/// Counts are in elements.
struct Ledger {
  std::array<std::int64_t, kArrays> read{}, written{};
  std::vector<Touch>* touches = nullptr;   // null: not kept
  std::int64_t tiles = 0, tiles_peak = 0;  // tiles of Q, K, V, O and their gradients: what the papers fit into M
  std::int64_t held = 0, held_peak = 0;    // those, and S, P, m, l as well: what must really fit
  std::int64_t matmul_flops = 0, other_flops = 0, exps = 0;

  Elements moved() const {
    Elements sum;
    for (int a = 0; a < kArrays; ++a) {
      (is_float32(static_cast<Array>(a)) ? sum.float32 : sum.stored) += read[a] + written[a];
    }
    return sum;
  }
  void touch(Array array, bool write, std::int64_t row, std::int64_t rows, std::int64_t cols) {
    (write ? written : read)[static_cast<std::size_t>(array)] += rows * cols;
    if (touches != nullptr && rows > 0) touches->push_back({array, write, row, rows});
  }
};

/// Counting policies: a rung compiled with Silent has no trace of counting.
struct Counting {
  Ledger* ledger;
  void touch(Array a, bool write, std::int64_t row, std::int64_t rows, std::int64_t cols) const {
    ledger->touch(a, write, row, rows, cols);
  }
  void matmul(std::int64_t flops) const { ledger->matmul_flops += flops; }
  void other(std::int64_t flops) const { ledger->other_flops += flops; }
  void exp(std::int64_t n) const { ledger->exps += n; }
  void hold(std::int64_t n, bool operand) const {
    Ledger& g = *ledger;
    g.held_peak = max_of(g.held_peak, g.held += n);
    if (operand) g.tiles_peak = max_of(g.tiles_peak, g.tiles += n);
  }
};
struct Silent {
  constexpr void touch(Array, bool, std::int64_t, std::int64_t, std::int64_t) const {}
  constexpr void matmul(std::int64_t) const {}
  constexpr void other(std::int64_t) const {}
  constexpr void exp(std::int64_t) const {}
  constexpr void hold(std::int64_t, bool) const {}
};

}  // namespace onepass::ladder
