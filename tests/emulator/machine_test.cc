// The emulator itself: right kernels are right for every seed, each kind of fault is found, by its symptom or by name.
#include "emulator/machine/machine.h"

#include <gtest/gtest.h>

#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/reduce.cuh"

namespace onepass::emulator {
namespace {

constexpr int kSeeds = 40, kThreads = 64, kBytes = 16 * kThreads;

Status run(std::uint64_t seed, std::int64_t blocks, std::int64_t shared_bytes, const std::function<void()>& kernel) {
  set_seed(seed);
  forget_global();
  return run_grid(blocks, kThreads, shared_bytes, kernel);
}
std::string error_of(std::uint64_t seed, std::int64_t blocks, const std::function<void()>& kernel) {
  return run(seed, blocks, kBytes, kernel).text();
}
testing::AssertionResult has(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos ? testing::AssertionSuccess() : testing::AssertionFailure() << text;
}

/// What a kernel that is right leaves out.
enum class Fault { none, commit, wait, arrival, departure };

/// Each thread copies 16 bytes of eight tiles, one after the other, through one buffer, and adds up what its neighbour
/// of the other warp copied.
void pipeline(const std::vector<float>& g_in, std::vector<float>& g_out, Fault without) {
  const auto thread = static_cast<int>(threadIdx.x);
  auto* s_tile = reinterpret_cast<float*>(ptx::dynamic_shared());
  float sum = 0;
  for (int tile = 0; tile < 8; ++tile) {
    ptx::cp_async_16(ptx::shared_address(s_tile + 4 * thread),
                     &g_in[static_cast<std::size_t>(kThreads * tile + thread) * 4]);
    if (without != Fault::commit) ptx::cp_async_commit();
    if (without != Fault::wait) ptx::cp_async_wait<0>();
    if (without != Fault::arrival) __syncthreads();
    for (int i = 0; i < 4; ++i) sum += s_tile[4 * (thread ^ 32) + i];
    if (without != Fault::departure) __syncthreads();
  }
  g_out[static_cast<std::size_t>(thread)] = sum;
}
/// Seeds for which the sums are wrong.
int wrong_pipelines(Fault without) {
  std::vector<float> in(kThreads * 8 * 4), out(kThreads);
  for (std::size_t n = 0; n < in.size(); ++n) in[n] = static_cast<float>(n);
  int wrong = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    EXPECT_TRUE(run(static_cast<std::uint64_t>(seed), 1, kBytes, [&] { pipeline(in, out, without); }).ok());
    bool right = true;
    for (int thread = 0; thread < kThreads; ++thread) {
      float sum = 0;
      for (int n = 0; n < 8 * 4; ++n)
        sum += in[static_cast<std::size_t>(n / 4 * 4 * kThreads + 4 * (thread ^ 32) + n % 4)];
      right = right && out[static_cast<std::size_t>(thread)] == sum;
    }
    wrong += right ? 0 : 1;
  }
  return wrong;
}

TEST(Emulator, ARightPipelineIsRightForEverySeed) {
  EXPECT_EQ(wrong_pipelines(Fault::none), 0);
}
TEST(Emulator, AMissingStepOfAPipelineIsFoundByEverySeed) {
  EXPECT_EQ(wrong_pipelines(Fault::commit), kSeeds);
  EXPECT_EQ(wrong_pipelines(Fault::wait), kSeeds);
  EXPECT_EQ(wrong_pipelines(Fault::arrival), kSeeds);
  EXPECT_EQ(wrong_pipelines(Fault::departure), kSeeds);
}

TEST(Emulator, AWaitForAllButTheNewestGroupLeavesThatOneOpen) {
  std::vector<float> in(8, 1.0f);
  int newest_late = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    ASSERT_TRUE(run(static_cast<std::uint64_t>(seed), 1, kBytes, [&] {
                  if (threadIdx.x != 0) return;
                  auto* s = reinterpret_cast<float*>(ptx::dynamic_shared());
                  for (int group = 0; group < 2; ++group) {
                    ptx::cp_async_16(ptx::shared_address(s + 4 * group), in.data() + 4 * group);
                    ptx::cp_async_commit();
                  }
                  ptx::cp_async_wait<1>();
                  EXPECT_EQ(s[0], 1.0f);
                  newest_late += std::isnan(s[4]) ? 1 : 0;
                }).ok());
  }
  EXPECT_GT(newest_late, kSeeds / 2);
  EXPECT_LT(newest_late, kSeeds);
}

