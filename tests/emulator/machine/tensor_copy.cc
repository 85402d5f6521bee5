#include "emulator/machine/tensor_copy.h"

#include <algorithm>
#include <cstring>

#include "emulator/machine/mbarrier.h"
#include "emulator/machine/units.h"

namespace onepass::emulator {
namespace {

constexpr int kRank = 5, kElement = 2, kSpan = 128;  // bytes of an element, of a row in shared memory

/// What the opaque 128 bytes of a map hold here.
struct Map {
  std::uint64_t mark;
  unsigned char* address;
  std::uint64_t sizes[kRank], strides[kRank - 1];
  std::uint32_t box_rows;
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));
constexpr std::uint64_t kMark = 0x7e50f0a9c0ffee01u;

/// A row of a box.
struct Row {
  unsigned char* global = nullptr;  // null: outside the tensor
  int bytes = 0;                    // inside the tensor
};

std::vector<Row> rows_of(const CUtensorMap& opaque, const int (&at)[5], const char* what) {
  Map map;
  std::memcpy(&map, &opaque, sizeof map);
  if (map.mark != kMark) fault("%s: no tensor map", what);
  const auto inside = [&](int dimension, std::int64_t x) {
    return x >= 0 && x < static_cast<std::int64_t>(map.sizes[dimension]);
  };
  std::vector<Row> rows(map.box_rows);
  bool any = false;
  for (std::uint32_t i = 0; i < map.box_rows; ++i) {
    const std::int64_t row = std::int64_t{at[1]} + i;
    if (!inside(1, row) || !inside(2, at[2]) || !inside(3, at[3]) || !inside(4, at[4]) || !inside(0, at[0])) continue;
    rows[i].bytes =
        static_cast<int>(std::min<std::int64_t>(kSpan, kElement * (static_cast<std::int64_t>(map.sizes[0]) - at[0])));
    rows[i].global = map.address + kElement * std::int64_t{at[0]} + row * static_cast<std::int64_t>(map.strides[0]);
    for (int n = 2; n < kRank; ++n) rows[i].global += at[n] * static_cast<std::int64_t>(map.strides[n - 1]);
    check_global(rows[i].global, rows[i].bytes, 1, what);
    any = true;
  }
  if (!any) {
    fault("%s: the box at (%d, %d, %d, %d, %d) lies outside the tensor altogether", what, at[0], at[1], at[2], at[3],
          at[4]);
  }
  return rows;
}

/// Where byte `offset` of a tile lies: bits 4 to 6 of its address are permuted by bits 7 to 9.
unsigned char* swizzled(unsigned char* shared_begin, std::uint32_t address, std::uint32_t offset) {
  std::uint32_t at = address + offset;
  at ^= (at >> 7 & 7) << 4;
  return shared_begin + (at - kSharedBase);
}

void load_in_parts(Block& block, unsigned char* barrier, int parts, const std::function<int(int)>& load) {
  for (int n = 0; n < parts; ++n) {
    at_any_moment([&block, barrier, load, n] { mbarrier_complete(block, barrier, load(n)); });
  }
}

void add_copy(std::shared_ptr<BulkCopy> copy) {
  units(block()).open[lane().thread].push_back(copy);
  const std::uint64_t fate = random().next() % 8;  // early, in two steps, or at the last moment
  if (fate < 3) at_any_moment([copy] { copy->read(); });
  if (fate < 2) at_any_moment([copy] { copy->finish(); });
}

std::shared_ptr<BulkCopy> copy_from(std::uint32_t address, int bytes, int alignment, const char* what) {
  auto copy = std::make_shared<BulkCopy>();
  copy->from = shared(address, bytes, alignment);
  copy->as_issued.assign(copy->from, copy->from + bytes);
  check_fenced(block(), copy->from, bytes, what);
  return copy;
}

void check_bulk(const void* global, int bytes, const char* what) {
  if (bytes <= 0 || bytes % 16 != 0) fault("%s of %d bytes", what, bytes);
  check_global(global, bytes, 16, what);
}

}  // namespace

CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                           const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                           const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  const bool served = (type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) &&
                      rank == kRank && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
                      swizzle == CU_TENSOR_MAP_SWIZZLE_128B && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE &&
                      box[0] * kElement == kSpan && box[2] == 1 && box[3] == 1 && box[4] == 1;
  if (!served) return CUDA_ERROR_NOT_SUPPORTED;
  bool valid = reinterpret_cast<std::uintptr_t>(map) % 64 == 0 && reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
  for (int n = 0; n < kRank; ++n) {
    valid &= sizes[n] > 0 && sizes[n] <= std::uint64_t{1} << 32 && box[n] > 0 && box[n] <= 256 && steps[n] == 1;
    if (n + 1 < kRank) valid &= strides[n] % 16 == 0 && strides[n] < std::uint64_t{1} << 40;
  }
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  Map content = {kMark, static_cast<unsigned char*>(address), {}, {}, box[1]};
  std::copy_n(sizes, kRank, content.sizes);
  std::copy_n(strides, kRank - 1, content.strides);
  std::memcpy(map, &content, sizeof content);
  return CUDA_SUCCESS;
}

