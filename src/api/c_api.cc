// The C ABI: the only place that catches exceptions, and the only one that keeps the text of the last error.
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "api/explain.h"
#include "api/options.h"
#include "api/request.h"
#include "api/run.h"

namespace onepass::api {
namespace {

thread_local std::string t_last_error;

onepass_status_t finish(const Status& status) {
  t_last_error = status.text();
  return status.code();
}

/// Runs `body`, which returns a Status, and turns whatever it throws into one.
template <class Body>
onepass_status_t guarded(Body&& body) noexcept {
  try {
    return finish(body());
  } catch (const std::bad_alloc&) {
    t_last_error.clear();  // no allocation here
    return ONEPASS_OUT_OF_MEMORY;
  } catch (const std::length_error&) {  // a vector longer than any memory
    t_last_error.clear();
    return ONEPASS_OUT_OF_MEMORY;
  } catch (...) {
    t_last_error.clear();
    return ONEPASS_DEVICE_ERROR;
  }
}

Status plan(onepass_pass_t pass, const void* args, Request* request) {
  switch (pass) {
    case ONEPASS_FORWARD: {
      onepass_forward_args_t a;
      ONEPASS_RETURN_IF_ERROR(read_args(args, onepass_forward_args_t ONEPASS_FORWARD_ARGS_INIT, "args", &a));
      return make_request(a, true, request);
    }
    case ONEPASS_BACKWARD: {
      onepass_backward_args_t a;
      ONEPASS_RETURN_IF_ERROR(read_args(args, onepass_backward_args_t ONEPASS_BACKWARD_ARGS_INIT, "args", &a));
      return make_request(a, true, request);
    }
    case ONEPASS_DECODE: {
      onepass_decode_args_t a;
      ONEPASS_RETURN_IF_ERROR(read_args(args, onepass_decode_args_t ONEPASS_DECODE_ARGS_INIT, "args", &a));
      return make_request(a, true, request);
    }
  }
  return invalid_argument("pass must be ONEPASS_FORWARD (0), ONEPASS_BACKWARD (1) or ONEPASS_DECODE (2): got %d",
                          static_cast<int>(pass));
}

}  // namespace
}  // namespace onepass::api

using onepass::invalid_argument;
using onepass::Status;
namespace api = onepass::api;

#define ONEPASS_TEXT_OF(x) #x
#define ONEPASS_VERSION_TEXT(major, minor, patch) \
  ONEPASS_TEXT_OF(major) "." ONEPASS_TEXT_OF(minor) "." ONEPASS_TEXT_OF(patch)

const char* onepass_version(void) {
  return ONEPASS_VERSION_TEXT(ONEPASS_VERSION_MAJOR, ONEPASS_VERSION_MINOR, ONEPASS_VERSION_PATCH);
}

onepass_status_t onepass_forward(const onepass_forward_args_t* args) {
  return api::guarded([&]() -> Status {
    onepass_forward_args_t a;
    ONEPASS_RETURN_IF_ERROR(api::read_args(args, onepass_forward_args_t ONEPASS_FORWARD_ARGS_INIT, "args", &a));
    api::Request request;
    ONEPASS_RETURN_IF_ERROR(api::make_request(a, false, &request));
    return request.kernel->forward(request.problem, request.forward, request.launch);
  });
}

onepass_status_t onepass_backward(const onepass_backward_args_t* args) {
  return api::guarded([&]() -> Status {
    onepass_backward_args_t a;
    ONEPASS_RETURN_IF_ERROR(api::read_args(args, onepass_backward_args_t ONEPASS_BACKWARD_ARGS_INIT, "args", &a));
    api::Request request;
    ONEPASS_RETURN_IF_ERROR(api::make_request(a, false, &request));
    return request.kernel->backward(request.problem, request.backward, request.launch);
  });
}

