// onepass explain: what would run for a problem, and why, without running it.
#include <memory>

#include "command.h"
#include "report.h"
#include "shape.h"

namespace onepass::cli {
namespace {

std::string value_text(const std::string& key, const nlohmann::ordered_json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_null()) return "-";
  if (value.is_number() && key.ends_with("bytes")) {
    const double bytes = value.get<double>();
    return bytes < 1024 ? bytes_text(bytes) : format("%s (%.0f)", bytes_text(bytes).c_str(), bytes);
  }
  if (value.is_number_float()) {
    const double number = value.get<double>();
    return format(number < 1e6 ? "%.6g" : number < 1e15 ? "%.0f" : "%.6g", number);
  }
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

/// One line a key; lists of sentences and objects one line an entry.
std::string pretty(const nlohmann::ordered_json& object) {
  std::size_t width = 0;
  for (const auto& [key, value] : object.items()) width = std::max(width, key.size());
  std::string text;
  for (const auto& [key, value] : object.items()) {
    std::string label = key + std::string(width - key.size(), ' ') + "  ";
    const auto line = [&](const std::string& content) {
      text += label + content + "\n";
      label.assign(label.size(), ' ');
    };
    if (value.is_array()) {
      std::string joined;
      for (const auto& entry : value) joined += (joined.empty() ? "" : ", ") + value_text(key, entry);
      if (joined.size() <= 40) {
        line(joined);
      } else {
        for (const auto& entry : value) line(value_text(key, entry));
      }
    } else if (value.is_object()) {
      for (const auto& [inner, entry] : value.items()) line(inner + ": " + value_text(inner, entry));
    } else {
      line(value_text(key, value));
    }
  }
  return text;
}

Status run_explain(const Options& options, const std::string& pass_text) {
  ONEPASS_RETURN_IF_ERROR(check_backend(options));
  const onepass_pass_t pass = !pass_text.empty() ? parse_pass(pass_text)
                              : options.backward ? ONEPASS_BACKWARD
                                                 : ONEPASS_FORWARD;
  ONEPASS_RETURN_IF_ERROR(check_backward(options, {pass}));
  ONEPASS_RETURN_IF_ERROR(check_kernel_pass(options, pass != ONEPASS_BACKWARD, pass == ONEPASS_BACKWARD));
  const std::vector<Shape> shapes = shapes_of(options, pass);
  std::string report;
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Shape& shape : shapes) {
    Attention attention;
    ONEPASS_RETURN_IF_ERROR(plan_shape(shape, options, attention));
    ONEPASS_ASSIGN(nlohmann::ordered_json json, attention.explain(pass));
    report += (report.empty() ? "" : "\n") + pretty(json);
    rows.push_back(std::move(json));
  }
  return print(options, report, std::move(rows));
}

}  // namespace

void add_explain(CLI::App& app) {
  auto options = std::make_shared<Options>();
  auto pass = std::make_shared<std::string>();
  CLI::App* command =
      app.add_subcommand("explain", "what would run for a problem and why: kernel, workspace, FLOPs, bytes");
  add_common_options(*command, *options);
  command->add_option("--pass", *pass, "fwd, bwd or decode (default: fwd, or bwd with --backward)")->type_name("PASS");
  command->callback([options, pass] { require(run_explain(*options, *pass)); });
}

}  // namespace onepass::cli