void load_box(std::uint32_t address, const CUtensorMap& map, std::uint32_t barrier, const int (&at)[5]) {
  const std::vector<Row> rows = rows_of(map, at, "cp.async.bulk.tensor");
  const int bytes = kSpan * static_cast<int>(rows.size());
  std::memset(shared(address, bytes, kSpan), 0xff, static_cast<std::size_t>(bytes));
  unsigned char* const begin = block().shared;
  constexpr int kParts = 2;
  load_in_parts(block(), shared(barrier, 8, 8), kParts, [=](int part) {
    const int first = part * static_cast<int>(rows.size()) / kParts,
              end = (part + 1) * static_cast<int>(rows.size()) / kParts;
    for (int i = first; i < end; ++i) {
      const Row& row = rows[static_cast<std::size_t>(i)];
      for (int chunk = 0; chunk < kSpan; chunk += 16) {
        unsigned char* to = swizzled(begin, address, static_cast<std::uint32_t>(i * kSpan + chunk));
        const int count = std::clamp(row.bytes - chunk, 0, 16);
        if (count > 0) std::memcpy(to, row.global + chunk, static_cast<std::size_t>(count));
        std::memset(to + count, 0, static_cast<std::size_t>(16 - count));
      }
    }
    return kSpan * (end - first);
  });
}

void store_box(const CUtensorMap& map, std::uint32_t address, const int (&at)[5]) {
  const std::vector<Row> rows = rows_of(map, at, "cp.async.bulk.tensor");
  const auto copy = copy_from(address, kSpan * static_cast<int>(rows.size()), kSpan, "cp.async.bulk.tensor");
  copy->write = [=](const unsigned char* data) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      for (int chunk = 0; chunk < rows[i].bytes; chunk += 16) {
        const std::uint32_t offset = static_cast<std::uint32_t>(i) * kSpan + static_cast<std::uint32_t>(chunk);
        const std::uint32_t from = (address + offset) ^ ((address + offset) >> 7 & 7) << 4;
        // TMA writes whole 16 bytes.
        std::memcpy(rows[i].global + chunk, data + (from - address), 16);
      }
    }
  };
  for (const Row& row : rows) {
    if (row.bytes % 16 != 0) check_global(row.global, (row.bytes + 15) / 16 * 16, 16, "cp.async.bulk.tensor");
  }
  add_copy(copy);
}

void bulk_load(std::uint32_t address, const void* global, int bytes, std::uint32_t barrier) {
  check_bulk(global, bytes, "cp.async.bulk");
  unsigned char* const to = shared(address, bytes, 16);
  std::memset(to, 0xff, static_cast<std::size_t>(bytes));
  load_in_parts(block(), shared(barrier, 8, 8), 1, [=](int) {
    std::memcpy(to, global, static_cast<std::size_t>(bytes));
    return bytes;
  });
}

void bulk_store(void* global, std::uint32_t address, int bytes) {
  check_bulk(global, bytes, "cp.async.bulk");
  const auto copy = copy_from(address, bytes, 16, "cp.async.bulk");
  copy->write = [=](const unsigned char* data) { std::memcpy(global, data, static_cast<std::size_t>(bytes)); };
  add_copy(copy);
}

void bulk_reduce_add(float* global, std::uint32_t address, int bytes) {
  check_bulk(global, bytes, "cp.reduce.async.bulk");
  const auto copy = copy_from(address, bytes, 16, "cp.reduce.async.bulk");
  copy->write = [=](const unsigned char* data) {
    for (int i = 0; i < bytes / 4; ++i) {
      float x;
      std::memcpy(&x, data + 4 * i, 4);
      add_flushed(global[i], x);
    }
  };
  add_copy(copy);
}

void bulk_commit() {
  Units& all = units(block());
  const int thread = lane().thread;
  all.closed[thread].push_back(std::exchange(all.open[thread], {}));
}

void bulk_wait(std::size_t pending, bool written) {
  if (random().next() % 4 == 0) {  // it takes long
    const auto wakes = std::make_shared<Sleepers>();
    at_last([wakes] { wakes->wake(); });
    wakes->wait("cp.async.bulk.wait_group", -1);
  }
  std::vector<BulkGroup>& groups = units(block()).closed[lane().thread];
  for (std::size_t n = 0; n + pending < groups.size(); ++n) {
    for (const auto& copy : groups[n]) {
      if (written) {
        copy->finish();
      } else {
        copy->read();
      }
    }
  }
  // Groups leave in order, since a wait counts them. Those that are only read write in the end, or when there are many.
  constexpr std::size_t kMost = 8;
  const auto written_all = [](const BulkGroup& group) {
    return std::all_of(group.begin(), group.end(), [](const auto& copy) { return copy->has_written; });
  };
  while (groups.size() > pending && (written_all(groups.front()) || groups.size() > pending + kMost)) {
    for (const auto& copy : groups.front()) copy->finish();
    groups.erase(groups.begin());
  }
}

}  // namespace onepass::emulator
