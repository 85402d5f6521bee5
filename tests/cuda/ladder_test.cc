// The GPU's ladder: its closed forms, by walking through the kernels' loops and by what the CPU's rungs count; every
// rung against the float64 reference.
#include "cuda/cuda_kit.h"
#include "cuda/ladder/measure.h"
#include "ladder/ladder_kit.h"
#include "ladder/parallel.h"

namespace onepass::cuda::ladder {
namespace {

namespace cpu = onepass::ladder;

const Rung& rung(std::string_view name) {
  for (const Rung& r : rungs()) {
    if (r.name == name) return r;
  }
  throw std::runtime_error("no such rung");
}

std::string text(const Rung& r, const Shape& s) {
  return std::string(r.name) + " heads " + std::to_string(s.heads) + " N " + std::to_string(s.N) + " d " +
         std::to_string(s.d) + (s.causal ? " causal" : "");
}

/// Bytes and FLOPs of a head, a tile at a time, in the kernels' order.
struct Walk {
  const Shape& s;
  std::int64_t bytes = 0, flops = 0;

  std::int64_t rows(std::int64_t i) const { return min_of<std::int64_t>(kBr, s.N - i); }
  void bf16(std::int64_t n) { bytes += 2 * n; }
  void f32(std::int64_t n) { bytes += 4 * n; }
  void product(std::int64_t i, std::int64_t j) { flops += 2 * rows(i) * rows(j) * s.d; }
  template <class F>
  void tiles(std::int64_t begin, std::int64_t end, F body) {
    for (std::int64_t n = begin; n < end; n += kBr) body(n);
  }

