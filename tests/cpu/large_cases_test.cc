// Sizes past 2^31 elements and millions of keys, in little memory: pages that repeat.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <memory>

#include "check/random.h"
#include "cpu/every_kernel.h"
#include "cpu/merge.h"

namespace onepass {
namespace {

using namespace every_kernel;

/// `times` blocks of `bytes` (whole pages) one after the other, all of them the same memory; the last one is its own if
/// asked for.
class RepeatedMemory {
 public:
  RepeatedMemory(std::size_t bytes, std::int64_t times, bool own_last)
      : bytes_(bytes), size_(bytes * static_cast<std::size_t>(times)) {
    void* base = mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    const int file = memfd_create("repeated", 0);
    if (base == MAP_FAILED || file < 0 || ftruncate(file, static_cast<off_t>(2 * bytes)) != 0) return;
    base_ = static_cast<char*>(base);
    ok_ = true;
    for (std::int64_t n = 0; n < times; ++n) {
      char* at = base_ + static_cast<std::size_t>(n) * bytes;
      const bool own = own_last && n + 1 == times;
      const void* got =
          mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, own ? static_cast<off_t>(bytes) : 0);
      ok_ = ok_ && got == at;
    }
    close(file);
  }
  RepeatedMemory(const RepeatedMemory&) = delete;
  RepeatedMemory& operator=(const RepeatedMemory&) = delete;
  ~RepeatedMemory() {
    if (base_ != nullptr) munmap(base_, size_);
  }
  bool ok() const { return ok_; }
  char* data() const { return base_; }
  char* last() const { return base_ + size_ - bytes_; }

 private:
  std::size_t bytes_, size_;
  char* base_ = nullptr;
  bool ok_ = false;
};

/// Address space of which only touched pages exist.
class SparseMemory {
 public:
  explicit SparseMemory(std::size_t size)
      : size_(size),
        data_(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  ~SparseMemory() {
    if (ok()) munmap(data_, size_);
  }
  bool ok() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }

