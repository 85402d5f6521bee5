// What `onepass ladder` measures and prints. Sizes of fast memory are in bytes here, in elements in src/ladder.
#pragma once

#include <string>
#include <vector>

#include "ladder/measure.h"
#include "options.h"
#include "report.h"

namespace onepass::cli {

struct LadderOptions : Options {
  std::vector<std::int64_t> fast_memory, processors;
  bool no_check = false;  // of the GPU's rungs
  std::vector<std::string> rungs;
  std::string pass = "all", sweep;
  bool fit = false, by_tensor = false, blocks = false, trace = false, parallel = false;
};

/// A rung on a problem, measured.
struct LadderCell {
  const ladder::Rung* rung;
  ladder::Problem problem;  // for_rung's
  ladder::Totals totals = {};
  ladder::Measurement measured = {};

  std::int64_t fast_memory() const { return problem.M * dtype_size(problem.dtype); }
  std::int64_t bytes_counted() const { return measured.ledger.moved().bytes(problem.dtype); }
  std::int64_t bytes_formula() const { return totals.moved.bytes(problem.dtype); }
  /// True if every count is what its formula says and what must fit fits.
  bool agrees() const;
};

/// Runs every cell, several at a time, after one reference for each (seq, head_dim).
Status measure_cells(std::vector<LadderCell>& cells, const LadderOptions& options);

nlohmann::ordered_json ladder_row(const LadderCell& cell);
/// Of the cells of one problem: the ladder, then what each rung is.
std::string ladder_table(const std::vector<LadderCell>& cells);
/// One line a rung, one column a problem: bytes.
std::string ladder_sweep_table(const std::vector<LadderCell>& cells, bool by_seq);
/// Elements read and written of each array.
std::string ladder_tensor_table(const std::vector<LadderCell>& cells);
nlohmann::ordered_json ladder_tensors(const std::vector<LadderCell>& cells);

/// A table, and the same for the JSON.
struct LadderReport {
  std::string text;
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
};
/// v1 and v2 for growing Br: what the choice of Br does.
Status ladder_block_rows(ladder::Problem problem, LadderReport& report);
/// Which rows of which array a rung moves, in order.
LadderReport ladder_trace(const std::vector<LadderCell>& cells, std::uint64_t seed);
/// Blocks of the papers and those that fit, for the given fast memories and processors.
LadderReport ladder_blocks(const LadderOptions& options, DType dtype, std::int64_t seq);
/// The parallel rungs: grid, FLOPs by their cost, warps, overlaps. The problem is of one head.
Status ladder_parallel(const ladder::Problem& problem, LadderReport& report);

/// The rungs of src/cuda/ladder on the first GPU, one table for each shape.
Status ladder_on_gpu(const LadderOptions& options);

/// The rungs that --rung and --pass name, as indices into `names`; `backward` says which pass each is of.
Result<std::vector<std::size_t>> chosen_rungs(const LadderOptions& options, const std::vector<std::string>& names,
                                              const std::vector<bool>& backward);
Status check_range(const std::vector<std::int64_t>& list, const char* option, std::int64_t least, std::int64_t most);

std::string with_commas(std::int64_t n);

}  // namespace onepass::cli
