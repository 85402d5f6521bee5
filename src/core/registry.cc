#include "core/registry.h"

#include <array>
#include <cinttypes>
#include <cstdio>

#include "core/work.h"
#include "cpu/kernel.h"
#if defined(ONEPASS_CUDA)
#include "cuda/kernel.h"
#endif
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
  if (nothing_to_write(problem, operands)) {
    clear_sums(problem, operands);
  } else {
    kBackward(problem, operands, launch);
  }
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

#if defined(ONEPASS_CUDA)
constexpr unsigned dtype_bit(DType dtype) {
  return 1u << static_cast<int>(dtype);
}
template <class Operands, auto kRun>
Status run_cuda(const Problem& problem, const Operands& operands, const Launch& launch) {
  return nothing_to_write(problem, operands) ? Status{} : kRun(problem, operands, launch);
}
#endif

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

#if defined(ONEPASS_CUDA)
#define ONEPASS_CUDA_RUN_forward(name) &run_cuda<ForwardOperands, &cuda::name::run>, nullptr
#define ONEPASS_CUDA_RUN_backward(name) nullptr, &run_cuda<BackwardOperands, &cuda::name::run>
#define ONEPASS_CUDA_KERNEL(name, pass, arch, dtype, head_dim, head_dim_v) \
  Kernel{#name,                                                            \
         Pass::pass,                                                       \
         Backend::cuda,                                                    \
         #arch,                                                            \
         dtype_bit(DType::dtype),                                          \
         head_dim,                                                         \
         0,                                                                \
         &cuda::name::workspace,                                           \
         ONEPASS_CUDA_RUN_##pass(name),                                    \
         &cuda::name::tiles,                                               \
         head_dim_v},
#else
#define ONEPASS_CUDA_KERNEL(...)
#endif

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

std::string_view arch_of(const Kernel& kernel) {
  return kernel.arch;
}

