"""Muon: equal to torch's, and which parameters it takes."""

import pytest
import torch
from torch import nn

import dlion
from dlion.methods.matrices import is_hidden
from dlion.optim import DiLoCo, Dion, GAdamW, GMuon, PowerSGD, SignMuon
from dlion.suite.data.torchvision_ops import declare_missing_operators
from dlion.suite.models.transformer import GPT, ViT
from tests.support.small_model import give_gradients, matrices


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_one_worker_is_torch_muon_to_the_bit(adjust):
    ours, theirs = matrices(), matrices()
    optimizer = GMuon(ours, lr=1e-2, adjust_lr=adjust, ns_precision="bf16")
    reference = torch.optim.Muon(theirs, lr=1e-2, adjust_lr_fn=adjust)
    for t in range(10):
        give_gradients(ours, t), give_gradients(theirs, t)
        optimizer.step(), reference.step()
        assert all(map(torch.equal, ours, theirs))


def test_muon_of_a_convolution_is_that_of_its_matrix():
    one = nn.Parameter(torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(0)))
    two = nn.Parameter(one.detach().flatten(1).clone())
    give_gradients([one], 0)
    two.grad = one.grad.flatten(1).clone()
    for param in (one, two):
        GMuon([param], lr=0.1).step()
    assert torch.equal(one.flatten(1), two)


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (GMuon, {}),
        (SignMuon, {"local_polar": True}),
        (DiLoCo, {"inner": "muon", "local_steps": 2}),
        (Dion, {"bucket_cap_mb": None}),
        (PowerSGD, {"bucket_cap_mb": None}),
    ],
)
def test_experts_in_one_parameter_are_trained_as_a_matrix_each(cls, settings):
    generator = torch.Generator().manual_seed(0)
    together = nn.Parameter(torch.randn(3, 18, 20, generator=generator))
    apart = [nn.Parameter(matrix.clone()) for matrix in together.detach()]
    one = cls([("mlp.experts.w", together)], lr=0.1, **settings)
    many = cls(
        [(f"mlp.experts.{i}.w", matrix) for i, matrix in enumerate(apart)], lr=0.1, **settings
    )
    for t in range(4):
        give_gradients([together], t)
        for matrix, grad in zip(apart, together.grad, strict=True):
            matrix.grad = grad.clone()
        one.step(), many.step()
    assert not torch.equal(apart[0], apart[1])
    assert torch.equal(together, torch.stack(apart))


def test_polar_express_reaches_the_polar_factor_and_the_quintic_does_not():
    errors = {}
    for coefficients in ("quintic", "polar_express"):
        params = matrices()
        before = [param.detach().clone() for param in params]
        give_gradients(params, 0)
        polar = [u @ vh for u, _, vh in (torch.linalg.svd(p.grad, False) for p in params)]
        settings = {"ns_coefficients": coefficients, "ns_precision": "float32", "ns_steps": 9}
        GMuon(params, lr=1, weight_decay=0, adjust_lr="original", **settings).step()
        scales = [max(1, len(p) / p.shape[1]) ** 0.5 for p in params]
        steps = [(b - p) / s for b, p, s in zip(before, params, scales, strict=True)]
        errors[coefficients] = max((s - p).norm().item() for s, p in zip(steps, polar, strict=True))
    assert errors["polar_express"] < 1e-3 < 0.1 < errors["quintic"]


def names(optimizer: GMuon, kind: bool) -> set[str]:
    return {
        slot.name
        for bucket in optimizer.buckets
        if (bucket.kind is not None) is kind
        for slot in bucket.slots
    }


def test_muon_leaves_embeddings_heads_and_vectors_to_adamw():
    block = {"qkv.weight", "attention_out.weight", "mlp_in.weight", "mlp_out.weight"}
    for model in (ViT(8, 1, 10, 2, 16, 2, 2, 16), GPT(10, 8, 16, 2, 2, 16, tie_embeddings=False)):
        optimizer = GMuon(model.named_parameters())
        assert names(optimizer, True) == {f"blocks.{i}.{name}" for i in (0, 1) for name in block}
        assert len(names(optimizer, False)) == len(list(model.parameters())) - 8


