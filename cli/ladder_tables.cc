// The tables and rows of `onepass ladder`.
#include <algorithm>
#include <cmath>

#include "ladder.h"

namespace onepass::cli {
namespace {

using ladder::Blocks;
using ladder::Rung;

const char* pass_of(const Rung& rung) {
  return rung.backward() ? "bwd" : "fwd";
}

/// 1.07 G.
std::string count_text(std::int64_t n) {
  double x = static_cast<double>(n);
  if (n < 1000) return std::to_string(n);
  static constexpr const char* kUnits[] = {"", " k", " M", " G", " T"};
  std::size_t unit = 0;
  for (; x >= 1000 && unit < 4; ++unit) x /= 1000;
  return format("%.4g%s", x, kUnits[unit]);
}

/// Bytes over those of the standard rung of the same pass, by formula.
std::string share_text(const LadderCell& cell) {
  const char* base = cell.rung->backward() ? "backward_standard" : "standard";
  for (const Rung& rung : ladder::rungs()) {
    if (rung.name != std::string_view(base)) continue;
    const double whole = static_cast<double>(rung.totals(cell.problem).moved.bytes(cell.problem.dtype));
    if (whole > 0) return format("%.3f", static_cast<double>(cell.bytes_counted()) / whole);
  }
  return "-";
}

std::string blocks_text(const ladder::Problem& p) {
  const Blocks b = blocks_of(p);
  return format("Br %lld, Bc %lld, Tr %lld, Tc %lld", static_cast<long long>(b.Br), static_cast<long long>(b.Bc),
                static_cast<long long>(b.Tr(p.N)), static_cast<long long>(b.Tc(p.N)));
}

/// What all cells have in common.
std::string problem_text(const std::vector<LadderCell>& cells) {
  const ladder::Problem &p = cells[0].problem, &last = cells.back().problem;
  std::string text;
  if (p.N == last.N) text += format("N %lld, ", static_cast<long long>(p.N));
  if (p.d == last.d) text += format("d %lld, ", static_cast<long long>(p.d));
  text += dtype_name(p.dtype);
  if (p.causal) text += ", causal";
  if (p.left >= 0 || p.right >= 0)
    text += format(", window %lld,%lld", static_cast<long long>(p.left), static_cast<long long>(p.right));
  if (p.M == last.M) {
    text += format("; fast memory M = %s, %s elements", bytes_text(static_cast<double>(cells[0].fast_memory())).c_str(),
                   with_commas(p.M).c_str());
  }
  return text + "\n";
}

}  // namespace

std::string with_commas(std::int64_t n) {
  std::string text = std::to_string(n);
  for (std::size_t at = text.size(); at > 3 && text[at - 4] != '-'; at -= 3) text.insert(at - 3, 1, ',');
  return text;
}

nlohmann::ordered_json ladder_row(const LadderCell& cell) {
  const ladder::Ledger& g = cell.measured.ledger;
  nlohmann::ordered_json row;
  row["rung"] = cell.rung->name;
  row["backend"] = "cpu";
  row["pass"] = pass_of(*cell.rung);
  row["seq"] = cell.problem.N;
  row["head_dim"] = cell.problem.d;
  row["fast_memory"] = cell.rung->tiled ? nlohmann::ordered_json(cell.fast_memory()) : nlohmann::ordered_json();
  row["bytes_formula"] = cell.bytes_formula();
  row["bytes_counted"] = cell.bytes_counted();
  row["peak_fast"] = g.held_peak * dtype_size(cell.problem.dtype);
  row["matmul_flops"] = g.matmul_flops;
  row["other_flops"] = g.other_flops;
  row["exps"] = g.exps;
  row["seconds"] = cell.measured.seconds;
  const double error = cell.measured.max_abs_err;  // JSON has no NaN: an overflow is null
  row["max_abs_err"] = std::isfinite(error) ? nlohmann::ordered_json(error) : nlohmann::ordered_json();
  return row;
}

std::string ladder_table(const std::vector<LadderCell>& cells) {
  Table table({"", "rung", "pass", "error", "bytes", "by formula", "share", "peak tiles", "peak", "matmul FLOPs",
               "other FLOPs", "exps", "time"});
  Table names({"", "rung", "what it is", "elements moved", "file"});
  const ladder::Problem *forward = nullptr, *backward = nullptr;
  for (const LadderCell& cell : cells) {
    const ladder::Ledger& g = cell.measured.ledger;
    const double size = static_cast<double>(dtype_size(cell.problem.dtype)), error = cell.measured.max_abs_err;
    table.add({std::to_string(cell.rung->number), cell.rung->name, pass_of(*cell.rung),
               std::isfinite(error) ? format("%.1e", error) : "overflow", with_commas(cell.bytes_counted()),
               with_commas(cell.bytes_formula()), share_text(cell),
               bytes_text(static_cast<double>(g.tiles_peak) * size),
               bytes_text(static_cast<double>(g.held_peak) * size), count_text(g.matmul_flops),
               count_text(g.other_flops), count_text(g.exps), duration_text(cell.measured.seconds)});
    names.add(
        {std::to_string(cell.rung->number), cell.rung->name, cell.rung->title, cell.rung->formula, cell.rung->file});
    (cell.rung->backward() ? backward : forward) = &cell.problem;
  }
  std::string text = problem_text(cells);
  if (forward != nullptr) text += "forward:  " + blocks_text(*forward) + "\n";
  if (backward != nullptr) text += "backward: " + blocks_text(*backward) + "\n";
  return text + "\n" + table.text() +
         "\nerror: largest, against float64. bytes: moved between slow and fast memory, counted while running; share: "
         "of\n"
         "rung standard's, or backward_standard's. peak tiles: fast memory for tiles of Q, K, V, O and gradients, as "
         "the\n"
         "papers count; peak: with S, P, m and l. time: of a run without counting, beside others on other "
         "threads.\n\n" +
         names.text();
}

std::string ladder_sweep_table(const std::vector<LadderCell>& cells, bool by_seq) {
  std::vector<std::string> header{"", "bytes moved"};
  std::vector<const Rung*> rungs;
  std::vector<std::string> labels;
  const bool dims = cells[0].problem.d != cells.back().problem.d;
  const auto label_of = [&](const LadderCell& cell) {
    std::string label =
        by_seq ? "N " + std::to_string(cell.problem.N) : "M " + bytes_text(static_cast<double>(cell.fast_memory()));
    if (!by_seq && cells[0].problem.N != cells.back().problem.N)
      label = "N " + std::to_string(cell.problem.N) + " " + label;
    return dims ? "d " + std::to_string(cell.problem.d) + " " + label : label;
  };
  for (const LadderCell& cell : cells) {
    if (std::find(rungs.begin(), rungs.end(), cell.rung) == rungs.end()) rungs.push_back(cell.rung);
    const std::string label = label_of(cell);
    if (std::find(labels.begin(), labels.end(), label) == labels.end()) labels.push_back(label);
  }
  header.insert(header.end(), labels.begin(), labels.end());
  Table table(header);
  for (const Rung* rung : rungs) {
    std::vector<std::string> line{std::to_string(rung->number), rung->name};
    for (const std::string& label : labels) {
      std::string text = "-";  // does not depend on M: measured once
      for (const LadderCell& cell : cells) {
        if (cell.rung == rung && label_of(cell) == label) text = bytes_text(static_cast<double>(cell.bytes_counted()));
      }
      line.push_back(text);
    }
    table.add(line);
  }
  return problem_text(cells) + "\n" + table.text() + (by_seq ? "" : "\n-: does not depend on M\n");
}

std::string ladder_tensor_table(const std::vector<LadderCell>& cells) {
  Table table({"", "rung", "tensor", "elements read", "written"});
  for (const LadderCell& cell : cells) {
    for (std::size_t a = 0; a < ladder::kArrays; ++a) {
      const std::int64_t read = cell.measured.ledger.read[a], written = cell.measured.ledger.written[a];
      if (read + written == 0) continue;
      table.add({std::to_string(cell.rung->number), cell.rung->name, ladder::kArrayNames[a], with_commas(read),
                 with_commas(written)});
    }
  }
  return table.text();
}

nlohmann::ordered_json ladder_tensors(const std::vector<LadderCell>& cells) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const LadderCell& cell : cells) {
    for (std::size_t a = 0; a < ladder::kArrays; ++a) {
      const std::int64_t read = cell.measured.ledger.read[a], written = cell.measured.ledger.written[a];
      if (read + written == 0) continue;
      list.push_back({{"rung", cell.rung->name},
                      {"seq", cell.problem.N},
                      {"head_dim", cell.problem.d},
                      {"fast_memory", cell.fast_memory()},
                      {"tensor", ladder::kArrayNames[a]},
                      {"read", read},
                      {"written", written}});
    }
  }
  return list;
}

}  // namespace onepass::cli
