// onepass ladder: the derivation, rung by rung.
#include "ladder.h"

#include <algorithm>
#include <charconv>
#include <memory>

#include "command.h"

namespace onepass::cli {
namespace {

constexpr std::int64_t kDefaultMemory = 128 * 1024, kMostMemory = std::int64_t{1} << 30;
constexpr std::int64_t kMostRows = 16384;  // N x N matrices of float32 are 1 GiB each

/// "192K" and "196608" bytes.
std::vector<std::int64_t> parse_memory(const std::string& text) {
  std::vector<std::int64_t> sizes;
  for (const std::string& part : split(text, ',')) {
    std::int64_t size = 0, unit = 1;
    const char* last = part.data() + part.size();
    const auto [end, error] = std::from_chars(part.data(), last, size);
    const std::string suffix(end, last);
    if (suffix == "K" || suffix == "KB" || suffix == "KiB") unit = 1024;
    if (suffix == "M" || suffix == "MB" || suffix == "MiB") unit = 1024 * 1024;
    const bool known = suffix.empty() || unit > 1;
    if (error != std::errc() || !known || size < 1 || size > kMostMemory / unit)
      refuse("--fast-memory", "takes bytes, 1 to 1024M", part, "--fast-memory 128K");
    sizes.push_back(size * unit);
  }
  return sizes;
}

Result<std::vector<const ladder::Rung*>> cpu_rungs(const LadderOptions& o) {
  std::vector<std::string> names;
  std::vector<bool> backward;
  for (const ladder::Rung& rung : ladder::rungs()) {
    names.emplace_back(rung.name);
    backward.push_back(rung.backward());
  }
  ONEPASS_ASSIGN(const std::vector<std::size_t> numbers, chosen_rungs(o, names, backward));
  std::vector<const ladder::Rung*> chosen;
  for (const std::size_t n : numbers) chosen.push_back(&ladder::rungs()[n]);
  return chosen;
}

/// The problems of the lists, in their order; what a list leaves out is a default.
Result<std::vector<ladder::Problem>> problems_of(const LadderOptions& o) {
  if (!o.sweep.empty() && !(o.sweep == "seq" ? o.seq : o.fast_memory).empty() && o.sweep != "block-rows") {
    return usage_error("--sweep %s takes values of its own; nearest: leave --sweep out, lists are swept",
                       o.sweep.c_str());
  }
  ONEPASS_RETURN_IF_ERROR(check_range(o.seq, "--seq", 0, kMostRows));
  ONEPASS_RETURN_IF_ERROR(check_range(o.head_dim, "--head-dim", 1, 1024));
  if (o.dtypes.size() > 1) return usage_error("--dtype takes one type here: got %zu; nearest: f32", o.dtypes.size());
  const ElementType type = o.dtypes.empty() ? ElementType::f32 : o.dtypes[0];
  if (type == ElementType::f64) return usage_error("--dtype must be one of f32 f16 bf16: got f64; nearest: f32");
  ladder::Problem p;
  p.dtype = type == ElementType::f16 ? DType::f16 : type == ElementType::bf16 ? DType::bf16 : DType::f32;
  p.causal = o.causal;
  p.left = o.window_left;
  p.right = o.window_right;
  p.honest = o.fit;
  std::vector<std::int64_t> seq = o.seq, dims = o.head_dim, memory = o.fast_memory;
  if (o.sweep == "seq") seq = {128, 256, 512, 1024};
  if (o.sweep == "fast-memory") memory = {8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10};
  if (seq.empty()) seq = {o.blocks ? 8192 : o.sweep.empty() && !o.parallel ? 1024 : 512};
  if (dims.empty()) dims = {64};
  if (memory.empty()) memory = {kDefaultMemory};
  std::vector<ladder::Problem> problems;
  for (const std::int64_t d : dims) {
    for (const std::int64_t N : seq) {
      for (const std::int64_t bytes : memory) {
        p.N = N;
        p.d = d;
        p.M = bytes / dtype_size(p.dtype);
        problems.push_back(p);
      }
    }
  }
  return problems;
}

Status check_memory(const LadderOptions& options, const std::vector<const ladder::Rung*>& rungs,
                    const std::vector<ladder::Problem>& problems) {
  for (const ladder::Problem& p : problems) {
    std::int64_t least = 0;
    for (const ladder::Rung* rung : rungs) least = max_of(least, ladder::least_memory(*rung, for_rung(*rung, p)));
    if (p.M >= least) continue;
    const long long size = dtype_size(p.dtype), bytes = least * size;
    long long given = kDefaultMemory;  // in bytes, as the option had it
    for (const std::int64_t memory : options.fast_memory) given = memory / size == p.M ? memory : given;
    return usage_error(
        "--fast-memory must hold a tile of one row, %lld bytes for head-dim %lld: got %lld; nearest: "
        "--fast-memory %lld",
        bytes, static_cast<long long>(p.d), given, bytes);
  }
  return {};
}

/// One mode at a time, and no option or size that it would ignore.
Status check_mode(const LadderOptions& o, std::size_t problems) {
  const bool block_rows = o.sweep == "block-rows";
  const int modes = !o.sweep.empty() + o.trace + o.blocks + o.parallel;
  if (modes > 1) return usage_error("--sweep, --trace, --blocks and --parallel are views of their own; nearest: one");
  if (!o.processors.empty() && (!o.blocks || o.fast_memory.empty()))
    return usage_error("--processors goes with --blocks and --fast-memory; nearest: leave it out");
  if ((block_rows || o.parallel) && problems > 1) {
    return usage_error("%s takes one size of each kind: got %zu problems; nearest: one",
                       o.parallel ? "--parallel" : "--sweep block-rows", problems);
  }
  if (o.blocks && o.seq.size() > 1) return usage_error("--blocks takes one --seq: got %zu; nearest: one", o.seq.size());
  return {};
}

/// A rung whose blocks do not depend on M is measured once for each N and d.
std::vector<LadderCell> cells_of(const std::vector<const ladder::Rung*>& rungs,
                                 const std::vector<ladder::Problem>& problems) {
  std::vector<LadderCell> cells;
  for (std::size_t n = 0; n < problems.size(); ++n) {
    const ladder::Problem& p = problems[n];
    const bool only_memory_changed = n > 0 && problems[n - 1].N == p.N && problems[n - 1].d == p.d;
    for (const ladder::Rung* rung : rungs) {
      if (only_memory_changed && !rung->tiled) continue;
      const ladder::Problem problem = for_rung(*rung, p);
      cells.push_back({rung, problem, rung->totals(problem)});
    }
  }
  return cells;
}

Status run_ladder(const LadderOptions& options) {
  if (options.backend == "cuda") return ladder_on_gpu(options);
  if (!options.heads.empty() || options.no_check) {
    return usage_error("%s is of the GPU's rungs; nearest: leave it out, or --backend cuda",
                       options.no_check ? "--no-check" : "--heads");
  }
  ONEPASS_ASSIGN(const std::vector<const ladder::Rung*> rungs, cpu_rungs(options));
  ONEPASS_ASSIGN(const std::vector<ladder::Problem> problems, problems_of(options));
  ONEPASS_RETURN_IF_ERROR(check_memory(options, rungs, problems));
  ONEPASS_RETURN_IF_ERROR(check_range(options.processors, "--processors", 1, 1 << 20));
  ONEPASS_RETURN_IF_ERROR(check_mode(options, problems.size()));
  nlohmann::ordered_json rows = nlohmann::ordered_json::array(), more = nlohmann::ordered_json::object();
  if (options.blocks) {
    LadderReport report = ladder_blocks(options, problems[0].dtype, problems[0].N);
    more["blocks"] = std::move(report.json);
    return print(options, report.text, std::move(rows), more);
  }
  if (options.sweep == "block-rows") {
    LadderReport report;
    ONEPASS_RETURN_IF_ERROR(ladder_block_rows(problems[0], report));
    more["block_rows"] = std::move(report.json);
    return print(options, report.text, std::move(rows), more);
  }
  if (options.parallel) {
    LadderReport report;
    ONEPASS_RETURN_IF_ERROR(ladder_parallel(problems[0], report));
    more["parallel"] = std::move(report.json);
    return print(options, report.text, std::move(rows), more);
  }
  std::vector<LadderCell> cells = cells_of(rungs, problems);
  if (options.trace) {
    LadderReport report = ladder_trace(cells, options.seed);
    more["touches"] = std::move(report.json);
    return print(options, report.text, std::move(rows), more);
  }
  ONEPASS_RETURN_IF_ERROR(measure_cells(cells, options));
  std::string wrong;
  for (const LadderCell& cell : cells) {
    rows.push_back(ladder_row(cell));
    if (!cell.agrees())
      wrong += std::string("WRONG: ") + cell.rung->name + " counted something else than its formula\n";
    const std::string over = overrun(*cell.rung, cell.problem, cell.measured.ledger);
    if (!over.empty()) wrong += "WRONG: " + over + "\n";
  }
  std::string report =
      problems.size() == 1 ? ladder_table(cells) : ladder_sweep_table(cells, problems[0].M == problems.back().M);
  if (options.by_tensor) {
    report += "\n" + ladder_tensor_table(cells);
    more["tensors"] = ladder_tensors(cells);
  }
  ONEPASS_RETURN_IF_ERROR(print(options, report + wrong, std::move(rows), more));
  if (!wrong.empty()) throw CheckFailure();
  return {};
}

}  // namespace

Status check_range(const std::vector<std::int64_t>& list, const char* option, std::int64_t least, std::int64_t most) {
  for (const std::int64_t n : list) {
    if (n >= least && n <= most) continue;
    return usage_error("%s must be %lld to %lld: got %lld; nearest: %s %lld", option, static_cast<long long>(least),
                       static_cast<long long>(most), static_cast<long long>(n), option,
                       static_cast<long long>(clamp_to(n, least, most)));
  }
  return {};
}

Result<std::vector<std::size_t>> chosen_rungs(const LadderOptions& o, const std::vector<std::string>& names,
                                              const std::vector<bool>& backward) {
  std::vector<std::size_t> chosen;
  for (std::size_t n = 0; n < names.size(); ++n) {
    const bool pass = o.pass == "all" || (o.pass == "bwd") == backward[n];
    const bool asked = o.rungs.empty() || std::find(o.rungs.begin(), o.rungs.end(), names[n]) != o.rungs.end();
    if (pass && asked) chosen.push_back(n);
  }
  for (const std::string& name : o.rungs) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    const std::string near = nearest(name, names);
    return usage_error("--rung: there is no rung '%s'; nearest: %s", printable(name, 40).c_str(),
                       near.empty() ? "flash_v2" : near.c_str());
  }
  if (chosen.empty()) return usage_error("--rung names none of --pass %s; nearest: --pass all", o.pass.c_str());
  return chosen;
}

