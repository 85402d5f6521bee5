// The tables of `onepass ladder` that are not the ladder itself: block sizes, the choice of Br, the order of the loops.
#include <algorithm>

#include "ladder.h"

namespace onepass::cli {
namespace {

const ladder::Rung& rung_named(std::string_view name) {
  return *std::find_if(ladder::rungs().begin(), ladder::rungs().end(),
                       [name](const ladder::Rung& rung) { return rung.name == name; });
}

std::string share_of_memory(std::int64_t elements, const ladder::Problem& p) {
  return format("%.3f M", static_cast<double>(elements) / static_cast<double>(p.M));
}

}  // namespace

Status ladder_block_rows(ladder::Problem p, LadderReport& report) {
  Table table({"Br", "", "v1 bytes", "v2 bytes", "tiles", "S", "all held"});
  if (p.N == 0) return usage_error("--sweep block-rows needs rows: got --seq 0; nearest: --seq 512");
  const ladder::Rung &v1 = rung_named("flash_v1"), &v2 = rung_named("flash_v2");
  const ladder::Arrays inputs = make_arrays(p, 0);
  for (const auto& [text, rows] :
       {std::pair{"d/4", p.d / 4}, {"d/2", p.d / 2}, {"d", p.d}, {"2d", 2 * p.d}, {"4d", 4 * p.d}}) {
    if (rows < 1 || rows > p.N) continue;
    p.Br = rows;
    ladder::Ledger first, second;
    ladder::Arrays x = inputs;
    prepare(v1, p, x);
    v1.run(p, x, &first);
    v2.run(p, x, &second);
    const std::int64_t scores = rows * blocks_of(p).Bc, size = dtype_size(p.dtype);
    table.add({std::to_string(rows), text, with_commas(first.moved().bytes(p.dtype)),
               with_commas(second.moved().bytes(p.dtype)), share_of_memory(first.tiles_peak, p),
               share_of_memory(scores, p), share_of_memory(first.held_peak, p)});
    report.json.push_back({{"seq", p.N},
                           {"head_dim", p.d},
                           {"fast_memory", p.M * size},
                           {"Br", rows},
                           {"Bc", blocks_of(p).Bc},
                           {"v1_bytes", first.moved().bytes(p.dtype)},
                           {"v2_bytes", second.moved().bytes(p.dtype)},
                           {"tiles", first.tiles_peak * size},
                           {"scores", scores * size},
                           {"peak_fast", first.held_peak * size}});
  }
  report.text =
      table.text() +
      "\nv1's traffic does not depend on Br, while S grows with it: beyond Br = d it passes the M / 4 of a tile.\n"
      "v2 reads K and V once for each block of rows: more rows are what it wants.\n";
  return {};
}

LadderReport ladder_trace(const std::vector<LadderCell>& cells, std::uint64_t seed) {
  LadderReport report;
  Table table({"step", "rung", "", "tensor", "rows"});
  for (const LadderCell& cell : cells) {
    ladder::Arrays x = make_arrays(cell.problem, seed);
    prepare(*cell.rung, cell.problem, x);
    std::vector<ladder::Touch> touches;
    ladder::Ledger ledger;
    ledger.touches = &touches;
    cell.rung->run(cell.problem, x, &ledger);
    for (std::size_t n = 0; n < touches.size(); ++n) {
      const ladder::Touch& t = touches[n];
      const char* tensor = ladder::kArrayNames[static_cast<std::size_t>(t.array)];
      table.add({std::to_string(n), cell.rung->name, t.write ? "write" : "read", tensor,
                 format("%lld ... %lld", static_cast<long long>(t.row), static_cast<long long>(t.row + t.rows - 1))});
      report.json.push_back({{"rung", cell.rung->name},
                             {"step", n},
                             {"tensor", tensor},
                             {"write", t.write},
                             {"row", t.row},
                             {"rows", t.rows}});
    }
  }
  report.text = table.text();
  return report;
}

LadderReport ladder_blocks(const LadderOptions& options, DType dtype, std::int64_t seq) {
  struct Device {
    std::int64_t memory, processors;
  };
  std::vector<Device> devices = {{192 * 1024, 108}, {228 * 1024, 132}};
  if (!options.fast_memory.empty()) {
    devices.clear();
    const std::vector<std::int64_t> counts =
        options.processors.empty() ? std::vector<std::int64_t>{1} : options.processors;
    for (const std::int64_t memory : options.fast_memory) {
      for (const std::int64_t n : counts) devices.push_back({memory, n});
    }
  }
  LadderReport report;
  Table table({"fast memory", "processors", "all of it", "d", "tiles", "Br", "Bc", "Tr", "Tc", "tiles of S", "held",
               "Q blocks each"});
  const std::int64_t size = dtype_size(dtype);
  for (const Device& device : devices) {
    for (const std::int64_t d : options.head_dim.empty() ? std::vector<std::int64_t>{64, 128} : options.head_dim) {
      for (const bool honest : {false, true}) {
        const std::int64_t M = device.memory / size;
        const ladder::Blocks b = honest ? ladder::honest_blocks(M, d, seq) : ladder::paper_blocks(M, d, seq);
        const std::int64_t Tr = b.Tr(seq), Tc = b.Tc(seq);
        const std::int64_t held = 2 * b.Br * d + 2 * b.Bc * d + b.Br * b.Bc + 2 * b.Br;
        const double each = static_cast<double>(Tr) / static_cast<double>(device.processors);
        table.add({bytes_text(static_cast<double>(device.memory)), std::to_string(device.processors),
                   bytes_text(static_cast<double>(device.memory * device.processors)), std::to_string(d),
                   honest ? "fit" : "paper", std::to_string(b.Br), std::to_string(b.Bc), std::to_string(Tr),
                   std::to_string(Tc), with_commas(Tr * Tc),
                   format("%.2f M", static_cast<double>(held * size) / static_cast<double>(device.memory)),
                   format("%.2f", each)});
        report.json.push_back({{"fast_memory", device.memory},
                               {"processors", device.processors},
                               {"dtype", dtype_name(dtype)},
                               {"seq", seq},
                               {"head_dim", d},
                               {"tiles", honest ? "fit" : "paper"},
                               {"Br", b.Br},
                               {"Bc", b.Bc},
                               {"Tr", Tr},
                               {"Tc", Tc},
                               {"held", held * size}});
      }
    }
  }
  report.text =
      format("N %lld, %s, one head\n\n", static_cast<long long>(seq), dtype_name(dtype)) + table.text() +
      "\npaper: Bc = ceil(M / 4d), Br = min(Bc, d). fit: the largest Bc with 2 Br d + 2 Bc d + Br Bc + 2 Br <= M.\n"
      "held: that sum. A block of Q is a thread block of v2; with fewer of them than processors some idle.\n";
  return report;
}

}  // namespace onepass::cli
