// Problems and runs for the ladder's tests.
#pragma once

#include <gtest/gtest.h>

#include "kit/kit.h"
#include "ladder/rungs.h"

namespace onepass::ladder {

inline Problem problem(std::int64_t N, std::int64_t d, std::int64_t M) {
  Problem p;
  p.N = N;
  p.d = d;
  p.M = M;
  return p;
}

/// Runs a rung from fresh arrays.
inline Arrays run(const Rung& rung, Problem p, Ledger* ledger, std::uint64_t seed = 1) {
  p = for_rung(rung, p);
  Arrays x = make_arrays(p, seed);
  prepare(rung, p, x);
  rung.run(p, x, ledger);
  return x;
}

inline Ledger ledger_of(const Rung& rung, const Problem& p) {
  Ledger ledger;
  run(rung, p, &ledger);
  return ledger;
}

/// Names the failing case.
inline std::string text(const Rung& rung, const Problem& p) {
  return std::string(rung.name) + " N " + std::to_string(p.N) + " d " + std::to_string(p.d) + " M " +
         std::to_string(p.M) + (p.causal ? " causal" : "") + " window " + std::to_string(p.left) + "," +
         std::to_string(p.right) + (p.honest ? " fit" : "");
}

/// Whether to run this case: kit::chosen.
inline bool chosen(const Rung& rung, const Problem& p) {
  return kit::chosen(text(rung, p), static_cast<double>(200 * p.N * p.N * p.d));
}

inline void expect_counts(const Rung& rung, const Problem& p) {
  if (!chosen(rung, p)) return;
  const Totals formula = rung.totals(p);
  const Ledger ledger = ledger_of(rung, p);
  EXPECT_EQ(ledger.moved().stored, formula.moved.stored) << text(rung, p);
  EXPECT_EQ(ledger.moved().float32, formula.moved.float32) << text(rung, p);
  EXPECT_EQ(ledger.matmul_flops, formula.matmul_flops) << text(rung, p);
  EXPECT_EQ(ledger.other_flops, formula.other_flops) << text(rung, p);
  EXPECT_EQ(ledger.exps, formula.exps) << text(rung, p);
  EXPECT_EQ(ledger.held_peak, formula.held_peak) << text(rung, p);
  EXPECT_EQ(ledger.held, 0) << text(rung, p);
  EXPECT_EQ(ledger.tiles, 0) << text(rung, p);
  EXPECT_EQ(overrun(rung, p, ledger), "");
}

inline std::int64_t read(const Ledger& ledger, Array a) {
  return ledger.read[static_cast<std::size_t>(a)];
}
inline std::int64_t written(const Ledger& ledger, Array a) {
  return ledger.written[static_cast<std::size_t>(a)];
}

}  // namespace onepass::ladder
