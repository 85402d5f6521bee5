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

/// Expects a backward on rows that see one key to be right, with dQ and dK 0 to the bit: dP and D have the same
/// products, and are summed alike.
void expect_no_gradient_of_scores(const Kernel& kernel, const check::CaseSpec& spec);

/// One head, head_dim_v as head_dim.
check::CaseSpec sized(Pass pass, DType dtype, std::int64_t seq_q, std::int64_t seq_k, std::int64_t dim);
inline check::CaseSpec sized(DType dtype, std::int64_t seq_q, std::int64_t seq_k, std::int64_t dim) {
  return sized(Pass::forward, dtype, seq_q, seq_k, dim);
}

/// A row of a CUDA kernel at the head_dims of its bucket, and what its random cases may be, on a GPU or emulated.
check::CaseSpec sized(const Kernel& kernel, std::int64_t seq_q, std::int64_t seq_k);
check::Limits cuda_limits(const Kernel& kernel);

/// Where every instruction is instrumented, tests take some twenty times as long.
#if defined(ONEPASS_SANITIZED)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// Whether to run this case of a test: always, unless sanitized. Then with a chance that falls with its cost, cheap
/// ones always, and a test's first that is not huge. Cases run and left out become properties of the test, which the
/// summary counts.
bool chosen(const check::CaseSpec& spec);
bool chosen(const std::string& name, double multiply_adds);

/// Seeds and counts for random tests, from ONEPASS_TEST_SEED and ONEPASS_TEST_FACTOR (usual: 1). Sanitized: a twentieth
/// of that; and the factor counts for the chance of being chosen, too.
std::uint64_t first_seed();
int scaled(int cases);

/// What kernels with float32 arithmetic read and write.
inline constexpr DType kStorage[] = {DType::f32, DType::f16, DType::bf16};

/// "fwd_cpu_avx2" is a fine test name already; other characters become '_'.
std::string test_name(const std::string& text);

}  // namespace onepass::kit
