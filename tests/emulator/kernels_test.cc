// The sm_80 kernels on the emulator, against the float64 reference.
#include "emulator/machine/machine.h"
#include "emulator/rows.h"
#include "kit/kit.h"

namespace onepass {
namespace {

class EmulatedKernel : public testing::TestWithParam<const Kernel*> {};

std::vector<const Kernel*> all_rows() {
  std::vector<const Kernel*> list;
  for (const Kernel& kernel : emulator::rows()) list.push_back(&kernel);
  return list;
}
INSTANTIATE_TEST_SUITE_P(Rows, EmulatedKernel, testing::ValuesIn(all_rows()),
                         [](const testing::TestParamInfo<const Kernel*>& row) { return std::string(row.param->name); });

TEST_P(EmulatedKernel, RandomCases) {
  const Kernel* kernel = GetParam();
  check::Sweep sweep;
  sweep.limits.pass = kernel->pass;
  sweep.limits.dtypes = kernel->dtypes;
  sweep.limits.max_head_dim = kernel->max_head_dim;
  sweep.limits.max_seq = 150;
  sweep.limits.work = 4e5;
  sweep.limits.cuda = true;
  sweep.first_seed = kit::first_seed();
  sweep.cases = kit::scaled(10);
  emulator::set_seed(sweep.first_seed);
  kit::expect_sweep({kernel}, sweep);
}

}  // namespace
}  // namespace onepass
