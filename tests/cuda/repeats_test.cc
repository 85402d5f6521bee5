// CUDA rows called again and again: the same bits, on two streams at once, from two threads at once.
#include <thread>

#include "cuda/cuda_kit.h"

namespace onepass {
namespace {

using namespace cuda_kit;

class CudaRepeats : public testing::TestWithParam<const Kernel*> {};
INSTANTIATE_TEST_SUITE_P(Rows, CudaRepeats, testing::ValuesIn(all_rows()), row_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaRepeats);

/// A causal batch with more tiles than multiprocessors, few keys a tile: where pipelines run dry.
CaseSpec busy(const Kernel& kernel) {
  CaseSpec spec = sized(kernel, 512, 512);
  spec.batch = 4;
  spec.heads_q = 12;
  spec.heads_kv = 4;
  spec.causal = true;
  spec.deterministic = kernel.pass == Pass::backward ? 1 : -1;
  return spec;
}

/// C17, C18: other work on the device between and beside the runs.
TEST_P(CudaRepeats, BitsStayTheSame) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  Case c(busy(*kernel));
  if (!check::serves(*kernel, c)) GTEST_SKIP() << kernel->name << " has no deterministic option";
  const OnDevice call(*kernel, c);
  ASSERT_TRUE(call.status().ok()) << call.status().text();
  cudaStream_t stream = nullptr, other = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  const auto noise = check::device_memory(std::size_t{64} << 20);
  std::uint64_t first = 0;
  const int rounds = kit::scaled(10), calls = 100;
  for (int round = 0; round < rounds; ++round) {
    for (int n = 0; n < calls; ++n) {
      if (n % 7 == 0) cudaMemsetAsync(noise.get(), n, std::size_t{64} << 20, other);
      const Status status = call.run(stream);
      ASSERT_TRUE(status.ok()) << status.text();
    }
    const Status fetched = call.fetch();
    ASSERT_TRUE(fetched.ok()) << fetched.text();
    if (round == 0) first = bits(c);
    ASSERT_EQ(bits(c), first) << kernel->name << " round " << round;
  }
  cudaStreamDestroy(stream);
  cudaStreamDestroy(other);
}

/// C46, C48: calls of different problems at once, each with its own workspace.
TEST_P(CudaRepeats, TwoStreamsAndTwoThreads) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  const auto work = [kernel](std::uint64_t seed, std::int64_t keys, Report* report) {
    CaseSpec spec = sized(*kernel, 190, keys);
    spec.seed = seed;
    spec.heads_q = spec.heads_kv = 3;
    spec.causal = seed % 2 == 0;
    spec.scale = 0.1 + 0.05 * static_cast<double>(seed);
    Case c(spec);
    const Reference reference(c);
    const OnDevice call(*kernel, c);
    cudaStream_t stream = nullptr;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (int n = 0; n < 20 && call.status().ok(); ++n) {
      const Status status = call.run(stream);
      if (!status.ok()) report->faults.push_back(status.text());
    }
    const Status fetched = call.fetch();
    *report = judged(c, reference);
    if (!fetched.ok()) report->faults.push_back(fetched.text());
    cudaStreamDestroy(stream);
  };
  Report one, two;
  std::thread first(work, 1, 300, &one), second(work, 2, 77, &two);
  first.join();
  second.join();
  EXPECT_TRUE(kit::passes(one));
  EXPECT_TRUE(kit::passes(two));
}

}  // namespace
}  // namespace onepass
