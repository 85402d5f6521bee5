// The parallel rungs: how the papers spread attention over a GPU's processors, warps and units, as models that run on
// one thread. Sources: FlashAttention (Dao et al. 2022), FlashAttention-2 (Dao 2023), FlashAttention-3 (Shah et al.
// 2024). Every function expects what its refusal() accepts.
#pragma once

#include "ladder/rung.h"

namespace onepass::ladder {

// ---- The grid: thread blocks over processors (parallel_grid.cc) ----

inline constexpr std::int64_t kA100SMs = 108, kH100SMs = 132;

/// `batch` x `heads` attentions of N queries and keys, in tiles of Br queries and Bc keys. A processor (SM) has
/// `blocks_per_sm` slots; a block takes one, and its time does not depend on what runs beside it.
struct Grid {
  std::int64_t batch = 1, heads = 1, N = 0, Br = 128, Bc = 128;
  bool causal = false;
  std::int64_t SMs = kA100SMs, blocks_per_sm = 1;
};
/// What a thread block computes: a whole head (v1), or one block of query rows (v2).
enum class BlockOf { head, query_block };
/// In which order blocks are given out: head after head with the query blocks rising, or the longest first.
enum class Order { plain, longest_first };

/// A thread block on its slot; times in tiles (the time of one Br x Bc tile of scores).
struct PlacedBlock {
  std::int64_t head, query_block;  // head of batch x heads; -1: all query blocks
  std::int64_t sm, slot;           // slot of 0 ... blocks_per_sm - 1 of that SM
  std::int64_t start, end;
};
struct GridRun {
  std::int64_t blocks = 0;    // in the grid
  std::int64_t slots = 0;     // blocks that run at once
  std::int64_t waves = 0;     // ceil(blocks / slots)
  std::int64_t work = 0;      // of all blocks, in tiles
  std::int64_t makespan = 0;  // end of the last block, in tiles
  std::int64_t tail = 0;      // from when the first slot finds no block left to the makespan, in tiles
  std::int64_t idle_sms = 0;  // that never get a block
  double idle_share = 0;      // of slots x makespan
  std::vector<PlacedBlock> placed;
};

std::string refusal(const Grid& grid);
/// List scheduling: each block in turn goes to the slot that is free first, spread over the SMs.
GridRun run_grid(const Grid& grid, BlockOf block, Order order);

/// "Efficient when this number is large (say >= 80)", of blocks on 108 SMs: FlashAttention-2, section 3.2. For blocks
/// of equal length.
struct RuleOfThumb {
  std::int64_t blocks;        // the rule's number
  double busy;                // share of the slots' time in use with that many
  std::int64_t worst_blocks;  // the number >= blocks with the least share, and that share
  double worst_busy;
  std::int64_t safe_from;  // from this number on, the share is never below `busy`; -1: there is none
};
/// blocks, slots >= 1.
RuleOfThumb rule_of_thumb(std::int64_t blocks = 80, std::int64_t slots = kA100SMs);

// ---- FLOPs by what they cost (parallel_flops.cc) ----

/// A100: 312 TFLOP/s of float16 products, 19.5 TFLOP/s of other float32 work (FlashAttention-2, section 3.1).
inline constexpr double kOtherWeight = 312.0 / 19.5;  // 16

struct WeighedFlops {
  const char* rung;
  bool backward;
  std::int64_t matmul_flops, other_flops, exps;
  double weighted;     // matmul + weight (other + exps), in products' FLOPs; an exponential counts as one FLOP
  double other_share;  // of weighted, what is not a product
};
WeighedFlops weigh(const Rung& rung, const Ledger& ledger, double weight = kOtherWeight);
/// Runs and weighs v1 and v2, forward and backward, in that order. Each must accept the problem: refusal(rung,
/// problem).
std::vector<WeighedFlops> weigh_rungs(const Problem& problem, double weight = kOtherWeight);

// ---- A thread block's warps (parallel_warps_*.cc) ----

/// `warps` warps share the work of each Br x Bc tile; Br and Bc are multiples of `warps`.
struct WarpBlock {
  std::int64_t warps = 4;
  Blocks blocks{64, 64};
};
struct WarpCount {
  Ledger ledger;              // read, written: elements of shared memory; matmul_flops of all warps
  std::int64_t barriers = 0;  // synchronisations of a thread block's warps, summed over the blocks
  std::int64_t races = 0;     // accesses that meet another warp's without a barrier between: 0 unless one is left out

