#include "read_bandwidth.h"

#include <atomic>
#include <chrono>

#include "core/base.h"
#include "cpu/parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace onepass::bench {
namespace {

using Sum = unsigned long long;

/// Where sums go, so that no read is left out.
volatile Sum sink;

template <int kAhead>
void prefetch(const char* p) {
  if constexpr (kAhead > 0) __builtin_prefetch(p + kAhead);
}

/// Any machine: 64-bit words.
template <int kAhead>
Sum read_words(const char* p, std::size_t bytes) {
  Sum sum[8] = {};
  std::size_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    prefetch<kAhead>(p + i);
    for (int w = 0; w < 8; ++w) {
      Sum x;
      __builtin_memcpy(&x, p + i + 8 * w, 8);
      sum[w] ^= x;
    }
  }
  for (int w = 1; w < 8; ++w) sum[0] ^= sum[w];
  return sum[0];
}

#if defined(__x86_64__)

/// kStreams parts of the range side by side, a cache line of each at a time.
template <int kStreams, int kAhead>
__attribute__((target("avx2"))) Sum read_avx2(const char* p, std::size_t bytes) {
  const std::size_t part = bytes / (64 * kStreams) * 64;
  __m256i sum[kStreams][2] = {};
  for (std::size_t i = 0; i < part; i += 64) {
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; ++s) {
      const char* at = p + s * part + i;
      prefetch<kAhead>(at);
      sum[s][0] = _mm256_xor_si256(sum[s][0], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
      sum[s][1] = _mm256_xor_si256(sum[s][1], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 32)));
    }
  }
  Sum total = read_words<0>(p + kStreams * part, bytes - kStreams * part);
  for (int s = 0; s < kStreams; ++s) {
    Sum lanes[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm256_xor_si256(sum[s][0], sum[s][1]));
    for (const Sum lane : lanes) total ^= lane;
  }
  return total;
}

template <int kStreams, int kAhead>
__attribute__((target("avx512f"))) Sum read_avx512(const char* p, std::size_t bytes) {
  const std::size_t part = bytes / (256 * kStreams) * 256;
  __m512i sum[kStreams][4] = {};
  for (std::size_t i = 0; i < part; i += 256) {
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; ++s) {
      const char* at = p + s * part + i;
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line) {
        prefetch<kAhead>(at + 64 * line);
        sum[s][line] = _mm512_xor_si512(sum[s][line], _mm512_loadu_si512(at + 64 * line));
      }
    }
  }
  Sum total = read_words<0>(p + kStreams * part, bytes - kStreams * part);
  for (int s = 0; s < kStreams; ++s) {
    const __m512i all =
        _mm512_xor_si512(_mm512_xor_si512(sum[s][0], sum[s][1]), _mm512_xor_si512(sum[s][2], sum[s][3]));
    Sum lanes[8];
    _mm512_storeu_si512(lanes, all);
    for (const Sum lane : lanes) total ^= lane;
  }
  return total;
}

#endif

}  // namespace

std::vector<ReadKernel> read_kernels() {
  std::vector<ReadKernel> list = {{"words", &read_words<0>, true}, {"words, prefetch 1 KB", &read_words<1024>, true}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    list.push_back({"avx2", &read_avx2<1, 0>, true});
    list.push_back({"avx2, prefetch 1 KB", &read_avx2<1, 1024>, true});
    list.push_back({"avx2, prefetch 4 KB", &read_avx2<1, 4096>, false});
    list.push_back({"avx2, 4 streams", &read_avx2<4, 0>, false});
  }
  if (__builtin_cpu_supports("avx512f")) {
    list.push_back({"avx512", &read_avx512<1, 0>, true});
    list.push_back({"avx512, one part a thread", &read_avx512<1, 0>, false});
    list.push_back({"avx512, prefetch 1 KB", &read_avx512<1, 1024>, true});
    list.push_back({"avx512, prefetch 4 KB", &read_avx512<1, 4096>, true});
    list.push_back({"avx512, prefetch 8 KB", &read_avx512<1, 8192>, false});
    list.push_back({"avx512, 4 streams, prefetch 1 KB", &read_avx512<4, 1024>, true});
  }
#endif
  return list;
}

double read_once(const ReadKernel& kernel, const std::vector<ReadRegion>& regions, int threads) {
  constexpr std::size_t kPiece = 256 << 10;
  // Pieces never straddle a region; a piece of a strided region is a range of its rows.
  std::vector<ReadRegion> pieces;
  for (const ReadRegion& region : regions) {
    ReadRegion whole = region;
    if (whole.row_bytes == whole.stride) whole = {region.data, region.rows * region.row_bytes / 64, 64, 64};
    const std::size_t step = max_of<std::size_t>(1, kPiece / whole.row_bytes);
    for (std::size_t row = 0; row < whole.rows; row += step) {
      pieces.push_back(
          {whole.data + row * whole.stride, min_of(step, whole.rows - row), whole.row_bytes, whole.stride});
    }
  }
  std::atomic<std::size_t> next{0};
  std::atomic<Sum> sum{0};
  const std::size_t grab = kernel.queue ? 1 : (pieces.size() + threads - 1) / threads;
  const auto start = std::chrono::steady_clock::now();
  cpu::parallel(threads, [&](int) {
    Sum mine = 0;
    for (std::size_t first; (first = next.fetch_add(grab)) < pieces.size();) {
      for (std::size_t n = first; n < min_of(first + grab, pieces.size()); ++n) {
        const ReadRegion& piece = pieces[n];
        if (piece.row_bytes == piece.stride) {
          mine ^= kernel.read(piece.data, piece.rows * piece.row_bytes);
        } else {
          for (std::size_t row = 0; row < piece.rows; ++row)
            mine ^= kernel.read(piece.data + row * piece.stride, piece.row_bytes);
        }
      }
    }
    sum.fetch_xor(mine);
  });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  sink = sum.load();
  return seconds;
}

}  // namespace onepass::bench
