// Options that contradict each other, the build, or the command they are given to.
#include <algorithm>

#include "options.h"

namespace onepass::cli {
namespace {

/// Those of options.kernels that this build has, in their order. Others are refused where they are asked for.
std::vector<onepass_kernel_info_t> known_kernels(const Options& options) {
  std::vector<onepass_kernel_info_t> known;
  for (const std::string& kernel : options.kernels) {
    for (std::int32_t i = 0; i < onepass_kernel_count(); ++i) {
      onepass_kernel_info_t info = ONEPASS_KERNEL_INFO_INIT;
      if (onepass_kernel_info(i, &info) == ONEPASS_OK && kernel == info.name) known.push_back(info);
    }
  }
  return known;
}

}  // namespace

Status check_used(const CLI::App& command, std::initializer_list<const char*> used, const char* why) {
  for (const CLI::Option* option : command.get_options()) {
    if (option->count() == 0) continue;
    const std::string name = option->get_name();
    if (std::find(used.begin(), used.end(), name) == used.end())
      return usage_error("%s: %s; nearest: leave it out", name.c_str(), why);
  }
  return {};
}

Status check_backward(const Options& options, const std::vector<onepass_pass_t>& passes) {
  if (!options.grad_out.empty()) return usage_error("--grad-out is for run; nearest: leave it out");
  if (!options.backward || passes.empty()) return {};
  if (std::find(passes.begin(), passes.end(), ONEPASS_BACKWARD) != passes.end()) return {};
  return usage_error("--backward contradicts --pass %s; nearest: --pass bwd", pass_name(passes[0]));
}

Status check_kernel_pass(const Options& options, bool forward, bool backward) {
  for (const onepass_kernel_info_t& info : known_kernels(options)) {
    const bool of_backward = info.pass == ONEPASS_BACKWARD;
    if (of_backward ? backward : forward) continue;
    return usage_error("--kernel %s is of the %s, which this command does not run; nearest: %s", info.name,
                       of_backward ? "backward" : "forward", of_backward ? "add --backward" : "leave it out");
  }
  return {};
}

Status check_backend(const Options& options) {
  if (options.backend == "auto") return {};
  bool available = false;
  for (std::int32_t i = 0; i < onepass_kernel_count(); ++i) {
    onepass_kernel_info_t info = ONEPASS_KERNEL_INFO_INIT;
    if (onepass_kernel_info(i, &info) != ONEPASS_OK || options.backend != info.backend) continue;
    available = available || info.available != 0;
  }
  if (!available) {
    return unsupported("--backend %s: this build has no kernel of it for this machine; nearest: --backend cpu",
                       options.backend.c_str());
  }
  for (const onepass_kernel_info_t& info : known_kernels(options)) {
    if (options.backend == info.backend) continue;
    return usage_error("--kernel %s belongs to backend %s, not %s; nearest: --backend %s", info.name, info.backend,
                       options.backend.c_str(), info.backend);
  }
  return {};
}

}  // namespace onepass::cli
