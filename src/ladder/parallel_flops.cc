// Parallel rung: FLOPs by what they cost (FlashAttention-2, section 3.1).
//
// Tensor cores do products 16 times as fast as a GPU's other units do anything else, so a FLOP outside the products
// weighs 16. v1 keeps O normalised: at every key block each of its d numbers is scaled, scaled again for the new sum
// and divided, 4d FLOPs a row. v2 multiplies by one factor and divides once at the end, d a row and key block. That is
// little beside the 4 Bc d of the two products, but not at 16 times the price, and the less so the smaller Bc is. The
// FLOPs are those the rungs counted while they ran.
#include "ladder/parallel.h"
#include "ladder/rungs.h"

namespace onepass::ladder {

WeighedFlops weigh(const Rung& rung, const Ledger& g, double weight) {
  const double products = static_cast<double>(g.matmul_flops);
  const double others = weight * static_cast<double>(g.other_flops + g.exps), all = products + others;
  return {rung.name, rung.backward(), g.matmul_flops, g.other_flops, g.exps, all, all > 0 ? others / all : 0};
}

std::vector<WeighedFlops> weigh_rungs(const Problem& problem, double weight) {
  std::vector<WeighedFlops> weighed;
  for (const Rung* rung : {&kFlashV1, &kFlashV2, &kBackwardV1, &kBackwardV2}) {
    const Problem p = for_rung(*rung, problem);
    Arrays arrays = make_arrays(p, 1);
    prepare(*rung, p, arrays);
    Ledger ledger;
    rung->run(p, arrays, &ledger);
    weighed.push_back(weigh(*rung, ledger, weight));
  }
  return weighed;
}

}  // namespace onepass::ladder
