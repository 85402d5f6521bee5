#include "cpu/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "kit/kit.h"

#if defined(__unix__)
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace onepass::cpu {
namespace {

/// Sums 0 ... count - 1 with a shared counter, as kernels take their tasks; returns the number of workers seen.
int sum_in_parallel(int threads, int count, std::int64_t* sum) {
  std::atomic<int> next{0}, workers{0};
  std::atomic<std::int64_t> total{0};
  parallel(threads, [&](int worker) {
    EXPECT_GE(worker, 0);
    EXPECT_LT(worker, threads);
    workers.fetch_add(1);
    std::int64_t mine = 0;
    for (int i; (i = next.fetch_add(1)) < count;) mine += i;
    total.fetch_add(mine);
  });
  *sum = total.load();
  return workers.load();
}

void expect_sum(int threads, int count) {
  std::int64_t sum = -1;
  const int workers = sum_in_parallel(threads, count, &sum);
  EXPECT_EQ(sum, std::int64_t{count} * (count - 1) / 2);
  EXPECT_GE(workers, 1);
  EXPECT_LE(workers, threads);
}

TEST(Parallel, EveryThreadCount) {
  for (int threads : {1, 2, 3, 8, 33}) expect_sum(threads, 1000);
}

TEST(Parallel, EachWorkerOnceAndZeroOnTheCaller) {
  std::vector<std::atomic<int>> calls(8);
  const auto caller = std::this_thread::get_id();
  parallel(8, [&](int worker) {
    calls[worker].fetch_add(1);
    EXPECT_EQ(worker == 0, std::this_thread::get_id() == caller);
  });
  EXPECT_EQ(calls[0].load(), 1);
  for (auto& n : calls) EXPECT_LE(n.load(), 1);
}

TEST(Parallel, RunsAtOnce) {
  // A pool that nobody else uses gives all it was asked for: the two meet.
  std::atomic<int> arrived{0};
  parallel(2, [&](int) {
    arrived.fetch_add(1);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (arrived.load() < 2 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  });
  EXPECT_EQ(arrived.load(), 2);
}

TEST(Parallel, NestedCallsRunAlone) {
  std::atomic<int> inner{0};
  parallel(3, [&](int) {
    parallel(4, [&](int worker) {
      EXPECT_EQ(worker, 0);
      inner.fetch_add(1);
    });
  });
  EXPECT_GE(inner.load(), 1);
  EXPECT_LE(inner.load(), 3);
  expect_sum(3, 100);  // and the caller is outside again
}

TEST(Parallel, SleepingWorkersWake) {
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    expect_sum(3, 100);
  }
}

TEST(Parallel, ManyCallersAtOnce) {
  std::vector<std::thread> callers;
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([c] {
      for (int i = 0; i < 300; ++i) expect_sum(1 + (c + i) % 5, 50);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(Parallel, DefaultIsWhatTheProcessMayUse) {
  EXPECT_GE(default_threads(), 1);
  EXPECT_LE(default_threads(), static_cast<int>(std::thread::hardware_concurrency()));
}

#if defined(__unix__)

constexpr const char* kNoForks = "a sanitizer's runtime does not survive the fork of a process with threads";

/// Runs `body` in a forked child; true if it returned true within 20 seconds.
template <class F>
bool in_child(F&& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(body() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(Parallel, AfterFork) {
  if (kit::kSanitized) GTEST_SKIP() << kNoForks;
  expect_sum(4, 100);
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(in_child([] {
      std::int64_t sum = 0;
      for (int n = 0; n < 20; ++n) {
        sum_in_parallel(4, 100, &sum);
        if (sum != 4950) return false;
      }
      return in_child([] {
        expect_sum(3, 100);
        return true;
      });
    }));
  }
  expect_sum(4, 100);
}

TEST(Parallel, ForkWhileOthersCall) {
  if (kit::kSanitized) GTEST_SKIP() << kNoForks;
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  for (int c = 0; c < 2; ++c) {
    callers.emplace_back([&] {
      while (!stop.load()) expect_sum(4, 20);
    });
  }
  for (int i = 0; i < 30; ++i) {
    EXPECT_TRUE(in_child([] {
      expect_sum(4, 100);
      return true;
    }));
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
}

TEST(Parallel, ExitWhileOthersCall) {
  if (kit::kSanitized) GTEST_SKIP() << kNoForks;
  EXPECT_TRUE(in_child([] {
    for (int c = 0; c < 3; ++c) {
      std::thread([] {
        for (;;) expect_sum(4, 20);
      }).detach();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::exit(0);  // runs the static destructors, unlike _exit
    return true;
  }));
}

TEST(Parallel, WorkersLeaveSignalsToTheProgram) {
  // But those that an instruction raises in a worker reach the program's handler: blocked, they would kill.
  std::atomic<int> wrong{0};
  std::atomic<bool> worked{false};
  for (int call = 0; call < 1000 && !worked; ++call) {
    parallel(3, [&](int worker) {
      if (worker == 0) return std::this_thread::yield();
      worked = true;
      sigset_t blocked;
      pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
      for (const int signal : {SIGINT, SIGTERM, SIGCHLD, SIGUSR1}) wrong += sigismember(&blocked, signal) == 0;
      for (const int signal : {SIGBUS, SIGFPE, SIGILL, SIGSEGV}) wrong += sigismember(&blocked, signal) != 0;
    });
  }
  EXPECT_TRUE(worked);
  EXPECT_EQ(wrong, 0);
}

TEST(Parallel, NoThreadsToBeHad) {
  if (kit::kSanitized) GTEST_SKIP() << kNoForks;
  // With the address space closed no stack can be mapped; the call runs with what there is.
  EXPECT_TRUE(in_child([] {
    expect_sum(2, 100);
    rlimit limit{};
    getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = 1;
    setrlimit(RLIMIT_AS, &limit);
    std::int64_t sum = 0;
    const int workers = sum_in_parallel(500, 100, &sum);  // more than the C library keeps stacks of ended threads
    return sum == 4950 && workers >= 1 && workers < 500;
  }));
}

#endif

}  // namespace
}  // namespace onepass::cpu
