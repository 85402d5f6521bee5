// Random numbers for test cases: the same on every machine and compiler.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace onepass::check {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {  // splitmix64
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  bool chance(double p) { return uniform() < p; }
  /// lo ... hi, both included; lo where hi < lo.
  std::int64_t between(std::int64_t lo, std::int64_t hi) {
    return hi <= lo ? lo : lo + static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(hi - lo + 1));
  }
  template <class T>
  T pick(std::initializer_list<T> list) {
    return list.begin()[between(0, static_cast<std::int64_t>(list.size()) - 1)];
  }
  double normal() {  // Box-Muller
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }

 private:
  std::uint64_t state_;
};

}  // namespace onepass::check
