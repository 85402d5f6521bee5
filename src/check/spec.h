// The description of a test case: everything that decides a problem and its operands, as plain data. Fill one by hand
// or draw it from a seed.
#pragma once

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "core/problem.h"
#include "core/registry.h"

namespace onepass::check {

/// Distributions of Q, K, V and dO.
enum class Values : std::uint8_t {
  normal,    // N(0,1)
  wide,      // 3 N(0,1)
  deep,      // all scores near -1e4
  equal,     // all scores equal and huge
  steep,     // scores of standard deviation 200
  rising,    // scores that grow slowly with the key
  denormal,  // N(0,1), half of them around and below the smallest normal numbers
  special,   // N(0,1) with a few NaN and Inf
  tiny       // denormal; all of V so, in causal backwards instead all of dO
};
const char* values_name(Values values);

/// Strides of a (batch, seq, heads, dim) operand: the order of the outer three (0 batch, 1 seq, 2 heads; outermost
/// first), elements left free behind each, dimensions with stride 0, elements before the first.
struct Layout {
  std::array<int, 3> order = {0, 1, 2};
  std::array<int, 3> gap = {0, 0, 0};
  std::array<bool, 3> broadcast = {false, false, false};
  int start = 0;
};

struct CaseSpec {
  std::uint64_t seed = 1;  // of the values
  Pass pass = Pass::forward;
  DType dtype = DType::f32;
  bool out_f32 = false;
  std::int64_t batch = 1, seq_q = 16, seq_k = 16, heads_q = 1, heads_kv = 1, head_dim = 16, head_dim_v = 16;

  bool causal = false;
  Align align = Align::bottom_right;
  std::int64_t window_left = -1, window_right = -1;
  // Packed if cu_seqlens_q is not empty; then seq_q and seq_k are the declared maxima.
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k;
  std::int64_t total_q = 0, total_k = 0;
  std::vector<std::int32_t> q_length, k_start, k_length, q_position;

  double scale = NAN;  // NAN: 1 / sqrt(head_dim)
  double softcap = 0;
  int alibi = 0;  // 1: a slope a head, 2: a slope a batch item and head
  bool bias = false;
  std::array<bool, 4> bias_broadcast = {false, false, false, false};
  DType bias_dtype = DType::f32;
  bool bias_extreme = false;  // some -inf, whole rows of -inf and of the lowest finite number
  bool sinks = false;
  DType sinks_dtype = DType::f32;
  bool sinks_none = false;  // some are -inf
  double dropout_p = 0;
  std::uint64_t dropout_seed = 0;
  std::uint32_t dropout_offset = 0;
  bool dropout_state = false;  // seed and offset in memory

  bool lse = true;                                             // the forward writes it
  bool grad_lse = false, grad_bias = true, grad_sinks = true;  // the last two where there is a bias or a sink
  int deterministic = -1;

  Values values = Values::normal;
  Layout layout_q, layout_k, layout_v, layout_out;  // dQ as out, dK as k, dV as v; outputs without broadcast
  int row_gap = 0;                                  // elements left free behind each row of lse

  bool varlen() const { return !cu_seqlens_q.empty(); }
};

/// What random_spec may draw.
struct Limits {
  Pass pass = Pass::forward;
  unsigned dtypes = kF32 | kF16 | kBf16;
  std::int64_t max_head_dim = 256;
  std::int64_t max_seq = 300;
  double work = 3e6;           // multiply-adds of Q K^T and P V, about
  bool plain = false;          // no score modifiers
  bool deterministic = false;  // every backward; else half of those for CUDA
  /// What CUDA kernels serve: plain, no NaN in V that only some rows see, nothing tiny in float32 (docs/cuda.md); half
  /// of the cases with aligned rows.
  bool cuda = false;
  /// A CUDA row: half of the cases have the head_dims of its bucket; all of them, aligned rows and what else it asks
  /// for, where the row serves nothing else.
  const Kernel* row = nullptr;
};

/// The case of `seed`: any mix of sizes, masks, modifiers, values and strides. Cases of different seeds are
/// independent.
CaseSpec random_spec(std::uint64_t seed, const Limits& limits);

/// One line with everything that is not a default.
std::string describe(const CaseSpec& spec);

}  // namespace onepass::check
