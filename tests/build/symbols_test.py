#!/usr/bin/env python3
"""Reads symbol tables.

    symbols_test.py exported NM LIBRARY HEADER   the library exports the header's functions and nothing else
    symbols_test.py kernels NM ISA OBJECT...     objects compiled for one instruction set define nothing outside their
                                                 namespace: an inline function left there could be picked by the
                                                 linker for the whole program and then fail on older machines
"""

import pathlib
import re
import subprocess
import sys


def symbols(nm, path, *options):
    """(kind, name) of the defined symbols that the linker can see from outside."""
    text = subprocess.run([nm, "--defined-only", *options, path], check=True, capture_output=True, text=True).stdout
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 3 and (fields[-2].isupper() or fields[-2] in "uvw"):
            yield fields[-2], fields[-1]


def check_exported(nm, library, header):
    declared = set(re.findall(r"ONEPASS_API[^;(]*?(onepass_\w+)\(", pathlib.Path(header).read_text()))
    exported = {name.split("@")[0] for kind, name in symbols(nm, library, "-D")}
    assert declared, "no declarations found in the header"
    assert exported == declared, f"missing {sorted(declared - exported)}, surplus {sorted(exported - declared)}"
    return f"{len(exported)} functions exported, all of the header's"


def check_kernels(nm, isa, *objects):
    # Itanium mangling: a function, a const method, a template, a static's guard ... of onepass::cpu::<isa>.
    own = re.compile(rf"^_Z(G[VR]|T[VTIS])?N[VKRO]*7onepass3cpu{len(isa)}{isa}")
    foreign = [f"{pathlib.Path(path).name}: {kind} {name}"
               for path in objects for kind, name in symbols(nm, path) if not own.match(name)]
    assert objects, "no objects"
    assert not foreign, "symbols outside onepass::cpu::" + isa + ":\n  " + "\n  ".join(foreign)
    return f"{len(objects)} objects define nothing outside onepass::cpu::{isa}"


if __name__ == "__main__":
    print({"exported": check_exported, "kernels": check_kernels}[sys.argv[1]](*sys.argv[2:]))
