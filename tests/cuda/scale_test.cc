// dQ where thousands of tiles add to it: blocks that meet at a query tile may lose a part once in as many, which no
// small case shows. Each element of every call is compared on the device.
#include <cmath>

#include "cuda/cuda_kit.h"
#include "cuda/gradients.h"

namespace onepass {
namespace {

using namespace cuda_kit;

/// The rows that work on 16-bit operands.
std::vector<const Kernel*> backward_rows() {
  std::vector<const Kernel*> list = all_rows();
  std::erase_if(list, [](const Kernel* kernel) {
    return kernel->pass != Pass::backward || (kernel->dtypes & (kF16 | kBf16)) == 0;
  });
  return list;
}

class CudaScale : public testing::TestWithParam<const Kernel*> {};
INSTANTIATE_TEST_SUITE_P(Rows, CudaScale, testing::ValuesIn(backward_rows()), row_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaScale);

constexpr int kTokens = 16384;

/// Self-attention of kTokens rows, about 2,048 columns of all query heads.
struct Shape {
  int seq;    // 0: packed sequences of other lengths each
  int group;  // query heads of a KV head
  bool causal;
};

/// A problem with its operands on the device, and what dQ must be.
class Scale {
 public:
  Scale(const Kernel& kernel, const Shape& shape, unsigned seed) : kernel_(kernel) {
    std::vector<std::int32_t> offsets;  // of sequences
    for (int at = 0; at<kTokens; at += shape.seq> 0 ? shape.seq : 37 + 149 * static_cast<int>(offsets.size()) % 883) {
      offsets.push_back(at);
    }
    if (shape.seq > 0 && kTokens % shape.seq != 0) offsets.pop_back();  // a batch of whole items
    const auto batch = static_cast<int>(offsets.size());
    const int rows = shape.seq > 0 ? batch * shape.seq : kTokens;
    offsets.push_back(rows);
    std::vector<int> first, keys;
    int longest = 0;
    for (int b = 0; b < batch; ++b) {
      const int length = offsets[b + 1] - offsets[b];
      longest = std::max(longest, length);
      for (int i = 0; i < length; ++i) first.push_back(offsets[b]), keys.push_back(shape.causal ? i + 1 : length);
    }
    const auto dim = static_cast<int>(kernel.max_head_dim), dim_v = static_cast<int>(kernel.max_head_dim_v);
    const int heads_kv = std::max(1, 2048 / dim / shape.group), heads_q = heads_kv * shape.group;
    const bool packed = shape.seq == 0;
    x_ = {(kernel.dtypes & kF16) != 0 ? DType::f16 : DType::bf16,
          rows,
          packed ? rows : shape.seq,
          heads_q,
          heads_kv,
          dim,
          dim_v,
          1 / std::sqrt(dim),
          upload(first),
          upload(keys)};

    problem_.pass = Pass::backward, problem_.dtype = x_.dtype;
    problem_.batch = batch, problem_.seq_q = problem_.seq_k = longest;
    problem_.total_q = problem_.total_k = packed ? rows : longest;
    problem_.heads_q = heads_q, problem_.heads_kv = heads_kv;
    problem_.head_dim = dim, problem_.head_dim_v = dim_v;
    problem_.mask.causal = shape.causal;
    problem_.mask.varlen = packed;
    if (packed) problem_.mask.cu_seqlens_q = problem_.mask.cu_seqlens_k = upload(offsets);
    problem_.score.scale = x_.scale;
    problem_.on_device = true;
    problem_.deterministic = 1;
    workspace_size_ = kernel.workspace(problem_, 1);
    workspace_ = memory(workspace_size_);

    const auto tensor = [&](int heads, int width) {
      const std::int64_t row = std::int64_t{heads} * width;
      return Tensor{memory(2 * rows * row), x_.dtype, packed ? 0 : shape.seq * row, row, width};
    };
    o_.q = tensor(heads_q, dim), o_.k = tensor(heads_kv, dim), o_.v = tensor(heads_kv, dim_v);
    o_.out = tensor(heads_q, dim_v), o_.grad_out = tensor(heads_q, dim_v);
    o_.grad_q = tensor(heads_q, dim), o_.grad_k = tensor(heads_kv, dim), o_.grad_v = tensor(heads_kv, dim_v);
    o_.lse = {static_cast<float*>(memory(std::size_t{4} * rows * heads_q)),
              packed ? 0 : std::int64_t{heads_q} * shape.seq, x_.item_rows};
    expected_ = static_cast<float*>(memory(4 * size()));
    spread_ = static_cast<float*>(memory(4 * size()));
    count_ = static_cast<unsigned*>(memory(sizeof *count_));
    in_order_ = memory(2 * size());
    if (!complete_) return;
    fill_normal(o_.q.data, x_.dtype, size(), 4 * seed, nullptr);
    fill_normal(o_.k.data, x_.dtype, std::int64_t{rows} * heads_kv * dim, 4 * seed + 1, nullptr);
    fill_normal(o_.v.data, x_.dtype, std::int64_t{rows} * heads_kv * dim_v, 4 * seed + 2, nullptr);
    fill_normal(o_.grad_out.data, x_.dtype, std::int64_t{rows} * heads_q * dim_v, 4 * seed + 3, nullptr);
    expected_gradient(x_, o_.q.data, o_.k.data, o_.v.data, o_.grad_out.data, o_.out.data, o_.lse.data, expected_,
                      spread_, nullptr);
    cudaDeviceSynchronize();
  }
  bool complete() const { return complete_; }

