"""The built-in shapes have the right number of parameters, and compute what transformers' models compute."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import bigbatch as bb
from bigbatch.tasks.shapes import SHAPES, find_shape
from bigbatch.tasks.shapes.gpt2 import Gpt2
from bigbatch.tasks.shapes.llama import Llama
from bigbatch.tasks.shapes.resnet import ResNet
from bigbatch.tasks.shapes.shape import class_loss, pixel_loss
from bigbatch.tasks.shapes.unet import UNet
from bigbatch.tasks.shapes.vit import ViT

NUM_PARAMETERS = {
    "gpt2": 124_439_808,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "resnet50": 25_557_032,
    "unet": 31_037_698,
    "vit-l": 304_326_632,
}
IDS = torch.randint(31, (3, 6), generator=torch.Generator().manual_seed(0))


def tiny_gpt2() -> nn.Module:
    return Gpt2(num_layers=3, width=8, num_heads=2, vocabulary=31, length=6)


def tiny_llama(*, tied: bool = False) -> nn.Module:
    sizes = dict(num_layers=3, width=16, num_heads=4, num_kv_heads=2, hidden=24, vocabulary=31, length=8)
    return Llama(**sizes, tied=tied)


def tiny_vit() -> nn.Module:
    return ViT(num_layers=3, width=8, num_heads=2, patch=4, size=8, num_classes=5)


def tiny_resnet() -> nn.Module:
    return ResNet((1, 2), width=4, num_classes=5)


def text() -> tuple[Tensor, Tensor]:
    return IDS, IDS.roll(-1, 1)


def pictures() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 3, 8, 8), torch.tensor([0, 4, 2])


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_parameters_of_its_publication_and_allocates_nothing_on_meta(name):
    shape = find_shape(name)
    with torch.device("meta"):
        model, batch = shape.model(), shape.batch(2)
    optimizer = shape.optimizer(model)

    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[name]
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers(), *batch)} == {"meta"}
    assert {tensor.shape[0] for tensor in batch} == {2}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len([*model.parameters()])
    assert torch.get_default_dtype() == torch.float32
    expected = torch.bfloat16 if name.startswith("llama") else torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    # sdpa has another path on meta, which is why this is only about shapes.
    assert shape.loss_fn(model, batch).shape == ()


@pytest.mark.parametrize(
    ("name", "size"), [("gpt2", 16), ("llama-8b", 128), ("resnet50", 96), ("unet", 32), ("vit-l", 64)]
)
def test_the_size_of_the_samples_can_be_chosen(name, size):
    shape = find_shape(name, size=size)
    with torch.device("meta"):
        model, batch = shape.model(), shape.batch(3)

    assert shape.size == size
    assert batch[0].shape == ((3, size) if batch[0].ndim == 2 else (3, 3, size, size))
    assert shape.loss_fn(model, batch).shape == ()


def test_what_cannot_be_is_said():
    with pytest.raises(bb.TaskError, match="no shape 'gpt3'; the built-in ones are gpt2, llama-8b"):
        find_shape("gpt3")
    with pytest.raises(bb.TaskError, match="gpt2 cannot have size=2048; it is from 1 to 1024"):
        find_shape("gpt2", size=2048)
    with pytest.raises(bb.TaskError, match="vit-l cannot have size=100; it is a multiple of 16"):
        find_shape("vit-l", size=100)
    with pytest.raises(bb.TaskError, match="llama-8b cannot have size=0; it is at least 1"):
        find_shape("llama-8b", size=0)


@pytest.mark.parametrize(
    ("make_model", "batch", "groups"),
    [
        (tiny_gpt2, text(), (("blocks.0", "blocks.1", "blocks.2"),)),
        (tiny_llama, text(), (("blocks.0", "blocks.1"), "blocks.2")),
        (tiny_vit, pictures(), (("blocks.0", "blocks.1", "blocks.2"),)),
        (tiny_resnet, pictures(), (("blocks.0", "blocks.1", "blocks.2"),)),
    ],
)
def test_neighbours_can_be_recomputed_as_one_group(make_model, batch, groups):
    model = make_model().double()
    batch = tuple(value.double() if value.is_floating_point() else value for value in batch)
    other = copy.deepcopy(model)
    class_loss(model, batch).backward()
    with bb.apply(bb.Plan(micro_batch_size=3, recompute=groups), other):
        class_loss(other, batch).backward()

    for (name, parameter), (_, same) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(parameter.grad, same.grad), name


def test_unet_can_be_recomputed_block_by_block():
    model = UNet(levels=2, width=4).double()
    batch = torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.randint(2, (2, 8, 8))
    other = copy.deepcopy(model)
    pixel_loss(model, batch).backward()
    names = ("stem", "down.0", "down.1", "up.0", "up.1")
    with bb.apply(bb.Plan(micro_batch_size=2, recompute=names), other):
        pixel_loss(other, batch).backward()

    for (name, parameter), (_, same) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(parameter.grad, same.grad), name


def test_a_pixel_of_unet_sees_the_whole_image():
    model = UNet(levels=2, width=4).double().eval()
    image = torch.randn(1, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    model(image)[0, 0, 0, 0].backward()

    assert model(image).shape == (1, 2, 8, 8)
    assert (image.grad[0].abs().sum(0) > 0).all()


@pytest.mark.parametrize("make_model", [tiny_gpt2, tiny_llama])
def test_a_token_does_not_see_the_ones_after_it(make_model):
    model = make_model()
    changed = IDS.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 31
    before, after = model(IDS), model(changed)

    torch.testing.assert_close(after[:, :3], before[:, :3])
    assert ((after - before).abs().amax((0, 2))[3:] > 1e-4).all(), "Control: the ones after it do."


def test_a_tied_head_is_the_embedding():
    tied, untied = tiny_llama(tied=True), tiny_llama()

    assert tied.head.weight is tied.embed.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 31 * 16


@pytest.mark.parametrize("name", ["gpt2", "resnet50"])
def test_the_first_loss_is_that_of_guessing(name):
    shape = find_shape(name, size=32)
    model = shape.model()
    with torch.no_grad():
        loss = shape.loss_fn(model, shape.batch(2))

    assert abs(float(loss) / math.log(50257 if name == "gpt2" else 1000) - 1) < 0.15


def test_llama_computes_what_transformers_computes():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=3,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        vocab_size=31,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        max_position_embeddings=8,
        attn_implementation="eager",
    )
    theirs = transformers.LlamaForCausalLM(config).double().eval()
    ours = tiny_llama().double()
    ours.load_state_dict(_llama_weights(theirs.state_dict(), ours))

    torch.testing.assert_close(ours(IDS), theirs(IDS).logits, rtol=1e-6, atol=1e-7)
    ours.sin.zero_()
    ours.cos.fill_(1)
    assert not torch.allclose(ours(IDS), theirs(IDS).logits, rtol=1e-3), "Control: positions matter."


def _llama_weights(theirs: dict[str, Tensor], ours: nn.Module) -> dict[str, Tensor]:
    found = {
        "embed.weight": theirs["model.embed_tokens.weight"],
        "norm.weight": theirs["model.norm.weight"],
        "head.weight": theirs["lm_head.weight"],
    }
    for index in range(len(ours.blocks)):
        old, new = f"model.layers.{index}", f"blocks.{index}"
        attention = [theirs[f"{old}.self_attn.{name}_proj.weight"] for name in "qkv"]
        found |= {
            f"{new}.norm1.weight": theirs[f"{old}.input_layernorm.weight"],
            f"{new}.norm2.weight": theirs[f"{old}.post_attention_layernorm.weight"],
            f"{new}.qkv.weight": torch.cat(attention),
            f"{new}.out.weight": theirs[f"{old}.self_attn.o_proj.weight"],
            f"{new}.gate_up.weight": torch.cat([theirs[f"{old}.mlp.{name}_proj.weight"] for name in ("gate", "up")]),
            f"{new}.down.weight": theirs[f"{old}.mlp.down_proj.weight"],
        }
    return found


def test_gpt2_computes_what_transformers_computes():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=31, n_positions=6)
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = tiny_gpt2().double()
    weights = theirs.state_dict()
    for old, new in _GPT2_NAMES.items():
        weights = {name.replace(old, new): value for name, value in weights.items()}
    transposed = ("qkv.weight", "out.weight", "mlp.0.weight", "mlp.2.weight")
    ours.load_state_dict({name: value.T if name.endswith(transposed) else value for name, value in weights.items()})

    torch.testing.assert_close(ours(IDS), theirs(IDS).logits, rtol=1e-9, atol=1e-10)
    ours.blocks[0].mlp[1].approximate = "none"
    assert not torch.allclose(ours(IDS), theirs(IDS).logits, rtol=1e-9, atol=1e-10), "Control: the other GELU is seen."


_GPT2_NAMES = {
    "transformer.h.": "blocks.",
    "transformer.wte": "embed",
    "transformer.wpe": "position",
    "transformer.ln_f": "norm",
    "lm_head": "head",
    "ln_1": "norm1",
    "ln_2": "norm2",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "mlp.c_fc": "mlp.0",
    "mlp.c_proj": "mlp.2",
}
