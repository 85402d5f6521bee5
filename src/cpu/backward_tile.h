// The arithmetic of the backward on one tile: P and dS from S^T = K Q^T and dP^T = V dO^T, lanes = queries, and the
// products that spread them. Names as in the FlashAttention-2 paper, with D = rowsum(dO o O) - dLSE.
#pragma once

#include "cpu/backward_plan.h"
#include "cpu/product.h"
#include "cpu/score.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// The query rows of one tile and what they see of the key block, keys counted from the block's first.
struct QueryBlock {
  std::int64_t i0 = 0, rows = 0;
  Interval any, all;             // keys that one row sees, that every row sees
  bool empty_row = false;        // a row has lse -inf
  bool masked = false;           // a pair of a row and a key in `any` is hidden: by the mask, or the row is empty
  bool finite = true;            // q and dout hold no NaN or Inf; known only if masked
  alignas(64) float l[kBlockQ];  // lse; +inf where nothing is to be seen, so that P = 0
  alignas(64) float d[kBlockQ];
  alignas(64) std::int32_t lo[kBlockQ];  // if masked: the row sees keys lo <= j < hi
  alignas(64) std::int32_t hi[kBlockQ];

  bool sees(std::int64_t i, std::int64_t j) const { return lo[i] <= j && j < hi[i]; }
};

/// What is computed at once: keys of the block by lanes of the query block.
struct Piece {
  std::int64_t key, keys, lane, lanes;
  bool masked;
};

/// Cuts the pairs of a block into pieces: as large as they may be where every row sees every key, steps of kEdge keys
/// and lanes along the mask's edges, so that little is computed in vain. Edges lie on multiples of kEdge from the
/// sequence's first key: the cut is the same for every block_k, a multiple of kEdge.
inline constexpr std::int64_t kEdge = 16;
static_assert(kEdge % kLanes == 0 && kBlockQ % kEdge == 0);

template <class F>
ONEPASS_INLINE void for_each_piece(const QueryBlock& block, const Sequence& sequence, std::int64_t j0, F&& f) {
  const auto [begin, end] = block.any;
  const std::int64_t lanes = round_up(block.rows, kLanes);
  const std::int64_t inner_begin = block.all.begin <= begin ? begin : min_of(round_up(block.all.begin, kEdge), end);
  const std::int64_t inner_end = max_of(inner_begin, block.all.end >= end ? end : block.all.end / kEdge * kEdge);
  for (std::int64_t key = begin, next; key < end; key = next) {
    if (key >= inner_begin && key < inner_end) {
      next = min_of(key + kPiece, inner_end);
      f(Piece{key, next - key, 0, lanes, block.empty_row});
      continue;
    }
    next = min_of(key / kEdge * kEdge + kEdge, end);
    const Interval rows = sequence.rows_seeing(j0 + key, j0 + next);
    const std::int64_t first = max_of<std::int64_t>(rows.begin - block.i0, 0) / kEdge * kEdge;
    const std::int64_t last = min_of(round_up(rows.end - block.i0, kEdge), lanes);
    f(Piece{key, next - key, first, last - first, true});
  }
}

ONEPASS_INLINE IntVec load_ints(const std::int32_t* p) {
  return as_int(load(reinterpret_cast<const float*>(p)));
}

// ---- C[rows][vectors] (+)= A B ----

/// Sums start at 0 (fresh) or at C (onto) and take their products in ascending k, one fused operation each. chunks:
/// sums of up to kChunk products, at least four, added up one after the other, which halves the rounding error of long
/// sums or better.
enum class Sum { fresh, onto, chunks };
inline constexpr std::int64_t kChunk = 8;
ONEPASS_INLINE std::int64_t chunk_step(std::int64_t depth) {
  return clamp_to<std::int64_t>(ceil_div(depth, 4), 2, kChunk);
}