/// Lanes write a row each, and ldmatrix gives them the rows of others.
int wrong_matrices(bool with_syncwarp) {
  int wrong = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    bool right = true;
    EXPECT_TRUE(run(static_cast<std::uint64_t>(seed), 1, 32 * kThreads, [&] {
                  const auto thread = static_cast<std::uint32_t>(threadIdx.x), lane = thread % 32;
                  const std::uint32_t s_warp = kSharedBase + thread / 32 * 1024;
                  for (std::uint32_t word = 0; word < 4; ++word)
                    ptx::store_shared(s_warp + 16 * lane + 4 * word, 4 * lane + word);
                  if (with_syncwarp) __syncwarp();
                  std::uint32_t r[4];
                  ptx::ldmatrix_x4(r, s_warp + 16 * (31 - lane));
                  for (std::uint32_t m = 0; m < 4; ++m) right &= r[m] == 4 * (31 - (8 * m + lane / 4)) + lane % 4;
                }).ok());
    wrong += right ? 0 : 1;
  }
  return wrong;
}
TEST(Emulator, WhatOtherLanesWroteNeedsASyncwarp) {
  EXPECT_EQ(wrong_matrices(true), 0);
  EXPECT_EQ(wrong_matrices(false), kSeeds);
}

TEST(Emulator, SharedMemoryOutOfRangeIsAFault) {
  EXPECT_TRUE(has(error_of(1, 1, [] { ptx::store_shared(kSharedBase + kBytes, 1u); }), "the block has 1024"));
  EXPECT_TRUE(has(error_of(1, 1, [] { ptx::store_shared(kSharedBase - 4, 1u); }), "at byte -4"));
  EXPECT_TRUE(has(error_of(1, 1, [] { ptx::store_shared(kSharedBase + 8, 1u, 1u, 1u, 1u); }), "no multiple of 16"));
  EXPECT_TRUE(has(error_of(1, 1, [] { ptx::dynamic_shared()[kBytes] = 0; }), "wrote to shared memory at byte 1024"));
  EXPECT_TRUE(has(error_of(1, 1, [] { ptx::dynamic_shared()[-1] = 0; }), "wrote to shared memory at byte -1"));
}

TEST(Emulator, SharedMemoryBeginsAsNan) {
  int numbers = 0;
  EXPECT_TRUE(run(1, 5, kBytes, [&] {
                float x = 0, y = 0;
                ptx::load_shared(kSharedBase + 8 * threadIdx.x, x, y);
                numbers += !std::isnan(x) || !std::isnan(y) ? 1 : 0;
                __syncthreads();
                ptx::store_shared(kSharedBase + 4 * threadIdx.x, 0u);
              }).ok());
  EXPECT_EQ(numbers, 0);
}

TEST(Emulator, GlobalMemoryOutsideTheOperandsIsAFault) {
  std::vector<float> in(64);
  set_seed(1);
  forget_global();
  allow_global(in.data(), 128);
  const auto copy = [&](int first) {
    return run_grid(1, 32, 512, [&, first] { ptx::cp_async_16(kSharedBase, in.data() + first); }).text();
  };
  EXPECT_EQ(copy(28), "");
  EXPECT_TRUE(has(copy(32), "outside every operand"));
  EXPECT_TRUE(has(copy(1), "no multiple of 16"));
  forget_global();
}

TEST(Emulator, ADeadlockSaysWhoWaitsWhere) {
  const std::string text = error_of(1, 1, [] {
    if (threadIdx.x < 32) ptx::named_barrier_sync(3, 64);
    if (threadIdx.x >= 32) ptx::named_barrier_sync(5, 64);
  });
  EXPECT_TRUE(has(text, "deadlock"));
  EXPECT_TRUE(has(text, "block 0 threads 0-31: barrier 3, 32 of 64 are there"));
  EXPECT_TRUE(has(text, "block 0 threads 32-63: barrier 5, 32 of 64 are there"));
  EXPECT_TRUE(has(error_of(1, 1,
                           [] {
                             if (threadIdx.x < 32) __syncthreads();
                           }),
                  "barrier 0, 32 of 64 are there"));
  const Status unequal = run_grid(1, 96, 0, [] { ptx::named_barrier_sync(1, threadIdx.x < 32 ? 96 : 64); });
  EXPECT_TRUE(has(unequal.text(), "barrier 1 of"));
}

TEST(Emulator, ArrivalsCountWithoutWaiting) {
  EXPECT_EQ(error_of(1, 3,
                     [] {
                       if (threadIdx.x < 32) ptx::named_barrier_arrive(2, 64);
                       if (threadIdx.x >= 32) ptx::named_barrier_sync(2, 64);
                     }),
            "");
}

TEST(Emulator, LanesOfAWarpThatPartAreAFault) {
  EXPECT_TRUE(has(error_of(1, 1,
                           [] {
                             if (threadIdx.x % 2 == 0) __syncwarp();
                             if (threadIdx.x % 2 == 1) __shfl_sync(~0u, 1, 0);
                           }),
                  "lanes of a warp part"));
  EXPECT_TRUE(has(error_of(1, 1,
                           [] {
                             if (threadIdx.x % 2 == 0) __syncwarp();
                           }),
                  "__syncwarp"));
}

