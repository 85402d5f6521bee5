// onepass_decode and onepass_merge through the C interface.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/half.h"
#include "kit/kit.h"
#include "onepass/onepass.h"
#if defined(__unix__)
#include <sys/mman.h>
#endif

namespace onepass {
namespace {

/// A compact float32 tensor with its DLTensor.
struct Owned {
  std::vector<std::int64_t> shape;
  std::vector<float> data;
  DLTensor tensor;

  explicit Owned(std::vector<std::int64_t> sizes, std::uint64_t seed = 0) : shape(std::move(sizes)) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    data.resize(static_cast<std::size_t>(count));
    for (float& x : data) x = normal(random);
    tensor = {
        data.data(), {kDLCPU, 0}, static_cast<std::int32_t>(shape.size()), {kDLFloat, 32, 1}, shape.data(), nullptr, 0};
  }
  Owned(const Owned&) = delete;
};
struct Ints {
  std::vector<std::int32_t> data;
  std::int64_t count;
  DLTensor tensor;

  explicit Ints(std::vector<std::int32_t> values)
      : data(std::move(values)), count(static_cast<std::int64_t>(data.size())) {
    tensor = {data.data(), {kDLCPU, 0}, 1, {kDLInt, 32, 1}, &count, nullptr, 0};
  }
};

template <class Args>
struct Scratch {
  std::vector<char> memory;
  void give(onepass_pass_t pass, Args& args) {
    std::size_t bytes = 0;
    ASSERT_EQ(onepass_workspace_size(pass, &args, &bytes), ONEPASS_OK) << onepass_last_error();
    memory.assign(bytes + 64, '\xff');
    args.workspace = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64);
    args.workspace_size = bytes;
  }
};

struct DecodeSetup {
  static constexpr std::int64_t kBatch = 3, kCapacity = 40, kHeads = 4, kHeadsKv = 2, kDim = 16;
  std::int64_t seq_q, seq_new;
  Owned q, k_cache, v_cache, k_new, v_new, out, lse;
  Ints lengths{{0, 17, 36}};
  onepass_decode_args_t args = ONEPASS_DECODE_ARGS_INIT;
  Scratch<onepass_decode_args_t> scratch;

  DecodeSetup(std::int64_t rows, std::int64_t fresh)
      : seq_q(rows),
        seq_new(fresh),
        q({kBatch, rows, kHeads, kDim}, 1),
        k_cache({kBatch, kCapacity, kHeadsKv, kDim}, 2),
        v_cache({kBatch, kCapacity, kHeadsKv, kDim}, 3),
        k_new({kBatch, fresh, kHeadsKv, kDim}, 4),
        v_new({kBatch, fresh, kHeadsKv, kDim}, 5),
        out({kBatch, rows, kHeads, kDim}, 6),
        lse({kBatch, kHeads, rows}, 7) {
    args.q = &q.tensor;
    args.k_cache = &k_cache.tensor;
    args.v_cache = &v_cache.tensor;
    args.cache_seqlens = &lengths.tensor;
    if (fresh > 0) {
      args.k_new = &k_new.tensor;
      args.v_new = &v_new.tensor;
    }
    args.out = &out.tensor;
    args.lse = &lse.tensor;
  }
};

