// The C interface with tensors in CUDA memory: places, refusals, the cache of a decode, merges.
#include <cmath>

#include "cuda/cuda_kit.h"

namespace onepass {
namespace {

using namespace cuda_kit;

CaseSpec small() {
  CaseSpec spec = sized(Pass::forward, DType::bf16, 70, 130, 64);
  spec.batch = 2;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.causal = true;
  return spec;
}

/// Asks for the workspace and calls onepass_forward.
onepass_status_t forward(check::AbiCall& call) {
  std::size_t bytes = 0;
  const onepass_status_t planned = onepass_workspace_size(ONEPASS_FORWARD, &call.forward, &bytes);
  if (planned != ONEPASS_OK) return planned;
  const auto workspace = check::device_memory(bytes);
  call.forward.workspace = workspace.get();
  call.forward.workspace_size = bytes;
  const onepass_status_t status = onepass_forward(&call.forward);
  cudaDeviceSynchronize();
  return status;
}

TEST(CudaCalls, ForwardThroughTheCInterface) {
  ONEPASS_NEEDS_GPU();
  Case c(small());
  const Reference reference(c);
  check::AbiCall call(c);
  const DeviceMirror mirror(c.memory());
  call.move(mirror);
  ASSERT_EQ(forward(call), ONEPASS_OK) << onepass_last_error();
  ASSERT_TRUE(mirror.download().ok());
  EXPECT_TRUE(kit::passes(judged(c, reference)));
}

TEST(CudaCalls, MixedPlacesAreRefused) {
  ONEPASS_NEEDS_GPU();
  Case c(small());
  check::AbiCall call(c);
  const DLTensor on_host = *call.forward.k;
  const DeviceMirror mirror(c.memory());
  call.move(mirror);
  call.forward.k = &on_host;
  EXPECT_EQ(forward(call), ONEPASS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(onepass_last_error()).find("move all tensors to one device"), std::string::npos)
      << onepass_last_error();
  DLTensor elsewhere = on_host;
  elsewhere.device = {kDLCUDA, 99};
  call.forward.k = &elsewhere;
  EXPECT_EQ(forward(call), ONEPASS_INVALID_ARGUMENT);
}

TEST(CudaCalls, ModifiersAndKernelsOfTheCpuAreRefused) {
  ONEPASS_NEEDS_GPU();
  Case c(small());
  check::AbiCall call(c);
  const DeviceMirror mirror(c.memory());
  call.move(mirror);
  call.options.softcap = 10;
  EXPECT_EQ(forward(call), ONEPASS_UNSUPPORTED);
  EXPECT_NE(std::string(onepass_last_error()).find("compute on the CPU"), std::string::npos) << onepass_last_error();
  call.options.softcap = 0;
  call.options.kernel = "fwd_cpu_portable";
  EXPECT_EQ(forward(call), ONEPASS_UNSUPPORTED);
  EXPECT_NE(std::string(onepass_last_error()).find("host memory"), std::string::npos) << onepass_last_error();
}

TEST(CudaCalls, ValidateReadsTheLengths) {
  ONEPASS_NEEDS_GPU();
  CaseSpec spec = small();
  spec.k_length = {130, 7};
  Case c(spec);
  check::AbiCall call(c);
  const DeviceMirror mirror(c.memory());
  call.move(mirror);
  call.options.validate = 1;
  EXPECT_EQ(forward(call), ONEPASS_OK) << onepass_last_error();
  const std::int32_t bad[2] = {130, 131};
  cudaMemcpy(call.options.k_length->data, bad, sizeof bad, cudaMemcpyHostToDevice);
  EXPECT_EQ(forward(call), ONEPASS_INVALID_ARGUMENT);
  call.options.validate = 0;  // clamped: memory stays safe
  EXPECT_EQ(forward(call), ONEPASS_OK) << onepass_last_error();
}

/// A decode on the device gives what the same decode on the CPU gives, caches included.
TEST(CudaCalls, DecodeAppendsAndAgreesWithTheCpu) {
  ONEPASS_NEEDS_GPU();
  constexpr std::int64_t kBatch = 3, kCapacity = 200, kNew = 2, kHeads = 4, kDim = 64;
  const auto make = [](std::int64_t rows, std::int64_t heads, std::uint64_t seed, bool output = false) {
    Array array(DType::bf16, {kBatch, rows, heads, kDim}, output);
    check::Random random(seed);
    if (!output) array.each([&](const Index&, std::int64_t at) { array.set(at, random.normal()); });
    array.seal();
    return array;
  };
  std::vector<Array> arrays;  // q, k, v, k_new, v_new, out
  arrays.push_back(make(kNew, 2 * kHeads, 1));
  arrays.push_back(make(kCapacity, kHeads, 2));
  arrays.push_back(make(kCapacity, kHeads, 3));
  arrays.push_back(make(kNew, kHeads, 4));
  arrays.push_back(make(kNew, kHeads, 5));
  arrays.push_back(make(kNew, 2 * kHeads, 6, true));
  std::vector<std::int32_t> lengths = {0, 77, static_cast<std::int32_t>(kCapacity - kNew)};
  const auto decode = [&](const DeviceMirror* mirror) {
    std::int64_t shapes[7][4] = {}, strides[7][4] = {};
    DLTensor tensors[7];
    for (std::size_t n = 0; n < 7; ++n) {
      if (n < 6) {
        std::copy_n(arrays[n].size().begin(), 4, shapes[n]);
        std::copy_n(arrays[n].stride().begin(), 4, strides[n]);
      } else {
        shapes[n][0] = kBatch;
        strides[n][0] = 1;
      }
      void* data = n < 6 ? arrays[n].data() : lengths.data();
      tensors[n] = {mirror != nullptr ? mirror->at(data) : data,
                    {mirror != nullptr ? kDLCUDA : kDLCPU, 0},
                    n < 6 ? 4 : 1,
                    n < 6 ? DLDataType{kDLBfloat, 16, 1} : DLDataType{kDLInt, 32, 1},
                    shapes[n],
                    strides[n],
                    0};
    }
    onepass_decode_args_t args = ONEPASS_DECODE_ARGS_INIT;
    args.q = &tensors[0];
    args.k_cache = &tensors[1];
    args.v_cache = &tensors[2];
    args.k_new = &tensors[3];
    args.v_new = &tensors[4];
    args.out = &tensors[5];
    args.cache_seqlens = &tensors[6];
    std::size_t bytes = 0;
    ASSERT_EQ(onepass_workspace_size(ONEPASS_DECODE, &args, &bytes), ONEPASS_OK) << onepass_last_error();
    const auto device = check::device_memory(bytes);
    std::vector<std::uint64_t> host(bytes / 8 + 16);
    const auto start = reinterpret_cast<std::uintptr_t>(host.data());
    args.workspace = mirror != nullptr ? device.get() : reinterpret_cast<char*>(host.data()) + (64 - start % 64) % 64;
    args.workspace_size = bytes;
    ASSERT_EQ(onepass_decode(&args), ONEPASS_OK) << onepass_last_error();
  };
  std::vector<Block> blocks;
  for (Array& array : arrays) blocks.push_back(array.memory());
  blocks.push_back({lengths.data(), 4 * lengths.size()});
  const DeviceMirror mirror(blocks);
  decode(nullptr);
  const std::vector<Array> right = arrays;
  for (Array& array : arrays) array.reset();
  decode(&mirror);
  ASSERT_TRUE(mirror.download().ok());
  for (const std::size_t n : {1u, 2u}) EXPECT_EQ(arrays[n].bits(), right[n].bits());
  arrays[5].each([&](const Index&, std::int64_t at) {
    ASSERT_NEAR(arrays[5].get(at), right[5].get(at), 0.02 + 0.02 * std::abs(right[5].get(at)));
  });
}

/// C51, C52: merges on the device are those of the CPU within rounding; an empty part is the identity.
TEST(CudaCalls, MergeOfParts) {
  ONEPASS_NEEDS_GPU();
  constexpr std::int64_t kRows = 5, kHeads = 3, kDim = 70;
  const Index size = {1, kRows, kHeads, kDim};
  Array a(DType::f32, size), b(DType::f32, size), out(DType::f32, size, true);
  Array lse_a = Array::rows(1, kHeads, kRows, 0, false), lse_b = Array::rows(1, kHeads, kRows, 0, false),
        lse = Array::rows(1, kHeads, kRows, 0, true);
  check::Random random(9);
  for (Array* array : {&a, &b}) array->each([&](const Index&, std::int64_t at) { array->set(at, random.normal()); });
  lse_a.each([&](const Index& i, std::int64_t at) {
    lse_a.set(at, i[2] == 0 || i[2] == 2 ? -INFINITY : i[2] == 3 ? 200 : 0.5);
  });
  lse_b.each([&](const Index& i, std::int64_t at) {
    lse_b.set(at, i[2] == 1 || i[2] == 2 ? -INFINITY : i[2] == 3 ? 0 : 0.25);
  });
  const DeviceMirror mirror({a.memory(), b.memory(), out.memory(), lse_a.memory(), lse_b.memory(), lse.memory()});
  std::int64_t shape[4] = {1, kRows, kHeads, kDim}, rows_shape[3] = {1, kHeads, kRows};
  const auto tensor = [&](const Array& array) {
    return DLTensor{mirror.at(array.data()), {kDLCUDA, 0}, 4, {kDLFloat, 32, 1}, shape, nullptr, 0};
  };
  const auto rows = [&](const Array& array) {
    return DLTensor{mirror.at(array.data()), {kDLCUDA, 0}, 3, {kDLFloat, 32, 1}, rows_shape, nullptr, 0};
  };
  const DLTensor ta = tensor(a), tb = tensor(b), to = tensor(out), la = rows(lse_a), lb = rows(lse_b), lo = rows(lse);
  onepass_merge_args_t args = ONEPASS_MERGE_ARGS_INIT;
  args.out_a = &ta;
  args.lse_a = &la;
  args.out_b = &tb;
  args.lse_b = &lb;
  args.out = &to;
  args.lse = &lo;
  ASSERT_EQ(onepass_merge(&args), ONEPASS_OK) << onepass_last_error();
  ASSERT_TRUE(mirror.download().ok());
  out.each([&](const Index& i, std::int64_t at) {
    const double x = a.get(at), y = b.get(at), w = 1 / (1 + std::exp(-0.25));
    if (i[1] == 0) {
      EXPECT_EQ(out.get(at), y);
    }
    if (i[1] == 1) {
      EXPECT_EQ(out.get(at), x);
    }
    if (i[1] == 2) {
      EXPECT_EQ(out.get(at), 0);
    }
    if (i[1] == 3) {
      EXPECT_EQ(out.get(at), x);
    }
    if (i[1] == 4) {
      EXPECT_NEAR(out.get(at), w * x + (1 - w) * y, 1e-6);
    }
  });
  lse.each([&](const Index& i, std::int64_t at) {
    const double right[] = {0.25, 0.5, -INFINITY, 200, 0.5 + std::log1p(std::exp(-0.25))};
    if (i[2] == 2) {
      EXPECT_EQ(lse.get(at), -INFINITY);
    } else {
      EXPECT_NEAR(lse.get(at), right[i[2]], 1e-6);
    }
  });
}

}  // namespace
}  // namespace onepass
