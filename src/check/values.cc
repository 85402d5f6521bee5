// What a case's operands hold: distributions, and NaN wherever nothing may look.
#include <limits>

#include "check/case.h"
#include "oracle/rows.h"

namespace onepass::check {
namespace {

template <class F>
void fill(Array& array, F&& value) {
  array.each([&](const Index& i, std::int64_t at) { array.set(at, value(i)); });
}

void fill_normal(Array& array, Random& random, double sigma) {
  fill(array, [&](const Index&) { return sigma * random.normal(); });
}

/// |scale|, or what it usually is where it is 0 and all scores are 0 anyway.
double size_of_scale(const Problem& p) {
  return p.score.scale != 0 ? std::abs(p.score.scale) : 1 / std::sqrt(std::max(1.0, static_cast<double>(p.head_dim)));
}

/// Q and K so that scale q.k = target (1 + noise).
void fill_scores(Case& c, Random& random, double target, double noise) {
  const Problem& p = c.problem();
  if (p.score.scale < 0) target = -target;
  const double each = std::sqrt(std::abs(target) / std::max(size_of_scale(p) * static_cast<double>(p.head_dim), 1e-30));
  const auto value = [&](const Index&) { return each * (1 + noise * random.normal()); };
  fill(c.q, value);
  fill(c.k, [&](const Index& i) { return target < 0 ? -value(i) : value(i); });
}

/// Half of the elements, or all, around and below the smallest normal number.
void fill_denormal(Array& array, Random& random, bool all) {
  const double tiny = array.dtype() == DType::f16 ? 0x1p-18 : array.dtype() == DType::f64 ? 0x1p-1030 : 0x1p-130;
  fill(array, [&](const Index&) { return random.normal() * (all || random.chance(0.5) ? tiny : 1.0); });
}

/// A few NaN and Inf. Inf in Q or K only without a softcap, which makes finite scores of it.
void add_special(Array& array, Random& random, bool infinite) {
  const double infinity = std::numeric_limits<double>::infinity();
  const std::int64_t count = array.count();
  if (count == 0) return;
  const std::int64_t chosen = random.between(0, count - 1);
  std::int64_t n = 0;
  array.each([&](const Index&, std::int64_t at) {
    if (n++ == chosen || random.chance(0.3 / static_cast<double>(count))) {
      array.set(at, infinite ? random.pick<double>({NAN, NAN, infinity, -infinity}) : NAN);
    }
  });
}

/// Offsets of an operand's rows that matter.
class Marks {
 public:
  explicit Marks(const Array& array) : array_(array), marks_(array.span(), false) {}
  void row(std::int64_t b, std::int64_t seq, std::int64_t head) {
    for (std::int64_t c = 0; c < array_.size()[3]; ++c) one({b, seq, head, c});
  }
  void one(Index at) {
    for (int axis = 0; axis < 4; ++axis) {
      if (array_.size()[axis] == 1) at[axis] = 0;  // packed operands, and a bias that broadcasts
    }
    marks_[array_.offset(at)] = true;
  }
  void poison(Array& array) const {
    if (array) array.poison_unmarked(marks_);
  }

 private:
  const Array& array_;
  std::vector<bool> marks_;
};

}  // namespace

void fill_values(Case& c, Random& random) {
  const Values values = c.spec().values;
  const bool backward = c.spec().pass == Pass::backward;
  const double sigma = values == Values::wide ? 3 : 1;
  const double scale_root = std::sqrt(size_of_scale(c.problem()));
  const double dim_root = std::sqrt(std::sqrt(static_cast<double>(std::max<std::int64_t>(c.problem().head_dim, 1))));
  fill_normal(c.q, random, values == Values::steep ? 200 / scale_root / dim_root : sigma);
  fill_normal(c.k, random, values == Values::steep ? 1 / scale_root / dim_root : sigma);
  fill_normal(c.v, random, sigma);
  if (backward) fill_normal(c.grad_out, random, sigma);
  if (c.grad_lse) fill_normal(c.grad_lse, random, 1);
  if (values == Values::deep) fill_scores(c, random, -1e4, 0.01);
  if (values == Values::equal) {
    fill_scores(c, random, random.pick({-46340.0, 3000.0, -300.0}) * (0.8 + 0.2 * random.uniform()), 0);
  }
  if (values == Values::rising) {
    fill_scores(c, random, 4, 0.1);
    const double first = c.k.count() > 0 ? c.k.get(0) : 0;
    fill(c.k,
         [&](const Index& i) { return first * (0.5 + static_cast<double>(i[1]) / 40) * (1 + 0.1 * random.normal()); });
  }
  if (values == Values::denormal || values == Values::tiny) {
    // Which operand is all tiny depends on the spec alone: the draws of a case have errors of one size.
    const bool tiny = values == Values::tiny, tiny_grad = tiny && backward && c.spec().causal;
    for (Array* array : {&c.q, &c.k}) fill_denormal(*array, random, false);
    fill_denormal(c.v, random, tiny && !tiny_grad);
    if (backward) fill_denormal(c.grad_out, random, tiny_grad);
  }
  if (values == Values::special) {
    const int which = static_cast<int>(random.between(0, backward ? 3 : 2));
    Array* array[] = {&c.q, &c.k, &c.v, &c.grad_out};
    add_special(*array[which], random, which >= 2 || c.spec().softcap == 0);
  }
}

void poison_invisible(Case& c) {
  const Problem& p = c.problem();
  Marks q(c.q), k(c.k), v(c.v), dout(c.grad_out), out(c.saved_out), lse(c.saved_lse), dlse(c.grad_lse), bias(c.bias);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const oracle::Item item = oracle::item_at(p, b);
    std::vector<bool> key_seen(p.heads_kv * item.k_length, false);
    for (std::int64_t i = 0; i < item.q_length; ++i) {
      for (std::int64_t h = 0; h < p.heads_q; ++h) {
        // A row whose keys all have a bias of -inf is as empty as one that sees none; but for that the bias is read.
        const oracle::Keys visible = oracle::visible_keys(p.mask, item, i);
        const oracle::Keys keys = oracle::seen_keys(p, item, b, h, i);
        const bool empty = keys.lo == keys.hi;
        for (std::int64_t j = keys.lo; j < keys.hi; ++j) key_seen[p.kv_head(h) * item.k_length + j] = true;
        const std::int64_t seq = item.q_row + i;
        if (!empty) q.row(b, seq, h);
        if (c.grad_out && !empty) dout.row(b, seq, h);
        // A sink's gradient asks for dLSE of empty rows, too.
        if (c.grad_lse && (!empty || c.sinks)) dlse.one({b, h, seq, 0});
        if (c.saved_out) out.row(b, seq, h);
        if (c.saved_lse) lse.one({b, h, seq, 0});
        for (std::int64_t j = visible.lo; c.bias && j < visible.hi; ++j) bias.one({b, h, i, item.k_start + j});
      }
    }
    for (std::int64_t j = 0; j < item.k_length; ++j) {
      for (std::int64_t h = 0; h < p.heads_kv; ++h) {
        if (!key_seen[h * item.k_length + j]) continue;
        k.row(b, item.k_row + j, h);
        v.row(b, item.k_row + j, h);
      }
    }
  }
  q.poison(c.q);
  k.poison(c.k);
  v.poison(c.v);
  dout.poison(c.grad_out);
  dlse.poison(c.grad_lse);
  out.poison(c.saved_out);
  lse.poison(c.saved_lse);
  bias.poison(c.bias);
}

}  // namespace onepass::check
