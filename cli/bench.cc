// onepass bench: timings of suites or explicit shapes.
#include <algorithm>
#include <memory>

#include "command.h"
#include "reading.h"
#include "report.h"
#include "suites.h"
#include "timing.h"

namespace onepass::cli {
namespace {

struct BenchOptions : Options {
  std::string suite;
  std::vector<onepass_pass_t> passes;
  int reps = 0;
};

/// A kernel of `onepass info` that belongs to another pass has no cell; an unknown one is refused by the library.
bool serves_pass(const std::string& kernel, onepass_pass_t pass) {
  for (std::int32_t i = 0; i < onepass_kernel_count(); ++i) {
    onepass_kernel_info_t info = ONEPASS_KERNEL_INFO_INIT;
    if (onepass_kernel_info(i, &info) == ONEPASS_OK && kernel == info.name) {
      return (info.pass == ONEPASS_BACKWARD) == (pass == ONEPASS_BACKWARD);
    }
  }
  return true;
}

Result<std::vector<Shape>> choose_shapes(const BenchOptions& o) {
  const auto wanted = [&](onepass_pass_t pass) {
    if (o.passes.empty()) return !o.backward || pass == ONEPASS_BACKWARD;
    return std::find(o.passes.begin(), o.passes.end(), pass) != o.passes.end();
  };
  ONEPASS_RETURN_IF_ERROR(check_backward(o, o.passes));
  std::vector<Shape> all;
  if (!o.suite.empty() || !o.has_sizes()) {
    const std::string suite = o.suite.empty() ? suite_names()[0] : o.suite;
    const std::vector<std::string>& names = suite_names();
    if (std::find(names.begin(), names.end(), suite) == names.end()) {
      const std::string near = nearest(suite, names);
      return usage_error("--suite must be one of quick cpu decode gpu: got '%s'; nearest: %s",
                         printable(suite, 40).c_str(), near.empty() ? "quick" : near.c_str());
    }
    if (o.has_sizes()) return usage_error("--suite %s has sizes of its own; nearest: leave out --suite", suite.c_str());
    for (Shape shape : suite_shapes(suite)) {
      const bool dtype = o.dtypes.empty() || std::find(o.dtypes.begin(), o.dtypes.end(), shape.dtype) != o.dtypes.end();
      if (!wanted(shape.pass) || !dtype || (o.causal && !shape.causal)) continue;
      if (o.kernels.empty()) all.push_back(shape);
      for (const std::string& kernel : o.kernels) {
        shape.kernel = kernel;
        all.push_back(shape);
      }
    }
  } else {
    std::vector<onepass_pass_t> passes = o.passes;
    if (passes.empty()) passes = {o.backward ? ONEPASS_BACKWARD : ONEPASS_FORWARD};
    for (const onepass_pass_t pass : passes) {
      const std::vector<Shape> shapes = shapes_of(o, pass);
      all.insert(all.end(), shapes.begin(), shapes.end());
    }
  }
  std::erase_if(all, [](const Shape& s) { return !s.kernel.empty() && !serves_pass(s.kernel, s.pass); });
  if (all.empty()) return usage_error("no shape is left: the suite has none of this pass, dtype, mask or kernel");
  return all;
}

nlohmann::ordered_json row_of(const Cell& cell, const Options& options, const Timing& timing) {
  const Shape& s = cell.shape();
  const nlohmann::ordered_json& plan = cell.plan();
  const double bytes = s.pass == ONEPASS_DECODE ? cache_bytes(s, options) : plan.value("bytes", 0.0);
  nlohmann::ordered_json row;
  row["kernel"] = plan.value("kernel", "");
  row["backend"] = plan.value("backend", "");
  row["pass"] = pass_name(s.pass);
  row["dtype"] = name_of(s.dtype);
  for (const char* key : {"batch", "seq_q", "seq_k", "heads_q", "heads_kv", "head_dim", "head_dim_v"})
    row[key] = plan[key];
  row["causal"] = s.causal;
  row["window"] = {options.window_left, options.window_right};
  row["ms_median"] = timing.median * 1e3;
  row["ms_min"] = timing.least * 1e3;
  row["ms_max"] = timing.most * 1e3;
  row["reps"] = timing.reps;
  row["tflops"] = plan.value("flops", 0.0) / timing.median * 1e-12;
  row["gbps"] = bytes / timing.median * 1e-9;
  if (s.pass == ONEPASS_DECODE) {
    const CacheReads::Best read = cell.reads().best();
    row["read_loop"] = read.loop;
    row["read_gbps"] = read.seconds > 0 ? bytes / read.seconds * 1e-9 : 0;
  }
  return row;
}

std::vector<std::string> cells_of(const nlohmann::ordered_json& row, const Timing& timing) {
  const auto number = [&row](const char* key) { return std::to_string(row[key].get<std::int64_t>()); };
  const auto pair = [&](const char* a, const char* b) {
    return row[a] == row[b] ? number(a) : number(a) + "/" + number(b);
  };
  const bool window = row["window"][0] != -1 || row["window"][1] != -1;
  const std::string mask =
      std::string(row["causal"].get<bool>() ? "causal" : "") + (window ? " " + row["window"].dump() : std::string());
  const bool decode = row["pass"] == "decode";
  return {row["kernel"],
          row["pass"],
          row["dtype"],
          number("batch"),
          pair("heads_q", "heads_kv"),
          pair("seq_q", "seq_k"),
          pair("head_dim", "head_dim_v"),
          mask,
          duration_text(timing.median),
          duration_text(timing.least),
          duration_text(timing.most),
          decode ? format("%.1f GB/s of %.1f", row["gbps"].get<double>(), row["read_gbps"].get<double>())
                 : format("%.1f GFLOP/s", row["tflops"].get<double>() * 1e3)};
}

Status run_bench(const BenchOptions& options) {
  ONEPASS_RETURN_IF_ERROR(check_backend(options));
  ONEPASS_ASSIGN(const std::vector<Shape> shapes, choose_shapes(options));
  std::vector<std::unique_ptr<Cell>> cells;
  for (const Shape& shape : shapes) {
    ONEPASS_ASSIGN(std::unique_ptr<Cell> cell, Cell::make(shape, options));
    cells.push_back(std::move(cell));
  }
  ONEPASS_RETURN_IF_ERROR(prepare_cells(cells, options.seed));
  ONEPASS_RETURN_IF_ERROR(run_rounds(cells, options.reps));

  Table table({"kernel", "pass", "dtype", "batch", "heads", "seq", "dim", "mask", "median", "min", "max", "rate"});
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const auto& cell : cells) {
    const Timing timing = summarise(cell->seconds);
    rows.push_back(row_of(*cell, options, timing));
    table.add(cells_of(rows.back(), timing));
  }
  return print(options, table.text(), std::move(rows));
}

}  // namespace

void add_bench(CLI::App& app) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand("bench", "timings: a suite, or explicit shapes (every size may be a list)");
  add_common_options(*command, *options);
  command->add_option("--suite", options->suite, "quick (default), cpu, decode or gpu")->type_name("NAME");
  command
      ->add_option_function<std::string>(
          "--pass",
          [options](const std::string& text) {
            options->passes.clear();
            for (const std::string& pass : split(text, ',')) options->passes.push_back(parse_pass(pass));
          },
          "fwd, bwd or decode (default: fwd, or all that a suite has)")
      ->type_name("PASS[,PASS...]");
  add_integer(*command, "--reps", options->reps, 1, 1000000, "rounds (default: 3 to 15, about a minute)");
  command->callback([options] { require(run_bench(*options)); });
}

}  // namespace onepass::cli
