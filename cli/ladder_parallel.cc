// onepass ladder --parallel: how the work is spread over processors, warps and units.
#include "ladder.h"
#include "ladder/parallel.h"

namespace onepass::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string percent(double share) {
  return format("%.1f %%", 100 * share);
}

/// A schedule of more blocks than this is not listed block by block.
constexpr std::int64_t kMostListed = 600;

std::string grid_tables(Json& json) {
  Table table({"batch x heads", "seq", "mask", "blocks are", "order", "blocks", "waves", "idle SMs", "idle share",
               "tail", "time"});
  const auto add = [&](const ladder::Grid& grid, ladder::BlockOf block, ladder::Order order) {
    const ladder::GridRun run = run_grid(grid, block, order);
    const char* of = block == ladder::BlockOf::head ? "heads (v1)" : "query blocks (v2)";
    const char* how = order == ladder::Order::plain ? "plain" : "longest first";
    table.add({format("%lld x %lld", static_cast<long long>(grid.batch), static_cast<long long>(grid.heads)),
               std::to_string(grid.N), grid.causal ? "causal" : "", of, how, std::to_string(run.blocks),
               std::to_string(run.waves), std::to_string(run.idle_sms), percent(run.idle_share),
               std::to_string(run.tail), std::to_string(run.makespan)});
    Json row = {{"batch", grid.batch},
                {"heads", grid.heads},
                {"seq", grid.N},
                {"causal", grid.causal},
                {"block_of", block == ladder::BlockOf::head ? "head" : "query_block"},
                {"order", how},
                {"sms", grid.SMs},
                {"Br", grid.Br},
                {"Bc", grid.Bc},
                {"blocks", run.blocks},
                {"waves", run.waves},
                {"idle_sms", run.idle_sms},
                {"idle_share", run.idle_share},
                {"tail", run.tail},
                {"makespan", run.makespan}};
    Json placed = Json::array();
    for (const ladder::PlacedBlock& b : run.placed) {
      if (run.blocks <= kMostListed) placed.push_back({b.sm, b.start, b.end});
    }
    row["placed"] = std::move(placed);  // [SM, start, end]
    json.push_back(std::move(row));
  };
  ladder::Grid grid;
  for (const auto& [batch, heads, seq] :
       {std::array<std::int64_t, 3>{32, 16, 512}, {2, 16, 8192}, {1, 8, 8192}, {1, 4, 1024}}) {
    grid.batch = batch;
    grid.heads = heads;
    grid.N = seq;
    add(grid, ladder::BlockOf::head, ladder::Order::plain);
    add(grid, ladder::BlockOf::query_block, ladder::Order::plain);
  }
  grid = {.batch = 1, .heads = 8, .N = 8192, .causal = true};
  add(grid, ladder::BlockOf::query_block, ladder::Order::plain);
  add(grid, ladder::BlockOf::query_block, ladder::Order::longest_first);
  return format("Grid: %lld SMs, a block each at a time; blocks of %lld x %lld, time in tiles of scores\n\n",
                static_cast<long long>(grid.SMs), static_cast<long long>(grid.Br), static_cast<long long>(grid.Bc)) +
         table.text();
}

std::string rule_text(Json& json) {
  const ladder::RuleOfThumb rule = ladder::rule_of_thumb();
  json = {{"blocks", rule.blocks},
          {"busy", rule.busy},
          {"worst_blocks", rule.worst_blocks},
          {"worst_busy", rule.worst_busy},
          {"safe_from", rule.safe_from}};
  return format(
      "\nRule of thumb, \"%lld blocks or more\": with %lld the SMs are busy %s of the time; %lld blocks are worse, "
      "%s;\n"
      "from %lld on it is never below.\n",
      static_cast<long long>(rule.blocks), static_cast<long long>(rule.blocks), percent(rule.busy).c_str(),
      static_cast<long long>(rule.worst_blocks), percent(rule.worst_busy).c_str(),
      static_cast<long long>(rule.safe_from));
}

std::string flops_table(const ladder::Problem& problem, Json& json) {
  Table table({"rung", "matmul FLOPs", "other FLOPs", "exps", "weighted", "not products"});
  for (const ladder::WeighedFlops& w : ladder::weigh_rungs(problem)) {
    table.add({w.rung, with_commas(w.matmul_flops), with_commas(w.other_flops), with_commas(w.exps),
               format("%.4g", w.weighted), percent(w.other_share)});
    json.push_back({{"rung", w.rung},
                    {"matmul_flops", w.matmul_flops},
                    {"other_flops", w.other_flops},
                    {"exps", w.exps},
                    {"weighted", w.weighted},
                    {"other_share", w.other_share}});
  }
  const ladder::Blocks b = blocks_of(problem);
  return format("\nFLOPs, those outside products weighted %.0f : 1 (N %lld, d %lld, Br %lld, Bc %lld)\n\n",
                ladder::kOtherWeight, static_cast<long long>(problem.N), static_cast<long long>(problem.d),
                static_cast<long long>(b.Br), static_cast<long long>(b.Bc)) +
         table.text();
}

