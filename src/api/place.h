// Where the tensors of a call live.
#pragma once

#include <initializer_list>

#include "core/problem.h"
#include "core/status.h"

namespace onepass::api {

struct NamedTensor {
  const char* name;
  const DLTensor* tensor;  // null: not given
};

/// Sets problem->on_device and launch->device from the tensors, which must all be in host memory or all in that of one
/// CUDA device. Pinned host memory is host memory, managed memory its device's.
Status find_place(std::initializer_list<NamedTensor> tensors, Problem* problem, Launch* launch);

/// The tensors of the options, for the list of a call.
#define ONEPASS_OPTION_TENSORS(o)                                                                     \
  {"cu_seqlens_q", (o).cu_seqlens_q}, {"cu_seqlens_k", (o).cu_seqlens_k}, {"q_length", (o).q_length}, \
      {"k_start", (o).k_start}, {"k_length", (o).k_length}, {"q_position", (o).q_position},           \
      {"alibi_slopes", (o).alibi_slopes}, {"bias", (o).bias}, {"sinks", (o).sinks}, {                 \
    "dropout_state", (o).dropout_state                                                                \
  }

/// check_lengths of arrays in device memory, on a copy: waits for the stream.
Status check_device_lengths(const Problem& problem, const Launch& launch);

}  // namespace onepass::api
