#include "core/registry.h"

#include <array>
#include <cinttypes>
#include <cstdio>

#include "core/work.h"
#include "cpu/kernel.h"
#include "oracle/oracle.h"

namespace onepass {
namespace {

template <auto kForward>
Status run_forward(const Problem& problem, const ForwardOperands& operands, const Launch& launch) {
  if (!nothing_to_write(problem, operands)) kForward(problem, operands, launch);
  return {};
}
template <auto kBackward>
Status run_backward(const Problem& problem, const BackwardOperands& operands, const Launch& launch) {
  if (!nothing_to_write(problem, operands)) kBackward(problem, operands, launch);
  return {};
}

std::size_t no_workspace(const Problem&, int) {
  return 0;
}
Status oracle_forward(const Problem& problem, const ForwardOperands& operands, const Launch&) {
  return oracle::forward(problem, operands);
}
Status oracle_backward(const Problem& problem, const BackwardOperands& operands, const Launch&) {
  return oracle::backward(problem, operands, oracle::Precision::exact, false);
}

#define ONEPASS_ROW_HEAD(name, pass, isa, dtypes, max_head_dim) \
#name, Pass::pass, Backend::cpu, #isa, dtypes, max_head_dim, 0
#define ONEPASS_ROW_forward(isa) &cpu::isa::forward_workspace, &run_forward<&cpu::isa::forward>, nullptr
#define ONEPASS_ROW_decode(isa) &cpu::isa::decode_workspace, &run_forward<&cpu::isa::decode>, nullptr
#define ONEPASS_ROW_backward(isa) &cpu::isa::backward_workspace, nullptr, &run_backward<&cpu::isa::backward>

#define ONEPASS_ROW_portable(name, pass, isa, ...) \
  Kernel{ONEPASS_ROW_HEAD(name, pass, isa, __VA_ARGS__), ONEPASS_ROW_##pass(isa)},
#define ONEPASS_ROW_oracle(name, pass, isa, ...) \
  Kernel{ONEPASS_ROW_HEAD(name, pass, isa, __VA_ARGS__), &no_workspace, &oracle_forward, &oracle_backward},
#if defined(ONEPASS_X86)
#define ONEPASS_ROW_x86 ONEPASS_ROW_portable
#else
#define ONEPASS_ROW_x86(...)
#endif
#define ONEPASS_ROW_avx2 ONEPASS_ROW_x86
#define ONEPASS_ROW_avx512 ONEPASS_ROW_x86
#define ONEPASS_ROW_avx512bf16 ONEPASS_ROW_x86
#define ONEPASS_ROW_amx ONEPASS_ROW_x86
#define ONEPASS_CPU_KERNEL(name, pass, isa, dtypes, max_head_dim) \
  ONEPASS_ROW_##isa(name, pass, isa, dtypes, max_head_dim)

constexpr auto kTable = std::to_array<Kernel>({
#include "core/kernels.def"
});

const char* pass_name(Pass pass) {
  return pass == Pass::forward ? "forward" : pass == Pass::backward ? "backward" : "decode";
}

/// Few query rows against many keys: split over keys instead of over query rows.
bool decode_shaped(const Problem& p) {
  return p.seq_q <= 16 && p.seq_k >= 128;
}

/// Why `kernel` does not serve `problem`, or null. Not whether the machine can run it.
const char* mismatch(const Kernel& kernel, const Problem& problem) {
  const bool same_pass = kernel.pass == problem.pass ||
                         (kernel.pass == Pass::decode && problem.pass == Pass::forward) ||
                         (kernel.pass == Pass::forward && problem.pass == Pass::decode);
  if (!same_pass) return "another pass";
  if ((kernel.dtypes >> static_cast<int>(problem.dtype) & 1u) == 0) return "dtype";
  if (max_of(problem.head_dim, problem.head_dim_v) > kernel.max_head_dim) return "head_dim";
  if (kernel.pass == Pass::decode && problem.seq_q > 16) return "more than 16 query rows";
  return nullptr;
}

std::string_view arch_of(const Kernel& kernel) {
  return kernel.arch;
}

/// Runs, but a later row is better: why, or null.
const char* not_preferred(const Kernel& kernel, const Problem& problem, const Machine& machine) {
  if (arch_of(kernel) == "oracle" && problem.dtype != DType::f64) return "the reference runs by name only";
  if (kernel.pass == Pass::decode && !decode_shaped(problem)) return "not decode-shaped";
  if (arch_of(kernel) == "avx512bf16" && kernel.pass != Pass::decode && !machine.fast_bf16_dot) {
    return "bfloat16 dot products are slower than float32 here";
  }
  return nullptr;
}

}  // namespace

std::span<const Kernel> kernels() {
  return kTable;
}

const Kernel* find_kernel(std::string_view name) {
  for (const Kernel& kernel : kTable) {
    if (name == kernel.name) return &kernel;
  }
  return nullptr;
}

bool can_run(const Kernel& kernel, const Machine& machine) {
  if (kernel.backend != machine.backend) return false;
  const std::string_view arch = arch_of(kernel);
  if (arch == "avx2") return machine.avx2;
  if (arch == "avx512") return machine.avx512;
  if (arch == "avx512bf16") return machine.avx512 && machine.avx512bf16;
  if (arch == "amx") return machine.avx512 && machine.avx512bf16 && machine.amx;
  return true;  // portable, oracle
}

Status select_kernel(const Problem& problem, const Machine& machine, const char* forced, const Kernel** kernel,
                     std::string* why) {
  if (forced != nullptr) {
    const Kernel* found = find_kernel(forced);
    if (found == nullptr) {
      return invalid_argument("kernel: there is none named '%.64s'; `onepass info` lists them", forced);
    }
    if (!can_run(*found, machine)) {
      return unsupported("kernel %s needs %s, which this machine lacks; leave `kernel` out to have one chosen", forced,
                         found->arch);
    }
    if (const char* reason = mismatch(*found, problem)) {
      return unsupported("kernel %s does not serve this %s problem: %s (dtype %s, head_dim %" PRId64
                         ", head_dim_v %" PRId64 ", seq_q %" PRId64 "); leave `kernel` out to have one chosen",
                         forced, pass_name(problem.pass), reason, dtype_name(problem.dtype), problem.head_dim,
                         problem.head_dim_v, problem.seq_q);
    }
    *kernel = found;
    if (why != nullptr) *why += std::string(forced) + ": asked for by name\n";
    return {};
  }
  std::int64_t largest = 0;
  for (const Kernel& row : kTable) {
    const char* reason = mismatch(row, problem);
    if (reason == nullptr && !can_run(row, machine)) reason = "this machine cannot run it";
    if (reason == nullptr) reason = not_preferred(row, problem, machine);
    if (reason == nullptr) {
      *kernel = &row;
      if (why != nullptr) *why += std::string(row.name) + ": the first row of kernels.def that serves it\n";
      return {};
    }
    if (row.backend == machine.backend && arch_of(row) != "oracle") largest = max_of(largest, row.max_head_dim);
    if (why != nullptr && row.pass == problem.pass) *why += std::string(row.name) + ": " + reason + "\n";
  }
  return unsupported("no kernel serves head_dim %" PRId64 " and head_dim_v %" PRId64 " of %s: the largest is %" PRId64,
                     problem.head_dim, problem.head_dim_v, dtype_name(problem.dtype), largest);
}

}  // namespace onepass
