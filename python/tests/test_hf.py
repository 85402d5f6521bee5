"""transformers with attn_implementation="onepass" beside "eager": small models of every kind of mask, untrained."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch_kit import near  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

import onepass.hf  # noqa: E402
from onepass import _hf_masks  # noqa: E402

onepass.hf.register()

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}
GROUPED = {**SIZES, "num_key_value_heads": 2}
FAMILIES = {
    "llama": (transformers.LlamaConfig, GROUPED),
    "mistral, window": (transformers.MistralConfig, {**GROUPED, "sliding_window": 5}),
    "mistral, itself alone": (transformers.MistralConfig, {**GROUPED, "sliding_window": 1}),
    "qwen2, some windows": (transformers.Qwen2Config, {**GROUPED, "use_sliding_window": True, "sliding_window": 4,
                                                       "max_window_layers": 1}),
    "gemma2, softcap and windows": (transformers.Gemma2Config, {**GROUPED, "head_dim": 8, "sliding_window": 4,
                                                                 "query_pre_attn_scalar": 8}),
    "gpt-oss, sinks": (transformers.GptOssConfig, {**GROUPED, "head_dim": 8, "sliding_window": 4,
                                                   "num_local_experts": 2, "num_experts_per_tok": 1}),
}
LEFT = [[0] * 5 + [1] * 7, [1] * 12, [0] * 11 + [1]]
RIGHT = [[1] * 7 + [0] * 5, [1] * 12, [1] + [0] * 11]
HOLES = [[1] * 3 + [0] * 2 + [1] * 7, [1] * 12, [0] * 4 + [1, 0] * 4]


def model_of(family, implementation="eager"):
    torch.manual_seed(0)
    config, sizes = FAMILIES[family]
    model = transformers.AutoModelForCausalLM.from_config(config(**sizes), attn_implementation=implementation).eval()
    for name, x in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(x)
    return model


def both(model, **inputs):
    outputs = []
    for implementation in ("eager", "onepass"):
        model.set_attn_implementation(implementation)
        outputs.append(model(**inputs))
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", [None, LEFT, RIGHT, HOLES], ids=["none", "left", "right", "holes"])
def test_logits_and_gradients(family, padding):
    model = model_of(family)
    ids = torch.randint(3, 64, (3, 12))
    mask = torch.ones_like(ids) if padding is None else torch.tensor(padding)
    results = []
    for out in both(model, input_ids=ids, attention_mask=mask):
        model.zero_grad()
        logits = out.logits[mask.bool()]
        logits.square().mean().backward()
        results.append((logits, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    near(results[1][0], results[0][0], torch.float32, factor=4)
    for got, want in zip(results[1][1], results[0][1], strict=True):
        near(got, want, torch.float32, factor=4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(family, cache):
    if (family, cache) == ("mistral, itself alone", "dynamic"):
        pytest.skip("that cache keeps every key, padding too, and eager attention sees them all")
    model = model_of(family)
    ids = torch.randint(3, 64, (3, 12))
    options = {"attention_mask": torch.tensor(LEFT), "max_new_tokens": 8, "do_sample": False, "eos_token_id": None,
               "output_logits": True, "return_dict_in_generate": True, "cache_implementation": cache,
               "disable_compile": True}
    results = []
    for implementation in ("eager", "onepass"):
        model.set_attn_implementation(implementation)
        results.append(model.generate(ids, **options))
    assert torch.equal(results[0].sequences, results[1].sequences)
    for got, want in zip(results[1].logits, results[0].logits, strict=True):
        near(got, want, torch.float32, factor=4)


def test_padding_needs_the_mask_interface():
    """With attention alone registered transformers makes no masks at all: results are wrong, silently."""
    ALL_ATTENTION_FUNCTIONS.register("onepass_without_masks", onepass.hf.attention_forward)
    model, ids, mask = model_of("llama"), torch.randint(3, 64, (3, 12)), torch.tensor(LEFT)
    wants = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    model.set_attn_implementation("onepass_without_masks")
    with pytest.raises(AssertionError):
        near(model(input_ids=ids, attention_mask=mask).logits[mask.bool()], wants, factor=1000)
    model.set_attn_implementation("onepass")
    near(model(input_ids=ids, attention_mask=mask).logits[mask.bool()], wants, factor=4)


def test_packed_positions_and_given_masks():
    model, ids = model_of("llama"), torch.randint(3, 64, (1, 12))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3]])
    want, got = both(model, input_ids=ids, position_ids=positions)
    near(got.logits, want.logits, factor=4)
    tree = torch.rand(1, 1, 12, 12) < 0.5
    tree |= torch.eye(12, dtype=torch.bool)
    for mask in (torch.zeros(1, 1, 12, 12).masked_fill(~tree, torch.finfo(torch.float32).min), ):
        want, got = both(model, input_ids=ids, attention_mask=mask)
        near(got.logits, want.logits, factor=4)


def test_encoder_with_padding():
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(transformers.BertConfig(**SIZES), attn_implementation="eager").eval()
    for padding in (LEFT, RIGHT, HOLES):
        mask = torch.tensor(padding)
        want, got = both(model, input_ids=torch.randint(3, 64, (3, 12)), attention_mask=mask)
        near(got.last_hidden_state[mask.bool()], want.last_hidden_state[mask.bool()], factor=4)


def test_relative_position_bias():
    """T5's bias is a permuted view."""
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64)
    torch.manual_seed(0)
    model = transformers.T5Model(config).eval()
    ids, targets = torch.randint(3, 64, (3, 12)), torch.randint(3, 64, (3, 5))
    for padding in (LEFT, RIGHT, HOLES):
        eager, ours = both(model, input_ids=ids, attention_mask=torch.tensor(padding), decoder_input_ids=targets)
        assert torch.allclose(ours.last_hidden_state, eager.last_hidden_state, atol=2e-5)


