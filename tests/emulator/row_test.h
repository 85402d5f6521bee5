// What tests of the emulator's rows share.
#pragma once

#include "emulator/machine/machine.h"
#include "emulator/machine/tensor_core.h"
#include "emulator/rows.h"
#include "kit/kit.h"

namespace onepass::emulator {

/// A test of each row: the first seed's order, sums rounded.
class RowTest : public testing::TestWithParam<const Kernel*> {
 protected:
  void SetUp() override {
    if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "compiled for AVX2, which this machine has not";
    set_seed(kit::first_seed());
  }
  void TearDown() override { adding = Adding::rounded; }
};

}  // namespace onepass::emulator
