"""Random small models of every family on random batches, against stock diffusers: outputs and LoRA gradients."""

from __future__ import annotations

from typing import Any

from torture.cases import Case, Wrong, forked

SIZES = ("num_layers", "num_single_layers", "num_attention_heads")


def batch(case: Case) -> None:
    outcome = forked(lambda: _compare(case), case.folder)
    if outcome.code != 0:
        raise Wrong(outcome.told)


def _compare(case: Case) -> None:
    import torch

    from family_samples import REFERENCES, Models, lora_gradient

    draw = case.random
    name = draw.choice(sorted(REFERENCES))
    models = Models(name, seed=draw.randrange(1000), change=lambda config: _another(config, draw))
    most = 1 if name == "qwen-image" else 4
    least = {"qwen-image": 1, "qwen-image-edit": 2}.get(name, 1)
    shapes = [
        [(draw.randint(1, 5), draw.randint(1, 5)) for _ in range(draw.randint(least, max(least, most)))]
        for _ in range(draw.randint(1, 5))
    ]
    text = [draw.randint(1, 12) for _ in shapes]
    if "flux" in name:  # its text has one length in a batch of stock diffusers; alone it may be any
        text = [text[0]] * len(text)
    samples = models.samples(shapes, seed=draw.randrange(1000), text=text)
    print(f"{name}, {dict(models.ours.config)}, {shapes}, {text}")
    alone = [models.alone(sample)[: sample.shapes.target_tokens] for sample in samples]
    for padded in (False, True):
        together = models.packed(samples, padded=padded)
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        gradients = (
            sum(lora_gradient(model, out, sample.upstream) for out, sample in zip(outs, samples, strict=True))
            for model, outs in ((models.ours, together), (models.stock, alone))
        )
        ours, theirs = gradients
        if not (ours - theirs).norm() <= 1e-4 * theirs.norm():
            raise Wrong(f"gradients differ by {float((ours - theirs).norm() / theirs.norm()):.2e}, padded: {padded}")


def _another(config: dict[str, Any], draw: Any) -> dict[str, Any]:
    """A model of other numbers of layers."""
    changed = dict(config)
    for key in SIZES[:2]:
        if isinstance(changed.get(key), int):
            changed[key] = draw.randint(1, 3)
    return changed
