#include "suites.h"

namespace onepass::cli {
namespace {

using enum ElementType;

/// A few seconds on two cores: is everything as fast as it was?
std::vector<Shape> quick_suite() {
  std::vector<Shape> shapes;
  for (const onepass_pass_t pass : {ONEPASS_FORWARD, ONEPASS_BACKWARD}) {
    for (const ElementType dtype : {f32, bf16}) {
      for (const bool causal : {false, true}) {
        shapes.push_back({.pass = pass,
                          .dtype = dtype,
                          .seq_q = 1024,
                          .seq_k = 1024,
                          .heads_q = 4,
                          .heads_kv = 4,
                          .causal = causal});
      }
    }
  }
  for (const ElementType dtype : {f32, bf16}) {
    shapes.push_back({.pass = ONEPASS_DECODE,
                      .dtype = dtype,
                      .seq_q = 1,
                      .seq_k = 4096,
                      .heads_q = 32,
                      .heads_kv = 8,
                      .head_dim = 128,
                      .head_dim_v = 128});
  }
  return shapes;
}

/// The grid on which other CPU libraries are measured: the same FLOPs by fewer heads as sequences grow.
std::vector<Shape> cpu_suite() {
  struct Size {
    std::int64_t seq, heads;
  };
  std::vector<Shape> shapes;
  for (const onepass_pass_t pass : {ONEPASS_FORWARD, ONEPASS_BACKWARD}) {
    for (const ElementType dtype : {f32, bf16}) {
      for (const std::int64_t head_dim : {64, 128}) {
        for (const Size size : {Size{512, 8}, Size{2048, 2}, Size{8192, 1}}) {
          for (const bool causal : {false, true}) {
            shapes.push_back({.pass = pass,
                              .dtype = dtype,
                              .seq_q = size.seq,
                              .seq_k = size.seq,
                              .heads_q = size.heads,
                              .heads_kv = size.heads,
                              .head_dim = head_dim,
                              .head_dim_v = head_dim,
                              .causal = causal});
          }
        }
      }
    }
  }
  return shapes;
}

/// The papers' grid for GPUs: 16,384 tokens in all, heads times head_dim 2,048.
std::vector<Shape> gpu_suite() {
  std::vector<Shape> shapes;
  for (const onepass_pass_t pass : {ONEPASS_FORWARD, ONEPASS_BACKWARD}) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
      for (const bool causal : {false, true}) {
        for (std::int64_t seq = 512; seq <= 16384; seq *= 2) {
          shapes.push_back({.pass = pass,
                            .dtype = bf16,
                            .batch = 16384 / seq,
                            .seq_q = seq,
                            .seq_k = seq,
                            .heads_q = 2048 / head_dim,
                            .heads_kv = 2048 / head_dim,
                            .head_dim = head_dim,
                            .head_dim_v = head_dim,
                            .causal = causal});
        }
      }
    }
  }
  return shapes;
}

/// One token against a cache, grouped-query.
std::vector<Shape> decode_suite() {
  std::vector<Shape> shapes;
  for (const ElementType dtype : {f32, bf16}) {
    for (const std::int64_t seq_k : {1024, 16384}) {
      shapes.push_back({.pass = ONEPASS_DECODE,
                        .dtype = dtype,
                        .seq_q = 1,
                        .seq_k = seq_k,
                        .heads_q = 32,
                        .heads_kv = 8,
                        .head_dim = 128,
                        .head_dim_v = 128});
    }
  }
  return shapes;
}

}  // namespace

const std::vector<std::string>& suite_names() {
  static const std::vector<std::string> names = {"quick", "cpu", "decode", "gpu"};
  return names;
}

std::vector<Shape> suite_shapes(const std::string& name) {
  return name == "cpu" ? cpu_suite() : name == "decode" ? decode_suite() : name == "gpu" ? gpu_suite() : quick_suite();
}

}  // namespace onepass::cli
