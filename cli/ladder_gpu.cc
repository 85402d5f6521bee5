// onepass ladder --backend cuda: the rungs of src/cuda/ladder.
#include "command.h"
#include "ladder.h"

#if defined(ONEPASS_CUDA)
#include "core/registry.h"
#include "cuda/ladder/measure.h"
#endif

namespace onepass::cli {

#if defined(ONEPASS_CUDA)
namespace {

namespace gpu = cuda::ladder;

constexpr std::int64_t kMostRows = 16384, kMostHeads = 65536;

struct GpuCell {
  const gpu::Rung* rung;
  gpu::Shape shape;
  double seconds = 0, error = NAN;
  bool checked = false;

  std::int64_t bytes() const { return shape.heads * rung->counts(shape).bytes(); }
  /// By the papers' convention: a causal mask counts half.
  double tflops() const {
    const double products = rung->backward ? 5 : 2, pairs = static_cast<double>(shape.N) * static_cast<double>(shape.N);
    const double flops = 2 * products * pairs * static_cast<double>(shape.heads * shape.d) / (shape.causal ? 2 : 1);
    return seconds > 0 ? 1e-12 * flops / seconds : 0;
  }
};

Result<std::vector<gpu::Shape>> shapes_of(const LadderOptions& o) {
  ONEPASS_RETURN_IF_ERROR(check_range(o.seq, "--seq", 1, kMostRows));
  ONEPASS_RETURN_IF_ERROR(check_range(o.heads, "--heads", 1, kMostHeads));
  for (const std::int64_t d : o.head_dim) {
    if (d != 64 && d != 128) {
      return usage_error("--head-dim must be 64 or 128 on the GPU: got %lld; nearest: --head-dim %d",
                         static_cast<long long>(d), d < 96 ? 64 : 128);
    }
  }
  if (o.dtypes.size() > 1 || (o.dtypes.size() == 1 && o.dtypes[0] != ElementType::bf16))
    return usage_error("--dtype must be bf16 on the GPU; nearest: --dtype bf16");
  const auto list = [](const std::vector<std::int64_t>& given, std::int64_t otherwise) {
    return given.empty() ? std::vector{otherwise} : given;
  };
  std::vector<gpu::Shape> shapes;
  for (const std::int64_t d : list(o.head_dim, 64)) {
    for (const std::int64_t N : list(o.seq, 1024)) {
      for (const std::int64_t heads : list(o.heads, 16)) shapes.push_back({heads, N, d, o.causal});
    }
  }
  return shapes;
}

nlohmann::ordered_json row_of(const GpuCell& cell) {
  const gpu::Grid grid = cell.rung->grid(cell.shape);
  nlohmann::ordered_json row;
  row["rung"] = cell.rung->name;
  row["backend"] = "cuda";
  row["pass"] = cell.rung->backward ? "bwd" : "fwd";
  row["seq"] = cell.shape.N;
  row["head_dim"] = cell.shape.d;
  row["fast_memory"] = 2 * gpu::one_head(cell.shape).M;
  row["bytes_formula"] = cell.bytes();
  row["bytes_counted"] = nullptr;  // a profiler's business: bench/ladder_gpu.py
  row["peak_fast"] = grid.shared_bytes;
  row["matmul_flops"] = cell.shape.heads * cell.rung->counts(cell.shape).matmul_flops;
  row["other_flops"] = nullptr;
  row["exps"] = nullptr;
  row["seconds"] = cell.seconds;
  row["max_abs_err"] = std::isfinite(cell.error) ? nlohmann::ordered_json(cell.error) : nlohmann::ordered_json();
  row["heads"] = cell.shape.heads;
  row["causal"] = cell.shape.causal;
  row["tflops"] = cell.tflops();
  row["kernels"] = cell.rung->kernels;
  row["blocks"] = grid.blocks;
  const bool modelled = cell.rung->shared_traffic != nullptr && !cell.shape.causal;
  row["shared_formula"] = modelled ? nlohmann::ordered_json(cell.shape.heads * cell.rung->shared_traffic(cell.shape))
                                   : nlohmann::ordered_json();
  return row;
}

/// Of one shape's cells.
std::string table_of(const std::vector<GpuCell>& cells) {
  const gpu::Shape& shape = cells[0].shape;
  Table table({"", "rung", "pass", "error", "time", "TFLOP/s", "bytes by formula", "share", "GB/s", "thread blocks",
               "shared memory"});
  int number = 0;
  for (const GpuCell& cell : cells) {
    const double whole = static_cast<double>(shape.heads * gpu::rungs()[0].counts(shape).bytes());
    const double bytes = static_cast<double>(cell.bytes());
    const gpu::Grid grid = cell.rung->grid(shape);
    const std::string error = !cell.checked ? "-" : std::isfinite(cell.error) ? format("%.1e", cell.error) : "NaN";
    table.add({std::to_string(++number), cell.rung->name, cell.rung->backward ? "bwd" : "fwd", error,
               duration_text(cell.seconds), format("%.1f", cell.tflops()), with_commas(cell.bytes()),
               cell.rung->backward ? "-" : format("%.3f", bytes / whole), format("%.0f", 1e-9 * bytes / cell.seconds),
               with_commas(grid.blocks), bytes_text(static_cast<double>(grid.shared_bytes))});
  }
  return format("%lld heads, N %lld, d %lld, bf16%s; Br %d, Bc %d, %d warps\n\n", static_cast<long long>(shape.heads),
                static_cast<long long>(shape.N), static_cast<long long>(shape.d), shape.causal ? ", causal" : "",
                gpu::kBr, gpu::kBc, gpu::kWarps) +
         table.text() + "\n";
}

Status measure_shape(const LadderOptions& options, std::vector<GpuCell>& cells) {
  bool squares = false;
  for (const GpuCell& cell : cells) squares = squares || cell.rung->squares;
  std::unique_ptr<gpu::Bench> bench;
  ONEPASS_RETURN_IF_ERROR(
      gpu::Bench::make(cells[0].shape, squares, !options.no_check, options.thread_count(), options.seed, &bench));
  for (GpuCell& cell : cells) {
    ONEPASS_RETURN_IF_ERROR(bench->run(*cell.rung));
    cell.checked = !options.no_check;
    if (cell.checked) ONEPASS_RETURN_IF_ERROR(bench->error(*cell.rung, &cell.error));
    ONEPASS_RETURN_IF_ERROR(bench->time(*cell.rung, &cell.seconds));
  }
  return {};
}

}  // namespace

Status ladder_on_gpu(const LadderOptions& options) {
  std::vector<std::string> names;
  std::vector<bool> backward;
  for (const gpu::Rung& rung : gpu::rungs()) {
    names.emplace_back(rung.name);
    backward.push_back(rung.backward);
  }
  ONEPASS_ASSIGN(const std::vector<std::size_t> chosen, chosen_rungs(options, names, backward));
  ONEPASS_ASSIGN(const std::vector<gpu::Shape> shapes, shapes_of(options));
  Machine machine;
  if (!this_gpu(0, &machine).ok() || machine.compute_capability < 80)
    return unsupported("--backend cuda: there is no GPU of compute capability 8.0 or more; nearest: --backend cpu");
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  std::string report, wrong;
  Progress progress("ladder", shapes.size());
  for (std::size_t n = 0; n < shapes.size(); ++n) {
    std::vector<GpuCell> cells;
    for (const std::size_t rung : chosen) cells.push_back({&gpu::rungs()[rung], shapes[n]});
    ONEPASS_RETURN_IF_ERROR(measure_shape(options, cells));
    for (const GpuCell& cell : cells) {
      rows.push_back(row_of(cell));
      if (cell.checked && !std::isfinite(cell.error))
        wrong += std::string("WRONG: ") + cell.rung->name + " gives NaN or infinity\n";
    }
    report += table_of(cells);
    progress.set(n + 1);
  }
  report +=
      "error: largest, against float64, of O or of dQ, dK and dV. bytes: between global memory and the "
      "multiprocessors; "
      "share:\nof rung standard's. GB/s: those bytes by the time. shared memory: of a thread block.\n\n";
  Table titles({"", "rung", "what it is", "elements moved by a head", "file"});
  for (std::size_t n = 0; n < chosen.size(); ++n) {
    const gpu::Rung& rung = gpu::rungs()[chosen[n]];
    titles.add({std::to_string(n + 1), rung.name, rung.title, rung.formula, rung.file});
  }
  ONEPASS_RETURN_IF_ERROR(print(options, report + titles.text() + wrong, std::move(rows)));
  if (!wrong.empty()) throw CheckFailure();
  return {};
}

#else
Status ladder_on_gpu(const LadderOptions&) {
  return unsupported("--backend cuda: this build computes on the CPU only; nearest: --backend cpu");
}
#endif

}  // namespace onepass::cli
