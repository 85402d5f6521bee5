#include "build_commit.h"
#include "report.h"

namespace onepass::cli {

const char* build_commit() {
  return ONEPASS_COMMIT;
}

}  // namespace onepass::cli