TEST(Decode, AppendsThenAttends) {
  for (const std::int64_t seq_q : {1, 4, 20}) {
    DecodeSetup d(seq_q, 3);
    onepass_options_t options = ONEPASS_OPTIONS_INIT;
    options.causal = 1;
    d.args.options = &options;
    d.scratch.give(ONEPASS_DECODE, d.args);
    const std::vector<float> k_before = d.k_cache.data;
    ASSERT_EQ(onepass_decode(&d.args), ONEPASS_OK) << onepass_last_error();
    const std::int64_t row = DecodeSetup::kHeadsKv * DecodeSetup::kDim;
    for (std::int64_t b = 0; b < DecodeSetup::kBatch; ++b) {
      const std::int64_t length = d.lengths.data[static_cast<std::size_t>(b)];
      for (std::int64_t j = 0; j < DecodeSetup::kCapacity; ++j) {
        const bool fresh = j >= length && j < length + 3;
        const float* expected = fresh ? d.k_new.data.data() + (b * 3 + j - length) * row
                                      : k_before.data() + (b * DecodeSetup::kCapacity + j) * row;
        EXPECT_EQ(std::memcmp(expected, d.k_cache.data.data() + (b * DecodeSetup::kCapacity + j) * row,
                              static_cast<std::size_t>(row) * 4),
                  0)
            << "item " << b << " slot " << j;
      }
    }
    // The same as a forward over the caches with their new lengths.
    Ints total({3, 20, 39});
    Owned out({DecodeSetup::kBatch, seq_q, DecodeSetup::kHeads, DecodeSetup::kDim}),
        lse({DecodeSetup::kBatch, DecodeSetup::kHeads, seq_q});
    onepass_forward_args_t forward = ONEPASS_FORWARD_ARGS_INIT;
    options.k_length = &total.tensor;
    options.kernel = "fwd_cpu_oracle";
    forward.options = &options;
    forward.q = &d.q.tensor;
    forward.k = &d.k_cache.tensor;
    forward.v = &d.v_cache.tensor;
    forward.out = &out.tensor;
    forward.lse = &lse.tensor;
    ASSERT_EQ(onepass_forward(&forward), ONEPASS_OK) << onepass_last_error();
    for (std::size_t i = 0; i < out.data.size(); ++i) EXPECT_NEAR(d.out.data[i], out.data[i], 1e-5f);
    for (std::size_t i = 0; i < lse.data.size(); ++i) {
      if (std::isinf(lse.data[i])) {
        EXPECT_EQ(d.lse.data[i], lse.data[i]);
      } else {
        EXPECT_NEAR(d.lse.data[i], lse.data[i], 1e-5f);
      }
    }
  }
}

TEST(Decode, RefusesAFullCacheAndWritesNothing) {
  DecodeSetup d(1, 5);  // 36 + 5 > 40
  const std::vector<float> k_before = d.k_cache.data, out_before = d.out.data;
  std::vector<double> workspace(1 << 16);
  d.args.workspace = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(workspace.data()) + 63) / 64 * 64);
  d.args.workspace_size = workspace.size() * 8 - 64;
  EXPECT_EQ(onepass_decode(&d.args), ONEPASS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(onepass_last_error()).find("cache_seqlens[2] is 36 with 5 new tokens"), std::string::npos)
      << onepass_last_error();
  EXPECT_EQ(d.k_cache.data, k_before);
  EXPECT_EQ(d.out.data, out_before);
  d.args.k_new = nullptr;
  EXPECT_EQ(onepass_decode(&d.args), ONEPASS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(onepass_last_error()).find("go together"), std::string::npos);
  d.args.v_new = nullptr;
  d.lengths.data[1] = -1;
  EXPECT_EQ(onepass_decode(&d.args), ONEPASS_INVALID_ARGUMENT);
  d.lengths.data[1] = 41;
  EXPECT_EQ(onepass_decode(&d.args), ONEPASS_INVALID_ARGUMENT);
}