  std::int64_t read() const;     // elements
  std::int64_t written() const;  // elements
  std::int64_t bytes() const;    // read and written; Q, K, V, dO, P, dS in 2 bytes, sums and statistics in 4
};

/// One head; reads and writes the same Arrays as the rungs: forward O with m, l (split-K) or L (split-Q), backward dQ,
/// dK, dV from L and D.
struct WarpRung {
  const char* name;   // "warps_split_k"
  const char* title;  // one line
  const char* file;
  bool backward;
  /// left_out: number (from 1) of a barrier that is counted but does not happen; 0: none.
  void (*run)(const Problem& problem, const WarpBlock& block, Arrays& arrays, WarpCount& count, std::int64_t left_out);
  WarpCount (*formula)(const Problem& problem, const WarpBlock& block);  // ledger.read, ledger.written, barriers
  const char* reads;                                                     // the formulas in the papers' letters, W warps
  const char* writes;
  const char* barriers;
};
/// Forward split-K and split-Q, backward split-K and split-Q.
std::span<const WarpRung> warp_rungs();
std::string refusal(const Problem& problem, const WarpBlock& block);
/// L from the forward, D = rowsum(dO O): what the backward warp rungs start from. Uncounted.
void prepare_warps(const WarpRung& rung, const Problem& problem, Arrays& arrays);

// ---- v3's overlaps (parallel_overlap.cc) ----

/// Clocks that one warp group's tile takes on an SM's tensor cores (S = Q K^T, O += P V) and exponential units.
struct TileCosts {
  double S, softmax, PV;
};
/// H100 and H200: 4,096 FLOPs of bfloat16 products and 16 exponentials a clock and SM, which at 132 SMs and 1.83 GHz
/// are 989 TFLOP/s and 3.9 T exp/s (FlashAttention-3, section 3.1). Of the softmax only the exponentials are counted.
inline constexpr double kHopperFlopsPerClock = 4096, kHopperExpsPerClock = 16, kHopperClock = 1.83e9;
/// rows of a warp group x Bc keys, heads of d numbers.
inline TileCosts hopper_costs(std::int64_t rows, std::int64_t Bc, std::int64_t d) {
  const double scores = static_cast<double>(rows * Bc), product = 2 * scores * static_cast<double>(d);
  return {product / kHopperFlopsPerClock, scores / kHopperExpsPerClock, product / kHopperFlopsPerClock};
}

enum class Unit { tensor_cores, exponentials };
enum class Step { S, softmax, PV };
inline constexpr const char* kUnitNames[] = {"tensor cores", "exponentials"};
inline constexpr const char* kStepNames[] = {"S", "softmax", "PV"};
struct Event {
  Unit unit;
  Step step;
  std::int64_t group, tile;  // warp group, key tile
  double start, end;         // clocks
};
struct Timeline {
  std::vector<Event> events;
  double makespan = 0;           // clocks
  double tensor_share = 0;       // of the makespan that the tensor cores work
  double exponential_share = 0;  // and the exponential units
};
/// A way to run `tiles` key tiles in each of `groups` warp groups.
struct OverlapRung {
  const char* name;  // "ping_pong"
  const char* title;
  std::int64_t groups;
  Timeline (*run)(std::int64_t tiles, const TileCosts& costs);
  double (*makespan)(double tiles, const TileCosts& costs);  // in closed form
  const char* formula;                                       // T tiles; a, e, b: clocks of S, softmax, PV
};
/// One group and two without overlap, each followed by its overlap.
std::span<const OverlapRung> overlap_rungs();
std::string refusal(std::int64_t tiles, const TileCosts& costs);

}  // namespace onepass::ladder
