#include "emulator/machine/wgmma.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "core/half.h"
#include "emulator/machine/tensor_core.h"
#include "emulator/machine/units.h"

namespace onepass::emulator {
namespace {

constexpr int kRows = 64, kDepth = 16, kMostColumns = 256, kThreads = 4 * kWarp;

/// One element's row and column in D, or in A for its registers, of register i of a thread.
struct Element {
  int row, column;
};
Element sum_at(int thread, int i) {
  return {thread / kWarp * 16 + thread % kWarp / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (thread % 4) + i % 2};
}

const float* half_table() {
  static const std::vector<float> table = [] {
    std::vector<float> all(1 << 16);
    for (unsigned bits = 0; bits < 1u << 16; ++bits) all[bits] = f16_to_float(static_cast<std::uint16_t>(bits));
    return all;
  }();
  return table.data();
}
float widen(std::uint16_t bits, bool half) {
  return half ? half_table()[bits] : bf16_to_float(bits);
}

struct Descriptor {
  std::uint32_t address, leading, stride;

  explicit Descriptor(std::uint64_t bits)
      : address(static_cast<std::uint32_t>(bits & 0x3fff) << 4),
        leading(static_cast<std::uint32_t>(bits >> 16 & 0x3fff) << 4),
        stride(static_cast<std::uint32_t>(bits >> 32 & 0x3fff) << 4) {
    if (bits >> 62 != 1) fault("wgmma: a descriptor without the 128-byte swizzle");
    if ((bits >> 49 & 7) != 0) fault("wgmma: a descriptor with a base offset");
    if (address % 1024 >= 128) fault("wgmma: an operand that begins inside the swizzle's pattern, at %u", address);
  }
};

/// Elements of an operand in shared memory: `count` rows (of A, or columns of B) of 16, to[k * pitch + i].
void gather_operand(Block& block, std::uint64_t bits, bool transposed, int count, bool half, float* to, int pitch) {
  const Descriptor x(bits);
  const auto chunk_at = [&](std::uint32_t offset) {
    std::uint32_t at = x.address + offset;
    at ^= (at >> 7 & 7) << 4;
    const std::int64_t begin = std::int64_t{at} - kSharedBase;
    if (begin < 0 || begin + 16 > block.shared_bytes)
      fault("wgmma reads shared memory at byte %lld", static_cast<long long>(begin));
    check_fenced(block, block.shared + begin, 16, "wgmma");
    return reinterpret_cast<const std::uint16_t*>(block.shared + begin);
  };
  if (!transposed) {  // 8 rows of 128 bytes, one after the other; k runs along them
    for (int i = 0; i < count; ++i) {
      for (int k = 0; k < kDepth; k += 8) {
        const std::uint16_t* from = chunk_at(static_cast<std::uint32_t>(i / 8) * x.stride + i % 8 * 128u + 2u * k);
        for (int e = 0; e < 8; ++e) to[(k + e) * pitch + i] = widen(from[e], half);
      }
    }
    return;
  }
  for (int k = 0; k < kDepth; ++k) {  // 8 rows of k, 64 columns each; `leading` to the next 64
    for (int i = 0; i < count; i += 8) {
      const std::uint16_t* from =
          chunk_at(static_cast<std::uint32_t>(i / 64) * x.leading + k / 8 * x.stride + k % 8 * 128u + i % 64 * 2u);
      for (int e = 0; e < 8; ++e) to[k * pitch + i + e] = widen(from[e], half);
    }
  }
}

/// d (64, columns) += a^T (16, 64) b (16, columns): the products are added in an order of their own, then to d.
void add_products(float* d, const float* a, const float* b, int columns) {
  const auto four = [=](int i, int j, int k) {
    const float *const x = a + k * kRows + i, *const y = b + k * columns + j;
    return (x[0] * y[0] + x[kRows] * y[columns]) + (x[2 * kRows] * y[2 * columns] + x[3 * kRows] * y[3 * columns]);
  };
  static_assert(kDepth == 16);
  for (int i = 0; i < kRows; ++i) {
    float* const row = d + static_cast<std::ptrdiff_t>(i) * columns;
    for (int j = 0; j < columns; ++j) row[j] += (four(i, j, 0) + four(i, j, 4)) + (four(i, j, 8) + four(i, j, 12));
  }
}

int rank_of(const Warp& warp) {
  return warp.lanes[0].thread / kWarp % 4;
}
Warpgroup& warpgroup_of(const Warp& warp) {
  return units(*warp.block).warpgroups.at(static_cast<std::size_t>(warp.lanes[0].thread / kThreads));
}

}  // namespace

void Warpgroup::issue(Warp& warp, int rank, WgmmaCall* const* lanes) {
  const std::int64_t number = issued_[rank]++;
  const WgmmaCall& call = *lanes[0];
  if (number == first_ + std::ssize(products_)) {
    products_.push_back(std::make_unique<Wgmma>());
    products_.back()->call = call;
  }
  Wgmma& x = product(number);
  const auto same = [&](const WgmmaCall& other) {
    return other.columns == x.call.columns && other.a_descriptor == x.call.a_descriptor &&
           other.b_descriptor == x.call.b_descriptor && other.accumulate == x.call.accumulate &&
           (other.a == nullptr) == (x.call.a == nullptr);
  };
  const int first = rank * kWarp;
  for (int i = 0; i < kWarp; ++i) {
    if (!same(*lanes[i])) fault("wgmma: threads of a warpgroup issue different products");
    x.a_registers[first + i] = lanes[i]->a;
    if (lanes[i]->a != nullptr) std::memcpy(x.a[first + i], lanes[i]->a, sizeof x.a[0]);
  }
  // The sums that these registers already belong to, or new ones.
  const auto continued = std::find_if(sums_.begin(), sums_.end(), [&](const std::shared_ptr<Sums>& sums) {
    return !sums->taken[rank] && sums->registers[first] == call.d;
  });
  if (continued == sums_.end()) {
    if (!fenced_[rank]) fault("wgmma without a fence after its registers were used");
    if (x.sums == nullptr) {
      x.sums = std::make_shared<Sums>();
      x.sums->columns = call.columns;
      x.sums->d.assign(static_cast<std::size_t>(kRows * call.columns), 0);
      sums_.push_back(x.sums);
    }
    for (int thread = first; thread < first + kWarp; ++thread) {
      float* const registers = x.sums->registers[thread] = lanes[thread - first]->d;
      for (int i = 0; i < call.columns / 2; ++i) {
        const Element at = sum_at(thread, i);
        if (call.accumulate) x.sums->d[static_cast<std::size_t>(at.row * call.columns + at.column)] = registers[i];
        registers[i] = std::bit_cast<float>(~0u);
      }
    }
  } else if (x.sums == nullptr) {
    x.sums = *continued;
  }
  if (x.sums->columns != call.columns) fault("wgmma: sums of another shape in the same registers");
  x.sums->last = std::max(x.sums->last, number + 1);
  if (++x.issued < 4) return;
  x.slow = random().next() % 16 == 0;
  if (random().next() % 8 == 0) {
    if (random().next() % 2 == 0) {
      perform(*warp.block, number + 1);
    } else {
      at_any_moment([this, &block = *warp.block, number] { perform(block, number + 1); });
    }
  }
  for (int other = 0; other < 4; ++other) {
    if (wanted_[other] == number + 1) satisfy_some_time(*warp.block, other);
  }
}

bool Warpgroup::wait(int rank, int pending) {
  std::vector<std::int64_t>& ends = ends_[rank];
  const std::int64_t groups = std::ssize(ends) - pending;
  if (groups <= 0) return true;
  const std::int64_t end = ends[static_cast<std::size_t>(groups - 1)];
  ends.erase(ends.begin(), ends.begin() + groups);
  fenced_[rank] = false;
  wanted_[rank] = end;
  if (std::all_of(issued_, issued_ + 4, [&](std::int64_t issued) { return issued >= end; })) {
    satisfy_some_time(block(), rank);
  }
  return wanted_[rank] < 0;
}

void Warpgroup::satisfy_some_time(Block& block, int rank) {
  const std::int64_t end = wanted_[rank];
  bool slow = false;
  for (std::int64_t number = performed_; number < end; ++number) slow |= product(number).slow;
  if (!slow) return satisfy(block, rank);
  at_last([this, &block, rank, end] {
    if (wanted_[rank] == end) satisfy(block, rank);
  });
}

void Warpgroup::satisfy(Block& block, int rank) {
  const std::int64_t end = std::exchange(wanted_[rank], -1);
  perform(block, end);
  deliver(rank, end);
  waiters[rank].wake();
}

void Warpgroup::perform(Block& block, std::int64_t end) {
  for (; performed_ < end; ++performed_) multiply(block, product(performed_));
}

void Warpgroup::multiply(Block& block, const Wgmma& x) {
  const int columns = x.call.columns;
  static float a[kDepth * kRows], b[kDepth * kMostColumns];
  if (x.call.a == nullptr) {
    gather_operand(block, x.call.a_descriptor, x.call.a_transposed, kRows, x.call.half, a, kRows);
  } else {
    for (int thread = 0; thread < kThreads; ++thread) {
      for (int i = 0; i < 8; ++i) {
        const Element at = sum_at(thread, i);
        a[at.column * kRows + at.row] =
            widen(static_cast<std::uint16_t>(x.a[thread][i / 2] >> 16 * (i % 2)), x.call.half);
      }
    }
  }
  gather_operand(block, x.call.b_descriptor, x.call.b_transposed, columns, x.call.half, b, columns);
  std::vector<float>& d = x.sums->d;
  if (!x.call.accumulate) std::fill(d.begin(), d.end(), 0.0f);
  if (adding == Adding::rounded) {
    add_products(d.data(), a, b, columns);
    return;
  }
  Product<kDepth> part;
  for (int j = 0; j < columns; j += 8) {
    for (int k = 0; k < kDepth; ++k) std::copy_n(b + k * columns + j, 8, part.b[k]);
    for (int i = 0; i < kRows; i += 16) {
      float* const first = d.data() + i * columns + j;
      for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < kDepth; ++k) part.a[row][k] = a[k * kRows + i + row];
        std::copy_n(first + row * columns, 8, part.c[row]);
      }
      part.add();
      for (int row = 0; row < 16; ++row) std::copy_n(part.c[row], 8, first + row * columns);
    }
  }
}

