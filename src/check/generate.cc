// random_spec: draws a case from a seed.
#include <algorithm>
#include <string_view>

#include "check/random.h"
#include "check/spec.h"

namespace onepass::check {
namespace {

/// Mostly around tile edges: multiples of 8, 16, 48, 64, 96 plus or minus a little.
std::int64_t draw_seq(Random& random, std::int64_t most) {
  std::int64_t seq = random.between(1, most);
  if (random.chance(0.6))
    seq = random.pick<std::int64_t>({1, 8, 16, 32, 48, 64, 96, 128, 192, 256}) + random.between(-1, 1);
  if (random.chance(0.02)) seq = 0;
  return std::clamp<std::int64_t>(seq, 0, most);
}

std::int64_t draw_dim(Random& random, std::int64_t most) {
  std::int64_t dim = random.pick<std::int64_t>({8, 16, 32, 40, 64, 64, 80, 96, 128, 128, 192, 256, 512});
  if (random.chance(0.4)) dim = random.between(1, 136);
  if (random.chance(0.2)) dim += random.between(-1, 1);
  return std::clamp<std::int64_t>(dim, 1, most);
}

Layout draw_layout(Random& random, bool output) {
  Layout layout;
  if (random.chance(0.5)) return layout;
  for (int n = 2; n > 0; --n) std::swap(layout.order[n], layout.order[random.between(0, n)]);
  for (int& gap : layout.gap) gap = random.chance(0.4) ? static_cast<int>(random.between(1, 19)) : 0;
  if (!output && random.chance(0.15)) layout.broadcast[random.between(0, 2)] = true;
  if (random.chance(0.3)) layout.start = static_cast<int>(random.between(1, 15));
  return layout;
}

std::vector<std::int32_t> draw_list(Random& random, std::int64_t count, std::int64_t lo, std::int64_t hi) {
  std::vector<std::int32_t> list(count);
  for (std::int32_t& x : list) x = static_cast<std::int32_t>(random.between(lo, hi));
  return list;
}

/// Cumulative lengths of `batch` sequences, some of them empty.
std::vector<std::int32_t> draw_cumulative(Random& random, std::int64_t batch, std::int64_t most) {
  std::vector<std::int32_t> list = {0};
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = most == 0 || random.chance(0.2) ? 0
                                : random.chance(0.3)            ? most
                                                                : random.between(1, most);
    list.push_back(list.back() + static_cast<std::int32_t>(length));
  }
  return list;
}

bool is_hopper(const Kernel* row) {
  return row != nullptr && std::string_view(row->arch) == "sm90";
}

/// Within the last 64 columns of the row's bucket. dO is laid out as q, so that a backward's head_dims end alike.
void fit_dims(const Kernel& row, CaseSpec& s) {
  const auto last_panel = [](std::int64_t dim, std::int64_t most) {
    const std::int64_t first = (most - 1) / 64 * 64;
    return first + 1 + (dim - 1) % (most - first);
  };
  s.head_dim = last_panel(s.head_dim, row.max_head_dim);
  s.head_dim_v = last_panel(s.head_dim_v, row.max_head_dim_v);
  const std::int64_t end = row.pass == Pass::backward ? s.head_dim : 8;
  s.head_dim_v = (s.head_dim_v - 1) / 8 * 8 + (end - 1) % 8 + 1;
}

void draw_sizes(Random& random, const Limits& limits, CaseSpec& s) {
  s.batch = random.chance(0.01) ? 0 : random.between(1, 3);
  s.heads_kv = random.chance(0.01) ? 0 : random.pick<std::int64_t>({1, 1, 1, 2, 2, 3, 5});
  s.heads_q = s.heads_kv * random.pick<std::int64_t>({1, 1, 1, 2, 3, 4, 5, 7, 8});
  s.head_dim = draw_dim(random, limits.max_head_dim);
  s.head_dim_v = random.chance(0.6) ? s.head_dim : draw_dim(random, limits.max_head_dim);
  if (is_hopper(limits.row) || (limits.row != nullptr && random.chance(0.5))) fit_dims(*limits.row, s);
  s.seq_q = limits.pass == Pass::decode ? random.between(1, 16) : draw_seq(random, limits.max_seq);
  s.seq_k = draw_seq(random, limits.pass == Pass::decode ? 4 * limits.max_seq : limits.max_seq);
  if (random.chance(0.3) && limits.pass != Pass::decode) s.seq_k = s.seq_q;
  const auto work = [&s] {
    return static_cast<double>(s.batch * s.heads_q) * static_cast<double>(s.seq_q * s.seq_k) *
           static_cast<double>(s.head_dim + s.head_dim_v);
  };
  while (work() > limits.work && s.batch > 1) --s.batch;
  while (work() > limits.work && s.heads_kv > 1) {
    s.heads_q = s.heads_q / s.heads_kv * (s.heads_kv - 1);
    --s.heads_kv;
  }
  while (work() > limits.work && s.heads_q > s.heads_kv) s.heads_q -= s.heads_kv;
  while (work() > limits.work) (s.seq_q > s.seq_k ? s.seq_q : s.seq_k) -= 1 + s.seq_k / 8;
}

void draw_sequences(Random& random, CaseSpec& s) {
  const double kind = random.uniform();
  if (kind < 0.3) {
    s.cu_seqlens_q = draw_cumulative(random, s.batch, s.seq_q);
    s.cu_seqlens_k =
        random.chance(0.3) && s.seq_q <= s.seq_k ? s.cu_seqlens_q : draw_cumulative(random, s.batch, s.seq_k);
    s.total_q = s.cu_seqlens_q.back() + (random.chance(0.4) ? random.between(1, 9) : 0);
    s.total_k = s.cu_seqlens_k.back() + (random.chance(0.4) ? random.between(1, 9) : 0);
  } else if (kind < 0.6) {
    if (random.chance(0.5)) s.q_length = draw_list(random, s.batch, 0, s.seq_q);
    if (random.chance(0.5)) s.k_start = draw_list(random, s.batch, 0, s.seq_k);
    if (random.chance(0.7)) s.k_length = draw_list(random, s.batch, 0, s.seq_k);
    for (std::size_t b = 0; b < s.k_start.size() && !s.k_length.empty(); ++b) {
      s.k_length[b] = std::min(s.k_length[b], static_cast<std::int32_t>(s.seq_k) - s.k_start[b]);
    }
    if (random.chance(0.3)) s.q_position = draw_list(random, s.batch, -s.seq_q / 2, s.seq_k);
  }
}

void draw_mask(Random& random, CaseSpec& s) {
  s.causal = random.chance(0.45);
  if (random.chance(0.35)) s.align = Align::top_left;
  const auto window = [&random, &s] {
    return random.chance(0.1) ? random.pick<std::int64_t>({0, 1, 100000, INT64_MAX}) : random.between(0, s.seq_k);
  };
  if (random.chance(0.25)) s.window_left = window();
  if (random.chance(0.2)) s.window_right = window();
}

void draw_modifiers(Random& random, CaseSpec& s) {
  if (random.chance(0.2)) s.scale = random.pick({0.05, 0.3, 1.0});
  if (random.chance(0.2)) s.softcap = random.pick({0.5, 5.0, 30.0});
  if (random.chance(0.2)) s.alibi = static_cast<int>(random.between(1, 2));
  if (random.chance(0.3)) {
    s.bias = true;
    for (bool& b : s.bias_broadcast) b = random.chance(0.4);
    s.bias_dtype = random.pick({DType::f32, s.dtype, DType::f16, DType::bf16});
    s.bias_extreme = random.chance(0.4);
    s.grad_bias = random.chance(0.8);
  }
  if (random.chance(0.25)) {
    s.sinks = true;
    s.sinks_dtype = random.pick({DType::f32, s.dtype});
    s.sinks_none = random.chance(0.3);
    s.grad_sinks = random.chance(0.8);
  }
  if (random.chance(0.2)) {
    s.dropout_p = random.pick({0.1, 0.5, 0.9, 1.0});
    s.dropout_seed = random.next();
    s.dropout_offset = static_cast<std::uint32_t>(random.next());
    s.dropout_state = random.chance(0.3);
  }
}

/// Any sign, and 0: drawn apart, so that the rest of a seed's case does not depend on it.
void draw_scale(Random random, CaseSpec& s) {
  if (random.chance(0.2)) s.scale = random.pick({-1.0, -0.3, -0.05, -0.05, 0.0, 0.05, 0.3, 1.0});
}

/// Makes every row of `dim` elements, or of 8 more or less, begin at a multiple of 8 elements.
void align_rows(Layout& layout, std::int64_t dim) {
  const auto up = [](std::int64_t n) { return static_cast<int>(round_up(n, 8)); };
  layout.gap[2] = up(dim + layout.gap[2]) - static_cast<int>(dim);
  layout.gap[1] = up(layout.gap[1]);
  layout.gap[0] = up(layout.gap[0]);
  layout.start = up(layout.start);
}

}  // namespace

