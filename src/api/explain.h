// What would run for a request, as JSON.
#pragma once

#include <string>

#include "api/request.h"

namespace onepass::api {

std::string explain(const Request& request);

}  // namespace onepass::api
