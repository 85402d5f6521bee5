// What DLPack adds for Python: the tensor that a capsule holds, and the table of C functions that a tensor type may
// carry as `__dlpack_c_exchange_api__` (DLPack 1.3). Layouts by https://dmlc.github.io/dlpack.
#pragma once

#include <cstdint>

#include "onepass/dlpack.h"

namespace onepass::python {

/// Of a capsule named "dltensor".
struct ManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct DLPackVersion {
  std::uint32_t major, minor;
};

/// Of a capsule named "dltensor_versioned".
struct ManagedTensorVersioned {
  DLPackVersion version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  DLTensor tensor;

  static constexpr std::uint64_t kReadOnly = 1;
};

struct ExchangeHeader {
  DLPackVersion version;
  ExchangeHeader* previous;
};

/// Only `describe` is called: it fills a DLTensor that is valid while the Python object is.
struct ExchangeApi {
  ExchangeHeader header;
  void* allocate;
  void* export_tensor;
  void* import_tensor;
  int (*describe)(void* object, DLTensor* tensor);  // may be null
  void* current_stream;
};

}  // namespace onepass::python
