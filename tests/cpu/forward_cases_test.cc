// Inputs that broke attention libraries, on every forward kernel of this machine.
#include <cmath>
#include <limits>

#include "kit/kit.h"

namespace onepass {
namespace {

using check::Array;
using check::Case;
using check::CaseSpec;
using check::Index;
using kit::kStorage;
using kit::sized;

template <class F>
void fill(Array& array, F&& value) {
  array.each([&](const Index& i, std::int64_t at) { array.set(at, value(i)); });
  array.seal();
}
double out(const Case& c, std::int64_t row, std::int64_t x = 0, std::int64_t head = 0, std::int64_t b = 0) {
  return c.out.get(c.out.offset({b, row, head, x}));
}
double lse(const Case& c, std::int64_t row, std::int64_t head = 0, std::int64_t b = 0) {
  return c.lse.get(c.lse.offset({b, head, row, 0}));
}

/// Runs every kernel on the case, compares with the reference, then calls then(kernel name).
template <class Then>
void on_every_kernel(Case& c, Then&& then) {
  const check::Reference reference(c);
  ASSERT_TRUE(reference.status().ok()) << reference.status().text();
  int served = 0;
  for (const Kernel* kernel : check::runnable_kernels(Pass::forward)) {
    if (!check::serves(*kernel, c) || std::string_view(kernel->arch) == "oracle") continue;
    ++served;
    EXPECT_TRUE(kit::passes(check::check_kernel(*kernel, c, reference, 1 + served % 3)));
    then(kernel->name);
  }
  EXPECT_GT(served, 0);
}
void on_every_kernel(Case& c) {
  on_every_kernel(c, [](const char*) {});
}

TEST(ForwardCases, C01EachAlignment) {
  const std::vector<std::vector<double>> bottom = {{4.5}, {2.5, 3}, {0, 0, 0, 1, 1.5}};
  const std::vector<std::vector<double>> top = {{1}, {1, 1.5}, {1, 1.5, 1.5, 1.5, 1.5}};
  const std::int64_t sizes[][2] = {{1, 8}, {2, 5}, {5, 2}};
  for (const DType dtype : kStorage) {
    for (const Align align : {Align::bottom_right, Align::top_left}) {
      for (std::size_t n = 0; n < 3; ++n) {
        CaseSpec spec = sized(dtype, sizes[n][0], sizes[n][1], 16);
        spec.causal = true;
        spec.align = align;
        Case c(spec);
        fill(c.q, [](const Index&) { return 0.0; });
        fill(c.k, [](const Index& i) { return static_cast<double>(i[3]); });
        fill(c.v, [](const Index& i) { return static_cast<double>(i[1] + 1); });
        on_every_kernel(c, [&](const char* kernel) {
          const std::vector<double>& right = (align == Align::top_left ? top : bottom)[n];
          for (std::int64_t i = 0; i < spec.seq_q; ++i) EXPECT_NEAR(out(c, i), right[i], 0.02) << kernel;
        });
      }
    }
  }
}

TEST(ForwardCases, C02C08MoreQueriesThanKeys) {
  for (const std::int64_t excess : {1, 63, 64, 65, 127, 128, 129}) {
    CaseSpec spec = sized(kStorage[excess % 3], 130 + excess, 130, 64);
    spec.heads_q = spec.heads_kv = 2;
    spec.causal = true;
    kit::expect_case(spec);
  }
  CaseSpec spec = sized(DType::f32, 100, 60, 64);
  spec.causal = true;
  spec.window_left = 16;
  kit::expect_case(spec);
}

TEST(ForwardCases, C03RowsOfMinusInfinity) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const DType dtype : kStorage) {
    CaseSpec spec = sized(dtype, 8, 8, 8);
    spec.bias = true;
    Case corner(spec);
    fill(corner.bias, [&](const Index& i) { return i[2] < 4 && i[3] < 4 ? 0.0 : -infinity; });
    on_every_kernel(corner, [&](const char* kernel) {
      for (std::int64_t i = 4; i < 8; ++i) EXPECT_EQ(lse(corner, i), -infinity) << kernel;
    });
    spec.causal = true;
    Case half(spec);
    fill(half.bias, [&](const Index& i) { return i[3] < 4 ? -infinity : 0.0; });
    on_every_kernel(half, [&](const char* kernel) {
      for (std::int64_t i = 0; i < 4; ++i) EXPECT_EQ(out(half, i), 0) << kernel;
    });
  }
  CaseSpec spec = sized(DType::f32, 8, 4, 8);
  spec.align = Align::top_left;
  spec.causal = true;
  spec.window_left = 1;
  kit::expect_case(spec);
}

TEST(ForwardCases, C04LowestFiniteBias) {
  const double lowest = std::numeric_limits<float>::lowest();
  CaseSpec spec = sized(DType::f32, 441, 441, 64);
  spec.bias = true;
  Case row(spec);
  fill(row.bias, [&](const Index& i) { return i[2] == 392 ? lowest : 0.0; });
  on_every_kernel(row, [&](const char* kernel) {
    double mean = 0;
    for (std::int64_t j = 0; j < 441; ++j) mean += row.v.get(row.v.offset({0, j, 0, 5})) / 441;
    EXPECT_NEAR(out(row, 392, 5), mean, 1e-6) << kernel;
    EXPECT_TRUE(std::isfinite(lse(row, 392))) << kernel;
  });
  Case columns(spec);
  fill(columns.bias, [&](const Index& i) { return i[3] < 128 ? lowest : 0.0; });
  on_every_kernel(columns);
}

