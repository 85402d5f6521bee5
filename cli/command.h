// The commands, and how they end.
#pragma once

#include <CLI/CLI.hpp>

#include "core/status.h"

namespace onepass::cli {

// Each adds one subcommand, whose callback runs it.
void add_run(CLI::App& app);
void add_check(CLI::App& app);
void add_bench(CLI::App& app);
void add_ladder(CLI::App& app);
void add_explain(CLI::App& app);
void add_info(CLI::App& app);

/// Thrown by a callback: main prints the status as one line and exits with its code.
struct CommandFailure {
  Status status;
};
/// Thrown after the report: exit code 1.
struct CheckFailure {};

inline void require(const Status& status) {
  if (!status.ok()) throw CommandFailure{status};
}

}  // namespace onepass::cli
