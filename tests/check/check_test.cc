// The checker itself: what it must catch, and that its cases cover what they claim.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "check/abi.h"
#include "check/compare.h"
#include "kit/kit.h"
#include "oracle/oracle.h"

namespace onepass {
namespace {

using check::Case;
using check::CaseSpec;
using check::Limits;
using check::Reference;
using check::Report;

CaseSpec plain_spec(DType dtype) {
  CaseSpec spec;
  spec.dtype = dtype;
  spec.seq_q = 20;
  spec.seq_k = 30;
  spec.causal = true;
  spec.layout_out.gap = {3, 2, 1};
  return spec;
}

Status good(const Problem& p, const ForwardOperands& x) {
  return oracle::forward(p, x);
}

TEST(Check, AcceptsTheReferenceAndTheYardstick) {
  for (const Pass pass : {Pass::forward, Pass::backward, Pass::decode}) {
    Limits limits;
    limits.pass = pass;
    limits.dtypes |= kF64;
    limits.work = 5e4;
    for (int n = 0; n < kit::scaled(80); ++n) {
      const CaseSpec spec = check::random_spec(kit::first_seed() + static_cast<std::uint64_t>(n), limits);
      Case c(spec);
      const Reference reference(c);
      for (const auto precision : {oracle::Precision::exact, oracle::Precision::storage}) {
        const Report report = pass == Pass::backward
                                  ? check::check_backward(c, reference,
                                                          [&](const Problem& p, const BackwardOperands& x) {
                                                            return oracle::backward(p, x, precision, false);
                                                          })
                                  : check::check_forward(c, reference, [&](const Problem& p, const ForwardOperands& x) {
                                      return oracle::forward(p, x, precision);
                                    });
        ASSERT_TRUE(kit::passes(report));
      }
    }
  }
}

TEST(Check, CatchesAWrongElement) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
    Case c(plain_spec(dtype));
    const Reference reference(c);
    EXPECT_TRUE(kit::passes(check::check_forward(c, reference, good)));
    const Report report = check::check_forward(c, reference, [&](const Problem& p, const ForwardOperands& x) {
      Status status = oracle::forward(p, x);
      const std::int64_t at = c.out.offset({0, 17, 0, 5});
      c.out.set(at, c.out.get(at) + 20 * check::ulp(dtype, 2.0));
      return status;
    });
    EXPECT_FALSE(report.ok());
    EXPECT_GT(report.worst_bound_ratio(), 1);
    EXPECT_NE(report.text().find("(0,17,0,5)"), std::string::npos) << report.text();
  }
}

TEST(Check, CatchesNonFiniteAndUnwrittenElements) {
  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    Case c(plain_spec(DType::f32));
    const Report report = check::check_forward(c, Reference(c), [&](const Problem& p, const ForwardOperands& x) {
      Status status = oracle::forward(p, x);
      c.out.set(3, bad);
      return status;
    });
    EXPECT_FALSE(report.ok());
  }
  Case c(plain_spec(DType::f32));
  const Report nothing =
      check::check_forward(c, Reference(c), [](const Problem&, const ForwardOperands&) { return Status(); });
  EXPECT_FALSE(nothing.ok());
  // A finite number where the reference is NaN is wrong as well, and so is a finite lse of an empty row.
  CaseSpec spec = plain_spec(DType::f32);
  spec.seq_k = 10;
  Case empty(spec);
  const Reference reference(empty);
  const Report finite = check::check_forward(empty, reference, [&](const Problem& p, const ForwardOperands& x) {
    Status status = oracle::forward(p, x);
    *x.lse.row(0, 0, 0) = -3e38f;
    return status;
  });
  EXPECT_FALSE(finite.ok());
}

TEST(Check, CatchesWritesOutsideTheOutputsAndToInputs) {
  Case c(plain_spec(DType::bf16));
  const Reference reference(c);
  const Report gap = check::check_forward(c, reference, [&](const Problem& p, const ForwardOperands& x) {
    Status status = oracle::forward(p, x);
    store_float(x.out.data, x.out.dtype, p.head_dim_v, 0);  // the gap behind the first row
    return status;
  });
  ASSERT_EQ(gap.faults.size(), 1u);
  EXPECT_EQ(gap.faults[0], "written outside output out");
  const Report before = check::check_forward(c, reference, [&](const Problem& p, const ForwardOperands& x) {
    Status status = oracle::forward(p, x);
    x.lse.data[-1] = 0;
    return status;
  });
  EXPECT_FALSE(before.ok());
  const Report input = check::check_forward(c, reference, [&](const Problem& p, const ForwardOperands& x) {
    Status status = oracle::forward(p, x);
    store_float(x.k.data, x.k.dtype, 0, 7);
    return status;
  });
  ASSERT_FALSE(input.faults.empty());
  EXPECT_EQ(input.faults[0], "input k was written");
}

TEST(Check, ReportsARefusal) {
  Case c(plain_spec(DType::f32));
  const Report report = check::check_forward(c, Reference(c), [](const Problem&, const ForwardOperands&) {
    return Status(ONEPASS_UNSUPPORTED, "no such thing");
  });
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.faults[0], "refused: no such thing");
}

