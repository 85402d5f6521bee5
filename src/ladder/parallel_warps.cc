// The warp rungs' list, what they accept and start from, and what they count.
#include "ladder/parallel_warps.h"

#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

constexpr std::int64_t kMostWarps = 32, kMostRows = 4096;

std::string bad_rows(const char* what, std::int64_t rows, std::int64_t warps) {
  const std::int64_t most = kMostRows / warps * warps;
  if (rows >= warps && rows <= most && rows % warps == 0) return "";
  const std::int64_t nearest = clamp_to((clamp_to(rows, warps, most) + warps / 2) / warps * warps, warps, most);
  return std::string(what) + " must be a multiple of the " + std::to_string(warps) + " warps up to " +
         std::to_string(kMostRows) + ", not " + std::to_string(rows) + "; the nearest is " + std::to_string(nearest);
}

std::int64_t sum(const std::array<std::int64_t, kArrays>& counts) {
  std::int64_t all = 0;
  for (const std::int64_t n : counts) all += n;
  return all;
}

struct Entry {
  Array array;
  std::int64_t n;
};
WarpCount counts(std::initializer_list<Entry> read, std::initializer_list<Entry> written, std::int64_t barriers) {
  WarpCount count;
  for (const auto& [array, n] : read) count.ledger.read[static_cast<std::size_t>(array)] = n;
  for (const auto& [array, n] : written) count.ledger.written[static_cast<std::size_t>(array)] = n;
  count.barriers = barriers;
  return count;
}

WarpCount split_k(const Problem& p, const WarpBlock& b) {
  const std::int64_t N = p.N, d = p.d, W = b.warps, Tr = b.blocks.Tr(N), Tc = b.blocks.Tc(N);
  const Entry l{Array::l, Tc * (W - 1) * N}, O{Array::O, Tc * (W - 1) * N * d};
  return counts(
      {{Array::Q, Tc * W * N * d}, {Array::K, N * d}, {Array::V, N * d}, {Array::m, Tc * W * (W - 1) * N}, l, O},
      {{Array::m, Tc * W * N}, l, O}, 2 * Tr * Tc);
}
WarpCount split_q(const Problem& p, const WarpBlock& b) {
  const std::int64_t Nd = p.N * p.d, all = b.blocks.Tr(p.N) * b.warps * Nd;
  return counts({{Array::Q, Nd}, {Array::K, all}, {Array::V, all}}, {}, 0);
}
WarpCount backward_split_k(const Problem& p, const WarpBlock& b) {
  const std::int64_t N = p.N, d = p.d, W = b.warps, Tr = b.blocks.Tr(N), Tc = b.blocks.Tc(N);
  const std::int64_t all = 2 * Tc * W * N * d, statistics = Tc * W * N;
  const Entry dQ{Array::dQ, Tc * (W - 1) * N * d};
  return counts({{Array::Q, all},
                 {Array::dO, all},
                 {Array::K, N * d},
                 {Array::V, N * d},
                 {Array::L, statistics},
                 {Array::D, statistics},
                 dQ},
                {dQ}, max_of<std::int64_t>(2 * Tr * Tc - 1, 0));
}
WarpCount backward_split_q(const Problem& p, const WarpBlock& b) {
  const std::int64_t N = p.N, d = p.d, W = b.warps, Tr = b.blocks.Tr(N), Tc = b.blocks.Tc(N);
  const Entry Q{Array::Q, Tc * (W + 1) * N * d}, dO{Array::dO, Q.n}, P{Array::P, N * N}, dS{Array::dS, N * N};
  return counts({Q,
                 dO,
                 {Array::K, 2 * Tr * W * N * d},
                 {Array::V, Tr * W * N * d},
                 {Array::L, Tc * N},
                 {Array::D, Tc * N},
                 P,
                 dS},
                {P, dS}, Tc * max_of<std::int64_t>(2 * Tr - 1, 0));
}

const WarpRung kWarpRungs[] = {
    {"warps_split_k", "v1: warps share the keys of a tile", "src/ladder/parallel_warps_split_k.cc", false,
     warps_split_k, split_k, "2Nd + Tc (2W - 1) Nd + Tc (W^2 - 1) N", "Tc (W - 1) Nd + Tc (2W - 1) N", "2 Tr Tc"},
    {"warps_split_q", "v2: warps share the queries", "src/ladder/parallel_warps_split_q.cc", false, warps_split_q,
     split_q, "Nd + Tr 2W Nd", "0", "0"},
    {"warps_backward_split_k", "v1 backward: warps share the keys, dQ is summed across them",
     "src/ladder/parallel_warps_backward_split_k.cc", true, warps_backward_split_k, backward_split_k,
     "2Nd + Tc (5W - 1) Nd + Tc 2W N", "Tc (W - 1) Nd", "2 Tr Tc - 1"},
    {"warps_backward_split_q", "v2 backward: no sum is split, P and dS are exchanged",
     "src/ladder/parallel_warps_backward_split_q.cc", true, warps_backward_split_q, backward_split_q,
     "Tc 2 (W + 1) Nd + Tr 3W Nd + 2 Tc N + 2N^2", "2N^2", "Tc (2 Tr - 1)"}};

}  // namespace

std::int64_t WarpCount::read() const {
  return sum(ledger.read);
}
std::int64_t WarpCount::written() const {
  return sum(ledger.written);
}
std::int64_t WarpCount::bytes() const {
  std::int64_t all = 4 * (read() + written());
  for (const Array a : {Array::Q, Array::K, Array::V, Array::dO, Array::P, Array::dS}) {
    all -= 2 * (ledger.read[static_cast<std::size_t>(a)] + ledger.written[static_cast<std::size_t>(a)]);
  }
  return all;
}

std::span<const WarpRung> warp_rungs() {
  return kWarpRungs;
}

std::string refusal(const Problem& p, const WarpBlock& block) {
  if (p.N < 0 || p.d < 1) return "N must be 0 or more and d 1 or more";
  if (block.warps < 1 || block.warps > kMostWarps) {
    return "the warps must be 1 ... " + std::to_string(kMostWarps) + ", not " + std::to_string(block.warps) +
           "; the nearest is " + std::to_string(block.warps < 1 ? 1 : kMostWarps);
  }
  const std::string text = bad_rows("Br", block.blocks.Br, block.warps);
  return text.empty() ? bad_rows("Bc", block.blocks.Bc, block.warps) : text;
}

void prepare_warps(const WarpRung& rung, const Problem& p, Arrays& x) {
  if (!rung.backward) return;
  prepare(kBackwardV2, p, x);  // O and L
  for (std::int64_t i = 0; i < p.N; ++i) {
    float D = 0;
    for (std::int64_t c = 0; c < p.d; ++c) D += x[Array::dO][i * p.d + c] * x[Array::O][i * p.d + c];
    x[Array::D][i] = D;
  }
}

}  // namespace onepass::ladder
