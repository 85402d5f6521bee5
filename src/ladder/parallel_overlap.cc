// Parallel rung: v3's two overlaps (FlashAttention-3, sections 3.1 and 3.2).
//
// A key tile is a chain: S = Q K^T on the tensor cores, the softmax on the exponential units, O += P V on the tensor
// cores. One after the other, each unit waits for the other. Two remedies:
// - Ping-pong: two warp groups, out of step. While one does its softmax the other has the tensor cores for P V of this
//   tile and S of the next.
// - Within one group: S of the next tile is issued before P V of this one, and its softmax runs under that P V.
// Here a timeline is a list of steps in the order in which they are issued; a step starts when its unit is done with
// the one before and what it needs is there.
#include <cmath>

#include "ladder/parallel.h"

namespace onepass::ladder {
namespace {

class Issue {
 public:
  explicit Issue(const TileCosts& costs) : duration_{costs.S, costs.softmax, costs.PV} {}

  /// Issues a step that may not start before `ready`; its end.
  double operator()(Step step, std::int64_t group, std::int64_t tile, double ready) {
    const Unit unit = step == Step::softmax ? Unit::exponentials : Unit::tensor_cores;
    double& free = free_[static_cast<int>(unit)];
    const double start = max_of(free, ready);
    free = start + duration_[static_cast<int>(step)];
    busy_[static_cast<int>(unit)] += duration_[static_cast<int>(step)];
    line_.events.push_back({unit, step, group, tile, start, free});
    line_.makespan = max_of(line_.makespan, free);
    return free;
  }
  Timeline finish() {
    if (line_.makespan > 0) {
      line_.tensor_share = busy_[0] / line_.makespan;
      line_.exponential_share = busy_[1] / line_.makespan;
    }
    return std::move(line_);
  }

 private:
  double duration_[3], free_[2] = {0, 0}, busy_[2] = {0, 0};
  Timeline line_;
};

/// All groups in step, one kind of work after the other.
template <std::int64_t kGroups>
Timeline in_step(std::int64_t tiles, const TileCosts& costs) {
  Issue issue(costs);
  double ready = 0;
  for (std::int64_t j = 0; j < tiles; ++j) {
    for (const Step step : {Step::S, Step::softmax, Step::PV}) {
      double end = ready;
      for (std::int64_t group = 0; group < kGroups; ++group) end = issue(step, group, j, ready);
      ready = end;
    }
  }
  return issue.finish();
}

Timeline within_group(std::int64_t tiles, const TileCosts& costs) {
  Issue issue(costs);
  double p = 0, o = 0;  // ends of the last softmax and the last P V
  for (std::int64_t j = 0; j < tiles; ++j) {
    const double s = issue(Step::S, 0, j, max_of(p, o));
    const double p_before = p;
    p = issue(Step::softmax, 0, j, s);
    if (j > 0) o = issue(Step::PV, 0, j - 1, p_before);
  }
  if (tiles > 0) issue(Step::PV, 0, tiles - 1, p);
  return issue.finish();
}

Timeline ping_pong(std::int64_t tiles, const TileCosts& costs) {
  Issue issue(costs);
  double p[2] = {0, 0};
  for (std::int64_t j = 0; j < tiles; ++j) {
    for (std::int64_t group = 0; group < 2; ++group) {  // barriers give the tensor cores to the groups in turn
      const double o = j > 0 ? issue(Step::PV, group, j - 1, p[group]) : 0;
      p[group] = issue(Step::softmax, group, j, issue(Step::S, group, j, o));
    }
  }
  for (std::int64_t group = 0; group < 2 && tiles > 0; ++group) issue(Step::PV, group, tiles - 1, p[group]);
  return issue.finish();
}

const OverlapRung kOverlapRungs[] = {
    {"one_group", "one warp group, step after step", 1, in_step<1>,
     [](double T, const TileCosts& c) { return T * (c.S + c.softmax + c.PV); }, "T (a + e + b)"},
    {"within_group", "one warp group, the next tile's softmax under this one's P V", 1, within_group,
     [](double T, const TileCosts& c) {
       return T == 0 ? 0 : c.S + c.softmax + c.PV + (T - 1) * (c.S + max_of(c.softmax, c.PV));
     },
     "a + e + b + (T - 1) (a + max(e, b))"},
    {"two_groups", "two warp groups in step", 2, in_step<2>,
     [](double T, const TileCosts& c) { return 2 * T * (c.S + c.softmax + c.PV); }, "2T (a + e + b)"},
    {"ping_pong", "two warp groups, one's softmax under the other's products", 2, ping_pong,
     [](double T, const TileCosts& c) {
       if (T == 0) return 0.0;
       if (c.softmax > c.S + c.PV) return c.S + 2 * T * c.softmax + c.PV;
       return 2 * T * (c.S + c.PV) + max_of(0.0, c.softmax - c.S) + max_of(0.0, c.softmax - c.PV);
     },
     "2T (a + b) + max(0, e - a) + max(0, e - b); a + 2T e + b where e > a + b"}};

}  // namespace

std::span<const OverlapRung> overlap_rungs() {
  return kOverlapRungs;
}

std::string refusal(std::int64_t tiles, const TileCosts& costs) {
  if (tiles < 0 || tiles > 1 << 20) return "the key tiles must be 0 ... 1048576, not " + std::to_string(tiles);
  for (const double clocks : {costs.S, costs.softmax, costs.PV}) {
    if (clocks >= 0 && std::isfinite(clocks)) continue;
    return "a step must take 0 clocks or more, a finite number, not " + std::to_string(clocks);
  }
  return "";
}

}  // namespace onepass::ladder
