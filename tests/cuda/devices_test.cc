// C53: every CUDA row on a second device, while another one is current, and on both at once. Skipped with one GPU.
#include <thread>

#include "cuda/cuda_kit.h"

namespace onepass {
namespace {

using namespace cuda_kit;

int devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
int current() {
  int device = -1;
  cudaGetDevice(&device);
  return device;
}

#define ONEPASS_NEEDS_TWO_GPUS() \
  if (devices() < 2) GTEST_SKIP() << "needs two GPUs: here are " << devices()

/// Grouped heads, causal, padded: more than one tile on both sides.
CaseSpec some(const Kernel& kernel) {
  CaseSpec spec = sized(kernel, 190, 300);
  spec.batch = spec.heads_kv = 2;
  spec.heads_q = 4;
  spec.causal = true;
  spec.k_length = {300, 171};
  return spec;
}

class CudaDevices : public testing::TestWithParam<const Kernel*> {
 protected:
  void TearDown() override { cudaSetDevice(0); }
};
INSTANTIATE_TEST_SUITE_P(Rows, CudaDevices, testing::ValuesIn(all_rows()), row_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaDevices);

/// The row in device 1's memory, called while device 0 is current, on a stream of device 1 or the default one.
TEST_P(CudaDevices, C53AnotherDeviceIsCurrent) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_TWO_GPUS();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  Case c(some(*kernel));
  const Reference reference(c);
  for (const bool own_stream : {false, true}) {
    c.reset();
    cudaSetDevice(1);
    const OnDevice call(*kernel, c);
    ASSERT_TRUE(call.status().ok()) << call.status().text();
    cudaStream_t stream = nullptr;
    if (own_stream) {
      ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    cudaSetDevice(0);
    const Status ran = call.run(stream, 1);
    ASSERT_TRUE(ran.ok()) << ran.text();
    EXPECT_EQ(current(), 0);
    cudaSetDevice(1);
    const Status fetched = call.fetch();
    ASSERT_TRUE(fetched.ok()) << fetched.text();
    EXPECT_TRUE(kit::passes(judged(c, reference))) << kernel->name;
    if (own_stream) cudaStreamDestroy(stream);
  }
}

/// A thread a device, each calling the row again and again.
TEST_P(CudaDevices, C53BothAtOnce) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_TWO_GPUS();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  Report reports[2];
  const auto work = [kernel, &reports](int device) {
    CaseSpec spec = some(*kernel);
    spec.seed = 1 + static_cast<std::uint64_t>(device);
    spec.seq_k += 70 * device;
    Case c(spec);
    const Reference reference(c);
    cudaSetDevice(device);
    const OnDevice call(*kernel, c);
    Status status = call.status();
    for (int n = 0; n < 10 && status.ok(); ++n) status = call.run(nullptr, device);
    const Status fetched = call.fetch();
    reports[device] = judged(c, reference);
    for (const Status& one : {status, fetched}) {
      if (!one.ok()) reports[device].faults.push_back(one.text());
    }
  };
  std::thread first(work, 0), second(work, 1);
  first.join();
  second.join();
  for (const Report& report : reports) EXPECT_TRUE(kit::passes(report)) << kernel->name;
}

/// Through the C interface: device 1's tensors while device 0 is current; tensors of both are refused.
TEST(CudaDeviceCalls, C53ThroughTheCInterface) {
  ONEPASS_NEEDS_TWO_GPUS();
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const DType dtype : kit::kStorage) {
      CaseSpec spec = sized(pass, dtype, 150, 210, 64);
      spec.heads_q = spec.heads_kv = 2;
      spec.causal = true;
      Case c(spec);
      const Reference reference(c);
      check::AbiCall call(c);
      cudaSetDevice(1);
      const DeviceMirror mirror(c.memory());
      ASSERT_TRUE(mirror.status().ok()) << mirror.status().text();
      cudaSetDevice(0);
      const DeviceMirror elsewhere(c.memory());
      call.move(mirror, 1);
      const bool backward = pass == Pass::backward;
      const onepass_pass_t which = backward ? ONEPASS_BACKWARD : ONEPASS_FORWARD;
      const void* args = backward ? static_cast<const void*>(&call.backward) : &call.forward;
      std::size_t bytes = 0;
      ASSERT_EQ(onepass_workspace_size(which, args, &bytes), ONEPASS_OK) << onepass_last_error();
      cudaSetDevice(1);
      const auto workspace = check::device_memory(bytes);
      cudaSetDevice(0);
      (backward ? call.backward.workspace : call.forward.workspace) = workspace.get();
      (backward ? call.backward.workspace_size : call.forward.workspace_size) = bytes;
      const auto run = [&] { return backward ? onepass_backward(&call.backward) : onepass_forward(&call.forward); };
      ASSERT_EQ(run(), ONEPASS_OK) << onepass_last_error();
      EXPECT_EQ(current(), 0);
      cudaSetDevice(1);
      ASSERT_TRUE(mirror.download().ok());
      cudaSetDevice(0);
      EXPECT_TRUE(kit::passes(judged(c, reference)));
      DLTensor there = backward ? *call.backward.k : *call.forward.k;
      there.data = elsewhere.at(c.k.data());
      there.device.device_id = 0;
      (backward ? call.backward.k : call.forward.k) = &there;
      EXPECT_EQ(run(), ONEPASS_INVALID_ARGUMENT) << onepass_last_error();
    }
  }
}

}  // namespace
}  // namespace onepass
