// The rungs by name.
#pragma once

#include "ladder/rung.h"

namespace onepass::ladder {

extern const Rung kNaive, kStandard, kThreePass, kTwoPass, kTwoPassAttention, kOnePassKeys, kOnePassTiles, kFlashV1,
    kFlashV2, kFlashV2Skipping, kSplitKeys, kBackwardStandard, kBackwardV1, kBackwardV1Statistics, kBackwardV2,
    kBackwardV2Parallel;

}  // namespace onepass::ladder