#if defined(__unix__)
TEST(Decode, WithoutMemoryTheCachesStayAsTheyAre) {
  // The reference kernel takes memory for all of a cache: 32 TB of address space, which nobody has to give.
  constexpr std::int64_t kSlots = std::int64_t{1} << 38, kDim = 16;
  const auto map = [](std::size_t bytes) {
    return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  constexpr std::size_t kBytes = std::size_t{kSlots} * kDim * 8;
  void *k_memory = map(kBytes), *v_memory = map(kBytes);
  if (k_memory == MAP_FAILED || v_memory == MAP_FAILED || kit::kSanitized) GTEST_SKIP() << "no such address space here";
  std::int64_t slots[4] = {1, kSlots, 1, kDim}, row[4] = {1, 1, 1, kDim}, one = 1;
  double values[3][kDim] = {{1}, {2}, {3}}, out[kDim];
  std::int32_t length = 0;
  const auto doubles = [](void* data, std::int64_t* shape) {
    return DLTensor{data, {kDLCPU, 0}, 4, {kDLFloat, 64, 1}, shape, nullptr, 0};
  };
  const DLTensor q = doubles(values[0], row), k_new = doubles(values[1], row), v_new = doubles(values[2], row);
  const DLTensor k = doubles(k_memory, slots), v = doubles(v_memory, slots), result = doubles(out, row);
  const DLTensor lengths{&length, {kDLCPU, 0}, 1, {kDLInt, 32, 1}, &one, nullptr, 0};
  onepass_decode_args_t args = ONEPASS_DECODE_ARGS_INIT;
  args.q = &q, args.k_cache = &k, args.v_cache = &v, args.cache_seqlens = &lengths;
  args.k_new = &k_new, args.v_new = &v_new, args.out = &result;
  Scratch<onepass_decode_args_t> scratch;
  scratch.give(ONEPASS_DECODE, args);
  const onepass_status_t status = onepass_decode(&args);
  const double first[2] = {*static_cast<double*>(k_memory), *static_cast<double*>(v_memory)};
  ::munmap(k_memory, kBytes);
  ::munmap(v_memory, kBytes);
  if (status == ONEPASS_OK) GTEST_SKIP() << "this machine promises any amount of memory";
  EXPECT_EQ(status, ONEPASS_OUT_OF_MEMORY) << onepass_last_error();
  EXPECT_EQ(first[0], 0);
  EXPECT_EQ(first[1], 0);
}
#endif

TEST(Decode, RefusesCachesThatOverlap) {
  DecodeSetup d(1, 1);
  d.scratch.give(ONEPASS_DECODE, d.args);
  d.v_cache.tensor.data = d.k_cache.data.data();
  EXPECT_EQ(onepass_decode(&d.args), ONEPASS_INVALID_ARGUMENT);
  std::vector<std::int64_t> broadcast{0, 32, 16, 1};
  d.v_cache.tensor.data = d.v_cache.data.data();
  d.v_cache.tensor.strides = broadcast.data();
  EXPECT_EQ(onepass_decode(&d.args), ONEPASS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(onepass_last_error()).find("v_cache"), std::string::npos);
}

struct MergeSetup {
  Owned out_a{{2, 5, 3, 8}, 1}, out_b{{2, 5, 3, 8}, 2}, out{{2, 5, 3, 8}, 3};
  Owned lse_a{{2, 3, 5}, 4}, lse_b{{2, 3, 5}, 5}, lse{{2, 3, 5}, 6};
  onepass_merge_args_t args = ONEPASS_MERGE_ARGS_INIT;
  MergeSetup() {
    args.out_a = &out_a.tensor;
    args.out_b = &out_b.tensor;
    args.out = &out.tensor;
    args.lse_a = &lse_a.tensor;
    args.lse_b = &lse_b.tensor;
    args.lse = &lse.tensor;
  }
};

TEST(Merge, FollowsItsFormula) {
  MergeSetup m;
  ASSERT_EQ(onepass_merge(&m.args), ONEPASS_OK) << onepass_last_error();
  for (int b = 0; b < 2; ++b) {
    for (int i = 0; i < 5; ++i) {
      for (int h = 0; h < 3; ++h) {
        const std::size_t row = static_cast<std::size_t>((b * 3 + h) * 5 + i);
        const double ea = std::exp(double{m.lse_a.data[row]}), eb = std::exp(double{m.lse_b.data[row]});
        EXPECT_NEAR(m.lse.data[row], std::log(ea + eb), 1e-6);
        for (int c = 0; c < 8; ++c) {
          const std::size_t at = static_cast<std::size_t>(((b * 5 + i) * 3 + h) * 8 + c);
          EXPECT_NEAR(m.out.data[at], (ea * m.out_a.data[at] + eb * m.out_b.data[at]) / (ea + eb), 1e-6);
        }
      }
    }
  }
}

TEST(Merge, InPlaceIsAllowedAndPartialOverlapIsNot) {
  MergeSetup separate, in_place;
  ASSERT_EQ(onepass_merge(&separate.args), ONEPASS_OK);
  in_place.args.out = in_place.args.out_a;
  in_place.args.lse = in_place.args.lse_b;
  ASSERT_EQ(onepass_merge(&in_place.args), ONEPASS_OK) << onepass_last_error();
  EXPECT_EQ(in_place.out_a.data, separate.out.data);
  EXPECT_EQ(in_place.lse_b.data, separate.lse.data);
  MergeSetup shifted;
  shifted.out.tensor.data = shifted.out_a.data.data() + 1;
  EXPECT_EQ(onepass_merge(&shifted.args), ONEPASS_INVALID_ARGUMENT);
  MergeSetup wrong;
  wrong.lse_b.shape = {2, 5, 3};
  EXPECT_EQ(onepass_merge(&wrong.args), ONEPASS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(onepass_last_error()).find("lse_b must have shape (2, 3, 5)"), std::string::npos);
  for (const std::int32_t threads : {-1, 1025}) {
    MergeSetup many;
    many.args.threads = threads;
    EXPECT_EQ(onepass_merge(&many.args), ONEPASS_INVALID_ARGUMENT);
    EXPECT_NE(std::string(onepass_last_error()).find("between 0 and 1024"), std::string::npos);
  }
  MergeSetup null;
  null.args.out_b = nullptr;
  EXPECT_EQ(onepass_merge(&null.args), ONEPASS_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace onepass