def test_compiled_forward_has_no_graph_break():
    model = model_of("llama", "onepass")
    ids = torch.randint(3, 64, (2, 9))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        near(compiled(input_ids=ids, use_cache=False).logits, model(input_ids=ids, use_cache=False).logits, factor=4)
        mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
        got, want = (m(input_ids=ids, attention_mask=mask, use_cache=False).logits for m in (compiled, model))
        near(got[mask.bool()], want[mask.bool()], factor=4)


def test_which_masks_are_intervals():
    known = {masking_utils.causal_mask_function: (True, -1), masking_utils.bidirectional_mask_function: (False, -1),
             masking_utils.sliding_window_causal_mask_function(5): (True, 4),
             masking_utils.sliding_window_causal_mask_function(2): (True, 1),
             masking_utils.sliding_window_bidirectional_mask_function(3): (False, 3),
             masking_utils.sliding_window_bidirectional_mask_function(0): (False, 0)}
    for function, meaning in known.items():
        assert _hf_masks.describe(function) == meaning
        arguments = {"batch_size": 3, "q_length": 4, "kv_length": 12, "q_offset": 8, "mask_function": function,
                     "attention_mask": torch.tensor(LEFT).bool()}
        interval = _hf_masks.mask(**arguments)
        assert _hf_masks.is_interval(interval) and interval.untyped_storage().nbytes() <= 3 * 3 * 4
        seen = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
        o = _hf_masks.options(interval, 3)
        j, p = torch.arange(12) - o["k_start"][:, None], torch.arange(4) + o["q_position"][:, None]
        distance = j[:, None, :] - p[:, :, None]
        mine = ((j >= 0) & (j < o["k_length"][:, None]))[:, None, :] & (distance <= 0 if o["causal"] else True)
        left, right = o["window"]
        mine = mine & (distance >= -left if left >= 0 else True) & (distance <= right if right >= 0 else True)
        assert torch.equal(mine.expand(3, 4, 12), seen[:, 0])
    others = [masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int)),
              masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function),
              masking_utils.sliding_window_overlay(4), masking_utils.sliding_window_causal_mask_function(1),
              masking_utils.sliding_window_causal_mask_function(0),
              lambda b, h, q, k: k <= q]
    for function in others:
        assert _hf_masks.describe(function) is None
        full = _hf_masks.mask(batch_size=1, q_length=4, kv_length=6, q_offset=2, mask_function=function)
        assert full.dtype == torch.float32 and full.shape == (1, 1, 4, 6)


def test_refusals():
    q, module = torch.zeros(1, 2, 4, 8), torch.nn.Module()
    for argument, value in (("head_mask", torch.ones(2)), ("output_attentions", True), ("score_mod", print)):
        with pytest.raises(NotImplementedError, match=f"onepass: {argument}.*attn_implementation='eager'"):
            onepass.hf.attention_forward(module, q, q, q, None, **{argument: value})
    with pytest.raises(ValueError, match="causal attention of 4 queries over 2 keys without a mask"):
        onepass.hf.attention_forward(module, q, q[:, :, :2], q[:, :, :2], None)
    with pytest.raises(ValueError, match=r"must be \(batch, 1 or heads, seq_q, seq_k\): got \(4, 4\)"):
        onepass.hf.attention_forward(module, q, q, q, torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="sliding_window must be 1, the token itself, or more: got 0"):
        onepass.hf.attention_forward(module, q, q, q, None, sliding_window=0)
    module.is_causal = False
    assert onepass.hf.attention_forward(module, q, q[:, :, :2], q[:, :, :2], None)[0].shape == (1, 4, 2, 8)