bool has_modifiers(const ScoreSpec& score) {
  return score.modified() || score.sinks;
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

const char* mismatch(const Kernel& kernel, const Problem& problem) {
  const bool same_pass = kernel.pass == problem.pass ||
                         (kernel.pass == Pass::decode && problem.pass == Pass::forward) ||
                         (kernel.pass == Pass::forward && problem.pass == Pass::decode);
  if (!same_pass) return "another pass";
  if ((kernel.dtypes >> static_cast<int>(problem.dtype) & 1u) == 0) return "dtype";
  if (problem.head_dim > kernel.max_head_dim) return "head_dim";
  if (problem.head_dim_v > kernel.max_head_dim_v) return "head_dim_v";
  if (kernel.pass == Pass::decode && problem.seq_q > 16) return "more than 16 query rows";
  if (kernel.backend == Backend::cuda && has_modifiers(problem.score)) return "softcap, ALiBi, bias, sinks or dropout";
  if (arch_of(kernel) == "sm90") {
    if (!problem.aligned_rows) return "rows that are not 16-byte aligned, or a float32 out";
    if (kernel.pass == Pass::forward && problem.head_dim_v % 8 != 0) return "a head_dim_v that is no multiple of 8";
    if (kernel.pass == Pass::forward && !(problem.score.scale > 0)) return "a scale that is not positive";
    // Kernels load every panel of 64 columns, and a box outside the operand altogether may fault (sm90/boxes.cuh).
    constexpr std::int64_t kPanel = 64;
    if (ceil_div(problem.head_dim, kPanel) < ceil_div(kernel.max_head_dim, kPanel) ||
        ceil_div(problem.head_dim_v, kPanel) < ceil_div(kernel.max_head_dim_v, kPanel)) {
      return "a head_dim that leaves 64 columns of the bucket empty";
    }
    if (max_of(problem.total_q, problem.total_k) >= (std::int64_t{1} << 29)) return "2^29 rows or more";
  }
  return nullptr;
}

bool can_run(const Kernel& kernel, const Machine& machine) {
  if (kernel.backend != machine.backend) return false;
  const std::string_view arch = arch_of(kernel);
  if (kernel.backend == Backend::cuda) {
    // Code for sm_90a runs on 9.0 alone; code for sm_80 on it and, as PTX, on anything newer.
    const bool capable = arch == "sm90" ? machine.compute_capability == 90 : machine.compute_capability >= 80;
    return capable && kernel.tiles().shared_bytes <= machine.shared_bytes;
  }
  if (arch == "avx2") return machine.avx2;
  if (arch == "avx512") return machine.avx512;
  if (arch == "avx512bf16") return machine.avx512 && machine.avx512bf16;
  if (arch == "amx") return machine.avx512 && machine.avx512bf16 && machine.amx;
  return true;  // portable, oracle
}

bool can_run_here(const Kernel& kernel) {
  if (kernel.backend == Backend::cpu) return can_run(kernel, this_cpu());
  Machine gpu;
  return this_gpu(0, &gpu).ok() && can_run(kernel, gpu);
}

#if !defined(ONEPASS_CUDA)
Status this_gpu(int, Machine*) {
  return unsupported("this build computes on the CPU only; `./dev build-cuda` makes one with the CUDA kernels");
}
#endif

namespace {

/// Why no row serves the problem on this machine.
Status none_serves(const Problem& p, const Machine& machine) {
  if (machine.backend == Backend::cuda) {
    if (machine.compute_capability < 80) {
      return unsupported("CUDA kernels need compute capability 8.0 or more: this device has %d.%d; compute on the CPU",
                         machine.compute_capability / 10, machine.compute_capability % 10);
    }
    if (has_modifiers(p.score)) {
      return unsupported("softcap, ALiBi, bias, sinks and dropout are not served in CUDA memory; compute on the CPU");
    }
  }
  std::int64_t largest = 0;
  for (const Kernel& row : kTable) {
    if (row.backend != machine.backend || arch_of(row) == "oracle" || !can_run(row, machine) ||
        (row.dtypes >> static_cast<int>(p.dtype) & 1u) == 0 ||
        (row.pass == Pass::backward) != (p.pass == Pass::backward)) {
      continue;
    }
    largest = max_of(largest, row.max_head_dim);
  }
  return unsupported("no kernel serves head_dim %" PRId64 " and head_dim_v %" PRId64 " of %s: the largest is %" PRId64
                     "%s",
                     p.head_dim, p.head_dim_v, dtype_name(p.dtype), largest,
                     largest == 0 ? ", that is, none of this pass and dtype: compute on the CPU" : "");
}

}  // namespace

Status select_kernel(const Problem& problem, const Machine& machine, const char* forced, const Kernel** kernel,
                     std::string* why) {
  if (forced != nullptr) {
    const Kernel* found = find_kernel(forced);
    if (found == nullptr) {
      return invalid_argument("kernel: there is none named '%.64s'; `onepass info` lists them", forced);
    }
    if (found->backend != machine.backend) {
      return unsupported(
          "kernel %s computes in %s memory, where the operands are not; move them, or leave `kernel` out", forced,
          found->backend == Backend::cuda ? "CUDA" : "host");
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
  for (const Kernel& row : kTable) {
    if (row.backend != machine.backend) continue;
    const char* reason = mismatch(row, problem);
    if (reason == nullptr && !can_run(row, machine)) reason = "this machine cannot run it";
    if (reason == nullptr) reason = not_preferred(row, problem, machine);
    if (reason == nullptr) {
      *kernel = &row;
      if (why != nullptr) *why += std::string(row.name) + ": the first row of kernels.def that serves it\n";
      return {};
    }
    if (why != nullptr && row.pass == problem.pass) *why += std::string(row.name) + ": " + reason + "\n";
  }
  return none_serves(problem, machine);
}

}  // namespace onepass