TEST(Check, SameSeedSameCase) {
  Limits limits;
  limits.pass = Pass::backward;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const CaseSpec a = check::random_spec(seed, limits), b = check::random_spec(seed, limits);
    if (!kit::chosen(a)) continue;
    EXPECT_EQ(describe(a), describe(b));
    EXPECT_EQ(Case(a).q.bits(), Case(b).q.bits());
    EXPECT_NE(describe(a), describe(check::random_spec(seed + 1, limits)));
  }
}

/// Every feature turns up in a few hundred cases.
TEST(Check, CasesCoverEverything) {
  std::set<std::string> seen;
  Limits limits;
  limits.pass = Pass::backward;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    const CaseSpec s = check::random_spec(seed, limits);
    seen.insert(std::string("values ") + check::values_name(s.values));
    seen.insert(std::string("dtype ") + dtype_name(s.dtype));
    const auto note = [&seen](bool happens, const char* what) {
      if (happens) seen.insert(what);
    };
    note(s.causal, "causal");
    note(s.align == Align::top_left, "top-left");
    note(s.window_left >= 0 && s.window_right >= 0, "window");
    note(s.varlen(), "varlen");
    note(!s.q_length.empty(), "q_length");
    note(!s.k_start.empty(), "k_start");
    note(!s.q_position.empty(), "q_position");
    note(s.scale < 0, "negative scale");
    note(s.scale == 0, "no scale");
    note(s.softcap != 0, "softcap");
    note(s.alibi == 2, "alibi");
    note(s.bias && s.bias_extreme, "bias");
    note(s.sinks && s.sinks_none, "sinks");
    note(s.dropout_p == 1, "all dropped");
    note(s.dropout_state, "dropout state");
    note(s.grad_lse, "grad_lse");
    note(s.heads_kv > 0 && s.heads_q / s.heads_kv % 2 == 1 && s.heads_q > s.heads_kv, "odd group");
    note(s.head_dim != s.head_dim_v, "head_dim_v");
    note(s.layout_k.broadcast[0] || s.layout_k.broadcast[1] || s.layout_k.broadcast[2], "broadcast");
    note(s.layout_q.order[0] == 2, "heads outermost");
    note(s.batch * s.heads_q * s.seq_q * s.seq_k == 0, "zero size");
    note(s.seq_q > s.seq_k && s.causal && s.align == Align::bottom_right && s.q_position.empty(), "empty rows");
  }
  EXPECT_EQ(seen.size(), 9u + 3u + 22u);
}

/// Inputs hold NaN in every place that must not matter, and the C interface sees the same arrays.
TEST(Check, AbiDescribesTheCase) {
  CaseSpec spec = plain_spec(DType::bf16);
  spec.batch = 2;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.layout_q = {{2, 0, 1}, {4, 0, 2}, {false, false, false}, 3};
  spec.k_length = {5, 30};
  Case c(spec);
  EXPECT_TRUE(std::isnan(c.k.get(c.k.offset({0, 5, 1, 0}))));
  EXPECT_FALSE(std::isnan(c.k.get(c.k.offset({1, 5, 1, 0}))));
  EXPECT_TRUE(std::isnan(c.q.get(c.q.offset({0, 3, 1, 0}))));  // sees no key
  check::AbiCall call(c);
  const DLTensor& q = *call.forward.q;
  EXPECT_EQ(q.ndim, 4);
  EXPECT_EQ(q.dtype.code, kDLBfloat);
  EXPECT_EQ(q.dtype.bits, 16);
  EXPECT_EQ(q.shape[2], 4);
  EXPECT_EQ(q.data, c.q.data());
  EXPECT_EQ(q.strides[1], c.q.stride()[1]);
  EXPECT_EQ(call.options.k_length->shape[0], 2);
  EXPECT_EQ(call.options.q_length, nullptr);
  EXPECT_EQ(call.options.causal, 1);
}

/// Random cases through descriptors, checks, selection and launch, on the reference kernels.
TEST(Check, AbiServesEveryCase) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    Limits limits;
    limits.pass = pass;
    limits.dtypes |= kF64;
    limits.work = 3e4;
    for (int n = 0; n < kit::scaled(150); ++n) {
      Case c(check::random_spec(kit::first_seed() + 1000 + static_cast<std::uint64_t>(n), limits));
      const char* kernel = pass == Pass::backward ? "bwd_cpu_oracle" : "fwd_cpu_oracle";
      EXPECT_TRUE(kit::passes(check::check_abi(c, Reference(c), kernel)));
    }
  }
}

TEST(Check, UnitsInTheLastPlace) {
  EXPECT_EQ(check::ulp(DType::f32, 1.0), 0x1p-23);
  EXPECT_EQ(check::ulp(DType::bf16, -3.0), 0x1p-6);
  EXPECT_EQ(check::ulp(DType::f16, 0.0), 0x1p-24);
  EXPECT_EQ(check::ulp(DType::f64, 1.5), 0x1p-52);
}

}  // namespace
}  // namespace onepass