  void standard() {
    tiles(0, s.N, [&](std::int64_t i) {
      bf16(rows(i) * s.d);  // Q
      tiles(0, s.N, [&](std::int64_t j) {
        bf16(rows(j) * s.d + rows(i) * kBc);  // K, S
        product(i, j);
      });
    });
    bf16(2 * s.N * s.pitch());  // S, P
    tiles(0, s.N, [&](std::int64_t i) {
      tiles(0, s.N, [&](std::int64_t j) {
        bf16(rows(i) * kBc + rows(j) * s.d);  // P, V
        product(i, j);
      });
      bf16(rows(i) * s.d);  // O
    });
  }
  void flash_v1() {
    bf16(s.N * s.d);
    f32(2 * s.N);
    tiles(0, s.N, [&](std::int64_t j) {
      bf16(2 * rows(j) * s.d);  // K, V
      tiles(0, s.N, [&](std::int64_t i) {
        bf16(3 * rows(i) * s.d);  // Q, O there and back
        f32(4 * rows(i));         // m, l there and back
        product(i, j), product(i, j);
      });
    });
  }
  void flash_v2() {
    tiles(0, s.N, [&](std::int64_t i) {
      bf16(2 * rows(i) * s.d);  // Q, O
      f32(rows(i));             // L
      tiles(0, s.causal ? min_of(s.N, i + kBr) : s.N, [&](std::int64_t j) {
        bf16(2 * rows(j) * s.d);  // K, V
        product(i, j), product(i, j);
      });
    });
  }
  void backward_v2() {
    bf16(2 * s.N * s.d);   // O, dO
    f32(s.N + s.N * s.d);  // D, dQ cleared
    tiles(0, s.N, [&](std::int64_t j) {
      bf16(4 * rows(j) * s.d);  // K, V, dK, dV
      tiles(s.causal ? j : 0, s.N, [&](std::int64_t i) {
        bf16(2 * rows(i) * s.d);           // Q, dO
        f32(2 * rows(i) + rows(i) * s.d);  // L, D, dQ added to
        for (int n = 0; n < 5; ++n) product(i, j);
      });
    });
    f32(s.N * s.d);  // dQ rounded
    bf16(s.N * s.d);
  }
};

TEST(GpuLadderForms, AreWhatTheLoopsMove) {
  for (const std::int64_t N : {1, 63, 64, 65, 100, 512, 1000}) {
    for (const std::int64_t d : {64, 128}) {
      for (const bool causal : {false, true}) {
        const Shape shape{1, N, d, causal};
        for (const auto& [name, walk] : {std::pair{"standard", &Walk::standard},
                                         {"flash_v1", &Walk::flash_v1},
                                         {"flash_v1_split_k", &Walk::flash_v1},
                                         {"flash_v2", &Walk::flash_v2},
                                         {"backward_v2", &Walk::backward_v2}}) {
          Walk w{shape};
          (w.*walk)();
          const Counts counts = rung(name).counts(shape);
          EXPECT_EQ(counts.bytes(), w.bytes) << text(rung(name), shape);
          EXPECT_EQ(counts.matmul_flops, w.flops) << text(rung(name), shape);
        }
      }
    }
  }
}

TEST(GpuLadderForms, AreTheCpusLedger) {
  for (const std::int64_t N : {64, 200}) {
    for (const bool causal : {false, true}) {
      const Shape shape{1, N, 64, causal};
      const auto counted = [&](const cpu::Rung& r) { return cpu::ledger_of(r, one_head(shape)); };
      const auto expect = [&](const char* name, const cpu::Ledger& ledger, std::int64_t more) {
        const Counts counts = rung(name).counts(shape);
        EXPECT_EQ(counts.bytes(), ledger.moved().bytes(DType::bf16) + more) << text(rung(name), shape);
        EXPECT_EQ(counts.matmul_flops, ledger.matmul_flops) << text(rung(name), shape);
      };
      expect("flash_v1", counted(cpu::kFlashV1), 0);
      expect("flash_v1_split_k", counted(cpu::kFlashV1), 0);
      expect("flash_v2", counted(cpu::kFlashV2Skipping), 0);
      if (N == 64) expect("standard", counted(cpu::kStandard), 0);                // K and V are one tile
      if (!causal) expect("backward_v2", counted(cpu::kBackwardV2), 8 * N * 64);  // dQ in float32
    }
  }
}

TEST(GpuLadderForms, SharedMemoryIsWhatTheModelsWarpsCount) {
  const Shape shape{1, 256, 64, false};
  const auto counted = [&](std::string_view name) {
    for (const cpu::WarpRung& r : cpu::warp_rungs()) {
      if (name != r.name) continue;
      cpu::Arrays x = make_arrays(one_head(shape), 1);
      prepare_warps(r, one_head(shape), x);
      cpu::WarpCount count;
      r.run(one_head(shape), {kWarps, {kBr, kBc}}, x, count, 0);
      return count;
    }
    throw std::runtime_error("no such model");
  };
  EXPECT_EQ(rung("flash_v1_split_k").shared_traffic(shape), counted("warps_split_k").bytes());
  EXPECT_EQ(rung("flash_v2").shared_traffic(shape), counted("warps_split_q").bytes());
  const cpu::WarpCount backward = counted("warps_backward_split_q");
  EXPECT_EQ(rung("backward_v2").shared_traffic(shape),
            backward.bytes() - 4 * (read(backward.ledger, cpu::Array::L) + read(backward.ledger, cpu::Array::D)));
}

/// In units of bfloat16's rounding of the largest answer, 2^-9. Standard rounds S, and v1 O at every tile.
double allowed(const Rung& r) {
  return std::string_view(r.name) == "flash_v2" ? 3 : r.backward ? 4 : 16;
}

class GpuLadder : public testing::TestWithParam<const Rung*> {};
std::vector<const Rung*> all() {
  std::vector<const Rung*> list;
  for (const Rung& r : rungs()) list.push_back(&r);
  return list;
}
INSTANTIATE_TEST_SUITE_P(Rungs, GpuLadder, testing::ValuesIn(all()),
                         [](const auto& rung_info) { return std::string(rung_info.param->name); });

TEST_P(GpuLadder, IsTheReference) {
  ONEPASS_NEEDS_GPU();
  const Rung& r = *GetParam();
  double worst = 0;
  for (const std::int64_t N : {1, 7, 63, 64, 65, 200, 512}) {
    for (const std::int64_t d : {64, 128}) {
      for (const bool causal : {false, true}) {
        const Shape shape{5, N, d, causal};
        std::unique_ptr<Bench> bench;
        ASSERT_TRUE(Bench::make(shape, r.squares, true, 2, static_cast<std::uint64_t>(N), &bench).ok());
        const Status status = bench->run(r);
        ASSERT_TRUE(status.ok()) << status.text();
        double error = NAN;
        ASSERT_TRUE(bench->error(r, &error).ok());
        const double units = error / (0x1p-9 * bench->largest(r));
        EXPECT_LE(units, allowed(r)) << text(r, shape);
        worst = max_of(worst, units);
      }
    }
  }
  EXPECT_GE(worst, 0.25) << "was anything rounded?";
  RecordProperty("worst", std::to_string(worst));
  std::printf("  %s: worst %.2f units of %.0f\n", r.name, worst, allowed(r));
}

}  // namespace
}  // namespace onepass::cuda::ladder