 private:
  std::size_t size_;
  void* data_;
};

void fill_normal(char* data, std::size_t bytes, DType dtype, std::uint64_t seed) {
  check::Random random(seed);
  const auto count = static_cast<std::int64_t>(bytes) / dtype_size(dtype);
  for (std::int64_t n = 0; n < count; ++n) store_float(data, dtype, n, static_cast<float>(random.normal()));
}

/// 16384 items of 128 rows and 8 heads of 128: 2^31 elements in each operand. The last item has rows, the others none:
/// it must be what it is alone.
TEST(Large, C25PastTwoToThe31Elements) {
  if (kit::kSanitized) GTEST_SKIP() << "shadow memory of 36 GiB";
  constexpr std::int64_t kBatch = 16384, kSeq = 128, kHeads = 8, kDim = 128, kItem = kSeq * kHeads * kDim;
  constexpr std::int64_t kBlockItems = 64;  // the unit that repeats: fewer mappings
  constexpr std::size_t kBytes = static_cast<std::size_t>(2 * kItem * kBlockItems);
  std::vector<std::unique_ptr<RepeatedMemory>> memory;
  for (int n = 0; n < 9; ++n) {
    memory.push_back(std::make_unique<RepeatedMemory>(kBytes, kBatch / kBlockItems, true));
    if (!memory.back()->ok()) GTEST_SKIP() << "this system grants no 36 GiB of address space";
  }
  const auto tensor = [&](std::size_t n) { return Tensor{memory[n]->data(), DType::f16, kItem, kHeads * kDim, kDim}; };
  const auto last_item = [&](std::size_t n) { return memory[n]->last() + 2 * kItem * (kBlockItems - 1); };
  for (std::size_t n = 0; n < 4; ++n) fill_normal(last_item(n), 2 * kItem, DType::f16, n);
  std::vector<std::int32_t> q_length(kBatch, 0);
  q_length.back() = kSeq;
  std::vector<float> lse(static_cast<std::size_t>(kBatch * kHeads * kSeq));
  std::vector<char> alone(4 * 2 * kItem);

  Problem p;
  p.dtype = DType::f16;
  p.batch = kBatch;
  p.seq_q = p.seq_k = p.total_q = p.total_k = kSeq;
  p.heads_q = p.heads_kv = kHeads;
  p.head_dim = p.head_dim_v = kDim;
  p.score.scale = std::sqrt(1.0 / kDim);
  p.mask.q_length = q_length.data();
  Problem one = p;
  one.batch = 1;
  one.mask.q_length = nullptr;
  const auto as_one = [&](Tensor t, std::size_t n) { return t.data = last_item(n), t; };
  const auto to_alone = [&](Tensor t, std::size_t n) { return t.data = alone.data() + 2 * kItem * n, t; };

  Case shape([] {
    CaseSpec spec;
    spec.dtype = DType::f16;
    return spec;
  }());
  for (const Kernel* kernel : kernels_for(shape)) {
    if (kernel->pass != Pass::forward) continue;
    SparseMemory workspace(kernel->workspace(p, 2) + 64);
    ASSERT_TRUE(workspace.ok());
    const RowTensor rows{lse.data(), kHeads * kSeq, kSeq};
    ASSERT_TRUE(kernel
                    ->forward(p, {tensor(0), tensor(1), tensor(2), tensor(4), rows},
                              {.workspace = workspace.data(), .threads = 2})
                    .ok());
    run(*kernel, one,
        ForwardOperands{as_one(tensor(0), 0), as_one(tensor(1), 1), as_one(tensor(2), 2), to_alone(tensor(4), 0), {}});
    EXPECT_EQ(std::memcmp(last_item(4), alone.data(), 2 * kItem), 0) << kernel->name;
    EXPECT_EQ(lse[0], -HUGE_VALF) << kernel->name;
    EXPECT_TRUE(std::isfinite(lse.back())) << kernel->name;
  }

  p.pass = one.pass = Pass::backward;
  Case backward_shape([] {
    CaseSpec spec;
    spec.pass = Pass::backward;
    spec.dtype = DType::f16;
    return spec;
  }());
  for (const Kernel* kernel : kernels_for(backward_shape)) {
    SparseMemory workspace(kernel->workspace(p, 2) + 64);
    ASSERT_TRUE(workspace.ok());
    const RowTensor rows{lse.data(), kHeads * kSeq, kSeq};
    const RowTensor last_rows{lse.data() + (kBatch - 1) * kHeads * kSeq, kHeads * kSeq, kSeq};
    const BackwardOperands x{tensor(0), tensor(1), tensor(2), tensor(4), tensor(3), rows,
                             {},        tensor(5), tensor(6), tensor(7), {},        {}};
    ASSERT_TRUE(kernel->backward(p, x, {.workspace = workspace.data(), .threads = 2}).ok());
    const BackwardOperands alone_x{as_one(tensor(0), 0),
                                   as_one(tensor(1), 1),
                                   as_one(tensor(2), 2),
                                   as_one(tensor(4), 4),
                                   as_one(tensor(3), 3),
                                   last_rows,
                                   {},
                                   to_alone(tensor(5), 0),
                                   to_alone(tensor(6), 1),
                                   to_alone(tensor(7), 2),
                                   {},
                                   {}};
    run(*kernel, one, alone_x);
    for (std::size_t n = 0; n < 3; ++n) {
      EXPECT_EQ(std::memcmp(last_item(5 + n), alone.data() + 2 * kItem * n, 2 * kItem), 0) << kernel->name << " " << n;
      EXPECT_EQ(load_float(memory[5 + n]->data(), DType::f16, 77), 0) << kernel->name;
    }
  }
}

/// 4194304 keys, one period of 65536 repeated: the last row of a causal problem is a softmax over one period, its lse
/// larger by ln 64; and it is the merge of two halves.
TEST(Large, C26FourMillionKeys) {
  if (kit::kSanitized) GTEST_SKIP() << "hours";
  constexpr std::int64_t kSeq = 4194304, kPeriod = 65536, kDim = 128, kHeads = 8, kRows = 16;
  constexpr std::size_t kBytes = static_cast<std::size_t>(2 * kPeriod * kDim);
  const RepeatedMemory k(kBytes, kSeq / kPeriod, false), v(kBytes, kSeq / kPeriod, false);
  if (!k.ok() || !v.ok()) GTEST_SKIP() << "this system grants no 2 GiB of repeated memory";
  fill_normal(k.data(), kBytes, DType::bf16, 1);
  fill_normal(v.data(), kBytes, DType::bf16, 2);
  std::vector<std::uint16_t> q(static_cast<std::size_t>(2048 * kHeads * kDim));
  fill_normal(reinterpret_cast<char*>(q.data()), q.size() * 2, DType::bf16, 3);
  for (std::uint16_t& x : q) x = float_to_bf16(2 * bf16_to_float(x));

  Problem p;
  p.dtype = DType::bf16;
  p.batch = p.heads_kv = 1;
  p.heads_q = kHeads;
  p.head_dim = p.head_dim_v = kDim;
  p.score.scale = std::sqrt(1.0 / kDim);
  p.mask.causal = true;
  const auto sized = [&](std::int64_t rows, std::int64_t keys) {
    Problem size = p;
    size.seq_q = size.total_q = rows;
    size.seq_k = size.total_k = keys;
    return size;
  };
  const auto keys_from = [&](const RepeatedMemory& memory, std::int64_t first) {
    return Tensor{memory.data() + 2 * first * kDim, DType::bf16, 0, kDim, kDim};
  };
  struct Result {
    std::vector<float> out, lse;
  };
  const auto last_rows = [&](const Kernel& kernel, const Problem& size, std::int64_t first_key) {
    Result r{std::vector<float>(static_cast<std::size_t>(size.seq_q * kHeads * kDim)),
             std::vector<float>(static_cast<std::size_t>(size.seq_q * kHeads))};
    // The queries' last rows: all calls end with the same one.
    const std::int64_t skipped = 2048 - size.seq_q;
    run(kernel, size,
        ForwardOperands{{q.data() + skipped * kHeads * kDim, DType::bf16, 0, kHeads * kDim, kDim},
                        keys_from(k, first_key),
                        keys_from(v, first_key),
                        {r.out.data(), DType::f32, 0, kHeads * kDim, kDim},
                        {r.lse.data(), 0, size.seq_q}});
    return r;
  };
  const auto row_of = [&](Result& r, std::int64_t rows) { return r.out.data() + (rows - 1) * kHeads * kDim; };
  const auto expect_same = [&](Result& a, std::int64_t rows_a, Result& b, std::int64_t rows_b, double more,
                               const char* kernel) {
    for (std::int64_t h = 0; h < kHeads; ++h) {
      const auto end = [&](std::int64_t rows) { return static_cast<std::size_t>((h + 1) * rows - 1); };
      EXPECT_NEAR(a.lse[end(rows_a)], b.lse[end(rows_b)] + more, 3e-5) << kernel;
      for (std::int64_t x = 0; x < kDim; ++x) {
        EXPECT_NEAR(row_of(a, rows_a)[h * kDim + x], row_of(b, rows_b)[h * kDim + x], 2e-4) << kernel;
      }
    }
  };

  // The two that the registry would take: others need minutes.
  int tried = 0;
  for (const Kernel* kernel : check::runnable_kernels(Pass::forward)) {
    const bool first = tried == 0 && kernel->pass == Pass::decode, second = tried == 1 && kernel->pass == Pass::forward;
    if (!first && !second) continue;
    ++tried;
    Result all = last_rows(*kernel, sized(kRows, kSeq), 0), period = last_rows(*kernel, sized(1, kPeriod), 0);
    expect_same(all, kRows, period, 1, std::log(64.0), kernel->name);

    Result halves[2], merged{std::vector<float>(kHeads * kDim), std::vector<float>(kHeads)};
    for (int n = 0; n < 2; ++n) halves[n] = last_rows(*kernel, sized(1, kSeq / 2), n * kSeq / 2);
    const auto tensor = [&](Result& r) { return Tensor{r.out.data(), DType::f32, 0, kHeads * kDim, kDim}; };
    const auto rows = [&](Result& r) { return RowTensor{r.lse.data(), 0, 1}; };
    ASSERT_TRUE(cpu::merge_partial(sized(1, kSeq), tensor(halves[0]), rows(halves[0]), tensor(halves[1]),
                                   rows(halves[1]), tensor(merged), rows(merged), 1)
                    .ok());
    expect_same(all, kRows, merged, 1, 0, kernel->name);

    if (kernel->pass == Pass::decode) continue;
    if (kit::scaled(1) >= 10) {  // minutes
      Result full = last_rows(*kernel, sized(2048, kSeq), 0);
      expect_same(full, 2048, period, 1, std::log(64.0), kernel->name);
    }
    p.mask.window_left = 1000;
    Result wide = last_rows(*kernel, sized(2048, kSeq), 0),
           near = last_rows(*kernel, sized(1, kPeriod), kSeq - kPeriod);
    expect_same(wide, 2048, near, 1, 0, kernel->name);
  }
  EXPECT_EQ(tried, 2);
}

}  // namespace
}  // namespace onepass
