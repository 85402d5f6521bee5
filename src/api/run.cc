#include "api/run.h"

#include <array>
#include <cinttypes>
#include <cstring>
#include <string_view>

#include "api/options.h"
#include "api/place.h"
#include "api/tensor.h"
#include "core/layout.h"
#include "cpu/merge.h"
#include "cpu/parallel.h"
#include "oracle/oracle.h"
#if defined(ONEPASS_CUDA)
#include "cuda/cache.h"
#endif

namespace onepass::api {
namespace {

void append(const Problem& p, const Tensor& fresh, std::int64_t seq_new, std::int64_t dim, const std::int32_t* lengths,
            const Tensor& cache) {
  const std::size_t bytes = static_cast<std::size_t>(dim * dtype_size(cache.dtype));
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t i = 0; i < seq_new; ++i) {
      for (std::int64_t h = 0; h < p.heads_kv; ++h) {
        std::memcpy(cache.row(b, lengths[b] + i, h), fresh.row(b, i, h), bytes);
      }
    }
  }
}

}  // namespace

Status run_decode(Request& request) {
  Problem& p = request.problem;
  auto* lengths = static_cast<std::int32_t*>(request.launch.workspace);
  const auto append_new = [&] {
    if (!request.k_new) return;
    append(p, request.k_new, request.seq_new, p.head_dim, request.cache_seqlens, request.forward.k);
    append(p, request.v_new, request.seq_new, p.head_dim_v, request.cache_seqlens, request.forward.v);
  };
  const bool on_oracle = std::string_view(request.kernel->arch) == "oracle";
  if (p.on_device) {
#if defined(ONEPASS_CUDA)
    ONEPASS_RETURN_IF_ERROR(cuda::append_to_cache(
        p, {request.k_new, request.v_new, request.seq_new, request.cache_seqlens, request.forward.k, request.forward.v},
        lengths, request.launch));
#endif
  } else {
    if (!on_oracle) append_new();
    for (std::int64_t b = 0; b < p.batch; ++b) {
      const std::int32_t start = p.mask.k_start != nullptr ? p.mask.k_start[b] : 0;
      lengths[b] = max_of(0, request.cache_seqlens[b] + static_cast<std::int32_t>(request.seq_new) - start);
    }
  }
  p.mask.k_length = lengths;
  // The one kernel that can fail: the caches are written once it cannot any more.
  if (on_oracle) return oracle::forward(p, request.forward, oracle::Precision::exact, append_new);
  Launch launch = request.launch;
  const std::int64_t used = round_up(p.batch * 4, 64);
  launch.workspace = static_cast<char*>(launch.workspace) + used;
  launch.workspace_size -= static_cast<std::size_t>(used);
  return request.kernel->forward(p, request.forward, launch);
}