Status warps_table(const ladder::Problem& problem, Json& json, std::string& text) {
  Table table({"warps share", "warps", "shared read", "written", "barriers", "bytes", "by formula"});
  const ladder::Blocks blocks{64, 64};
  for (const ladder::WarpRung& rung : ladder::warp_rungs()) {
    for (const std::int64_t warps : {4, 8}) {
      const ladder::WarpBlock block{warps, blocks};
      const std::string why = refusal(problem, block);
      if (!why.empty()) return usage_error("%s", why.c_str());
      ladder::Arrays x = make_arrays(problem, 1);
      prepare_warps(rung, problem, x);
      ladder::WarpCount count;
      rung.run(problem, block, x, count, 0);
      const ladder::WarpCount formula = rung.formula(problem, block);
      table.add({rung.name, std::to_string(warps), with_commas(count.read()), with_commas(count.written()),
                 with_commas(count.barriers), with_commas(count.bytes()), with_commas(formula.bytes())});
      json.push_back({{"rung", rung.name},
                      {"warps", warps},
                      {"read", count.read()},
                      {"written", count.written()},
                      {"barriers", count.barriers},
                      {"bytes", count.bytes()},
                      {"bytes_formula", formula.bytes()},
                      {"barriers_formula", formula.barriers}});
    }
  }
  text = format("\nWarps of a block: elements through shared memory (N %lld, d %lld, Br %lld, Bc %lld)\n\n",
                static_cast<long long>(problem.N), static_cast<long long>(problem.d), static_cast<long long>(blocks.Br),
                static_cast<long long>(blocks.Bc)) +
         table.text();
  return {};
}

std::string overlap_table(Json& json) {
  constexpr std::int64_t kRows = 64, kBc = 128, kTiles = 6;
  Table table({"overlap", "d", "clocks", "by formula", "tensor cores busy", "exponential units busy"});
  for (const std::int64_t d : {64, 128}) {
    const ladder::TileCosts costs = ladder::hopper_costs(kRows, kBc, d);
    for (const ladder::OverlapRung& rung : ladder::overlap_rungs()) {
      const ladder::Timeline line = rung.run(kTiles, costs);
      const double formula = rung.makespan(kTiles, costs);
      table.add({rung.name, std::to_string(d), format("%.0f", line.makespan), format("%.0f", formula),
                 percent(line.tensor_share), percent(line.exponential_share)});
      Json events = Json::array();
      for (const ladder::Event& e : line.events) {
        events.push_back({{"unit", ladder::kUnitNames[static_cast<int>(e.unit)]},
                          {"step", ladder::kStepNames[static_cast<int>(e.step)]},
                          {"group", e.group},
                          {"tile", e.tile},
                          {"start", e.start},
                          {"end", e.end}});
      }
      json.push_back({{"overlap", rung.name},
                      {"title", rung.title},
                      {"head_dim", d},
                      {"rows", kRows},
                      {"Bc", kBc},
                      {"tiles", kTiles},
                      {"makespan", line.makespan},
                      {"formula", formula},
                      {"tensor_share", line.tensor_share},
                      {"exponential_share", line.exponential_share},
                      {"events", std::move(events)}});
    }
  }
  return format("\nOverlaps on an H100's SM: %lld rows a warp group, %lld keys a tile, %lld tiles\n\n",
                static_cast<long long>(kRows), static_cast<long long>(kBc), static_cast<long long>(kTiles)) +
         table.text();
}

}  // namespace

Status ladder_parallel(const ladder::Problem& problem, LadderReport& report) {
  report.json = Json::object();
  for (const char* key : {"grid", "flops", "warps", "overlaps"}) report.json[key] = Json::array();
  report.text = grid_tables(report.json["grid"]) + rule_text(report.json["rule_of_thumb"]) +
                flops_table(problem, report.json["flops"]);
  std::string warps;
  ONEPASS_RETURN_IF_ERROR(warps_table(problem, report.json["warps"], warps));
  report.text += warps + overlap_table(report.json["overlaps"]);
  return {};
}

}  // namespace onepass::cli
