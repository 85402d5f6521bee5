// Every CUDA row against the float64 reference: random cases, every length around its tiles, adversarial scores.
#include <utility>

#include "cuda/cuda_kit.h"

namespace onepass {
namespace {

using namespace cuda_kit;

class CudaKernel : public testing::TestWithParam<const Kernel*> {};
INSTANTIATE_TEST_SUITE_P(Rows, CudaKernel, testing::ValuesIn(all_rows()), row_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaKernel);

check::Sweep sweep_of(const Kernel& kernel, std::uint64_t first_seed, int cases) {
  check::Sweep sweep;
  sweep.limits = kit::cuda_limits(kernel);
  sweep.first_seed = first_seed;
  sweep.cases = kit::scaled(cases);
  sweep.forwards = gpu_forwards();
  return sweep;
}

TEST_P(CudaKernel, RandomCases) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  kit::expect_sweep({kernel}, sweep_of(*kernel, kit::first_seed(), 200));
}

/// Longer sequences: several tiles on both sides, more tiles than multiprocessors.
TEST_P(CudaKernel, RandomLongCases) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  check::Sweep sweep = sweep_of(*kernel, kit::first_seed() + 1000, 30);
  sweep.limits.max_seq = 1500;
  sweep.limits.work = 6e7;
  kit::expect_sweep({kernel}, sweep);
}

TEST_P(CudaKernel, EveryLengthAroundTheTiles) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  const Tiles tiles = kernel->tiles();
  const std::int64_t most = 2 * max_of(tiles.block_q, tiles.block_k) + 2;
  for (std::int64_t n = 1; n <= most; ++n) {
    for (const bool causal : {false, true}) {
      CaseSpec spec = sized(*kernel, n, most - n / 2);
      if (n % 3 == 0) std::swap(spec.seq_q, spec.seq_k);
      if (n % 3 == 1) spec.seq_k = spec.seq_q;
      spec.causal = causal;
      if (std::string_view(kernel->arch) != "sm90") {
        spec.head_dim = spec.head_dim_v = min_of<std::int64_t>(spec.head_dim, 64);
      }
      expect_right(*kernel, spec);
      if (HasFailure()) return;
    }
  }
}

TEST_P(CudaKernel, EveryHeadDim) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  for (std::int64_t dim = 1; dim <= kernel->max_head_dim; dim += dim % 8 == 0 ? 3 : 1) {
    CaseSpec spec = sized(*kernel, 70, 130);
    spec.head_dim = dim;
    spec.head_dim_v = min_of(kernel->max_head_dim_v, kernel->max_head_dim + 1 - dim);
    const bool whole_rows = std::string_view(kernel->arch) == "sm90";
    // Pitches of whole 16 bytes: a gap behind each head's row.
    const auto pad = [](std::int64_t d) { return static_cast<int>(round_up(d, 8) - d); };
    if (whole_rows) {
      spec.head_dim_v = kernel->pass == Pass::backward ? dim : round_up(spec.head_dim_v, 8);  // dO is laid out as Q
      spec.layout_q.gap[2] = spec.layout_k.gap[2] = pad(spec.head_dim);
      spec.layout_v.gap[2] = spec.layout_out.gap[2] = pad(spec.head_dim_v);
    }
    Case c(spec);
    if (whole_rows && !check::serves(*kernel, c)) continue;  // another bucket's
    expect_right(*kernel, spec);
    if (HasFailure()) return;
  }
}

/// dS of a row that sees one key: dP and D are summed alike, however tensor cores cut off their sums.
TEST_P(CudaKernel, OneKeyHasNoGradientOfScores) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  if (kernel->pass == Pass::forward || kernel->dtypes == kF32) return;
  kit::expect_no_gradient_of_scores(*kernel, sized(*kernel, 200, 1));
}

TEST_P(CudaKernel, AdversarialScores) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  using check::Values;
  for (const Values values :
       {Values::wide, Values::deep, Values::equal, Values::steep, Values::rising, Values::denormal, Values::tiny}) {
    for (const bool causal : {false, true}) {
      CaseSpec spec = sized(*kernel, 300, 517);
      if (values == Values::tiny && spec.dtype == DType::f32) continue;  // docs/cuda.md
      spec.values = values;
      spec.causal = causal;
      expect_right(*kernel, spec);
    }
  }
}