SMALL = {
    "bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8},
    "t5": {"d_model": 16, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
    "llama": {"hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1},
    "bert": {"hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 1},
}


@pytest.mark.parametrize(
    ("kind", "task", "head"),
    [
        ("bart", "Seq2SeqLM", "lm_head"),
        ("bart", "SequenceClassification", "classification_head.out_proj"),
        ("t5", "Seq2SeqLM", "lm_head"),
        ("llama", "CausalLM", "lm_head"),
        ("llama", "SequenceClassification", "score"),
        ("bert", "MaskedLM", "cls.predictions.decoder"),
        ("bert", "SequenceClassification", "classifier"),
    ],
)
def test_embeddings_and_heads_of_transformers_models_are_not_orthogonalised(kind, task, head):
    declare_missing_operators()
    import transformers

    settings = {"vocab_size": 20, "tie_word_embeddings": False, **SMALL[kind]}
    config = transformers.AutoConfig.for_model(kind, **settings)
    with torch.device("meta"):
        model = getattr(transformers, f"AutoModelFor{task}").from_config(config)
    embeddings = {n for n, module in model.named_modules() if isinstance(module, nn.Embedding)}
    found = {n for n, p in model.named_parameters() if p.dim() > 1 and not is_hidden(n)}
    assert found >= {f"{n}.weight" for n in (*embeddings, head)} & {*dict(model.named_parameters())}
    layers = {n for n, p in model.named_parameters() if p.dim() > 1 and "layer" in n}
    assert layers - found == {n for n in layers if "relative_attention_bias" not in n} != set()


def test_vectors_in_tensors_of_more_dimensions_and_tables_of_biases_are_not_orthogonalised():
    declare_missing_operators()
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 8, "head_dim": 4, "num_attention_heads": 4}
    layers = {"num_hidden_layers": 1, "num_local_experts": 4, "vocab_size": 20}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **layers))
    model.scale, model.gate = nn.Parameter(torch.ones(8, 1, 1)), nn.Linear(8, 1)
    attention = {f"self_attn.{each}_proj.weight" for each in "qkvo"}
    experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight"}
    found = names(GMuon(model.named_parameters()), True)
    assert found == {f"model.layers.0.{name}" for name in attention | experts}


@pytest.mark.parametrize("cls", [GMuon, SignMuon])
def test_guesses_from_names_are_warned_of(cls, recwarn):
    """A list of matrices, as torch.optim.Muon takes them, needs no names."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.Linear(6, 3))
    cls(dlion.param_groups(model))
    cls([param for param in model.parameters() if param.dim() > 1])
    cls([{"params": model.parameters(), "use_muon": True}])
    assert not recwarn
    with pytest.warns(UserWarning, match=r"guessed from names: all are .* \(3\): give") as warned:
        cls(model.parameters())
    assert warned[0].filename == __file__
    model = nn.ModuleDict({"head": nn.Linear(4, 6), "body": nn.Linear(6, 3)})
    with pytest.warns(UserWarning, match=r"all but head.weight are orthogonalised \(1\)"):
        cls(model.named_parameters())
    with pytest.raises(ValueError, match="none of 2 parameters seems to be a matrix of a hidden"):
        cls(model["head"].named_parameters(prefix="head"))


def test_a_group_says_itself_who_is_muons():
    hidden, head = nn.Linear(4, 6), nn.Linear(6, 2)
    groups = [
        {"params": head.named_parameters(), "use_muon": True, "lr": 0.5},
        {"params": hidden.named_parameters(prefix="hidden"), "use_muon": False},
    ]
    optimizer = GMuon(groups)
    assert names(optimizer, True) == {"weight"}
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-3]
    # half of AdamW's memory
    assert set(optimizer.state[head.weight]) == {"momentum_buffer", "step"}
    by_name = GMuon([*hidden.named_parameters("a"), *head.named_parameters("b")], adamw_names="a.w")
    assert names(by_name, True) == {"b.weight"}
    groups[0]["params"] = head.named_parameters()
    groups[1] |= {"params": hidden.named_parameters(prefix="hidden"), "use_muon": True}
    assert names(GMuon(groups, adamw_names="hidden"), True) == {"weight"}


def test_what_is_adamws_moves_as_under_adamw():
    one, two = nn.Linear(4, 6), nn.Linear(4, 6)
    two.load_state_dict(one.state_dict())
    for model, cls in ((one, GMuon), (two, GAdamW)):
        optimizer = cls(model.parameters(), lr=1e-2, weight_decay=0.1)
        for t in range(3):
            give_gradients(list(model.parameters()), t)
            optimizer.step()
    assert torch.equal(one.bias, two.bias) and not torch.equal(one.weight, two.weight)
