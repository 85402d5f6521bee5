// The registry: picks a kernel from kernels.def for a problem and a machine.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/problem.h"
#include "core/status.h"
#include "core/tiles.h"

namespace onepass {

enum class Backend : std::uint8_t { cpu, cuda };

inline constexpr unsigned kF32 = 1u << static_cast<int>(DType::f32), kF16 = 1u << static_cast<int>(DType::f16),
                          kBf16 = 1u << static_cast<int>(DType::bf16), kF64 = 1u << static_cast<int>(DType::f64);

/// One row of kernels.def.
struct Kernel {
  const char* name;
  Pass pass;
  Backend backend;
  const char* arch;  // instruction set or compute capability
  unsigned dtypes;   // kF32 | ...
  std::int64_t max_head_dim;
  int priority;  // position in kernels.def
  /// Bytes of workspace, for any content of the device arrays.
  std::size_t (*workspace)(const Problem&, int threads);
  Status (*forward)(const Problem&, const ForwardOperands&, const Launch&);    // forward and decode kernels
  Status (*backward)(const Problem&, const BackwardOperands&, const Launch&);  // backward kernels
  Tiles (*tiles)() = nullptr;                                                  // CUDA kernels
  std::int64_t max_head_dim_v = max_head_dim;
};

/// What the machine can run. Tests make these up.
struct Machine {
  Backend backend = Backend::cpu;
  bool avx2 = false, avx512 = false, avx512bf16 = false, amx = false;
  bool fast_bf16_dot = false;     // vdpbf16ps outruns the float32 FMA: AMD's cores, not Intel's up to Sapphire Rapids
  int compute_capability = 0;     // CUDA: 90 for 9.0
  std::int64_t shared_bytes = 0;  // CUDA: shared memory that a thread block may ask for
};

/// This machine's CPU, detected once.
const Machine& this_cpu();
/// A GPU of this machine by its CUDA ordinal; a refusal without CUDA in the build, or without that GPU.
Status this_gpu(int ordinal, Machine* machine);

std::span<const Kernel> kernels();
const Kernel* find_kernel(std::string_view name);
bool can_run(const Kernel& kernel, const Machine& machine);
/// On this CPU, or on this machine's first GPU.
bool can_run_here(const Kernel& kernel);

/// Why `kernel` does not serve `problem`, or null. Not whether the machine can run it.
const char* mismatch(const Kernel& kernel, const Problem& problem);

/// The kernel for a problem: the one named in `forced`, if any, else the first row that serves it. The reasons for
/// passing over better rows are appended to *why, if given, one line each.
Status select_kernel(const Problem& problem, const Machine& machine, const char* forced, const Kernel** kernel,
                     std::string* why = nullptr);

}  // namespace onepass
