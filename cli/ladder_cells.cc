// Runs the rungs of `onepass ladder`.
#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <numeric>

#include "cpu/parallel.h"
#include "ladder.h"

namespace onepass::cli {
namespace {

/// body(n) for n < count on several threads, in this order; the first exception is thrown here.
template <class F>
void for_each_index(std::size_t count, int threads, Progress* progress, F body) {
  std::atomic<std::size_t> next = 0;
  std::exception_ptr failure;
  std::mutex mutex;
  std::size_t done = 0;
  cpu::parallel(threads, [&](int) {
    for (std::size_t n; (n = next.fetch_add(1)) < count;) {
      std::exception_ptr thrown;
      try {
        body(n);
      } catch (...) {
        thrown = std::current_exception();
      }
      const std::lock_guard<std::mutex> lock(mutex);
      if (thrown && !failure) failure = thrown;
      if (progress != nullptr) progress->set(++done);
    }
  });
  if (failure) std::rethrow_exception(failure);
}

struct Inputs {
  ladder::Problem problem;
  bool gradients = false;
  ladder::Arrays arrays = {};
  ladder::Exact exact = {};
  Status status = {};
};

}  // namespace

bool LadderCell::agrees() const {
  const ladder::Ledger& g = measured.ledger;
  return g.moved() == totals.moved && g.matmul_flops == totals.matmul_flops && g.other_flops == totals.other_flops &&
         g.exps == totals.exps && (problem.N == 0 || g.held_peak == totals.held_peak);
}

Status measure_cells(std::vector<LadderCell>& cells, const LadderOptions& options) {
  const int threads = options.thread_count();
  std::vector<Inputs> inputs;  // one a (seq, head_dim)
  std::vector<std::size_t> input_of(cells.size());
  for (std::size_t n = 0; n < cells.size(); ++n) {
    const ladder::Problem& p = cells[n].problem;
    const auto same = [&p](const Inputs& x) { return x.problem.N == p.N && x.problem.d == p.d; };
    auto at = std::find_if(inputs.begin(), inputs.end(), same);
    if (at == inputs.end()) at = inputs.insert(inputs.end(), {p});
    at->gradients = at->gradients || cells[n].rung->backward();
    input_of[n] = static_cast<std::size_t>(at - inputs.begin());
  }
  for_each_index(inputs.size(), threads, nullptr, [&](std::size_t n) {
    Inputs& x = inputs[n];
    x.arrays = make_arrays(x.problem, options.seed);
    x.status = exact_of(x.problem, x.arrays, x.gradients, x.exact);
  });
  for (const Inputs& x : inputs) ONEPASS_RETURN_IF_ERROR(x.status);
  // The longest first, so that no thread is left with one at the end.
  std::vector<std::size_t> order(cells.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return cells[a].totals.matmul_flops > cells[b].totals.matmul_flops;
  });
  Progress progress("ladder", cells.size());
  for_each_index(cells.size(), threads, &progress, [&](std::size_t n) {
    LadderCell& cell = cells[order[n]];
    const Inputs& x = inputs[input_of[order[n]]];
    cell.measured = measure(*cell.rung, cell.problem, x.arrays, x.exact);
  });
  return {};
}

}  // namespace onepass::cli
