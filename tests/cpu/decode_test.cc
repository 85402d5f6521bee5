// The decode on every instruction set of this machine.
#include "cpu/decode_kit.h"

namespace onepass {
namespace {

using namespace decode_kit;

TEST(Decode, RandomCases) {
  check::Sweep sweep;
  sweep.limits.pass = Pass::decode;
  sweep.cases = kit::scaled(600);
  sweep.first_seed = kit::first_seed();
  sweep.threads = {1, 2, 3, 8};
  kit::expect_sweep(decode_kernels(), sweep);
}

TEST(Decode, LargeHeadDims) {
  check::Sweep sweep;
  sweep.limits.pass = Pass::decode;
  sweep.limits.max_head_dim = 1024;
  sweep.limits.max_seq = 1500;
  sweep.limits.work = 2e7;
  sweep.cases = kit::scaled(60);
  sweep.first_seed = kit::first_seed() + 100000;
  sweep.threads = {1, 3};
  kit::expect_sweep(decode_kernels(), sweep);
}

TEST(Decode, EveryHeadDim) {
  for (std::int64_t dim = 1; dim <= 264; ++dim) {
    CaseSpec spec = sized(2, 37, 3, 1, dim);
    spec.dtype = static_cast<DType>(dim % 3);
    if (dim % 5 == 0) spec.head_dim_v = 265 - dim;
    spec.causal = true;
    expect_right(spec, {1});
  }
  for (const std::int64_t dim : {320, 511, 512, 576, 1000, 1024}) {
    CaseSpec spec = sized(1, 300, 4, 2, dim);
    expect_right_in_each_type(spec);
  }
}

TEST(Decode, HeadDimZero) {
  for (const std::int64_t dim : {0, 8}) {
    CaseSpec spec = sized(3, 300, 2, 1, dim);
    spec.head_dim_v = 8 - dim;
    spec.scale = 1;
    expect_right_in_each_type(spec);
  }
}

TEST(Decode, EveryGroupAndRowCount) {
  for (std::int64_t group = 1; group <= 17; ++group) {
    for (std::int64_t seq_q = 1; seq_q <= 16; seq_q += group % 3 + 1) {
      CaseSpec spec = sized(seq_q, 300, 2 * group, 2, 16);
      spec.seed = static_cast<std::uint64_t>(group * 100 + seq_q);
      spec.dtype = static_cast<DType>((group + seq_q) % 3);
      spec.causal = seq_q % 2 == 0;
      if (seq_q % 3 == 0) spec.window_left = 10 * group;
      expect_right(spec, {1, 3});
    }
  }
  expect_right_in_each_type(sized(16, 600, 71, 1, 32));  // 1136 packed rows: 36 tasks, chunks of 36 tiles
  expect_right_in_each_type(sized(1, 5000, 40, 1, 8));   // 2 tasks of 20 rows
}

TEST(Decode, ChunkEdges) {
  for (const std::int64_t seq_k : {1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 511, 512, 513, 1023, 1025, 2049}) {
    for (const std::int64_t window : {-1, 0, 1, 255, 256, 300}) {
      CaseSpec spec = sized(3, seq_k, 4, 2, 32);
      spec.seed = static_cast<std::uint64_t>(seq_k);
      spec.dtype = static_cast<DType>(seq_k % 3);
      spec.causal = true;
      spec.window_left = window;
      expect_right(spec, {1, 3});
    }
  }
}

TEST(Decode, Modifiers) {
  for (const bool causal : {false, true}) {
    CaseSpec spec = sized(5, 700, 6, 2, 40);
    spec.batch = 2;
    spec.causal = causal;
    spec.softcap = 5;
    expect_right_in_each_type(spec);
    spec.softcap = 0;
    spec.alibi = 2;
    expect_right_in_each_type(spec);
    spec.bias = true;
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
      spec.bias_dtype = dtype;
      spec.bias_extreme = dtype != DType::f16;
      expect_right_in_each_type(spec);
    }
    spec.sinks = true;
    spec.bias_broadcast = {true, false, true, false};
    expect_right_in_each_type(spec);
    spec.bias_broadcast = {false, true, false, true};
    spec.dropout_p = 0.4;
    expect_right_in_each_type(spec);
  }
}

TEST(Decode, DifficultValues) {
  for (const Values values : {Values::wide, Values::deep, Values::equal, Values::steep, Values::rising,
                              Values::denormal, Values::tiny, Values::special}) {
    CaseSpec spec = sized(2, 1100, 4, 1, 64);
    spec.values = values;
    expect_right_in_each_type(spec);
    spec.causal = true;
    spec.window_left = 400;
    spec.sinks = true;
    expect_right_in_each_type(spec);
  }
}

// Empty sequences between others, lengths and starts that reach over chunks, rows outside all sequences.
TEST(Decode, Batches) {
  CaseSpec spec = sized(4, 900, 6, 3, 24);
  spec.batch = 6;
  spec.q_length = {4, 0, 1, 3, 4, 2};
  spec.k_length = {900, 100, 0, 257, 512, 1};
  spec.k_start = {0, 7, 300, 256, 300, 899};
  spec.causal = true;
  expect_right_in_each_type(spec);
  spec.q_position = {896, 3, 0, -2, 510, 900};
  expect_right_in_each_type(spec);

  CaseSpec packed = sized(5, 1300, 6, 3, 24);
  packed.batch = 5;
  packed.cu_seqlens_q = {0, 5, 5, 6, 9, 11};
  packed.cu_seqlens_k = {0, 1300, 1301, 1301, 1557, 2500};
  packed.total_q = 14;
  packed.total_k = 2600;
  expect_right_in_each_type(packed);
  packed.causal = true;
  packed.window_left = 270;
  packed.sinks = true;
  expect_right_in_each_type(packed);
}

TEST(Decode, Strides) {
  for (const std::array<int, 3> order : {std::array{0, 1, 2}, std::array{0, 2, 1}, std::array{2, 1, 0}}) {
    CaseSpec spec = sized(3, 520, 4, 2, 33);
    spec.batch = 2;
    spec.layout_k = {.order = order, .gap = {3, 1, 7}, .broadcast = {}, .start = 5};
    spec.layout_v = {.order = {2, 0, 1}, .gap = {0, 13, 2}, .broadcast = {}, .start = 1};
    spec.layout_q = spec.layout_out = spec.layout_k;
    spec.row_gap = 3;
    expect_right_in_each_type(spec);
    spec.layout_k.broadcast = {true, false, false};
    spec.layout_v.broadcast = {false, false, true};
    spec.out_f32 = true;
    expect_right_in_each_type(spec);
  }
}

// Heads side by side are read together, more or fewer of them for more or fewer threads: the same bits.
TEST(Decode, HeadsSideBySide) {
  for (const std::int64_t group : {1, 2, 3, 4, 9}) {
    for (const std::int64_t dim : {7, 40, 64}) {
      CaseSpec spec = sized(1, 1200, 5 * group, 5, dim);
      spec.batch = 2;
      spec.causal = true;
      expect_right_in_each_type(spec);
      spec.head_dim_v = 96 - dim;
      spec.seq_q = 3;
      expect_right_in_each_type(spec);
    }
  }
}

TEST(Decode, NothingToDo) {
  for (int empty = 0; empty < 4; ++empty) {
    CaseSpec spec = sized(empty == 0 ? 0 : 2, empty == 1 ? 0 : 5, empty == 2 ? 0 : 4, empty == 2 ? 0 : 2, 16);
    spec.batch = empty == 3 ? 0 : 2;
    expect_right_in_each_type(spec);
    spec.sinks = true;
    expect_right_in_each_type(spec);
  }
}

}  // namespace
}  // namespace onepass