void add_ladder(CLI::App& app) {
  auto options = std::make_shared<LadderOptions>();
  LadderOptions& o = *options;
  CLI::App* command = app.add_subcommand("ladder", "the derivation, rung by rung: error, bytes, FLOPs, time");
  add_sizes(*command, "--seq", o.seq,
            "N: query rows and keys (default 1024; 512 in sweeps and with --parallel, 8192 with --blocks)");
  add_sizes(*command, "--head-dim", o.head_dim, "d (default 64)");
  command
      ->add_option_function<std::string>(
          "--fast-memory", [&o](const std::string& text) { o.fast_memory = parse_memory(text); },
          "M: bytes, also 192K or 1M (default 128K)")
      ->type_name("BYTES[,BYTES...]");
  add_dtype_option(*command, o);
  add_mask_options(*command, o);
  command
      ->add_option_function<std::string>(
          "--tiles", [&o](const std::string& text) { o.fit = text == "fit"; },
          "paper (default): Q, K, V and O tiles fill M; fit: S, m and l must fit too, an overrun is an error")
      ->check(CLI::IsMember({"paper", "fit"}))
      ->type_name("RULE");
  command->add_option("--pass", o.pass, "fwd, bwd or all (default)")
      ->check(CLI::IsMember({"fwd", "bwd", "all"}))
      ->type_name("PASS");
  command
      ->add_option_function<std::string>(
          "--rung", [&o](const std::string& text) { o.rungs = split(text, ','); }, "only these (default: all)")
      ->type_name("NAME[,NAME...]");
  command->add_option("--sweep", o.sweep, "bytes against fast-memory or seq; block-rows: what Br does to v1 and v2")
      ->check(CLI::IsMember({"fast-memory", "seq", "block-rows"}))
      ->type_name("WHAT");
  command->add_flag("--by-tensor", o.by_tensor, "reads and writes of each tensor too");
  command->add_flag("--trace", o.trace, "only: which rows of which tensor move, in order");
  command->add_flag("--blocks", o.blocks, "only: block sizes for 192 KB x 108 and 228 KB x 132 processors, or M's");
  command->add_flag("--parallel", o.parallel, "only: models of the grid, of a block's warps and of a GPU's units");
  add_sizes(*command, "--processors", o.processors, "with --blocks and --fast-memory: how many share the work");
  command->add_option("--backend", o.backend, "auto or cpu: one head; cuda: the GPU's rungs")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  add_sizes(*command, "--heads", o.heads, "with cuda: batch x heads (default 16)");
  command->add_flag("--no-check", o.no_check, "with cuda: time only, no comparison with the reference");
  add_execution_options(*command, o);
  command->callback([options, command] {
    if (options->backend == "cuda") {
      require(check_used(*command,
                         {"--backend", "--seq", "--head-dim", "--heads", "--dtype", "--causal", "--pass", "--rung",
                          "--no-check", "--threads", "--seed", "--json"},
                         "the GPU's rungs have tiles of their own and no window"));
    }
    require(run_ladder(*options));
  });
}

}  // namespace onepass::cli
