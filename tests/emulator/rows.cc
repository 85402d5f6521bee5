#include "emulator/rows.h"

#include "core/work.h"
#include "cuda/kernel.h"
#include "emulator/machine/machine.h"

namespace onepass::emulator {
namespace {

/// From the first element to behind the last.
void allow(const Tensor& x, const Problem& p, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  const std::int64_t last = x.offset(p.mask.varlen ? 0 : p.batch - 1, rows - 1, heads - 1) + dim;
  if (p.batch > 0 && rows > 0 && dim > 0) allow_global(x.data, last * dtype_size(x.dtype));
}
void allow(const Problem& p, const ForwardOperands& x) {
  allow(x.q, p, p.total_q, p.heads_q, p.head_dim);
  allow(x.k, p, p.total_k, p.heads_kv, p.head_dim);
  allow(x.v, p, p.total_k, p.heads_kv, p.head_dim_v);
  allow(x.out, p, p.total_q, p.heads_q, p.head_dim_v);
}
void allow(const Problem& p, const BackwardOperands& x) {
  allow(p, ForwardOperands{x.q, x.k, x.v, x.out, x.lse});
  allow(x.grad_out, p, p.total_q, p.heads_q, p.head_dim_v);
  allow(x.grad_q, p, p.total_q, p.heads_q, p.head_dim);
  allow(x.grad_k, p, p.total_k, p.heads_kv, p.head_dim);
  allow(x.grad_v, p, p.total_k, p.heads_kv, p.head_dim_v);
}

template <class Operands, auto kRun>
Status run(const Problem& problem, const Operands& operands, const Launch& launch) {
  if (nothing_to_write(problem, operands)) return {};
  forget_global();
  allow(problem, operands);
  allow_global(launch.workspace, static_cast<std::int64_t>(launch.workspace_size));
  return kRun(problem, operands, launch);
}

}  // namespace

// Backend::cpu: their memory is the host's.
#define ONEPASS_EMULATED_RUN_forward(name) &run<ForwardOperands, &cuda::name::run>, nullptr
#define ONEPASS_EMULATED_RUN_backward(name) nullptr, &run<BackwardOperands, &cuda::name::run>
#define ONEPASS_CPU_KERNEL(...)
#define ONEPASS_CUDA_KERNEL(name, pass, arch, dtype, head_dim, head_dim_v) \
  Kernel{#name,                                                            \
         Pass::pass,                                                       \
         Backend::cpu,                                                     \
         #arch,                                                            \
         1u << static_cast<int>(DType::dtype),                             \
         head_dim,                                                         \
         0,                                                                \
         &cuda::name::workspace,                                           \
         ONEPASS_EMULATED_RUN_##pass(name),                                \
         &cuda::name::tiles,                                               \
         head_dim_v},

const std::vector<Kernel>& rows() {
  static const std::vector<Kernel> list = {
#include "core/kernels.def"
  };
  return list;
}

std::vector<const Kernel*> forward_rows() {
  std::vector<const Kernel*> list;
  for (const Kernel& kernel : rows()) {
    if (kernel.pass == Pass::forward) list.push_back(&kernel);
  }
  return list;
}

}  // namespace onepass::emulator
