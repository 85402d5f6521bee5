// The emulator's units of compute capability 9.0: what is right is right for every seed, each kind of fault is found.
#include "emulator/machine/units.h"

#include <gtest/gtest.h>

#include "core/half.h"
#include "cuda/host/tensor_map.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace onepass::emulator {
namespace {

constexpr int kSeeds = 20, kThreads = 128, kBytes = 64 * 1024;
constexpr std::uint32_t kBarrier = kSharedBase + kBytes - 64, kTile = kSharedBase;

std::string error_of(std::uint64_t seed, const std::function<void()>& kernel) {
  set_seed(seed);
  return run_grid(1, kThreads, kBytes, kernel).text();
}
testing::AssertionResult has(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos ? testing::AssertionSuccess() : testing::AssertionFailure() << text;
}
void init_barrier(int count) {
  if (threadIdx.x == 0) ptx::mbarrier_init(kBarrier, count);
  __syncthreads();
}

TEST(HopperUnits, ABarrierCountsThreadsAndBytes) {
  const auto kernel = [](int count, int arrivals, std::uint32_t parity) {
    return [=] {
      init_barrier(count);
      if (threadIdx.x < static_cast<unsigned>(arrivals)) ptx::mbarrier_arrive(kBarrier);
      ptx::mbarrier_wait(kBarrier, parity);
    };
  };
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_EQ(error_of(seed, kernel(128, 128, 0)), "");
    EXPECT_EQ(error_of(seed, kernel(128, 0, 1)), "");  // the phase before the first has ended
    EXPECT_TRUE(has(error_of(seed, kernel(128, 127, 0)), "deadlock"));
    EXPECT_TRUE(has(error_of(seed, kernel(64, 128, 0)), "deadlock"));  // two phases: the parity of the first is back
  }
  EXPECT_TRUE(has(error_of(1, [] { ptx::mbarrier_arrive(kBarrier); }), "no mbarrier"));
  EXPECT_TRUE(has(error_of(1,
                           [] {
                             init_barrier(1);
                             if (threadIdx.x != 0) return;
                             ptx::mbarrier_arrive_expect(kBarrier, 16);
                             ptx::mbarrier_arrive(kBarrier);
                           }),
                  "one thread more"));
}

/// 40 rows of 72 columns of one head in 64-column boxes of 16 rows.
struct Operand {
  std::vector<std::uint16_t> memory = std::vector<std::uint16_t>(40 * 80);
  CUtensorMap map;

  Operand() {
    for (std::size_t n = 0; n < memory.size(); ++n) memory[n] = static_cast<std::uint16_t>(n);
    const Tensor tensor = {memory.data(), DType::f16, 0, 80, 80};
    EXPECT_TRUE(cuda::encode_map(map, tensor, {72, 40, 1, 1}, 16).ok());
    forget_global();
    allow_global(memory.data(), 2 * (39 * 80 + 72));
  }
  ~Operand() { forget_global(); }
  /// The first `rows` of a box are rows [row, row + rows).
  static ptx::TmaCoordinates box(int column, int row, int rows) { return {column, 16 - rows, row + rows, 0, 0}; }
};

std::uint16_t element(int row, int column) {  // of a box in shared memory
  const int chunk = column / 8 ^ row % 8;
  std::uint16_t x;
  std::memcpy(&x, ptx::dynamic_shared() + row * 128 + chunk * 16 + column % 8 * 2, 2);
  return x;
}

TEST(HopperUnits, ABoxIsSwizzledAndZeroOutside) {
  Operand x;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const int first : {0, 64}) {
      EXPECT_EQ(error_of(seed,
                         [&] {
                           init_barrier(1);
                           if (threadIdx.x == 0) {
                             ptx::mbarrier_arrive_expect(kBarrier, 16 * 128);
                             ptx::tma_load(kTile, &x.map, kBarrier, Operand::box(first, 29, 11));
                           }
                           ptx::mbarrier_wait(kBarrier, 0);
                           for (int row = 0; row < 16; ++row) {
                             for (int column = 0; column < 64; ++column) {
                               const bool inside = row < 11 && first + column < 72;
                               const int right = inside ? (29 + row) * 80 + first + column : 0;
                               if (element(row, column) != right) fault("row %d column %d", row, column);
                             }
                           }
                         }),
                "");
    }
  }
}

TEST(HopperUnits, NoBoxTouchesWhatIsNotTheOperands) {
  Operand x;
  const auto load = [&](const ptx::TmaCoordinates& at) {
    return error_of(1, [&, at] {
      init_barrier(1);
      if (threadIdx.x == 0) ptx::tma_load(kTile, &x.map, kBarrier, at);
    });
  };
  EXPECT_TRUE(has(load(Operand::box(0, 39, 2)), "outside the tensor altogether"));  // c2 is 41, of 41
  EXPECT_TRUE(has(load(Operand::box(128, 0, 16)), "outside the tensor altogether"));
  EXPECT_TRUE(has(load({0, 0, 15, 0, 0}), "outside every operand"));  // rows -1 to 14
  const Tensor unaligned = {x.memory.data() + 1, DType::f16, 0, 80, 80}, odd = {x.memory.data(), DType::f16, 0, 81, 81};
  CUtensorMap map;
  EXPECT_FALSE(cuda::encode_map(map, unaligned, {72, 40, 1, 1}, 16).ok());
  EXPECT_FALSE(cuda::encode_map(map, odd, {72, 40, 1, 1}, 16).ok());
  EXPECT_FALSE(cuda::encode_map(map, {x.memory.data(), DType::f16, 0, 80, 80}, {72, 40, 1, 1}, 257).ok());
}