/// One group of kN vectors of columns.
template <int kN, Sum kSum>
ONEPASS_INLINE void multiply_columns(float* c, std::int64_t c_row, const float* a, std::int64_t a_row, std::int64_t a_k,
                                     const float* b, std::int64_t b_k, std::int64_t rows, std::int64_t depth) {
  for_row_tiles(rows, [&](std::int64_t m, auto count) {
    constexpr int kM = decltype(count)::value;
    float* out = c + m * c_row;
    const float* in = a + m * a_row;
    const auto zero = [](int, int) { return Vec{}; };
    if constexpr (kSum == Sum::chunks) {
      // As many totals as chunk sums, all in registers.
      Vec total[kM][kN]{};
      const std::int64_t step = chunk_step(depth);
      for (std::int64_t k = 0; k < depth; k += step) {
        product_tile<kM, kN>(in + k * a_k, a_row, a_k, b + k * b_k, b_k, min_of(depth - k, step), zero,
                             [&](int i, int j, Vec x) { total[i][j] += x; });
      }
#pragma GCC unroll 16
      for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < kN; ++j) store(out + i * c_row + j * kLanes, total[i][j]);
      }
    } else {
      product_tile<kM, kN>(
          in, a_row, a_k, b, b_k, depth,
          [&](int i, int j) { return kSum == Sum::onto ? load(out + i * c_row + j * kLanes) : Vec{}; },
          [&](int i, int j, Vec x) { store(out + i * c_row + j * kLanes, x); });
    }
  });
}

/// Columns beside the widest group go by pairs of vectors and one by one.
template <Sum kSum>
[[gnu::noinline]] void multiply(float* c, std::int64_t c_row, const float* a, std::int64_t a_row, std::int64_t a_k,
                                const float* b, std::int64_t b_k, std::int64_t rows, std::int64_t vectors,
                                std::int64_t depth) {
  constexpr int kGroup = kSum == Sum::chunks ? 2 : kVectors;
  for (; vectors >= kGroup; vectors -= kGroup, c += kGroup * kLanes, b += kGroup * kLanes) {
    multiply_columns<kGroup, kSum>(c, c_row, a, a_row, a_k, b, b_k, rows, depth);
  }
  if constexpr (kGroup > 2) {
    for (; vectors >= 2; vectors -= 2, c += 2 * kLanes, b += 2 * kLanes) {
      multiply_columns<2, kSum>(c, c_row, a, a_row, a_k, b, b_k, rows, depth);
    }
  }
  if (vectors > 0) multiply_columns<1, kSum>(c, c_row, a, a_row, a_k, b, b_k, rows, depth);
}

/// The same sums where the factor a is 0 in the hidden pairs and b may be NaN or Inf there: it counts as 0 then. The
/// same bits as multiply gives with a 0 in that place. visible(row, k).
template <class Visible>
void multiply_visible(float* c, std::int64_t c_row, const float* a, std::int64_t a_row, std::int64_t a_k,
                      const float* b, std::int64_t b_k, std::int64_t rows, std::int64_t vectors, std::int64_t depth,
                      bool accumulate, Visible&& visible) {
  for (std::int64_t m = 0; m < rows; ++m) {
    for (std::int64_t column = 0; column < vectors * kLanes; column += kLanes) {
      Vec sum = accumulate ? load(c + m * c_row + column) : Vec{};
      for (std::int64_t k = 0; k < depth; ++k) {
        const Vec x = load(b + k * b_k + column);
        sum = multiply_add(broadcast(a[m * a_row + k * a_k]), visible(m, k) ? x : select(x * 0.0f == 0.0f, x, Vec{}),
                           sum);
      }
      store(c + m * c_row + column, sum);
    }
  }
}

