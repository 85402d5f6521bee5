// onepass run: attention on tensors from files.
#include <memory>

#include "command.h"
#include "operands.h"
#include "report.h"
#include "timing.h"
#include "verify.h"

namespace onepass::cli {
namespace {

/// One pass of a run: what ran, how long, how well.
struct PassResult {
  onepass_pass_t pass;
  nlohmann::ordered_json plan;
  Timing timing;
  std::vector<Verdict> verdicts;
  bool ok = true;
};

Result<PassResult> run_pass(const Attention& attention, onepass_pass_t pass, bool check) {
  PassResult result{.pass = pass, .plan = {}, .timing = {}, .verdicts = {}};
  ONEPASS_ASSIGN(result.plan, attention.explain(pass));
  Runner runner;
  ONEPASS_RETURN_IF_ERROR(runner.prepare(attention, pass));
  // A first call pays for page faults and waking threads; a short one is repeated for half a second at most.
  ONEPASS_ASSIGN(double seconds, runner.seconds(1));
  std::vector<double> samples = {seconds};
  for (double spent = seconds; spent < 0.5 && samples.size() < 21; spent += seconds) {
    ONEPASS_ASSIGN(seconds, runner.seconds(1));
    samples.push_back(seconds);
  }
  if (samples.size() > 1) samples.erase(samples.begin());
  result.timing = summarise(std::move(samples));
  ONEPASS_RETURN_IF_ERROR(runner.fetch());
  if (!check) return result;
  ONEPASS_ASSIGN(result.verdicts, verify(attention, pass));
  for (const Verdict& verdict : result.verdicts) result.ok = result.ok && verdict.ok;
  return result;
}

std::string problem_text(const Attention& a, const nlohmann::ordered_json& plan, const std::string& notes) {
  const auto number = [&](const char* key) { return plan.value(key, std::int64_t{0}); };
  std::string text = format("%s, %lld sequence%s, ", name_of(a.q.type()), static_cast<long long>(number("batch")),
                            number("batch") == 1 ? "" : "s");
  text += format("%s%lld queries x %lld keys, ", a.packed() ? "packed, up to " : "",
                 static_cast<long long>(number("seq_q")), static_cast<long long>(number("seq_k")));
  text += format("%lld heads over %lld, head_dim %lld", static_cast<long long>(number("heads_q")),
                 static_cast<long long>(number("heads_kv")), static_cast<long long>(number("head_dim")));
  if (number("head_dim_v") != number("head_dim")) text += format("/%lld", static_cast<long long>(number("head_dim_v")));
  if (a.causal) text += ", causal";
  if (a.window_left >= 0 || a.window_right >= 0) {
    text += format(", window %lld,%lld", static_cast<long long>(a.window_left), static_cast<long long>(a.window_right));
  }
  if (a.bias) text += ", bias";
  if (a.alibi) text += ", ALiBi";
  if (a.sinks) text += ", sinks";
  return text + (notes.empty() ? "" : "\n          by default: " + notes);
}

std::string pass_text(const PassResult& result) {
  const char* name = result.pass == ONEPASS_BACKWARD ? "backward" : "forward ";
  const double rate = result.plan.value("flops", 0.0) / result.timing.median * 1e-9;
  std::string text =
      format("%s  %s, %lld threads: %s (median of %d), %.4g GFLOP/s\n", name, result.plan.value("kernel", "").c_str(),
             static_cast<long long>(result.plan.value("threads", std::int64_t{0})),
             duration_text(result.timing.median).c_str(), result.timing.reps, rate);
  for (const Verdict& v : result.verdicts) {
    text += format("  check   %-10s error %.3g, allowed %.3g, %.2f x the formula's error: %s\n", v.what.c_str(),
                   v.error, v.bound, v.ratio, v.ok ? "ok" : "FAILED");
  }
  return text;
}

nlohmann::ordered_json row_of(const Attention& a, const PassResult& result) {
  nlohmann::ordered_json row;
  row["kernel"] = result.plan.value("kernel", "");
  row["backend"] = result.plan.value("backend", "");
  row["pass"] = pass_name(result.pass);
  row["dtype"] = name_of(a.q.type());
  for (const char* key : {"batch", "seq_q", "seq_k", "heads_q", "heads_kv", "head_dim", "head_dim_v"}) {
    row[key] = result.plan.value(key, std::int64_t{0});
  }
  row["causal"] = a.causal;
  row["window"] = {a.window_left, a.window_right};
  row["ms_median"] = result.timing.median * 1e3;
  row["ms_min"] = result.timing.least * 1e3;
  row["ms_max"] = result.timing.most * 1e3;
  row["reps"] = result.timing.reps;
  row["tflops"] = result.plan.value("flops", 0.0) / result.timing.median * 1e-12;
  row["gbps"] = result.plan.value("bytes", 0.0) / result.timing.median * 1e-9;
  if (result.verdicts.empty()) return row;
  double worst = 0;
  nlohmann::ordered_json checks = nlohmann::ordered_json::array();
  for (const Verdict& v : result.verdicts) {
    worst = std::max(worst, v.ratio);
    checks.push_back(
        {{"tensor", v.what}, {"max_abs_err", v.error}, {"bound", v.bound}, {"ratio", v.ratio}, {"ok", v.ok}});
  }
  row["worst_ratio"] = worst;
  row["failed"] = !result.ok;
  row["checks"] = std::move(checks);
  return row;
}

Status run_run(const RunOptions& options) {
  ONEPASS_RETURN_IF_ERROR(check_backend(options));
  ONEPASS_RETURN_IF_ERROR(check_kernel_pass(options, true, options.backward));
  if (options.file.empty() &&
      !(options.q.ends_with(".npy") && options.k.ends_with(".npy") && options.v.ends_with(".npy"))) {
    return usage_error("run needs a .safetensors FILE, or --q, --k and --v with .npy files: got neither");
  }
  if (!options.grad_out.empty() && !options.backward)
    return usage_error("--grad-out is for the gradients; nearest: --backward --grad-out %s",
                       printable(options.grad_out, 60).c_str());
  ONEPASS_RETURN_IF_ERROR(check_output(options.out));
  Operands operands;
  ONEPASS_RETURN_IF_ERROR(load_operands(options, operands));
  const Attention& attention = operands.attention;

  std::vector<PassResult> results;
  ONEPASS_ASSIGN(PassResult forward, run_pass(attention, ONEPASS_FORWARD, options.check));
  std::string report = "problem   " + problem_text(attention, forward.plan, operands.notes) + "\n" + pass_text(forward);
  results.push_back(std::move(forward));
  if (options.backward) {
    ONEPASS_ASSIGN(PassResult backward, run_pass(attention, ONEPASS_BACKWARD, options.check));
    report += pass_text(backward);
    results.push_back(std::move(backward));
  }
  bool ok = true;
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const PassResult& result : results) {
    ok = ok && result.ok;
    rows.push_back(row_of(attention, result));
  }
  if (!options.out.empty() && ok) {
    report += "wrote     ";
    ONEPASS_RETURN_IF_ERROR(write_outputs(operands, results[0].plan.value("kernel", ""), options.out, report));
    report += "\n";
  } else if (!options.out.empty()) {
    report += "wrote     nothing: the results failed their check\n";
  }
  ONEPASS_RETURN_IF_ERROR(print(options, report, std::move(rows)));
  if (!ok) throw CheckFailure();
  return {};
}

}  // namespace

void add_run(CLI::App& app) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand("run", "attention on tensors from a .safetensors file or .npy files");
  command->add_option("FILE", options->file,
                      ".safetensors; its tensors q, k, v, and cu_seqlens_q, cu_seqlens_k,\n"
                      "q_length, k_start, k_length, q_position, grad_out where it has them");
  command->add_option("--q", options->q, "queries (default: q)")->type_name("NAME|FILE.npy");
  command->add_option("--k", options->k, "keys (default: k)")->type_name("NAME|FILE.npy");
  command->add_option("--v", options->v, "values (default: v)")->type_name("NAME|FILE.npy");
  add_name(*command, "-o,--out", options->out,
           "out, lse and gradients to a .safetensors file, or to OUT.npy, OUT.lse.npy, ...")
      ->type_name("OUT");
  command
      ->add_option("--layout", options->layout,
                   "of the tensors: bshd (default) or bhsd; without b where they have 3 dimensions")
      ->check(CLI::IsMember({"bshd", "bhsd"}));
  command->add_flag("--check", options->check, "compare with the float64 reference; exit code 1 beyond the tolerance");
  add_common_options(*command, *options);
  command->callback([options] { require(run_run(*options)); });
}

}  // namespace onepass::cli
