// onepass check: random and adversarial cases on every kernel of this machine, against the float64 reference.
#include <algorithm>
#include <memory>
#include <string_view>

#include "check/sweep.h"
#include "command.h"
#include "cpu/parallel.h"
#include "report.h"

namespace onepass::cli {
namespace {

struct CheckOptions : Options {
  int cases = 200;
  std::vector<onepass_pass_t> passes = {ONEPASS_FORWARD, ONEPASS_DECODE, ONEPASS_BACKWARD};
};

Pass core_pass(onepass_pass_t pass) {
  return pass == ONEPASS_BACKWARD ? Pass::backward : pass == ONEPASS_DECODE ? Pass::decode : Pass::forward;
}
const char* name_of_pass(Pass pass) {
  return pass == Pass::backward ? "bwd" : pass == Pass::decode ? "decode" : "fwd";
}

Result<unsigned> dtype_bits(const Options& options) {
  if (options.dtypes.empty()) return kF32 | kF16 | kBf16;
  unsigned bits = 0;
  for (const ElementType type : options.dtypes) {
    if (type == ElementType::f64)
      return unsupported("check has no float64 cases, that is the reference's type; nearest: --dtype f32");
    bits |= type == ElementType::f32 ? kF32 : type == ElementType::f16 ? kF16 : kBf16;
  }
  return bits;
}

/// The kernels asked for, or all that this machine runs but the reference itself.
Result<std::vector<const Kernel*>> choose_kernels(const Options& options, Pass pass, Backend backend) {
  std::vector<const Kernel*> chosen;
  const bool wanted = options.backend == "auto" || (options.backend == "cuda") == (backend == Backend::cuda);
  for (const Kernel* kernel : check::runnable_kernels(pass, backend)) {
    const bool named = std::find(options.kernels.begin(), options.kernels.end(), kernel->name) != options.kernels.end();
    if (named || (options.kernels.empty() && wanted && std::string_view(kernel->arch) != "oracle"))
      chosen.push_back(kernel);
  }
  return chosen;
}

/// A kernel must exist and run here; the library's own words where it does not.
Status check_kernels(const Options& options) {
  for (const std::string& name : options.kernels) {
    const Kernel* kernel = find_kernel(name);
    if (kernel == nullptr) {
      std::vector<std::string> names;
      for (const Kernel& other : kernels()) names.emplace_back(other.name);
      const std::string near = nearest(name, names);
      return usage_error("--kernel: there is none named '%s'; nearest: %s", printable(name, 64).c_str(),
                         near.empty() ? "`onepass info` lists them" : near.c_str());
    }
    if (!can_run_here(*kernel)) {
      return unsupported("kernel %s needs %s, which this machine lacks; nearest: leave --kernel out", kernel->name,
                         kernel->arch);
    }
  }
  return {};
}

void merge(std::vector<check::Tally>& all, check::Tally tally) {
  for (check::Tally& other : all) {
    if (other.kernel != tally.kernel || other.dtype != tally.dtype) continue;
    other.cases += tally.cases;
    other.failed += tally.failed;
    if (tally.worst_ratio >= other.worst_ratio) {
      other.worst_ratio = tally.worst_ratio;
      other.worst_case = std::move(tally.worst_case);
    }
    other.worst_bound_ratio = std::max(other.worst_bound_ratio, tally.worst_bound_ratio);
    other.failures.insert(other.failures.end(), tally.failures.begin(), tally.failures.end());
    return;
  }
  all.push_back(std::move(tally));
}

Status run_check(const CheckOptions& options) {
  ONEPASS_RETURN_IF_ERROR(check_backend(options));
  ONEPASS_RETURN_IF_ERROR(check_kernels(options));
  ONEPASS_ASSIGN(const unsigned dtypes, dtype_bits(options));

  std::vector<check::Tally> tallies;
  for (const onepass_pass_t pass : options.passes) {
    for (const Backend backend : {Backend::cpu, Backend::cuda}) {
      ONEPASS_ASSIGN(const std::vector<const Kernel*> kernels, choose_kernels(options, core_pass(pass), backend));
      if (kernels.empty()) continue;
      const int threads = options.threads > 0 ? options.threads : std::max(2, cpu::default_threads());
      check::Sweep sweep;
      sweep.limits.pass = core_pass(pass);
      sweep.limits.dtypes = dtypes;
      sweep.limits.cuda = backend == Backend::cuda;
      sweep.limits.deterministic = options.deterministic;
      if (sweep.limits.cuda && kernels.size() == 1) sweep.limits.row = kernels[0];
      sweep.first_seed = options.seed;
      sweep.cases = options.cases;
      sweep.threads = threads == 1 || backend == Backend::cuda ? std::vector<int>{1} : std::vector<int>{1, threads};
      if (backend == Backend::cuda) sweep.forwards = check::runnable_kernels(Pass::forward, backend);
      Progress progress(pass_name(pass), static_cast<std::size_t>(options.cases));
      sweep.progress = [&](int done) { progress.set(static_cast<std::size_t>(done)); };
      for (check::Tally& tally : check::run_sweep(kernels, sweep)) merge(tallies, std::move(tally));
    }
  }
  if (tallies.empty())
    return usage_error("no kernel is left for these passes and dtypes; nearest: leave --kernel and --dtype out");
  std::stable_sort(tallies.begin(), tallies.end(),
                   [](const check::Tally& a, const check::Tally& b) { return a.kernel < b.kernel; });

  Table table({"kernel", "pass", "dtype", "cases", "failed", "worst ratio", "of the bound"});
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  std::string failures;
  int failed = 0, cases = 0;
  for (const check::Tally& tally : tallies) {
    const char* pass = name_of_pass(tally.kernel->pass);
    table.add({tally.kernel->name, pass, dtype_name(tally.dtype), std::to_string(tally.cases),
               std::to_string(tally.failed), format("%.3f", tally.worst_ratio),
               format("%.0f %%", 100 * tally.worst_bound_ratio)});
    rows.push_back({{"kernel", tally.kernel->name},
                    {"backend", tally.kernel->backend == Backend::cpu ? "cpu" : "cuda"},
                    {"pass", pass},
                    {"dtype", dtype_name(tally.dtype)},
                    {"cases", tally.cases},
                    {"worst_ratio", tally.worst_ratio},
                    {"worst_case", tally.worst_case},
                    {"failed", tally.failed}});
    failed += tally.failed;
    cases += tally.cases;
    for (const std::string& failure : tally.failures) failures += failure + "\n";
  }
  std::string report = table.text();
  report +=
      "\nworst ratio: error against float64 over the same formula's error in float32, rounded to the type;\n"
      "of the bound: error over 2 x the formula's + 1 ulp of the largest value\n";
  if (!failures.empty()) report += "\n" + failures;
  report += format("%d cases, seeds from %llu: %s\n", cases, static_cast<unsigned long long>(options.seed),
                   failed == 0 ? "all within the bound" : format("%d FAILED", failed).c_str());
  ONEPASS_RETURN_IF_ERROR(print(options, report, std::move(rows)));
  if (failed != 0) throw CheckFailure();
  return {};
}

}  // namespace

void add_check(CLI::App& app) {
  auto options = std::make_shared<CheckOptions>();
  CLI::App* command = app.add_subcommand("check", "random and adversarial cases against the float64 reference");
  add_common_options(*command, *options);
  add_integer(*command, "--cases", options->cases, 1, 1000000000, "drawn for each pass (default 200)");
  command
      ->add_option_function<std::string>(
          "--pass",
          [options](const std::string& text) {
            options->passes.clear();
            for (const std::string& pass : split(text, ',')) options->passes.push_back(parse_pass(pass));
          },
          "fwd, bwd or decode (default: all)")
      ->type_name("PASS[,PASS...]");
  command->callback([options, command] {
    require(check_used(
        *command,
        {"--backend", "--kernel", "--dtype", "--deterministic", "--threads", "--seed", "--json", "--cases", "--pass"},
        "check draws sizes, masks and modifiers of its own, `onepass run --check` takes yours"));
    require(run_check(*options));
  });
}

}  // namespace onepass::cli