CaseSpec random_spec(std::uint64_t seed, const Limits& limits) {
  Random random(seed);
  CaseSpec s;
  s.seed = seed;
  s.pass = limits.pass;
  do {
    s.dtype = static_cast<DType>(random.between(0, kDTypeCount - 1));
  } while ((limits.dtypes >> static_cast<int>(s.dtype) & 1u) == 0);
  draw_sizes(random, limits, s);
  draw_sequences(random, s);
  if (random.chance(0.8)) draw_mask(random, s);
  if (!limits.plain && !limits.cuda && random.chance(0.7)) draw_modifiers(random, s);
  draw_scale(Random(seed * 0x9E3779B97F4A7C15u + 1), s);
  s.out_f32 = s.pass != Pass::backward && s.dtype != DType::f64 && random.chance(0.15);
  s.lse = s.pass == Pass::backward || random.chance(0.9);
  s.grad_lse = random.chance(0.3);
  if (random.chance(0.4)) {
    s.values = random.pick(
        {Values::wide, Values::deep, Values::equal, Values::steep, Values::rising, Values::denormal, Values::special});
  }
  if (s.values == Values::denormal && Random(~seed).chance(0.4)) s.values = Values::tiny;
  if (limits.cuda && s.values == Values::special) s.values = Values::normal;
  // What docs/semantics.md and docs/cuda.md say of numbers that are all subnormal.
  const bool no_tiny = (limits.cuda && s.dtype == DType::f32) || (s.pass == Pass::decode && s.dtype == DType::bf16);
  if (s.values == Values::tiny && no_tiny) s.values = Values::denormal;
  s.layout_q = draw_layout(random, false);
  s.layout_k = draw_layout(random, false);
  s.layout_v = draw_layout(random, false);
  s.layout_out = draw_layout(random, true);
  if (random.chance(0.2)) s.row_gap = static_cast<int>(random.between(1, 9));
  const bool ordered = limits.deterministic || (limits.cuda && Random(seed * 0x9E3779B97F4A7C15u + 2).chance(0.5));
  if (s.pass == Pass::backward && ordered) s.deterministic = 1;
  if (is_hopper(limits.row)) {
    s.out_f32 = false;
    if (s.pass != Pass::backward) s.scale = s.scale == 0 ? NAN : std::abs(s.scale);
    for (Layout* layout : {&s.layout_q, &s.layout_k}) align_rows(*layout, s.head_dim);
    for (Layout* layout : {&s.layout_v, &s.layout_out}) align_rows(*layout, s.head_dim_v);
  } else if (limits.cuda && random.chance(0.5)) {
    // In a backward dO is laid out as q and O as out, dQ as out, dK as k and dV as v.
    s.head_dim_v = s.head_dim_v / 8 * 8 + s.head_dim % 8;
    if (s.head_dim_v > limits.max_head_dim) s.head_dim_v -= 8;
    if (s.head_dim_v == 0) s.head_dim_v = 8;
    for (Layout* layout : {&s.layout_q, &s.layout_k, &s.layout_v, &s.layout_out}) align_rows(*layout, s.head_dim);
  }
  return s;
}

}  // namespace onepass::check
