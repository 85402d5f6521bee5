"""What the tests of the command line share: tensor files by hand, and running onepass."""

import json
import pathlib
import random
import struct
import subprocess
import tempfile
import unittest

onepass_path = ""  # set by the script

BENCH_KEYS = ("kernel backend pass dtype batch seq_q seq_k heads_q heads_kv head_dim head_dim_v causal window "
              "ms_median ms_min ms_max reps tflops gbps").split()
CHECK_KEYS = "kernel backend pass dtype cases worst_ratio worst_case failed".split()
LADDER_KEYS = ("rung backend pass seq head_dim fast_memory bytes_formula bytes_counted peak_fast matmul_flops "
               "other_flops exps seconds max_abs_err").split()


def write_safetensors(path, tensors):
    header, blobs, offset = {}, b"", 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        blobs += data
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + blobs)


def read_safetensors(path):
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8:8 + length]), content[8 + length:]
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for name, t in header.items()}


def write_npy(path, descr, shape, data):
    header = repr({"descr": descr, "fortran_order": False, "shape": tuple(shape)})
    header += " " * (-(len(header) + 11) % 64) + "\n"  # the data begin at 64 bytes, as NumPy's do
    path.write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode() + data)


def f32(values):
    return struct.pack(f"<{len(values)}f", *values)


def floats(data):
    return struct.unpack(f"<{len(data) // 4}f", data)


def normal(count, seed):
    draw = random.Random(seed)
    return f32([draw.gauss(0, 1) for _ in range(count)])


class Cli(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = pathlib.Path(self.folder.name)

    def onepass(self, *args, code=0, **kwargs):
        result = subprocess.run([onepass_path, *map(str, args)], capture_output=True, text=True, timeout=300, **kwargs)
        self.assertEqual(result.returncode, code, f"{args}: {result.stdout}{result.stderr}")
        self.assertNotIn("\x1b", result.stderr, "no progress bar in a pipe")
        if code in (2, 3, 4):
            self.assertEqual(result.stdout, "")
            self.assertRegex(result.stderr, r"\Aonepass[^\n]*: [^\n]+\n\Z")
        return result.stdout if code in (0, 1) else result.stderr

    def rows(self, *args, code=0):
        result = json.loads(self.onepass(*args, "--json", code=code))
        self.assertEqual(list(result), ["onepass", "commit", "date", "device", "rows"])
        self.assertEqual(list(result["device"]), ["name", "backend", "threads", "driver"])
        return result["rows"]

    def sample(self, name="in.safetensors", **extra):
        """batch 2, seq 5, heads 4 over 2, head_dim 8."""
        path = self.path / name
        write_safetensors(path, {"q": ("F32", [2, 5, 4, 8], normal(320, 1)), "k": ("F32", [2, 5, 2, 8], normal(160, 2)),
                                 "v": ("F32", [2, 5, 2, 8], normal(160, 3)), **extra})
        return path
