import os
import zlib

import numpy as np
import pytest

SEED = int(os.environ.get("ONEPASS_TEST_SEED", "20260101"))
TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def pytest_report_header():
    return f"ONEPASS_TEST_SEED={SEED}"


@pytest.fixture
def rng(request):
    return np.random.default_rng([SEED, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture
def near():
    """near(result, float64 reference, dtype): within the dtype's rounding of the largest value."""

    def check(got, want, dtype="float32", factor=1):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert got.shape == want.shape
        finite = np.isfinite(want)
        assert np.array_equal(got[~finite], want[~finite], equal_nan=True)
        limit = factor * TOLERANCE[str(dtype)] * max(1.0, np.abs(want[finite]).max(initial=0))
        error = np.abs(got[finite] - want[finite]).max(initial=0)
        assert error <= limit, f"error {error:.3g} of {limit:.3g}"

    return check