  /// dQ of a call whose workspace and dQ are full of NaN: no sum of an earlier call is there to be found.
  Status run(int deterministic, cudaStream_t stream) {
    cudaMemsetAsync(workspace_, 0xff, workspace_size_, stream);
    cudaMemsetAsync(o_.grad_q.data, 0xff, 2 * size(), stream);
    problem_.deterministic = deterministic;
    return kernel_.backward(problem_, o_,
                            {.workspace = workspace_, .workspace_size = workspace_size_, .stream = stream});
  }
  void keep_in_order(cudaStream_t stream) {
    cudaMemcpyAsync(in_order_, o_.grad_q.data, 2 * size(), cudaMemcpyDeviceToDevice, stream);
  }

  /// Elements that the calls since the last question got wrong; that are not the deterministic call's sums.
  void compare(cudaStream_t stream) {
    count_wrong(o_.grad_q.data, expected_, spread_, x_.dtype, size(), count_, stream);
  }
  void compare_in_order(cudaStream_t stream) {
    count_other_sums(o_.grad_q.data, in_order_, spread_, x_.dtype, size(), count_, stream);
  }
  void forget(cudaStream_t stream) { cudaMemsetAsync(count_, 0, sizeof *count_, stream); }
  unsigned counted(cudaStream_t stream) {
    unsigned count = ~0u;
    if (cudaStreamSynchronize(stream) != cudaSuccess) return ~0u;
    cudaMemcpy(&count, count_, sizeof count, cudaMemcpyDeviceToHost);
    forget(stream);
    return count;
  }

 private:
  std::int64_t size() const { return std::int64_t{x_.rows} * x_.heads_q * x_.dim; }  // of dQ, elements
  void* memory(std::size_t bytes) {
    memory_.push_back(check::device_memory(bytes));
    complete_ = complete_ && memory_.back() != nullptr;
    return memory_.back().get();
  }
  const int* upload(const std::vector<int>& x) {
    void* const data = memory(4 * x.size());
    if (complete_) cudaMemcpy(data, x.data(), 4 * x.size(), cudaMemcpyHostToDevice);
    return static_cast<const int*>(data);
  }

  const Kernel& kernel_;
  bool complete_ = true;
  std::vector<std::shared_ptr<void>> memory_;
  RowsOfQueries x_;
  Problem problem_;
  BackwardOperands o_;
  void *workspace_ = nullptr, *in_order_ = nullptr;
  std::size_t workspace_size_ = 0;
  float *expected_ = nullptr, *spread_ = nullptr;  // (rows, heads_q, dim)
  unsigned* count_ = nullptr;
};

/// The deterministic call is right by the formula in float64. The default one adds up the same parts in another order,
/// every time, also beside other work on the device.
TEST_P(CudaScale, NoPartOfDqIsLost) {
  const Kernel* kernel = GetParam();
  ONEPASS_NEEDS_GPU_FOR(kernel);
  constexpr Shape kShapes[] = {{512, 1, true},  {256, 1, true},  {512, 1, false}, {1024, 4, true}, {777, 2, true},
                               {384, 2, false}, {2048, 1, true}, {0, 1, true},    {0, 4, false}};
  Scale beside(*kernel, {640, 1, true}, 99);
  ASSERT_TRUE(beside.complete());
  cudaStream_t stream = nullptr, other = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  unsigned seed = 0;
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << "seq " << shape.seq << ", group " << shape.group << ", causal " << shape.causal);
    Scale x(*kernel, shape, ++seed);
    ASSERT_TRUE(x.complete());
    x.forget(stream);
    ASSERT_TRUE(x.run(1, stream).ok());
    x.keep_in_order(stream);
    x.compare(stream);
    EXPECT_EQ(x.counted(stream), 0u) << "deterministic, elements that are wrong";
    for (int n = 0; n < kit::scaled(20); ++n) {
      if (n % 3 == 0) {
        ASSERT_TRUE(beside.run(n % 2, other).ok());
      }
      ASSERT_TRUE(x.run(0, stream).ok());
      x.compare_in_order(stream);
    }
    EXPECT_EQ(x.counted(stream), 0u) << "elements that are other sums";
    x.compare(stream);
    EXPECT_EQ(x.counted(stream), 0u) << "elements that are wrong";
  }
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  cudaStreamDestroy(stream);
  cudaStreamDestroy(other);
}

}  // namespace
}  // namespace onepass
