// Where the tiles of a call lie: sequences, the rows and keys of each that matter, and which rows see which 128 keys.
// Keys that no row sees and rows that see no key are left out at both ends, so that what they hold is never read.
#pragma once

#include "cuda/sm90/backward_config.cuh"

namespace onepass::cuda::sm90 {

inline constexpr std::int64_t kFarRow = std::int64_t{1} << 30;  // a shift that hides or shows everything

/// The last b of [0, batch) with first(b) <= x, else 0; first(b) grows with b.
template <class First>
__device__ __forceinline__ std::int64_t last_begun(std::int64_t batch, std::int64_t x, First first) {
  std::int64_t low = 0, high = batch;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (first(middle) <= x ? low : high) = middle;
  }
  return low;
}

/// The item of the batch to which tile `index` of `block` rows belongs, and its first tile. A packed item has the tiles
/// from cu_seqlens[b] / block + b on, a padded one `of_item` tiles.
struct TileOwner {
  std::int64_t b, first;
};
__device__ __forceinline__ std::int64_t first_tile(const std::int32_t* cu_seqlens, std::int64_t b, std::int64_t total,
                                                   std::int64_t of_item, int block) {
  return cu_seqlens == nullptr ? b * of_item : clamp_to<std::int64_t>(cu_seqlens[b], 0, total) / block + b;
}
__device__ inline TileOwner tile_owner(const std::int32_t* cu_seqlens, std::int64_t index, std::int64_t batch,
                                       std::int64_t total, std::int64_t of_item, int block) {
  const auto first = [&](std::int64_t b) { return first_tile(cu_seqlens, b, total, of_item, block); };
  const std::int64_t b = cu_seqlens == nullptr ? index / of_item : last_begun(batch, index, first);
  return {b, first(b)};
}

/// Rows that see any key, keys that any row sees.
struct Extent {
  Interval rows, keys;
};
ONEPASS_INLINE Extent seen(const Sequence& s) {
  if (s.q_length == 0 || s.k_length == 0) return {};
  const Extent x = {s.rows_seeing(0, s.k_length), s.visible_to_any(0, s.q_length)};
  return x.rows.size() == 0 || x.keys.size() == 0 ? Extent{} : x;
}

/// The key tile at place `index` of the order in which blocks take them. Deterministic calls take the last keys of a
/// sequence first, so that a tile waits only for others that were taken before it.
template <class C>
__device__ KeyTile plan_key_tile(const BackwardParams& p, std::int64_t index) {
  std::int64_t head, tile;  // KV head, key tile of all items
  if (p.mask.varlen) {
    head = p.ordered ? index % p.heads_kv : index / p.key_tiles;
    tile = p.ordered ? p.key_tiles - 1 - index / p.heads_kv : index % p.key_tiles;
  } else {
    std::int64_t of_all, in_item;  // KV head of all items
    if (p.section > 0) {
      const std::int64_t first = index / (p.section * p.item_k_tiles) * p.section;
      const std::int64_t heads = min_of<std::int64_t>(p.section, p.batch * p.heads_kv - first);
      const std::int64_t in_section = index - first * p.item_k_tiles;
      of_all = first + in_section % heads;
      in_item = in_section / heads;
    } else {
      of_all = index / p.item_k_tiles;
      in_item = index % p.item_k_tiles;
    }
    if (p.ordered) in_item = p.item_k_tiles - 1 - in_item;
    head = of_all % p.heads_kv;
    tile = of_all / p.heads_kv * p.item_k_tiles + in_item;
  }
  const TileOwner owner = tile_owner(p.mask.cu_seqlens_k, tile, p.batch, p.total_k, p.item_k_tiles, C::kBlockK);
  const Sequence s = p.sequence(owner.b);
  const Extent x = seen(s);
  const std::int64_t key = (tile - owner.first) * C::kBlockK;  // from the first key that matters
  KeyTile out = {};
  if (key >= x.keys.size()) return out;
  const std::int64_t keys = min_of<std::int64_t>(C::kBlockK, x.keys.size() - key);
  const std::int64_t first_key = x.keys.begin + key;
  const Interval rows = s.rows_seeing(first_key, first_key + keys);
  const std::int64_t begin = (rows.begin - x.rows.begin) / C::kBlockQ;
  const std::int64_t end = ceil_div(rows.end - x.rows.begin, C::kBlockQ);
  out.k_row = static_cast<int>(s.k_row + first_key);
  out.keys = static_cast<int>(keys);
  out.kv_head = static_cast<int>(head);
  out.batch = p.mask.varlen ? 0 : static_cast<int>(owner.b);
  out.q_row = static_cast<int>(s.q_row + x.rows.begin);
  out.q_rows = static_cast<int>(x.rows.size());
  out.first_row = static_cast<int>(begin * C::kBlockQ);
  out.steps = static_cast<int>(end - begin);
  out.lo = static_cast<int>(clamp_to<std::int64_t>(s.lo_shift + x.rows.begin - first_key, -kFarRow, kFarRow));
  out.hi = static_cast<int>(clamp_to<std::int64_t>(s.hi_shift + x.rows.begin - first_key, -kFarRow, kFarRow));
  out.q_tile = static_cast<int>(first_tile(p.mask.cu_seqlens_q, owner.b, p.total_q, p.item_q_tiles, C::kBlockQ));
  out.keys_left = static_cast<int>(x.keys.size() - key);
  return out;
}

/// How many key tiles add to the query tile from `row` on before this one: those of later keys that it sees.
template <class C>
__device__ __forceinline__ int turn_of(const KeyTile& tile, int row) {
  const int last_row = min(row + C::kBlockQ, tile.q_rows) - 1;
  return (min(tile.hi + last_row, tile.keys_left) - 1) / C::kBlockK;
}

}  // namespace onepass::cuda::sm90