void Warpgroup::deliver(int rank, std::int64_t end) {
  for (; taken_[rank] < end; ++taken_[rank]) {
    const Wgmma& x = product(taken_[rank]);
    for (int thread = rank * kWarp; thread < (rank + 1) * kWarp; ++thread) {
      if (x.a_registers[thread] != nullptr && std::memcmp(x.a_registers[thread], x.a[thread], sizeof x.a[0]) != 0) {
        fault("wgmma: thread %d of the warpgroup changed an operand in registers before its wait", thread);
      }
    }
  }
  for (const auto& sums : sums_) {
    if (sums->taken[rank] || sums->last > end || sums->registers[rank * kWarp] == nullptr) continue;
    sums->taken[rank] = true;
    for (int thread = rank * kWarp; thread < (rank + 1) * kWarp; ++thread) {
      for (int i = 0; i < sums->columns / 2; ++i) {
        float& x = sums->registers[thread][i];
        if (std::bit_cast<std::uint32_t>(x) != ~0u) {
          fault("wgmma: thread %d of the warpgroup wrote sums that are under way", thread);
        }
        const Element at = sum_at(thread, i);
        x = sums->d[static_cast<std::size_t>(at.row * sums->columns + at.column)];
      }
    }
  }
  std::erase_if(sums_,
                [](const auto& sums) { return std::all_of(sums->taken, sums->taken + 4, [](bool x) { return x; }); });
  while (!products_.empty() && std::all_of(taken_, taken_ + 4, [&](std::int64_t taken) { return taken > first_; })) {
    products_.pop_front();
    ++first_;
  }
}

