// CUDA rows called again and again: the same bits, on two streams at once, from two threads at once.
#include <thread>

#include "cuda/cuda_kit.h"
#include "cuda/differences.h"

namespace onepass {
namespace {

using namespace cuda_kit;

class CudaRepeats : public testing::TestWithParam<const Kernel*> {};
INSTANTIATE_TEST_SUITE_P(Rows, CudaRepeats, testing::ValuesIn(all_rows()), row_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaRepeats);

/// A batch with more tiles than multiprocessors, few keys a tile: where pipelines run dry. Wide rows have small tiles.
CaseSpec busy(const Kernel& kernel, bool causal) {
  CaseSpec spec = sized(kernel, kernel.pass == Pass::backward && kernel.max_head_dim > 128 ? 256 : 512, 512);
  spec.batch = 4;
  spec.heads_q = kernel.pass == Pass::backward ? 8 : 12;
  spec.heads_kv = 4;
  spec.causal = causal;
  spec.deterministic = kernel.pass == Pass::backward ? 1 : -1;
  return spec;
}

/// What an output held first, on the device.
struct Kept {
  Kept(const OnDevice& call, const Block& output) : block(output), first(check::device_memory(output.bytes)) {
    cudaMemcpy(first.get(), call.mirror().at(block.data), block.bytes, cudaMemcpyDeviceToDevice);
  }
  Block block;
  std::shared_ptr<void> first;
};

/// C17, C18: every run has the bits of the first, beside other work on the device. Runs go in pairs, so that half of
/// them may begin while another ends. With ONEPASS_TEST_FACTOR=20 they are ten thousand, with either mask.
TEST_P(CudaRepeats, BitsStayTheSame) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  for (const bool causal : {true, false}) {
    CaseSpec long_rows = sized(*kernel, 300, 1111);
    Case c(busy(*kernel, causal));
    long_rows.deterministic = c.spec().deterministic;
    Case beside(long_rows);
    const OnDevice one(*kernel, c), two(*kernel, c), noise(*kernel, beside);
    for (const OnDevice* call : {&one, &two, &noise}) ASSERT_TRUE(call->status().ok()) << call->status().text();
    cudaStream_t stream = nullptr, other = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_TRUE(one.run(stream).ok());
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    std::vector<Kept> kept;
    for (Array* array : {&c.out, &c.lse, &c.grad_k, &c.grad_v, &c.grad_q}) {
      if (*array) kept.emplace_back(one, array->memory());
    }
    const auto count = check::device_memory(sizeof(unsigned));
    cudaMemset(count.get(), 0, sizeof(unsigned));
    for (int pair = 0; pair < kit::scaled(250); ++pair) {
      if (pair % 3 == 0) {
        ASSERT_TRUE(noise.run(other).ok());
      }
      for (const OnDevice* call : {&one, &two}) ASSERT_TRUE(call->run(stream).ok());
      for (const OnDevice* call : {&one, &two}) {
        for (const Kept& x : kept) {
          count_differences(x.first.get(), call->mirror().at(x.block.data), x.block.bytes,
                            static_cast<unsigned*>(count.get()), stream);
        }
      }
    }
    unsigned differing = 1;
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(&differing, count.get(), sizeof differing, cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_EQ(differing, 0u) << kernel->name << (causal ? ", causal" : "");
    cudaStreamDestroy(stream);
    cudaStreamDestroy(other);
  }
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