TEST(ForwardCases, C06NoKeys) {
  for (const DType dtype : kStorage) {
    kit::expect_case(sized(dtype, 7, 0, 16));
    CaseSpec spec = sized(dtype, 3, 1, 16);
    spec.causal = true;
    kit::expect_case(spec);
  }
}

TEST(ForwardCases, C07WindowsOverOneHotValues) {
  for (const std::int64_t left : {0, 1, 4, 15, 16, 1000}) {
    for (const std::int64_t right : {0, -1, 3}) {
      CaseSpec spec = sized(kStorage[left % 3], 16, 16, 16);
      spec.window_left = left;
      spec.window_right = right;
      Case c(spec);
      fill(c.v, [](const Index& i) { return i[1] == i[3] ? 1.0 : 0.0; });
      on_every_kernel(c, [&](const char* kernel) {
        for (std::int64_t i = 0; i < 16; ++i) {
          for (std::int64_t j = 0; j < 16; ++j) {
            const bool seen = j >= i - left && (right < 0 || j <= i + right);
            EXPECT_EQ(out(c, i, j) != 0, seen) << kernel << " row " << i << " key " << j;
          }
        }
      });
    }
  }
}

TEST(ForwardCases, C10NanQueries) {
  for (const DType dtype : kStorage) {
    CaseSpec spec = sized(dtype, 16, 16, 8);
    spec.batch = 2;
    spec.heads_q = spec.heads_kv = 4;
    Case all(spec);
    fill(all.q, [](const Index&) { return std::nan(""); });
    on_every_kernel(all, [&](const char* kernel) {
      all.out.each([&](const Index&, std::int64_t at) { EXPECT_TRUE(std::isnan(all.out.get(at))) << kernel; });
    });
    Case c(spec);
    fill(c.q,
         [&](const Index& i) { return i[0] == 1 && i[1] == 5 && i[2] == 2 ? std::nan("") : c.q.get(c.q.offset(i)); });
    on_every_kernel(c, [&](const char* kernel) {
      c.out.each([&](const Index& i, std::int64_t at) {
        EXPECT_EQ(std::isnan(c.out.get(at)), i[0] == 1 && i[1] == 5 && i[2] == 2) << kernel;
      });
      EXPECT_TRUE(std::isnan(lse(c, 5, 2, 1))) << kernel;
    });
  }
}

TEST(ForwardCases, C11HugeNegativeScores) {
  for (const DType dtype : kStorage) {
    for (const std::int64_t keys : {1, 2}) {
      Case c(sized(dtype, 5, keys, 128));
      fill(c.q, [](const Index&) { return 64.0; });
      fill(c.k, [](const Index&) { return -64.0; });
      fill(c.v, [](const Index&) { return 1.0; });
      on_every_kernel(c, [&](const char* kernel) {
        EXPECT_EQ(out(c, 4, 100), 1) << kernel;
        EXPECT_NEAR(lse(c, 4), -524288 / std::sqrt(128.0) + std::log(static_cast<double>(keys)), 0.005) << kernel;
      });
    }
  }
}

TEST(ForwardCases, C12LargeProductsAndValues) {
  for (const double sign : {1.0, -1.0}) {
    for (const double scale : {1.0 / 256, std::sqrt(1.0 / 128)}) {
      CaseSpec spec = sized(DType::f16, 3, 70, 128);
      spec.scale = scale;
      Case c(spec);
      fill(c.q, [](const Index&) { return 16.0; });
      fill(c.k, [sign](const Index&) { return sign * 34.1875; });
      on_every_kernel(c);
    }
  }
  Case c(sized(DType::f16, 1, 4096, 16));
  fill(c.q, [](const Index&) { return 0.0; });
  fill(c.v, [](const Index&) { return 60000.0; });
  on_every_kernel(c, [&](const char* kernel) { EXPECT_EQ(out(c, 0), 60000) << kernel; });
}

TEST(ForwardCases, C13WeightsSumToOne) {
  const std::int64_t sizes[][2] = {{16, 170000}, {1, 1}, {1, 7}, {1, 100}};
  for (const auto& size : sizes) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      CaseSpec spec = sized(dtype, size[0], size[1], 128);
      spec.layout_v.broadcast = {false, true, false};
      if (!kit::chosen(spec)) continue;
      Case c(spec);
      fill(c.v, [](const Index&) { return 1.0; });
      for (const Kernel* kernel : check::runnable_kernels(Pass::forward)) {
        if (!check::serves(*kernel, c) || std::string_view(kernel->arch) == "oracle") continue;
        std::vector<char> workspace(kernel->workspace(c.problem(), 2) + 64);
        Launch launch{.threads = 2};
        launch.workspace = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(workspace.data()) + 63) / 64 * 64);
        ASSERT_TRUE(kernel->forward(c.problem(), c.forward_operands(), launch).ok());
        c.out.each([&](const Index&, std::int64_t at) {
          ASSERT_NEAR(c.out.get(at), 1, dtype == DType::f32 ? 5e-6 : 0.008) << kernel->name << " " << size[1];
        });
      }
    }
  }
}

}  // namespace
}  // namespace onepass
