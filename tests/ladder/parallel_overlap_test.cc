// The timelines: no unit overlaps itself, nothing starts before what it needs, and the makespans are the formulas.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>

#include "ladder/parallel.h"

namespace onepass::ladder {
namespace {

const OverlapRung& rung(const std::string& name) {
  for (const OverlapRung& r : overlap_rungs()) {
    if (name == r.name) return r;
  }
  throw std::out_of_range(name);
}

/// Calls f(tiles, costs) over a sweep with every order of the three costs; whole clocks, so that sums are exact.
template <class F>
void sweep(F f) {
  for (const std::int64_t tiles : {0, 1, 2, 3, 4, 7, 20}) {
    for (const int S : {0, 1, 3, 8, 20}) {
      for (const int softmax : {0, 1, 2, 5, 8, 11, 13, 28, 40, 100}) {
        for (const int PV : {0, 1, 3, 8, 20}) f(tiles, TileCosts{double(S), double(softmax), double(PV)});
      }
    }
  }
}

TEST(ParallelOverlap, MakespansAreTheFormulas) {
  for (const OverlapRung& r : overlap_rungs()) {
    sweep([&](std::int64_t T, const TileCosts& c) {
      ASSERT_EQ(refusal(T, c), "");
      ASSERT_EQ(r.run(T, c).makespan, r.makespan(T, c))
          << r.name << " T " << T << " a " << c.S << " e " << c.softmax << " b " << c.PV;
    });
  }
}

TEST(ParallelOverlap, StepsRunOnceInOrderAndWhenTheyCan) {
  for (const OverlapRung& r : overlap_rungs()) {
    sweep([&](std::int64_t T, const TileCosts& c) {
      const Timeline line = r.run(T, c);
      ASSERT_EQ(line.events.size(), static_cast<std::size_t>(3 * T * r.groups)) << r.name;
      std::map<std::tuple<Step, std::int64_t, std::int64_t>, const Event*> at;
      double free[2] = {0, 0}, busy[2] = {0, 0};
      for (const Event& e : line.events) {  // each unit's events come in the order of time
        double& unit = free[static_cast<int>(e.unit)];
        ASSERT_GE(e.start, unit) << r.name;
        unit = e.end;
        busy[static_cast<int>(e.unit)] += e.end - e.start;
        ASSERT_EQ(e.unit, e.step == Step::softmax ? Unit::exponentials : Unit::tensor_cores);
        ASSERT_EQ(e.end - e.start, e.step == Step::S ? c.S : e.step == Step::PV ? c.PV : c.softmax);
        ASSERT_LE(e.end, line.makespan);
        ASSERT_TRUE(at.emplace(std::tuple(e.step, e.group, e.tile), &e).second);
      }
      for (std::int64_t group = 0; group < r.groups; ++group) {
        for (std::int64_t j = 0; j < T; ++j) {
          const Event &s = *at.at({Step::S, group, j}), &p = *at.at({Step::softmax, group, j});
          const Event& o = *at.at({Step::PV, group, j});
          ASSERT_GE(p.start, s.end) << r.name;
          ASSERT_GE(o.start, p.end) << r.name;
          // The running maximum and O go from tile to tile.
          if (j > 0) {
            ASSERT_GE(p.start, at.at({Step::softmax, group, j - 1})->end) << r.name;
            ASSERT_GE(o.start, at.at({Step::PV, group, j - 1})->end) << r.name;
          }
        }
      }
      if (line.makespan > 0) {
        ASSERT_NEAR(line.tensor_share, busy[0] / line.makespan, 1e-12);
        ASSERT_NEAR(line.exponential_share, busy[1] / line.makespan, 1e-12);
        ASSERT_LE(std::max(line.tensor_share, line.exponential_share), 1 + 1e-12);
      }
    });
  }
}

TEST(ParallelOverlap, OverlapIsShorterUnlessThereIsNothingToHide) {
  sweep([](std::int64_t T, const TileCosts& c) {
    for (const auto& [with, without] : {std::pair("within_group", "one_group"), std::pair("ping_pong", "two_groups")}) {
      const double overlapped = rung(with).run(T, c).makespan, plain = rung(without).run(T, c).makespan;
      ASSERT_LE(overlapped, plain) << with;
      const bool hides = c.softmax > 0 && c.PV > 0 && T > 1;
      if (hides) {
        ASSERT_LT(overlapped, plain) << with << " a " << c.S << " e " << c.softmax << " b " << c.PV;
      }
      ASSERT_GE(overlapped, rung(with).groups * T * std::max(c.S + c.PV, c.softmax)) << with;
    }
  });
}

TEST(ParallelOverlap, OnHopper) {
  // The rates behind the clocks: 989 TFLOP/s, and 3.9 T exponentials a second.
  EXPECT_NEAR(kHopperFlopsPerClock * kH100SMs * kHopperClock, 989e12, 0.5e12);
  EXPECT_NEAR(kHopperExpsPerClock * kH100SMs * kHopperClock, 3.9e12, 0.05e12);
  // d = 128: the exponentials take half the time of the products (FlashAttention-3, section 3.1).
  const TileCosts c = hopper_costs(64, 128, 128);
  EXPECT_EQ(c.S, 512);
  EXPECT_EQ(c.PV, 512);
  EXPECT_EQ(c.softmax, 512);
  EXPECT_EQ(hopper_costs(64, 128, 64).softmax, 2 * hopper_costs(64, 128, 64).S);
  const std::int64_t T = 64;
  EXPECT_NEAR(rung("two_groups").run(T, c).tensor_share, 2.0 / 3, 1e-12);
  EXPECT_EQ(rung("ping_pong").run(T, c).tensor_share, 1);
  EXPECT_NEAR(rung("within_group").run(T, c).tensor_share, 128.0 / 129, 1e-12);
  // Softmax really lies under a product of the other group, or of its own.
  for (const char* name : {"ping_pong", "within_group"}) {
    const Timeline line = rung(name).run(T, c);
    for (const Event& e : line.events) {
      if (e.step != Step::softmax || e.tile == 0 || e.tile == T - 1) continue;
      double under = 0;
      for (const Event& other : line.events) {
        if (other.unit == Unit::tensor_cores && (std::string(name) == "within_group" || other.group != e.group)) {
          under += std::max(0.0, std::min(e.end, other.end) - std::max(e.start, other.start));
        }
      }
      ASSERT_EQ(under, e.end - e.start) << name << " tile " << e.tile;
    }
  }
}

TEST(ParallelOverlap, RefusesWhatIsNoTime) {
  EXPECT_NE(refusal(-1, {1, 1, 1}).find("not -1"), std::string::npos);
  EXPECT_NE(refusal(std::int64_t{1} << 40, {1, 1, 1}), "");
  EXPECT_NE(refusal(2, {1, -1, 1}), "");
  EXPECT_NE(refusal(2, {1, 1, NAN}), "");
  EXPECT_NE(refusal(2, {INFINITY, 1, 1}), "");
  for (const OverlapRung& r : overlap_rungs()) {
    const Timeline line = r.run(0, {1, 2, 3});
    EXPECT_TRUE(line.events.empty());
    EXPECT_EQ(line.makespan + line.tensor_share + line.exponential_share, 0) << r.name;
  }
}

}  // namespace
}  // namespace onepass::ladder
