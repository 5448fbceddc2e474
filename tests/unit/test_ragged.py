"""The ragged core against brute force."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxKontextPipeline
from diffusers.models.attention import FeedForward
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_flux import FluxPosEmbed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from qflux.models.flux_kontext.positions import image_ids
from qflux.ragged import fused
from qflux.ragged.attention import Segments, masked_attention, ragged_attention
from qflux.ragged.compilation import compile_blocks, watched
from qflux.ragged.heads import join_turned_heads, turned_heads
from qflux.ragged.interleave import Interleave
from qflux.ragged.layout import PackedLayout, PaddedLayout, padding_ratio
from qflux.ragged.modulation import take
from qflux.ragged.patches import mask_to_tokens, pack, unpack
from qflux.ragged.rope import rotary_from, rotate
from qflux.ragged.shapes import Shapes

lengths = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=6)


@given(lengths=lengths)
def test_joining_makes_each_sample_contiguous_and_splitting_undoes_it(lengths):
    first = [torch.arange(n) + 100 * b for b, (n, _) in enumerate(lengths)]
    second = [torch.arange(n) + 100 * b + 50 for b, (_, n) in enumerate(lengths)]
    streams = Interleave.build([n for n, _ in lengths], [n for _, n in lengths])
    joint = streams.join(torch.cat(first), torch.cat(second))
    assert joint.tolist() == torch.cat([x for pair in zip(first, second, strict=True) for x in pair]).tolist()
    assert streams.joint_sample.tolist() == (joint // 100).tolist()
    back = streams.split(joint)
    assert torch.equal(back[0], torch.cat(first))
    assert torch.equal(back[1], torch.cat(second))


def test_the_gradient_of_joining_is_the_gradient_of_the_permutation():
    streams = Interleave.build([2, 0, 3], [1, 4, 2])
    first, second = (torch.randn(n, 2, dtype=torch.double, requires_grad=True) for n in (5, 7))
    torch.autograd.gradcheck(lambda a, b: streams.split(streams.join(a, b).sin()), (first, second))


def attention_by_hand(query, key, value):
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_attention_of_each_sample_is_the_textbook_formula(lengths, seed):
    torch.manual_seed(seed)
    query, key, value = (torch.randn(sum(lengths), 3, 8, dtype=torch.double) for _ in range(3))
    expected = torch.cat(
        [attention_by_hand(*part) for part in zip(*(x.split(lengths) for x in (query, key, value)), strict=True)]
    )
    packed = ragged_attention(query, key, value, Segments.of(lengths))
    assert (packed - expected).abs().max() < 1e-10

    layout = PaddedLayout.of(PackedLayout.build([0] * len(lengths), lengths))
    padded = masked_attention(*(layout.enter_image(x) for x in (query, key, value)), layout.mask)
    assert (layout.leave_image(padded) - expected).abs().max() < 1e-10


def test_attention_follows_autocast():
    query, key = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    value = torch.randn(6, 2, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = ragged_attention(query, key, value, Segments.of([2, 4]))
    assert out.dtype == torch.bfloat16


def test_a_layout_is_uniform_only_if_text_and_every_image_agree():
    same = [(1, 2, 3), (1, 4, 4)]
    assert PackedLayout.from_shapes([5, 5], [same, same]).uniform
    assert PackedLayout.from_shapes([5], [same]).uniform
    assert not PackedLayout.from_shapes([5, 6], [same, same]).uniform
    assert not PackedLayout.from_shapes([5, 5], [same, [(1, 3, 2), (1, 4, 4)]]).uniform
    assert not PackedLayout.from_shapes([5, 5], [same, same[:1]]).uniform


def test_padding_ratio():
    assert padding_ratio([4, 4]) == 0
    assert padding_ratio([1, 4]) == pytest.approx(3 / 8)


def test_image_ids_are_the_pipelines_with_the_control_number_as_domain():
    ids = image_ids([Shapes(((1, 2, 3),), ((1, 3, 2), (1, 1, 1))), Shapes(((1, 2, 2),))])
    grid = FluxKontextPipeline._prepare_latent_image_ids
    expected = [grid(1, rows, columns, "cpu", torch.float32) for rows, columns in ((2, 3), (3, 2), (1, 1), (2, 2))]
    for domain, part in enumerate(expected[:3]):
        part[:, 0] = domain
    assert torch.equal(ids, torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_diffusers(dtype):
    ids = image_ids([Shapes(((1, 5, 7),), ((1, 3, 4),))])
    cos, sin = FluxPosEmbed(theta=10000, axes_dim=[4, 6, 6])(ids)
    x = torch.randn(len(ids), 3, 16).to(dtype)
    expected = apply_rotary_emb(x[None], (cos, sin), sequence_dim=1)[0]
    assert (rotate(x, rotary_from(cos, sin)) - expected).abs().max() <= (1e-6 if dtype == torch.float32 else 2**-7)


def test_the_gradient_of_a_rotation_is_correct():
    angles = torch.rand(4, 3).repeat_interleave(2, dim=1)
    rotary = rotary_from(angles.cos(), angles.sin())
    x = torch.randn(4, 2, 6, requires_grad=True)
    upstream = torch.randn(4, 2, 6)
    (gradient,) = torch.autograd.grad(rotate(x, rotary), x, upstream)
    # A rotation is orthogonal: <R x, u> = <x, R^T u> for every x.
    other = torch.randn(4, 2, 6)
    assert (rotate(other, rotary) * upstream).sum() == pytest.approx(float((other * gradient).sum()), abs=1e-4)


@pytest.mark.parametrize("norm", [nn.RMSNorm, RMSNorm])
@pytest.mark.parametrize("exact", [False, True])
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=lengths, seed=st.integers(0, 99))
def test_heads_in_one_pass_are_those_of_norm_join_and_turn_and_so_are_gradients(
    monkeypatch, norm, exact, lengths, seed
):
    """The operators for GPUs, by the plain operations that stand for their kernels."""
    torch.manual_seed(seed)
    layout = PackedLayout.build([n for n, _ in lengths], [n for _, n in lengths])
    text, image = (torch.randn(sum(column), 3, 8, requires_grad=True) for column in zip(*lengths, strict=True))
    norms = tuple(norm(8, eps=1e-6).requires_grad_(False) for _ in range(2))
    for each in norms:
        nn.init.normal_(each.weight)
    angle = torch.randn(len(text) + len(image), 1, 4)
    rotary = torch.stack([angle.cos(), angle.sin()], dim=-1)
    weights = torch.randn(len(text) + len(image), 3, 8)

    def both() -> list[torch.Tensor]:
        found = []
        for out in (
            join_turned_heads(layout, text, image, norms, rotary),
            turned_heads(layout.join(text, image), norms[0], rotary, exact),
        ):
            found += [out, *torch.autograd.grad((out * weights).sum(), (text, image))]
        return found

    expected, calls = both(), []
    with monkeypatch.context() as patched:
        patched.setattr(fused, "possible", lambda x: (calls.append(1), True)[1])
        actual = both()
    assert calls
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def test_a_trained_norm_gets_its_gradient(monkeypatch):
    monkeypatch.setattr(fused, "possible", lambda x: True)
    x, norm = torch.randn(5, 2, 8, requires_grad=True), nn.RMSNorm(8, eps=1e-6)
    angle = torch.randn(5, 1, 4)
    turned_heads(x, norm, torch.stack([angle.cos(), angle.sin()], dim=-1)).square().sum().backward()
    assert norm.weight.grad is not None
    assert norm.weight.grad.abs().sum() > 0


def test_patches_are_the_pipelines_and_can_be_undone():
    latents = torch.randn(16, 6, 10)
    tokens = pack(latents)
    assert torch.equal(tokens, FluxKontextPipeline._pack_latents(latents[None], 1, 16, 6, 10)[0])
    assert torch.equal(unpack(tokens, (1, 3, 5)), latents)


def test_a_tokens_mask_is_the_maximum_of_its_cells_means():
    mask = torch.zeros(1, 32, 48)
    mask[0, 0:8, 0:4] = 1  # half of one cell of token 0
    mask[0, 16:32, 32:48] = 1  # all of the last token
    assert mask_to_tokens(mask).tolist() == [[0.5, 0, 0, 0, 0, 1]]


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_the_gradient_of_a_row_of_conditioning_is_the_sum_over_its_tokens(rows):
    generator = torch.Generator().manual_seed(rows)
    table = torch.randn(rows, 24, generator=generator, dtype=torch.float64, requires_grad=True)
    row = torch.randint(0, rows, (100,), generator=generator)
    seen = torch.randn(100, 24, generator=generator, dtype=torch.float64)
    assert torch.equal(take(table, row), table[row])
    (found,) = torch.autograd.grad((take(table, row) * seen).sum(), table)
    (expected,) = torch.autograd.grad((table.index_select(0, row) * seen).sum(), table)
    assert torch.allclose(found, expected, atol=1e-12)


def test_compilation_tells_how_far_it_is():
    torch._dynamo.reset()
    told: list[tuple[int, float]] = []
    layer = FeedForward(3)  # torch's own modules are not compiled by themselves
    with watched(lambda *progress: told.append(progress)):
        compile_blocks([layer], backend="aot_eager")
        assert told == []
        layer(torch.randn(5, 3)).sum().backward()
    assert [pieces for pieces, _ in told] == sorted(pieces for pieces, _ in told)
    assert told[0] == (0, 0.0)
    assert told[-1][0] >= 1
    assert told[-1][1] > 0
    count = len(told)
    torch._dynamo.reset()
    layer(torch.randn(4, 3))
    assert len(told) == count, "nobody listens any more"