/// Blocks add in turn, by number or by ticket.
Status take_turns(std::uint64_t seed, bool by_ticket, std::vector<unsigned>& order) {
  unsigned turn = 0, tickets = 0;
  order.clear();
  return run(seed, 8, kBytes, [&] {
    if (threadIdx.x != 0) return;
    const unsigned own = by_ticket ? atomicAdd(&tickets, 1) : blockIdx.x;
    while (ptx::load_acquire(&turn) != own) {
    }
    order.push_back(own);
    ptx::reduce_add_release(&turn, 1);
  });
}
TEST(Emulator, TurnsNeedTicketsSinceBlocksBeginInAnyOrder) {
  const std::vector<unsigned> right = {0, 1, 2, 3, 4, 5, 6, 7};
  std::vector<unsigned> order;
  int stuck = 0;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    EXPECT_TRUE(take_turns(seed, true, order).ok());
    EXPECT_EQ(order, right);
    const Status status = take_turns(seed, false, order);
    if (!status.ok()) {
      EXPECT_TRUE(has(status.text(), "waits for ever"));
      EXPECT_TRUE(has(status.text(), "in a loop"));
      ++stuck;
    }
  }
  EXPECT_GT(stuck, 0);
}

TEST(Emulator, ASeedRepeatsItsOrder) {
  const auto order = [](std::uint64_t seed) {
    std::vector<unsigned> list;
    EXPECT_TRUE(run(seed, 6, kBytes, [&] {
                  for (int n = 0; n < 5; ++n) {
                    __syncwarp();
                    list.push_back(blockIdx.x * kThreads + threadIdx.x);
                  }
                }).ok());
    return list;
  };
  EXPECT_EQ(order(7), order(7));
  EXPECT_NE(order(7), order(8));
}

/// One product of mma: c + a_0 b_0 + a_1 b_1 in every element.
float product_of(Adding how, float c, float a0, float a1) {
  Product<16> product = {};
  for (auto& row : product.a) row[0] = a0, row[1] = a1;
  for (auto& row : product.b) std::fill(std::begin(row), std::end(row), 1.0f);
  for (auto& row : product.c) std::fill(std::begin(row), std::end(row), c);
  adding = how;
  product.add();
  adding = Adding::rounded;
  return product.c[15][7];
}
TEST(Emulator, TensorCoresCutOff) {
  constexpr float kBig = 0x1p24f, kEps = 0x1p-23f;
  EXPECT_EQ(product_of(Adding::rounded, kBig, 1.5f, 0), kBig + 2);
  EXPECT_EQ(product_of(Adding::cut_off, kBig, 1.5f, 0), kBig);
  // Two bits below the last take part in the sum.
  EXPECT_EQ(product_of(Adding::cut_off, 1, 0.5f * kEps, 0.5f * kEps), 1 + kEps);
  EXPECT_EQ(product_of(Adding::cut_off, 1, 0.75f * kEps, 0.25f * kEps), 1 + kEps);
  EXPECT_EQ(product_of(Adding::cut_off, 1, 0.875f * kEps, 0.125f * kEps), 1);
  EXPECT_TRUE(std::isnan(product_of(Adding::cut_off, NAN, 1, 1)));
  EXPECT_EQ(product_of(Adding::cut_off, INFINITY, 1, 1), INFINITY);
}

/// Fragments by the tables of the PTX ISA: A through ldmatrix, B through ldmatrix.trans, C by hand.
TEST(Emulator, MatrixInstructionsMultiplyMatrices) {
  constexpr int kColumns = 16;
  check::Random draw(3);
  __nv_bfloat16 a[16][kColumns], b[16][kColumns];
  for (auto* matrix : {&a, &b})
    for (auto& row : *matrix)
      for (auto& x : row) x = __float2bfloat16(static_cast<float>(draw.between(-8, 8)));
  float c[16][kColumns] = {};
  const Status status = run(1, 1, kBytes, [&] {
    const int lane = static_cast<int>(threadIdx.x);
    if (lane >= 32) return;
    auto* s = reinterpret_cast<__nv_bfloat16*>(ptx::dynamic_shared());
    for (int i = lane; i < 16 * kColumns; i += 32)
      s[i] = a[i / kColumns][i % kColumns], s[256 + i] = b[i / kColumns][i % kColumns];
    __syncwarp();
    std::uint32_t r_a[4], r_b[4];
    const std::uint32_t at = ptx::shared_address(s) + static_cast<std::uint32_t>(lane % 16 * 32 + lane / 16 * 16);
    ptx::ldmatrix_x4(r_a, at);
    ptx::ldmatrix_x4_trans(r_b, at + 512);
    for (int half = 0; half < 2; ++half) {
      float r_c[4] = {1, 1, 1, 1};
      ptx::mma_16x8x16<__nv_bfloat16>(r_c, r_a, r_b[2 * half], r_b[2 * half + 1]);
      for (int e = 0; e < 4; ++e) c[lane / 4 + e / 2 * 8][8 * half + lane % 4 * 2 + e % 2] = r_c[e];
    }
  });
  ASSERT_TRUE(status.ok()) << status.text();
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < kColumns; ++j) {
      float sum = 1;
      for (int k = 0; k < 16; ++k) sum += __bfloat162float(a[i][k]) * __bfloat162float(b[k][j]);
      EXPECT_EQ(c[i][j], sum) << i << ' ' << j;
    }
  }
}

}  // namespace
}  // namespace onepass::emulator