onepass_status_t onepass_decode(const onepass_decode_args_t* args) {
  return api::guarded([&]() -> Status {
    onepass_decode_args_t a;
    ONEPASS_RETURN_IF_ERROR(api::read_args(args, onepass_decode_args_t ONEPASS_DECODE_ARGS_INIT, "args", &a));
    api::Request request;
    ONEPASS_RETURN_IF_ERROR(api::make_request(a, false, &request));
    return api::run_decode(request);
  });
}

onepass_status_t onepass_merge(const onepass_merge_args_t* args) {
  return api::guarded([&]() -> Status {
    onepass_merge_args_t a;
    ONEPASS_RETURN_IF_ERROR(api::read_args(args, onepass_merge_args_t ONEPASS_MERGE_ARGS_INIT, "args", &a));
    return api::run_merge(a);
  });
}

onepass_status_t onepass_workspace_size(onepass_pass_t pass, const void* args, size_t* bytes) {
  return api::guarded([&]() -> Status {
    if (bytes == nullptr) return invalid_argument("bytes is null: pass where to write the size");
    api::Request request;
    ONEPASS_RETURN_IF_ERROR(api::plan(pass, args, &request));
    *bytes = request.workspace_needed;
    return {};
  });
}

onepass_status_t onepass_explain(onepass_pass_t pass, const void* args, char* text, size_t capacity, size_t* length) {
  return api::guarded([&]() -> Status {
    if (text == nullptr && capacity > 0) return invalid_argument("text is null, but capacity is %zu", capacity);
    api::Request request;
    ONEPASS_RETURN_IF_ERROR(api::plan(pass, args, &request));
    const std::string json = api::explain(request);
    if (length != nullptr) *length = json.size();
    if (capacity > 0) {
      const size_t count = onepass::min_of(json.size(), capacity - 1);
      std::memcpy(text, json.data(), count);
      text[count] = 0;
    }
    return {};
  });
}

int32_t onepass_kernel_count(void) {
  return static_cast<int32_t>(onepass::kernels().size());
}

onepass_status_t onepass_kernel_info(int32_t index, onepass_kernel_info_t* info) {
  return api::guarded([&]() -> Status {
    onepass_kernel_info_t filled;
    ONEPASS_RETURN_IF_ERROR(api::read_args(info, onepass_kernel_info_t ONEPASS_KERNEL_INFO_INIT, "info", &filled));
    if (index < 0 || index >= onepass_kernel_count()) {
      return invalid_argument("index must be between 0 and %d: got %d", onepass_kernel_count() - 1, index);
    }
    const onepass::Kernel& kernel = onepass::kernels()[static_cast<size_t>(index)];
    filled.name = kernel.name;
    filled.backend = kernel.backend == onepass::Backend::cpu ? "cpu" : "cuda";
    filled.arch = kernel.arch;
    filled.pass = kernel.pass == onepass::Pass::forward    ? ONEPASS_FORWARD
                  : kernel.pass == onepass::Pass::backward ? ONEPASS_BACKWARD
                                                           : ONEPASS_DECODE;
    filled.dtypes = api::dtype_list(kernel.dtypes);
    filled.max_head_dim = kernel.max_head_dim;
    filled.available = onepass::can_run_here(kernel) ? 1 : 0;
    const size_t size = onepass::min_of(info->struct_size, sizeof filled);
    filled.struct_size = info->struct_size;
    std::memcpy(static_cast<void*>(info), &filled, size);
    return {};
  });
}

const char* onepass_status_string(onepass_status_t status) {
  switch (status) {
    case ONEPASS_OK: return "ok";
    case ONEPASS_INVALID_ARGUMENT: return "invalid argument";
    case ONEPASS_UNSUPPORTED: return "unsupported";
    case ONEPASS_OUT_OF_MEMORY: return "out of memory";
    case ONEPASS_DEVICE_ERROR: return "device error";
    case ONEPASS_IO_ERROR: return "input/output error";
  }
  return "unknown status";
}

const char* onepass_last_error(void) {
  return api::t_last_error.c_str();
}
