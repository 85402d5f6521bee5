#include "core/registry.h"

#include <gtest/gtest.h>

#include <set>

namespace onepass {
namespace {

Problem problem(Pass pass, DType dtype, std::int64_t head_dim = 64, std::int64_t seq_q = 1024) {
  Problem p;
  p.pass = pass;
  p.dtype = dtype;
  p.batch = 1;
  p.seq_q = p.total_q = seq_q;
  p.seq_k = p.total_k = 1024;
  p.heads_q = p.heads_kv = 4;
  p.head_dim = p.head_dim_v = head_dim;
  return p;
}

std::string chosen(const Problem& p, const Machine& machine, const char* forced = nullptr) {
  const Kernel* kernel = nullptr;
  const Status status = select_kernel(p, machine, forced, &kernel);
  return status.ok() ? kernel->name : "refused: " + status.text();
}

Machine made_up(bool avx2, bool avx512, bool avx512bf16, bool amx, bool fast_dot) {
  Machine m;
  m.avx2 = avx2;
  m.avx512 = avx512;
  m.avx512bf16 = avx512bf16;
  m.amx = amx;
  m.fast_bf16_dot = fast_dot;
  return m;
}
const Machine kOld = made_up(false, false, false, false, false), kHaswell = made_up(true, false, false, false, false),
              kSkylake = made_up(true, true, false, false, false),
              kCooperLake = made_up(true, true, true, false, false), kZen4 = made_up(true, true, true, false, true),
              kSapphireRapids = made_up(true, true, true, true, false);

TEST(Registry, NamesAreUniqueAndFound) {
  std::set<std::string> names;
  for (const Kernel& kernel : kernels()) {
    EXPECT_TRUE(names.insert(kernel.name).second) << kernel.name;
    EXPECT_EQ(find_kernel(kernel.name), &kernel);
    EXPECT_NE(kernel.dtypes, 0u);
    EXPECT_EQ(kernel.pass == Pass::backward ? kernel.backward != nullptr : kernel.forward != nullptr, true);
  }
  EXPECT_EQ(find_kernel("fwd_cpu"), nullptr);
}

#if defined(ONEPASS_X86)
TEST(Registry, PicksByMachine) {
  const Problem f32 = problem(Pass::forward, DType::f32), bf16 = problem(Pass::forward, DType::bf16);
  EXPECT_EQ(chosen(f32, kOld), "fwd_cpu_portable");
  EXPECT_EQ(chosen(f32, kHaswell), "fwd_cpu_avx2");
  EXPECT_EQ(chosen(f32, kSkylake), "fwd_cpu_avx512");
  EXPECT_EQ(chosen(f32, kSapphireRapids), "fwd_cpu_avx512");
  EXPECT_EQ(chosen(bf16, kHaswell), "fwd_cpu_avx2");
  EXPECT_EQ(chosen(bf16, kCooperLake), "fwd_cpu_avx512");
  EXPECT_EQ(chosen(bf16, kZen4), "fwd_cpu_avx512bf16");
  EXPECT_EQ(chosen(bf16, kSapphireRapids), "fwd_cpu_amx");
  EXPECT_EQ(chosen(problem(Pass::backward, DType::bf16), kSapphireRapids), "bwd_cpu_amx");
  EXPECT_EQ(chosen(problem(Pass::backward, DType::bf16), kZen4), "bwd_cpu_avx512bf16");
  EXPECT_EQ(chosen(problem(Pass::backward, DType::f16), kSapphireRapids), "bwd_cpu_avx512");
}

TEST(Registry, DecodeShapedForwards) {
  EXPECT_EQ(chosen(problem(Pass::forward, DType::f32, 64, 1), kHaswell), "decode_cpu_avx2");
  EXPECT_EQ(chosen(problem(Pass::forward, DType::f32, 64, 16), kHaswell), "decode_cpu_avx2");
  EXPECT_EQ(chosen(problem(Pass::forward, DType::f32, 64, 17), kHaswell), "fwd_cpu_avx2");
  EXPECT_EQ(chosen(problem(Pass::decode, DType::f32, 64, 17), kHaswell), "fwd_cpu_avx2");
  EXPECT_EQ(chosen(problem(Pass::decode, DType::bf16, 64, 1), kZen4), "decode_cpu_avx512bf16");
  EXPECT_EQ(chosen(problem(Pass::decode, DType::bf16, 64, 1), kSapphireRapids), "decode_cpu_amx");
  EXPECT_EQ(chosen(problem(Pass::decode, DType::f32, 64, 1), kSapphireRapids), "decode_cpu_amx");
}
#endif

TEST(Registry, ReferenceServesFloat64AndRunsByName) {
  EXPECT_EQ(chosen(problem(Pass::forward, DType::f64), kOld), "fwd_cpu_oracle");
  EXPECT_EQ(chosen(problem(Pass::backward, DType::f64), kZen4), "bwd_cpu_oracle");
  EXPECT_EQ(chosen(problem(Pass::forward, DType::f32), kZen4, "fwd_cpu_oracle"), "fwd_cpu_oracle");
}

TEST(Registry, RefusalsSayWhatIsWrongAndWhatWouldDo) {
  const auto text = chosen(problem(Pass::forward, DType::f32, 1025), kZen4);
  EXPECT_NE(text.find("1025"), std::string::npos) << text;
  EXPECT_NE(text.find("1024"), std::string::npos) << text;
  EXPECT_NE(chosen(problem(Pass::forward, DType::f32), kZen4, "fwd_gpu").find("'fwd_gpu'"), std::string::npos);
  EXPECT_NE(chosen(problem(Pass::forward, DType::f32), kZen4, "bwd_cpu_portable").find("another pass"),
            std::string::npos);
#if defined(ONEPASS_X86)
  EXPECT_NE(chosen(problem(Pass::forward, DType::f32), kSapphireRapids, "fwd_cpu_amx").find("dtype"),
            std::string::npos);
  EXPECT_NE(chosen(problem(Pass::forward, DType::bf16), kZen4, "fwd_cpu_amx").find("lacks"), std::string::npos);
  EXPECT_NE(chosen(problem(Pass::forward, DType::f32, 64, 17), kZen4, "decode_cpu_avx2").find("16 query rows"),
            std::string::npos);
#endif
  Problem p = problem(Pass::forward, DType::f32);
  const Kernel* kernel = nullptr;
  EXPECT_EQ(select_kernel(p, kOld, "nothing", &kernel).code(), ONEPASS_INVALID_ARGUMENT);
  p.head_dim = 4096;
  EXPECT_EQ(select_kernel(p, kOld, nullptr, &kernel).code(), ONEPASS_UNSUPPORTED);
}

#if defined(ONEPASS_CUDA)
Machine gpu(int compute_capability, std::int64_t shared_bytes) {
  Machine m;
  m.backend = Backend::cuda;
  m.compute_capability = compute_capability;
  m.shared_bytes = shared_bytes;
  return m;
}
const Machine kTuring = gpu(75, 64 * 1024), kA100 = gpu(80, kSharedBytes80), kRtx30 = gpu(86, kSharedBytes86),
              kH100 = gpu(90, kSharedBytes90), kB200 = gpu(100, kSharedBytes90), kRtx50 = gpu(120, kSharedBytes86);

/// Every head_dim and dtype has a kernel on every card from 8.0 on, in both passes.
TEST(Registry, EveryBucketOnEveryCard) {
  for (const Machine& machine : {kA100, kRtx30, kH100, kB200, kRtx50}) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        for (std::int64_t dim = 1; dim <= 256; ++dim) {
          const std::string name = chosen(problem(pass, dtype, dim), machine);
          ASSERT_EQ(name.find("refused"), std::string::npos) << machine.compute_capability << " " << name;
          // sm_90a code runs on 9.0 alone.
          if (machine.compute_capability != 90) {
            ASSERT_EQ(name.find("sm90"), std::string::npos) << name;
          }
        }
      }
    }
  }
}

