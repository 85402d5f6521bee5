// Problems given by sizes alone, for `bench` and `explain`.
#pragma once

#include <vector>

#include "options.h"
#include "source.h"

namespace onepass::cli {

struct Shape {
  onepass_pass_t pass = ONEPASS_FORWARD;
  ElementType dtype = ElementType::f32;
  std::int64_t batch = 1, seq_q = 2048, seq_k = 2048, heads_q = 8, heads_kv = 8, head_dim = 64, head_dim_v = 64;
  bool causal = false;
  std::string kernel = {};  // empty: chosen
};

/// Every combination of the sizes, dtypes and kernels that the options list, defaults where they list none. A decode
/// has one query row unless told otherwise.
std::vector<Shape> shapes_of(const Options& options, onepass_pass_t pass);

/// Reads the lengths, bias, slopes and sinks that the options name into `attention`, and sets its maxima.
Status load_modifiers(const Options& options, const TensorSource& source, Attention& attention);

/// Operands of a shape without memory. Length tensors come first: packed sequences decide the row counts. Without
/// tensors of its own a decode has its cache full.
Status plan_shape(const Shape& shape, const Options& options, Attention& attention);

}  // namespace onepass::cli
