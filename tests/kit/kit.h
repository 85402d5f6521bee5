// GoogleTest glue over src/check: what every test of a kernel includes.
#pragma once

#include <gtest/gtest.h>

#include "check/abi.h"
#include "check/sweep.h"

namespace onepass::kit {

/// EXPECT_TRUE(passes(check_kernel(kernel, c))) prints the case and each output out of bounds.
testing::AssertionResult passes(const check::Report& report);

/// Expects the sweep to pass on `kernels`; prints one line a kernel and dtype: cases and the worst error ratio.
void expect_sweep(const std::vector<const Kernel*>& kernels, const check::Sweep& sweep);

/// Expects one hand-made case to pass on every kernel of this machine that serves it, with 1 and 3 threads.
void expect_case(const check::CaseSpec& spec);

/// Seeds and counts for random tests, from ONEPASS_TEST_SEED and ONEPASS_TEST_FACTOR (usual: 1, fewer if sanitized).
std::uint64_t first_seed();
int scaled(int cases);

/// What kernels with float32 arithmetic read and write.
inline constexpr DType kStorage[] = {DType::f32, DType::f16, DType::bf16};

/// Sweeps and sizes are divided by this: where every instruction is instrumented, they are thinner.
#if defined(ONEPASS_SANITIZED)
inline constexpr int kThin = 8;
#else
inline constexpr int kThin = 1;
#endif

/// "fwd_cpu_avx2" is a fine test name already; other characters become '_'.
std::string test_name(const std::string& text);

}  // namespace onepass::kit
