#include "reading.h"

#include "timing.h"

namespace onepass::cli {

Interval visible_keys(const Shape& s, const Options& options) {
  MaskSpec mask;
  mask.causal = s.causal;
  mask.align = options.align == ONEPASS_TOP_LEFT ? Align::top_left : Align::bottom_right;
  mask.window_left = options.window_left;
  mask.window_right = options.window_right;
  const Sequence sequence = sequence_at(mask, 0, s.seq_q, s.seq_k, s.seq_q, s.seq_k);
  return s.seq_q > 0 ? sequence.visible_to_any(0, s.seq_q) : Interval{};
}

double cache_bytes(const Shape& s, const Options& options) {
  return static_cast<double>(s.batch) * static_cast<double>(s.heads_kv) *
         static_cast<double>(visible_keys(s, options).size()) * static_cast<double>(s.head_dim + s.head_dim_v) *
         static_cast<double>(size_of(s.dtype));
}

CacheReads::CacheReads(const Attention& attention, Interval keys, int threads)
    : loops_(bench::read_kernels()), seconds_(loops_.size()), threads_(threads) {
  if (keys.size() <= 0) return;
  for (const Array* cache : {&attention.k, &attention.v}) {  // (batch, keys, heads_kv, dim), contiguous
    const auto key = static_cast<std::size_t>(cache->size(2) * cache->size(3)) * size_of(cache->type());
    const auto* data = reinterpret_cast<const char*>(cache->data());
    for (std::int64_t b = 0; b < cache->size(0); ++b) {
      const std::size_t first = static_cast<std::size_t>(b * cache->size(1) + keys.begin) * key;
      regions_.push_back({data + first, static_cast<std::size_t>(keys.size()), key, key});
    }
  }
}

void CacheReads::sample() {
  if (regions_.empty()) return;
  for (std::size_t n = 0; n < loops_.size(); ++n) {
    seconds_[n].push_back(bench::read_once(loops_[n], regions_, threads_));
  }
}

CacheReads::Best CacheReads::best() const {
  Best best;
  for (std::size_t n = 0; n < loops_.size(); ++n) {
    const Timing timing = summarise(seconds_[n]);
    if (timing.reps > 0 && (best.loop.empty() || timing.median < best.seconds)) best = {loops_[n].name, timing.median};
  }
  return best;
}

}  // namespace onepass::cli