/// What is left out between a store to shared memory, its bulk copy and the next store.
enum class Without { nothing, fence, wait, end };
std::string store_twice(std::uint64_t seed, float* g_out, Without without) {
  return error_of(seed, [=] {
    if (threadIdx.x != 0) return;
    units(block());
    for (int n = 0; n < 2; ++n) {
      ptx::store_shared(kTile, 1.f + n, 2.f, 3.f, 4.f);
      if (without != Without::fence) ptx::fence_async_shared();
      ptx::bulk_reduce_add(g_out, kTile, 16);
      ptx::bulk_commit();
      if (without == Without::end || (n == 0 && without == Without::wait)) continue;
      ptx::bulk_wait_read_but<0>();
    }
  });
}
TEST(HopperUnits, ABulkCopyReadsWhatWasFencedUntilItIsWaitedFor) {
  alignas(16) float out[4] = {};
  forget_global();
  int overwritten = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    out[0] = 0;
    EXPECT_EQ(store_twice(seed, out, Without::nothing), "");
    EXPECT_EQ(out[0], 3) << "both have arrived when the launch ends";
    EXPECT_TRUE(has(store_twice(seed, out, Without::fence), "without a fence"));
    EXPECT_NE(store_twice(seed, out, Without::end), "");
    overwritten += has(store_twice(seed, out, Without::wait), "while a bulk copy read it") ? 1 : 0;
  }
  EXPECT_GE(overwritten, kSeeds / 2);
}

/// D (64, 64) = A (64, 16) B (16, 64): A's rows are 1 to 64 in column 0, B's first row is 1 to 64. `broken` leaves a
/// rule out.
enum class Broken { none, no_fence, no_wait, sums, operands };
std::string multiply(std::uint64_t seed, Broken broken) {
  return error_of(seed, [=] {
    const auto thread = static_cast<int>(threadIdx.x), row = thread / 32 * 16 + thread % 32 / 4;
    units(block());
    for (int n = thread; n < 16 * 64; n += kThreads) {
      const int k = n / 64, column = n % 64, chunk = column / 8 ^ k % 8;
      const std::uint16_t x = k == 0 ? float_to_f16(1.f + column) : 0;
      std::memcpy(ptx::dynamic_shared() + k * 128 + chunk * 16 + column % 8 * 2, &x, 2);
    }
    __syncthreads();
    float r_d[32];
    std::uint32_t r_a[4] = {};
    if (thread % 4 == 0) r_a[0] = float_to_f16(1.f + row), r_a[1] = float_to_f16(9.f + row);
    if (broken != Broken::no_fence) ptx::wgmma_fence();
    ptx::Wgmma<__half, 64>::rs<1>(r_d, r_a, ptx::descriptor(ptx::descriptor_low(kTile, 16 * 128)), 0);
    ptx::wgmma_commit();
    if (!std::isnan(r_d[3])) fault("sums before the wait");
    if (broken == Broken::sums) r_d[0] = 0;
    if (broken == Broken::operands) r_a[2] = 1;
    if (broken == Broken::no_wait) return;
    ptx::wgmma_wait<0>();
    for (int i = 0; i < 32; ++i) {
      const int r = row + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (thread % 4) + i % 2;
      if (r_d[i] != static_cast<float>((r + 1) * (column + 1))) fault("row %d column %d", r, column);
    }
  });
}
TEST(HopperUnits, AProductIsThereAfterItsWaitAndNotBefore) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_EQ(multiply(seed, Broken::none), "");
    EXPECT_TRUE(has(multiply(seed, Broken::no_fence), "without a fence"));
    EXPECT_TRUE(has(multiply(seed, Broken::no_wait), "without a wait"));
    EXPECT_TRUE(has(multiply(seed, Broken::sums), "wrote sums that are under way"));
    EXPECT_TRUE(has(multiply(seed, Broken::operands), "changed an operand in registers"));
  }
}

TEST(HopperUnits, RegistersThatNobodyGaveBackAreAFault) {
  const auto error = [](const std::function<void()>& kernel) { return run_grid(1, 256, 1024, kernel).text(); };
  const auto first = [] { return threadIdx.x < 128; };  // warpgroup; the launch gives 248
  EXPECT_EQ(error([&] { first() ? ptx::registers_increase<256>() : ptx::registers_decrease<240>(); }), "");
  EXPECT_TRUE(has(error([&] { first() ? ptx::registers_increase<256>() : void(); }), "504 registers of the 496"));
  EXPECT_TRUE(has(error([&] { ptx::registers_decrease<256>(); }), "setmaxnreg.dec from 248 to 256"));
  EXPECT_TRUE(has(error([&] { ptx::registers_increase<240>(); }), "setmaxnreg.inc from 248 to 240"));
}

}  // namespace
}  // namespace onepass::emulator