void Warpgroup::end() const {
  if (!products_.empty()) fault("a warpgroup has ended without a wait for its products");
}

void wgmma(const WgmmaCall& own) {
  WgmmaCall call = own;
  together("wgmma", call, [](WgmmaCall* const* lanes) {
    Warp& warp = *lane().warp;
    warpgroup_of(warp).issue(warp, rank_of(warp), lanes);
  });
}

void wgmma_fence() {
  int nothing = 0;
  together("wgmma.fence", nothing, [](int* const*) { warpgroup_of(*lane().warp).fence(rank_of(*lane().warp)); });
}

void wgmma_commit() {
  int nothing = 0;
  together("wgmma.commit_group", nothing,
           [](int* const*) { warpgroup_of(*lane().warp).commit(rank_of(*lane().warp)); });
}

void wgmma_wait(int pending) {
  int nothing = 0;
  if (!gather("wgmma.wait_group", &nothing)) return;
  Warp& warp = *lane().warp;
  const int rank = rank_of(warp);
  Warpgroup& warpgroup = warpgroup_of(warp);
  if (warpgroup.wait(rank, pending)) {
    release(warp);
  } else {
    warpgroup.waiters[rank].wait("wgmma.wait_group", -1);
  }
}

}  // namespace onepass::emulator
