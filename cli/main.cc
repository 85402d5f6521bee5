// onepass: the command line.
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>

#include "command.h"
#include "io/result.h"
#include "options.h"

namespace onepass::cli {
namespace {

enum ExitCode { kDone = 0, kCheckFailed = 1, kBadArguments = 2, kUnsupported = 3, kNoDeviceOrMemory = 4 };

int exit_code(onepass_status_t status) {
  switch (status) {
    case ONEPASS_OK: return kDone;
    case ONEPASS_INVALID_ARGUMENT:
    case ONEPASS_IO_ERROR: return kBadArguments;
    case ONEPASS_UNSUPPORTED: return kUnsupported;
    case ONEPASS_OUT_OF_MEMORY:
    case ONEPASS_DEVICE_ERROR: break;
  }
  return kNoDeviceOrMemory;
}

int fail(const CLI::App& app, int code, const std::string& text) {
  std::string command = "onepass";
  for (const CLI::App* chosen : app.get_subcommands()) command += " " + chosen->get_name();
  std::fflush(stdout);
  std::fprintf(stderr, "%s: %s\n", command.c_str(), printable(text, 1000).c_str());
  return code;
}

/// What CLI11 refuses, as one line; a misspelt option with the one most like it.
std::string parse_error_text(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* command = app.get_subcommands().empty() ? &app : app.get_subcommands()[0];
  const std::vector<std::string> extras = command->remaining(true);
  const bool no_command = command == &app && dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  if (no_command && extras.empty()) return "a command is missing; nearest: onepass --help";
  if (!no_command && (dynamic_cast<const CLI::ExtrasError*>(&error) == nullptr || extras.empty())) return error.what();
  // Options that follow an unknown one may be left over too; the first is the culprit.
  const std::string word = extras.front().substr(0, extras.front().find('='));
  std::vector<std::string> names;
  for (const CLI::Option* option : command->get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  if (command == &app) {
    for (const CLI::App* other : app.get_subcommands(nullptr)) names.push_back(other->get_name());
  }
  const std::string near = nearest(word, names);
  return "there is no " +
         std::string(word.starts_with("-") ? "option "
                     : command == &app     ? "command "
                                           : "argument ") +
         word + "; " + (near.empty() ? "--help lists what there is" : "nearest: " + near);
}

int run(int argc, char** argv) {
  CLI::App app("Exact attention in one pass over the keys: forward, backward and decode.", "onepass");
  app.set_version_flag("--version", onepass_version());
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  add_run(app);
  add_check(app);
  add_bench(app);
  add_ladder(app);
  add_explain(app);
  add_info(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    const int code = app.exit(success);  // --help, --version
    std::cout.flush();
    return std::cout ? code : fail(app, kBadArguments, "standard output cannot be written");
  } catch (const CLI::ParseError& error) {
    return fail(app, kBadArguments, parse_error_text(app, error));
  } catch (const CommandFailure& failure) {
    return fail(app, exit_code(failure.status.code()), failure.status.text());
  } catch (const CheckFailure&) {
    return kCheckFailed;
  } catch (const std::bad_alloc&) {
    return fail(app, kNoDeviceOrMemory, "out of memory; nearest: a smaller problem");
  } catch (const std::exception& error) {
    return fail(app, kNoDeviceOrMemory, std::string("internal error: ") + error.what());
  }
  return kDone;
}

}  // namespace
}  // namespace onepass::cli

/// What reading a mapped file raises where it has become shorter since, or the disk fails. The kernels' threads let it
/// through; no output has been begun.
extern "C" void end_reading(int) {
  static std::atomic_flag ending;  // several threads may come here at once: the first says it, and ends the others
  while (ending.test_and_set()) ::pause();
  constexpr char kText[] = "onepass: an input file became shorter, or cannot be read, while it was in use\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kText, sizeof kText - 1);
  ::_exit(2);
}

int main(int argc, char** argv) {
  std::signal(SIGBUS, &end_reading);
  // A reader that goes away makes writes fail, which is reported, instead of ending the program unseen.
  std::signal(SIGPIPE, SIG_IGN);
  return onepass::cli::run(argc, argv);
}