/// c[kBlockQ] = the columns' sums of a o b, both [depth][kBlockQ], in the order of Sum::chunks.
inline void column_dots(float* c, const float* a, const float* b, std::int64_t depth) {
  const std::int64_t step = chunk_step(depth);
  for (std::int64_t lane = 0; lane < kBlockQ; lane += kLanes) {
    Vec total{};
    for (std::int64_t begin = 0; begin < depth; begin += step) {
      Vec sum{};
      for (std::int64_t k = begin; k < min_of(depth, begin + step); ++k) {
        sum = multiply_add(load(a + k * kBlockQ + lane), load(b + k * kBlockQ + lane), sum);
      }
      total += sum;
    }
    store(c + lane, total);
  }
}

/// True if none of the floats is NaN or Inf; a multiple of kLanes of them.
inline bool all_finite(const float* x, std::int64_t count) {
  Vec sum{};
  for (std::int64_t n = 0; n < count; n += kLanes) sum += load(x + n) * 0.0f;
  return !any(sum != 0.0f);
}

// ---- P and dS ----

/// Turns S^T and dP^T of a piece into P^T, dropped where there is dropout, and dS^T; with kRaw the gradient of the raw
/// product, through the softcap, else of the score. j0: the block's first key.
template <bool kModified, bool kRaw>
void weigh(const Scratch& t, float* ds, const QueryBlock& block, const HeadScore& h, std::int64_t j0,
           const Piece& piece, bool dropout) {
  const float scale = static_cast<float>(h.spec->scale);
  if constexpr (kModified) {
    const std::int64_t size = piece.keys * kBlockQ;
    for (std::int64_t x = 0; x < size; x += kLanes) store(t.p + x, load(t.p + x) * scale);
    for (std::int64_t x = 0; x < size && dropout; x += kLanes) store(t.keep + x, broadcast(1));
    for (std::int64_t lane = piece.lane / kWidth * kWidth; lane < piece.lane + piece.lanes; lane += kWidth) {
      const std::int64_t i = block.i0 + lane, rows = min_of<std::int64_t>(kWidth, block.rows - lane),
                         j = j0 + piece.key;
      modify_scores(h, t.p + lane, piece.keys, i, rows, j, kRaw ? t.cap_slope + lane : nullptr, kBlockQ);
      if (dropout) drop_tile(h, t.keep + lane, piece.keys, i, j, kBlockQ);
    }
  }
  const bool capped = kModified && kRaw && h.spec->softcap != 0;
  for (std::int64_t j = 0; j < piece.keys; ++j) {
    const std::int32_t at = static_cast<std::int32_t>(piece.key + j);
    for (std::int64_t lane = piece.lane; lane < piece.lane + piece.lanes; lane += kLanes) {
      const std::int64_t x = j * kBlockQ + lane;
      // Subtracted before the change of base: exact where score and lse are large and near.
      Vec p = exp((kModified ? load(t.p + x) : load(t.p + x) * scale) - load(block.l + lane));
      Vec dp = load(ds + x);
      const Vec keep = kModified && dropout ? load(t.keep + x) : broadcast(1);
      if (kModified && dropout) dp *= keep;
      Vec gradient = p * (dp - load(block.d + lane));
      if (capped) gradient *= load(t.cap_slope + x);
      if (kModified && dropout) p *= keep;
      if (piece.masked) {
        const IntVec visible = (load_ints(block.lo + lane) <= at) & (load_ints(block.hi + lane) > at);
        p = select(visible, p, Vec{});
        gradient = select(visible, gradient, Vec{});
      }
      store(t.p + x, p);
      store(ds + x, gradient);
    }
  }
}

/// S^T, dP^T and from them P^T (t.p) and dS^T (ds) of a piece.
template <bool kRaw>
inline void score_piece(const BackwardPlan& plan, const Problem& problem, const Scratch& t, float* ds,
                        const QueryBlock& block, const HeadScore& h, std::int64_t j0, const Piece& piece) {
  const std::int64_t vectors = piece.lanes / kLanes, lane = piece.lane;
  multiply<Sum::chunks>(t.p + lane, kBlockQ, t.k + piece.key * plan.dim, plan.dim, 1, t.q_t + lane, kBlockQ, piece.keys,
                        vectors, problem.head_dim);
  multiply<Sum::chunks>(ds + lane, kBlockQ, t.v + piece.key * plan.dim_v, plan.dim_v, 1, t.dout_t + lane, kBlockQ,
                        piece.keys, vectors, problem.head_dim_v);
  if (plan.modified) {
    weigh<true, kRaw>(t, ds, block, h, j0, piece, problem.score.dropout.threshold != 0);
  } else {
    weigh<false, kRaw>(t, ds, block, h, j0, piece, false);
  }
}

