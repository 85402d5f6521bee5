// The pool: workers spin for a moment between calls, then sleep; a call takes the workers that are free.
#include "cpu/parallel.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#define ONEPASS_HAS_PTHREAD 1
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace onepass::cpu {
namespace {

constexpr int kMaxWorkers = 1023;
// Waking a sleeper costs about 20 us, so waiting that long and a little more costs at most about twice the best.
constexpr std::chrono::microseconds kSpin{50};

/// True in a worker and in a caller's own share: a call from there runs alone.
thread_local bool t_inside = false;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// A word that one thread sets and another waits for.
class Signal {
 public:
  void set(int value) {
    value_.store(value, std::memory_order_seq_cst);
    // Either this sees the sleeper or the sleeper sees the value: both are sequentially consistent.
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }
  /// Returns the value once accept(value) holds.
  template <class Accept>
  int wait(bool spin, Accept accept) {
    if (spin) {
      const auto end = std::chrono::steady_clock::now() + kSpin;
      do {
        for (int i = 0; i < 16; ++i) {
          const int value = value_.load(std::memory_order_acquire);
          if (accept(value)) return value;
          relax();
        }
      } while (std::chrono::steady_clock::now() < end);
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    int value;
    while (!accept(value = value_.load(std::memory_order_seq_cst))) changed_.wait(lock);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return value;
  }

 private:
  std::atomic<int> value_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

enum : int { kIdle, kWork, kDone, kStop };

struct alignas(64) Worker {
  Signal signal;
  // Written before kWork is set, read after.
  void (*body)(void*, int) = nullptr;
  void* context = nullptr;
  int index = 0;
  bool spin = true;
  Worker* next = nullptr;  // in the call's list, or the free list under the pool's mutex
  std::thread thread;
};

void serve(Worker* worker) {
  t_inside = true;
  bool spin = true;
  while (worker->signal.wait(spin, [](int v) { return v == kWork || v == kStop; }) == kWork) {
    worker->body(worker->context, worker->index);
    spin = worker->spin;  // from kDone on the fields belong to the next caller
    worker->signal.set(kDone);
  }
}

struct Pool {
  std::mutex mutex;
  Worker* free = nullptr;  // last used first: it may still spin
  int workers = 0;
  bool closed = false;
};

// Never destroyed: calls from other threads may come while the process exits.
union Storage {
  Pool pool;
  constexpr Storage() : pool() {}
  ~Storage() {}
};
constinit Storage g_storage;
Pool& pool() {
  return g_storage.pool;
}

/// In a forked child: its parent's workers do not exist here, and their mutexes may be held by nobody.
[[maybe_unused]] void start_anew() {
  new (&g_storage.pool) Pool;
}

/// Stops idle workers when the library is unloaded or the process exits.
struct Lifetime {
#if defined(ONEPASS_HAS_PTHREAD)
  Lifetime() {
    pthread_atfork(nullptr, nullptr, &start_anew);
  }
#endif
  ~Lifetime() {
    Worker* idle;
    {
      const std::lock_guard<std::mutex> lock(pool().mutex);
      pool().closed = true;
      idle = pool().free;
      pool().free = nullptr;
    }
    while (idle != nullptr) {
      Worker* worker = idle;
      idle = worker->next;
      worker->signal.set(kStop);
      worker->thread.join();
      delete worker;
    }
  }
} g_lifetime;

/// A new worker, or null if the system has no thread to give.
Worker* start_worker() {
  Worker* worker = new (std::nothrow) Worker;
  if (worker == nullptr) return nullptr;
#if defined(ONEPASS_HAS_PTHREAD)
  // The program's signals are for its own threads, but for those that an instruction raises: blocked, they would end
  // the process without its handler.
  sigset_t all, before;
  sigfillset(&all);
  for (const int raised : {SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGTRAP}) sigdelset(&all, raised);
  pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
  try {
    worker->thread = std::thread(&serve, worker);
  } catch (...) {
    delete worker;
    worker = nullptr;
  }
#if defined(ONEPASS_HAS_PTHREAD)
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
  return worker;
}

/// Up to `count` workers, as a list. There are never more in all than the largest call asked for, so callers at the
/// same time share them instead of crowding the processors.
Worker* take_workers(int count) {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  if (p.closed) return nullptr;
  Worker* list = nullptr;
  for (int taken = 0; taken < count; ++taken) {
    Worker* worker = p.free;
    if (worker != nullptr) {
      p.free = worker->next;
    } else {
      if (p.workers >= count || (worker = start_worker()) == nullptr) break;
      ++p.workers;
    }
    worker->next = list;
    list = worker;
  }
  return list;
}

void give_back(Worker* first, Worker* last) {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  last->next = p.free;
  p.free = first;
}

}  // namespace

void run_parallel(int threads, void (*body)(void* context, int worker), void* context) {
  Worker* workers = nullptr;
  if (threads > 1 && !t_inside) workers = take_workers(threads - 1 < kMaxWorkers ? threads - 1 : kMaxWorkers);
  if (workers == nullptr) {
    body(context, 0);
    return;
  }
  static const int processors = default_threads();
  const bool spin = threads <= processors;  // else whoever spins keeps another from running
  int index = 1;
  for (Worker* worker = workers; worker != nullptr; worker = worker->next) {
    worker->body = body;
    worker->context = context;
    worker->index = index++;
    worker->spin = spin;
    worker->signal.set(kWork);
  }
  t_inside = true;
  body(context, 0);
  t_inside = false;
  Worker* last = nullptr;
  for (Worker* worker = workers; worker != nullptr; worker = worker->next) {
    worker->signal.wait(spin, [](int v) { return v == kDone; });
    last = worker;
  }
  give_back(workers, last);
}

}  // namespace onepass::cpu
