"""What the installed package is made of."""

import importlib.metadata
import pathlib
import subprocess
import sys

import pytest

import onepass


def files():
    return [pathlib.PurePosixPath(f) for f in importlib.metadata.files("onepass") or []]


installed = pytest.mark.skipif("site-packages" not in onepass.__file__, reason="runs against an installed wheel")


@installed
def test_one_compiled_file_and_nothing_stray():
    shipped = [f for f in files() if ".dist-info" not in f.parts[0] and "__pycache__" not in f.parts]
    assert {f.parts[0] for f in shipped} == {"onepass"}
    assert [f.name for f in shipped if f.suffix not in (".py", ".pyi", ".typed")] == ["_core.abi3.so"]
    wheel = importlib.metadata.distribution("onepass").read_text("WHEEL")
    assert "Tag: cp310-abi3-" in wheel and "linux" in wheel
    assert importlib.metadata.version("onepass") == onepass.__version__


@installed
def test_type_hints_pass_mypy(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "use.py").write_text(
        "import numpy as np\nimport onepass\n\n"
        "x = np.zeros((1, 2, 1, 4), np.float32)\n"
        "out, lse = onepass.attention(x, x, x, causal=True, window=(3, -1), return_lse=True)\n"
        "g: onepass.Gradients = onepass.attention_backward(out, x, x, x, out, lse)\n"
        "reveal_type(onepass.explain(x, x, x, which='decode'))\n"
        "name: str = onepass.kernels()[0].name\n"
        "onepass.explain(x, x, x, which='sideways')\n"
        "onepass.attention(x, x, x, causl=True)\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "use.py"], cwd=tmp_path, capture_output=True,
                          text=True)
    assert 'Revealed type is "onepass._explain.Explanation"' in done.stdout, done.stdout + done.stderr
    assert 'use.py:9: error: Argument "which"' in done.stdout and 'use.py:10: error: Unexpected keyword' in done.stdout
    assert "Found 2 errors" in done.stdout, done.stdout


@installed
def test_the_package_itself_passes_mypy(tmp_path):
    pytest.importorskip("mypy")
    pytest.importorskip("torch")
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = True\n"
        "[mypy-cupy.*,jax.*,matplotlib.*,ml_dtypes.*,transformers.*]\nignore_missing_imports = True\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "-p", "onepass"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_tables_of_timings():
    timings = onepass.bench(seq=[16, 32], dtype=["f32", "f16"], which=["forward", "backward"], seconds=0.0, torch=False)
    assert len(timings) == 8 and all(row["ms_median"] > 0 and row["tflops"] > 0 for row in timings)
    assert repr(timings).splitlines()[0].split()[:2] == ["which", "dtype"] and len(repr(timings).splitlines()) == 9
    assert timings._repr_html_().count("<tr>") == 9
    with pytest.raises(ValueError, match="bench knows"):
        onepass.bench(dtype="f8")


def test_bench_plots_its_rows():
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    rows = onepass.bench(seq=[32, 64], head_dim=[16, 32], seconds=0.0, torch=False)
    axes = rows.plot()
    assert len(axes.get_lines()) == 2  # a line for each head_dim
    assert [list(line.get_xdata()) for line in axes.get_lines()] == [[32, 64], [32, 64]]
    assert rows.plot(axes) is axes
