// Sizes past what a grid may count in y and z, and past 2^31 elements.
#include "cuda/cuda_kit.h"

namespace onepass {
namespace {

using namespace cuda_kit;

/// C24: more than 65,535 of everything that a grid may count. A few elements each: there are many, and each costs a
/// draw, a reference and a comparison.
class CudaMany : public testing::TestWithParam<Pass> {
 protected:
  static constexpr int kMany = 66000;
  static CaseSpec few(DType dtype) { return sized(GetParam(), dtype, 3, 4, 8); }
};
INSTANTIATE_TEST_SUITE_P(Passes, CudaMany, testing::Values(Pass::forward, Pass::backward),
                         [](const auto& pass) { return pass.param == Pass::forward ? "forward" : "backward"; });

TEST_P(CudaMany, C24Items) {
  ONEPASS_NEEDS_GPU();
  CaseSpec spec = few(DType::bf16);
  spec.batch = kMany;
  expect_everywhere(spec);
}

TEST_P(CudaMany, C24Heads) {
  ONEPASS_NEEDS_GPU();
  CaseSpec spec = few(DType::f16);
  spec.heads_q = spec.heads_kv = kMany;
  expect_everywhere(spec);
}

TEST_P(CudaMany, C24Sequences) {
  ONEPASS_NEEDS_GPU();
  CaseSpec spec = few(DType::bf16);
  spec.batch = kMany;
  spec.cu_seqlens_q = spec.cu_seqlens_k = {0};
  for (int n = 0; n < kMany; ++n) {
    spec.cu_seqlens_q.push_back(spec.cu_seqlens_q.back() + n % 4);
    spec.cu_seqlens_k.push_back(spec.cu_seqlens_k.back() + (n + 1) % 5);
  }
  spec.total_q = spec.cu_seqlens_q.back();
  spec.total_k = spec.cu_seqlens_k.back();
  expect_everywhere(spec);
}

/// C25: 2^31 elements an operand. The last item has rows, the others none: it must be what it is alone.
TEST(CudaLarge, C25PastTwoToThe31Elements) {
  ONEPASS_NEEDS_GPU();
  constexpr std::int64_t kBatch = 16385, kSeq = 128, kHeads = 8, kDim = 128, kItem = kSeq * kHeads * kDim;
  std::size_t available = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&available, &total), cudaSuccess);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const std::size_t operands = pass == Pass::backward ? 8 : 4;
    CaseSpec spec = sized(pass, DType::f16, kSeq, kSeq, kDim);
    spec.heads_q = spec.heads_kv = kHeads;
    Case c(spec);
    const Reference reference(c);
    for (const Kernel* kernel : kernels_for(c)) {
      Problem p = c.problem();
      p.batch = kBatch;
      p.on_device = true;
      const std::size_t scratch = kernel->workspace(p, 1);
      if (operands * 2 * kItem * kBatch + scratch + (std::size_t{2} << 30) > available) continue;
      std::vector<std::int32_t> lengths(kBatch, 0);
      lengths.back() = kSeq;
      const DeviceMirror mirror(c.memory());
      ASSERT_TRUE(mirror.status().ok());
      const auto q_length = check::device_memory(4 * kBatch);
      cudaMemcpy(q_length.get(), lengths.data(), 4 * kBatch, cudaMemcpyHostToDevice);
      p.mask.q_length = static_cast<const std::int32_t*>(q_length.get());
      const auto workspace = check::device_memory(scratch);
      std::vector<std::shared_ptr<void>> memory;
      constexpr std::int64_t kLast = (kBatch - 1) * kItem;
      const auto enlarged = [&](Tensor t) {  // the last item is the case's
        memory.push_back(check::device_memory(2 * kItem * kBatch));
        auto* data = static_cast<char*>(memory.back().get());
        cudaMemset(data, 0xff, 2 * kItem * kBatch);
        cudaMemcpy(data + 2 * kLast, t.data, 2 * kItem, cudaMemcpyDeviceToDevice);
        return Tensor{data, t.dtype, kItem, kHeads * kDim, kDim};
      };
      const auto back = [&](const Tensor& large, const Tensor& small) {
        cudaMemcpy(small.data, static_cast<char*>(large.data) + 2 * kLast, 2 * kItem, cudaMemcpyDeviceToDevice);
      };
      const auto rows = check::device_memory(4 * kBatch * kHeads * kSeq);
      RowTensor lse{static_cast<float*>(rows.get()), kHeads * kSeq, kSeq};
      float* last_rows = lse.row(kBatch - 1, 0, 0);
      const Launch launch{.workspace = workspace.get(), .workspace_size = scratch};
      Status status;
      if (pass == Pass::forward) {
        const ForwardOperands small = mirror.at(c.forward_operands());
        const ForwardOperands x{enlarged(small.q), enlarged(small.k), enlarged(small.v), enlarged(small.out), lse};
        status = kernel->forward(p, x, launch);
        back(x.out, small.out);
        cudaMemcpy(small.lse.data, last_rows, 4 * kHeads * kSeq, cudaMemcpyDeviceToDevice);
      } else {
        const BackwardOperands small = mirror.at(c.backward_operands());
        cudaMemcpy(last_rows, small.lse.data, 4 * kHeads * kSeq, cudaMemcpyDeviceToDevice);
        BackwardOperands x{enlarged(small.q),
                           enlarged(small.k),
                           enlarged(small.v),
                           enlarged(small.out),
                           enlarged(small.grad_out),
                           lse,
                           {},
                           enlarged(small.grad_q),
                           enlarged(small.grad_k),
                           enlarged(small.grad_v),
                           {},
                           {}};
        status = kernel->backward(p, x, launch);
        back(x.grad_q, small.grad_q);
        back(x.grad_k, small.grad_k);
        back(x.grad_v, small.grad_v);
      }
      ASSERT_TRUE(status.ok()) << kernel->name << ": " << status.text();
      ASSERT_TRUE(mirror.download().ok()) << kernel->name;
      EXPECT_TRUE(kit::passes(judged(c, reference))) << kernel->name;
    }
  }
}

}  // namespace
}  // namespace onepass
