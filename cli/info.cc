// onepass info: version, build, CPU features, GPUs, kernels.
#include <memory>

#include "check/device.h"
#include "command.h"
#include "core/registry.h"
#include "cpu/parallel.h"
#include "report.h"

namespace onepass::cli {
namespace {

std::string cpu_features() {
  const Machine& cpu = this_cpu();
  std::string text;
  const auto add = [&text](bool present, const char* name) {
    if (present) text += (text.empty() ? "" : " ") + std::string(name);
  };
  add(cpu.avx2, "avx2");
  add(cpu.avx512, "avx512");
  add(cpu.avx512bf16, "avx512bf16");
  add(cpu.amx, "amx");
  return text.empty() ? "none beyond the portable build" : text;
}

Status run_info(const Options& options) {
  ONEPASS_RETURN_IF_ERROR(check_backend(options));
  std::string report = format("onepass %s, commit %s\n", onepass_version(), build_commit());
  report += format("build     %s\n", ONEPASS_BUILD);
  report +=
      format("CPU       %s, %d threads: %s\n", cpu_name().c_str(), cpu::default_threads(), cpu_features().c_str());
  bool any_cuda = false;
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  Table table({"kernel", "backend", "pass", "arch", "dtypes", "max head_dim", "here"});
  for (std::int32_t i = 0; i < onepass_kernel_count(); ++i) {
    onepass_kernel_info_t info = ONEPASS_KERNEL_INFO_INIT;
    ONEPASS_RETURN_IF_ERROR(status_of(onepass_kernel_info(i, &info)));
    const std::string backend = info.backend;
    any_cuda = any_cuda || backend == "cuda";
    if (options.backend != "auto" && options.backend != backend) continue;
    table.add({info.name, backend, pass_name(info.pass), info.arch, info.dtypes, std::to_string(info.max_head_dim),
               info.available != 0 ? "yes" : "no"});
    rows.push_back({{"kernel", info.name},
                    {"backend", backend},
                    {"pass", pass_name(info.pass)},
                    {"arch", info.arch},
                    {"dtypes", split(info.dtypes, ' ')},
                    {"max_head_dim", info.max_head_dim},
                    {"available", info.available != 0}});
  }
  report += !any_cuda ? "CUDA      not compiled in\n"
            : check::gpu_name().empty()
                ? "CUDA      compiled in; no GPU here\n"
                : format("GPU       %s, driver for CUDA %s\n", check::gpu_name().c_str(), check::gpu_driver().c_str());
  return print(options, report + "\n" + table.text(), std::move(rows));
}

}  // namespace

void add_info(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("info", "version, build, CPU features, GPUs, every kernel compiled in");
  add_common_options(*command, *options);
  command->callback([options, command] {
    require(check_used(*command, {"--backend", "--json"}, "info computes nothing"));
    require(run_info(*options));
  });
}

}  // namespace onepass::cli