/// Calls without rows or without keys still write what there is to write; nobody clears counters of turns then.
TEST_P(CudaKernel, NoRowsOrNoKeys) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  for (const auto& [seq_q, seq_k] : {std::pair{0, 65}, {65, 0}}) {
    for (const bool packed : {false, true}) {
      CaseSpec spec = sized(*kernel, seq_q, seq_k);
      if (packed) {
        spec.cu_seqlens_q = {0, seq_q}, spec.cu_seqlens_k = {0, seq_k};
        spec.total_q = seq_q + 2, spec.total_k = seq_k + 2;
      }
      spec.deterministic = spec.pass == Pass::backward ? 1 : -1;
      expect_right(*kernel, spec);
    }
  }
}

/// One key far above the rest, in every tile position: the running maximum must follow wherever it comes.
/// Forward only: a row that sees one key in effect has gradients of exactly 0, whose rounding docs/semantics.md speaks
/// of.
TEST_P(CudaKernel, OneKeyFarAboveTheRest) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  if (kernel->pass == Pass::backward) return;
  const std::int64_t keys = 5 * kernel->tiles().block_k + 3, step = max_of(kernel->tiles().block_k / 4, 1);
  for (std::int64_t jump = 0; jump < keys; jump += step) {
    Case c(sized(*kernel, 64, keys));
    // Queries and that key point one way; the score exceeds the others by hundreds of powers of two.
    c.q.each([&](const Index&, std::int64_t at) { c.q.set(at, std::abs(c.q.get(at)) + 1); });
    c.k.each([&](const Index& i, std::int64_t at) {
      if (i[1] == jump) c.k.set(at, 16);
    });
    for (Array* array : {&c.q, &c.k}) array->seal();
    EXPECT_TRUE(kit::passes(check::check_kernel(*kernel, c))) << "key " << jump;
    if (HasFailure()) return;
  }
}

/// Few small problems that go through every launch of a row and every way to load: what compute-sanitizer looks at
/// (tests/gpu/run.py). The workspace is as it was allocated, so that reading what nobody wrote is seen.
TEST_P(CudaKernel, EachWayOnce) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  CaseSpec padded = sized(*kernel, 150, 333);
  padded.batch = padded.heads_kv = 2;
  padded.heads_q = 4;
  padded.causal = true;
  padded.k_length = {333, 130};
  padded.q_length = {150, 77};
  CaseSpec packed = sized(*kernel, 200, 300);
  packed.batch = 3;
  packed.window_left = 70;
  packed.window_right = 40;
  packed.cu_seqlens_q = {0, 130, 130, 330};
  packed.cu_seqlens_k = {0, 300, 305, 449};
  packed.total_q = 333;
  packed.total_k = 449;
  packed.grad_lse = true;
  std::vector<CaseSpec> specs = {padded, packed};
  if (kernel->pass == Pass::backward) {
    specs.push_back(padded);
    specs.back().deterministic = 1;
  }
  if (std::string_view(kernel->arch) != "sm90") {  // rows that begin anywhere
    specs.push_back(packed);
    specs.back().head_dim = specs.back().head_dim_v = kernel->max_head_dim - 1;
  }
  for (const CaseSpec& spec : specs) {
    Case c(spec);
    if (!check::serves(*kernel, c)) continue;
    const OnDevice call(*kernel, c, Workspace::as_allocated);
    const Status ran = call.status().ok() ? call.run() : call.status();
    ASSERT_TRUE(ran.ok()) << ran.text();
    const Status fetched = call.fetch();
    ASSERT_TRUE(fetched.ok()) << fetched.text();
    EXPECT_TRUE(kit::passes(judged(c, Reference(c)))) << kernel->name;
  }
}

/// Lengths are read when the kernel runs: a captured call replays with other ones.
TEST_P(CudaKernel, GraphReplaysWithOtherLengths) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  CaseSpec spec = sized(*kernel, 200, 300);
  spec.batch = 3;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.causal = true;
  spec.k_length = {300, 0, 170};
  spec.q_length = {200, 200, 13};
  Case first(spec);
  OnDevice call(*kernel, first);
  ASSERT_TRUE(call.status().ok()) << call.status().text();
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const Status captured = call.run(stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_TRUE(captured.ok()) << captured.text();
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  for (int n = 0; n < 3; ++n) {
    CaseSpec other = spec;
    other.k_length = {100 * n, 299 - n, 64};
    other.q_length = {0, 150 + n, 64 * n};
    Case now(other);
    const Reference reference(now);
    ASSERT_TRUE(call.mirror().upload(now.memory()).ok());
    ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
    const Status fetched = call.mirror().download(now.memory());
    ASSERT_TRUE(fetched.ok()) << fetched.text();
    EXPECT_TRUE(kit::passes(judged(now, reference))) << kernel->name << " replay " << n;
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace onepass
