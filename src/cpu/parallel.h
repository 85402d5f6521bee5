// Threads for the CPU kernels: one small pool for the process. No OpenMP: its runtime hangs after fork and
// oversubscribes beside other frameworks' runtimes.
#pragma once

namespace onepass::cpu {

/// Calls body(context, worker) for worker = 0 ... n - 1, n <= threads, at once, worker 0 on the calling thread; returns
/// when all are done. n may be less than `threads` (pool busy with another caller, threads not to be had), so workers
/// take their work from a shared counter and may not wait for a worker that might not exist. Safe from several
/// threads at once, after fork, and from inside a body (then n = 1).
void run_parallel(int threads, void (*body)(void* context, int worker), void* context);

/// The threads a call uses if it names none: the processors this process may run on.
int default_threads();

template <class T>
struct RemoveReferenceOf {
  using type = T;
};
template <class T>
struct RemoveReferenceOf<T&> {
  using type = T;
};
template <class T>
using RemoveReference = typename RemoveReferenceOf<T>::type;

template <class F>
inline __attribute__((always_inline)) void parallel(int threads, F&& body) {
  using Body = RemoveReference<F>;
  struct Call {
    static void run(void* context, int worker) { (*static_cast<Body*>(context))(worker); }
  };
  run_parallel(threads, &Call::run, const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace onepass::cpu
