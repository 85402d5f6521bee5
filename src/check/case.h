// A test case: operands in memory, filled and poisoned, for a CaseSpec.
#pragma once

#include "check/array.h"
#include "check/random.h"
#include "core/problem.h"

namespace onepass::check {

/// Holds what `problem` and the operands point into; moves keep those pointers valid.
class Case {
 public:
  explicit Case(const CaseSpec& spec);
  Case(Case&&) = default;
  Case& operator=(Case&&) = default;

  const CaseSpec& spec() const { return spec_; }
  const Problem& problem() const { return problem_; }
  ForwardOperands forward_operands() const;
  BackwardOperands backward_operands() const;

  /// What of it a device has to hold.
  std::vector<Block> memory();

  /// Outputs back to NaN, guards back to their pattern.
  void reset();
  /// True if the inputs hold what the spec's seed draws.
  bool as_drawn() const;
  /// A line for each input that changed and each output written outside its elements.
  std::vector<std::string> faults() const;

  // Inputs. NaN wherever no result may look: gaps, rows outside sequences, keys that no row sees, rows without keys.
  Array q, k, v, grad_out, grad_lse, alibi, bias, sinks;
  Array saved_out, saved_lse;  // the forward's results, from the reference, for the backward
  // Outputs.
  Array out, lse, grad_q, grad_k, grad_v, grad_bias, grad_sinks;
  IntArray cu_seqlens_q, cu_seqlens_k, q_length, k_start, k_length, q_position;
  std::vector<std::int64_t> dropout_state;

 private:
  void make_problem();
  void make_operands();
  void make_modifiers(Random& random);
  void save_forward();
  std::vector<Array*> inputs();
  std::vector<Array*> outputs();

  CaseSpec spec_;
  Problem problem_;
};

/// Fills Q, K, V, dO with the distribution of the spec.
void fill_values(Case& c, Random& random);

/// NaN in every place that must not matter.
void poison_invisible(Case& c);

}  // namespace onepass::check
