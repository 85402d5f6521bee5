// Named sets of shapes for `onepass bench`.
#pragma once

#include <string>
#include <vector>

#include "shape.h"

namespace onepass::cli {

/// Names of the suites, the default first.
const std::vector<std::string>& suite_names();

/// The shapes of a suite, every pass of it.
std::vector<Shape> suite_shapes(const std::string& name);

}  // namespace onepass::cli