/// dV and dK of the key block, all but dQ of the tile; leaves dS^T in t.ds.
inline void add_key_gradients(const BackwardPlan& plan, const Problem& problem, const Scratch& t,
                              const QueryBlock& block, const Sequence& sequence, const HeadScore& h, std::int64_t j0) {
  const std::int64_t dim = plan.dim, dim_v = plan.dim_v;
  for_each_piece(block, sequence, j0, [&](const Piece& piece) {
    const std::int64_t key = piece.key, keys = piece.keys, lane = piece.lane;
    float* ds = t.ds + key * kBlockQ;
    score_piece<true>(plan, problem, t, ds, block, h, j0, piece);
    const std::int64_t rows = min_of(piece.lanes, block.rows - lane);
    const float *p = t.p + lane, *dout = t.dout + lane * dim_v, *q = t.q + lane * dim;
    float *dv = t.dv + key * dim_v, *dk = t.dk + key * dim;
    ds += lane;
    if (!piece.masked || block.finite) {
      multiply<Sum::onto>(dv, dim_v, p, kBlockQ, 1, dout, dim_v, keys, dim_v / kLanes, rows);
      multiply<Sum::onto>(dk, dim, ds, kBlockQ, 1, q, dim, keys, dim / kLanes, rows);
    } else {
      const auto visible = [&](std::int64_t j, std::int64_t i) { return block.sees(lane + i, key + j); };
      multiply_visible(dv, dim_v, p, kBlockQ, 1, dout, dim_v, keys, dim_v / kLanes, rows, true, visible);
      multiply_visible(dk, dim, ds, kBlockQ, 1, q, dim, keys, dim / kLanes, rows, true, visible);
    }
  });
}

/// dQ of the block (+)= dS K; dq_row: distance of its rows. The rows along the mask's edges take only the keys they
/// see.
inline void add_query_gradient(const BackwardPlan& plan, const Scratch& t, const QueryBlock& block,
                               const Sequence& sequence, std::int64_t j0, float* dq, std::int64_t dq_row,
                               bool accumulate, bool k_finite) {
  const bool edge = block.all.begin > block.any.begin || block.all.end < block.any.end;
  const std::int64_t step = edge ? kEdge : kBlockQ;
  for (std::int64_t i = 0; i < block.rows; i += step) {
    const std::int64_t rows = min_of(step, block.rows - i);
    Interval keys = block.any;
    if (edge) {
      const Interval seen = sequence.visible_to_any(block.i0 + i, block.i0 + i + rows);
      keys.begin = clamp_to(seen.begin - j0, keys.begin, keys.end);
      keys.end = clamp_to(seen.end - j0, keys.begin, keys.end);
    }
    const float *ds = t.ds + keys.begin * kBlockQ + i, *k = t.k + keys.begin * plan.dim;
    float* out = dq + i * dq_row;
    if (!block.masked || k_finite) {
      (accumulate ? multiply<Sum::onto> : multiply<Sum::fresh>)(out, dq_row, ds, 1, kBlockQ, k, plan.dim, rows,
                                                                plan.dim / kLanes, keys.size());
    } else {
      multiply_visible(out, dq_row, ds, 1, kBlockQ, k, plan.dim, rows, plan.dim / kLanes, keys.size(), accumulate,
                       [&](std::int64_t r, std::int64_t j) { return block.sees(i + r, keys.begin + j); });
    }
  }
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
