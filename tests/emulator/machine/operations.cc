#include <utility>

#include "emulator/machine/machine.h"

namespace onepass::emulator {
namespace {

constexpr double kAtOnce = 0.125, kSometime = 0.125;  // else at the last moment

}  // namespace

void Operation::perform() {
  if (done()) return;
  const std::function<void()> effect = std::exchange(effect_, nullptr);
  effect();
  progress();
}

void Groups::add(std::function<void()> effect) {
  const double fate = random().uniform();
  if (fate < kAtOnce) {
    effect();
    return;
  }
  open_.push_back(std::make_shared<Operation>(std::move(effect)));
  if (fate < kAtOnce + kSometime) block().at_any_moment.push_back(open_.back());
}

void Groups::commit() {
  closed_.push_back(std::move(open_));
  open_.clear();
}

void Groups::perform(std::vector<Pending>& group) {
  while (!group.empty()) {
    const auto last = std::ssize(group) - 1;
    std::swap(group[static_cast<std::size_t>(random().between(0, last))], group.back());
    group.back()->perform();
    group.pop_back();
  }
}

void Groups::wait(std::size_t pending) {
  for (; closed_.size() > pending; closed_.pop_front()) perform(closed_.front());
}

void Groups::finish() {
  commit();
  wait(0);
}

void at_any_moment(std::function<void()> effect) {
  block().at_any_moment.push_back(std::make_shared<Operation>(std::move(effect)));
}

void at_last(std::function<void()> effect) {
  block().at_last.push_back(std::make_shared<Operation>(std::move(effect)));
}

}  // namespace onepass::emulator
