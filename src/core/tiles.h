// The shape of a GPU kernel: what `onepass explain` prints and the registry compares with a device's limits.
#pragma once

#include "core/base.h"

namespace onepass {

struct Tiles {
  int block_q = 0;  // query rows of a tile
  int block_k = 0;  // keys of a tile
  int stages = 0;   // tiles under way at once
  int threads = 0;  // of a thread block
  std::int64_t shared_bytes = 0;
};

/// Shared memory that a thread block may have, in bytes: CUDA C++ Programming Guide, "Compute Capabilities".
inline constexpr std::int64_t kSharedBytes80 = 163 * 1024;  // 8.0, 8.7
inline constexpr std::int64_t kSharedBytes86 = 99 * 1024;   // 8.6, 8.9, 12.x
inline constexpr std::int64_t kSharedBytes90 = 227 * 1024;  // 9.0, 10.x

}  // namespace onepass