TEST(Registry, CudaRefusals) {
  EXPECT_NE(chosen(problem(Pass::forward, DType::bf16), kTuring).find("8.0 or more: this device has 7.5"),
            std::string::npos);
  Problem p = problem(Pass::forward, DType::bf16);
  p.score.softcap = 5;
  EXPECT_NE(chosen(p, kH100).find("compute on the CPU"), std::string::npos);
  EXPECT_NE(chosen(problem(Pass::forward, DType::f64), kH100).find("compute on the CPU"), std::string::npos);
  EXPECT_NE(chosen(problem(Pass::forward, DType::bf16, 257), kH100).find("the largest is 256"), std::string::npos);
  EXPECT_NE(chosen(problem(Pass::forward, DType::bf16), kH100, "fwd_cpu_portable").find("host memory"),
            std::string::npos);
}

TEST(Registry, CudaTilesFitTheirDevice) {
  for (const Kernel& kernel : kernels()) {
    if (kernel.backend != Backend::cuda) continue;
    const std::string_view arch = kernel.arch;
    const Tiles tiles = kernel.tiles();
    EXPECT_LE(tiles.shared_bytes, arch == "sm90"   ? kSharedBytes90
                                  : arch == "sm80" ? kSharedBytes80
                                                   : kSharedBytes86)
        << kernel.name;
    EXPECT_GT(tiles.block_q, 0) << kernel.name;
    EXPECT_EQ(tiles.threads % 32, 0) << kernel.name;
  }
}
#endif

TEST(Registry, WorkspaceIsPlannedForAnySize) {
  // Host planning only: no division by zero, no overflow, whatever the sizes.
  for (const Kernel& kernel : kernels()) {
    for (const std::int64_t seq : {std::int64_t{0}, std::int64_t{1}, std::int64_t{1} << 20, std::int64_t{1} << 24}) {
      for (const std::int64_t batch : {0, 1, 1000, 100000}) {
        for (const std::int64_t dim : {0, 1, 64, 1024}) {
          Problem p = problem(kernel.pass, DType::bf16, dim);
          p.batch = batch;
          p.seq_k = p.total_k = seq;
          p.seq_q = p.total_q = kernel.pass == Pass::decode ? min_of<std::int64_t>(seq, 16) : seq;
          const std::size_t bytes = kernel.workspace(p, 2);
          EXPECT_LT(static_cast<double>(bytes), 9e18) << kernel.name;
          // The forward's scratch is tiles and a few numbers a sequence, whatever the lengths.
          if (kernel.pass == Pass::forward) {
            EXPECT_LE(bytes, 48u << 20) << kernel.name << " " << batch << " " << seq;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace onepass