Status run_merge(const onepass_merge_args_t& args) {
  ONEPASS_RETURN_IF_ERROR(read_flag("threads (0 means all)", args.threads, 0, kMaxThreads));
  Problem p;
  Launch launch;
  launch.stream = args.stream;
  ONEPASS_RETURN_IF_ERROR(find_place({{"out_a", args.out_a},
                                      {"lse_a", args.lse_a},
                                      {"out_b", args.out_b},
                                      {"lse_b", args.lse_b},
                                      {"out", args.out},
                                      {"lse", args.lse}},
                                     &p, &launch));
  Parsed parsed;
  p.mask.varlen = args.out_a != nullptr && args.out_a->ndim == 3;
  struct Part {
    const char *name, *lse_name;
    const DLTensor *tensor, *lse_tensor;
    Tensor out;
    RowTensor lse;
  };
  std::array<Part, 3> parts{{{"out_a", "lse_a", args.out_a, args.lse_a, {}, {}},
                             {"out_b", "lse_b", args.out_b, args.lse_b, {}, {}},
                             {"out", "lse", args.out, args.lse, {}, {}}}};
  for (Part& part : parts) {
    ONEPASS_RETURN_IF_ERROR(parse_operand({part.name}, part.tensor, p.mask.varlen, &parsed, &part.out));
    if (&part == &parts[0]) {
      const int rest = p.mask.varlen ? 0 : 1;
      p.batch = p.mask.varlen ? 1 : parsed.size[0];
      p.seq_q = p.total_q = parsed.size[rest];
      p.heads_q = parsed.size[rest + 1];
      p.head_dim_v = parsed.size[rest + 2];
    }
    if (p.mask.varlen) {
      ONEPASS_RETURN_IF_ERROR(require_shape({part.name}, parsed, {p.total_q, p.heads_q, p.head_dim_v}));
    } else {
      ONEPASS_RETURN_IF_ERROR(require_shape({part.name}, parsed, {p.batch, p.seq_q, p.heads_q, p.head_dim_v}));
    }
    if (parsed.dtype == DType::f64)
      return unsupported("%s: merge works on float32, float16 and bfloat16; got float64", part.name);
    ONEPASS_RETURN_IF_ERROR(parse_rows({part.lse_name}, part.lse_tensor, p, &part.lse));
  }
  const auto out_layout = [&](const Part& part) {
    return make_layout(part.out.data, part.out.dtype, p.head_dim_v, {p.batch, p.seq_q, p.heads_q},
                       {part.out.stride_batch, part.out.stride_seq, part.out.stride_head});
  };
  const auto lse_layout = [&](const Part& part) {
    return make_layout(part.lse.data, DType::f32, p.seq_q, {p.batch, p.heads_q},
                       {part.lse.stride_batch, part.lse.stride_head});
  };
  const auto same = [](const Layout& a, const Layout& b) {
    return a.base == b.base && a.run == b.run && a.rank == b.rank && a.size == b.size && a.stride == b.stride;
  };
  const Layout written[2] = {out_layout(parts[2]), lse_layout(parts[2])};
  for (int k = 0; k < 2; ++k) {
    const char* name = k == 0 ? "out" : "lse";
    if (overlaps_itself(written[k]))
      return invalid_argument("%s: an output's elements must not overlap; pass a contiguous tensor", name);
    for (int i = 0; i < 2; ++i) {
      const Layout read[2] = {out_layout(parts[static_cast<std::size_t>(i)]),
                              lse_layout(parts[static_cast<std::size_t>(i)])};
      for (int r = 0; r < 2; ++r) {
        if (overlap(written[k], read[r]) && !(r == k && same(written[k], read[r]))) {
          return invalid_argument("%s overlaps %s%s without being it: pass that tensor itself or a separate one", name,
                                  r == 0 ? "out" : "lse", i == 0 ? "_a" : "_b");
        }
      }
    }
  }
  if (overlap(written[0], written[1])) return invalid_argument("out overlaps lse: pass separate tensors");
#if defined(ONEPASS_CUDA)
  if (p.on_device) {
    Machine gpu;
    ONEPASS_RETURN_IF_ERROR(this_gpu(launch.device, &gpu));
    return cuda::merge_partial(p, {parts[0].out, parts[0].lse}, {parts[1].out, parts[1].lse},
                               {parts[2].out, parts[2].lse}, launch);
  }
#endif
  const int threads = args.threads > 0 ? args.threads : cpu::default_threads();
  return cpu::merge_partial(p, parts[0].out, parts[0].lse, parts[1].out, parts[1].lse, parts[2].out, parts[2].lse,
                            threads);
}

const char* dtype_list(unsigned dtypes) {
  switch (dtypes) {
    case kBf16: return "bf16";
    case kF16 | kBf16: return "f16 bf16";
    case kF32: return "f32";
    case kF32 | kF16 | kBf16: return "f32 f16 bf16";
    case kF32 | kF16 | kBf16 | kF64: return "f32 f16 bf16 f64";
    default: return "";
  }
}

}  // namespace onepass::api
