"""FlashAttention-2's Python interface: `import onepass.flash_attn as flash_attn` runs code written for it, on CPU
tensors. `install()` makes `from flash_attn import ...` find it."""

from __future__ import annotations

import sys

from . import bert_padding, flash_attn_interface
from .flash_attn_interface import (flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func,
                                   flash_attn_varlen_func, flash_attn_varlen_kvpacked_func,
                                   flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache)

__version__ = "2.8.3"  # the release whose functions these are
__all__ = ["bert_padding", "flash_attn_func", "flash_attn_interface", "flash_attn_kvpacked_func",
           "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
           "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "install"]


def install() -> None:
    """Makes `import flash_attn`, `flash_attn.bert_padding` and `flash_attn.flash_attn_interface` mean these modules.

    Raises:
        RuntimeError: another flash_attn has been imported already.
    """
    modules = {"flash_attn": sys.modules[__name__], "flash_attn.bert_padding": bert_padding,
               "flash_attn.flash_attn_interface": flash_attn_interface}
    taken = [name for name, module in modules.items() if sys.modules.get(name, module) is not module]
    if taken:
        raise RuntimeError(f"{taken[0]} is imported already, from {getattr(sys.modules[taken[0]], '__file__', '?')}: "
                           "call onepass.flash_attn.install() before it")
    sys.modules.update(modules)
