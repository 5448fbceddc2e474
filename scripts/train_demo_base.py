"""Train the demo's base model on synthetic scenes: the VAE first, then transformer and text encoders together.

    python scripts/train_demo_base.py --output OUT           # one large GPU, about twelve minutes
    python scripts/train_demo_base.py --output OUT --smoke   # everything once, on a CPU, in a minute

Pictures of all sizes train in the same batches, by qflux's own ragged forward. A VAE that lies in OUT is not trained
again. OUT/model is what ships in src/qflux/demo/model; OUT/report.json says how good it is, OUT/*.png shows it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qflux.data.images.pixels import to_image
from qflux.demo.instructions import SIZES, Instruction, draw_instruction, words
from qflux.demo.scenes import COLOURS, Scene, dimmed, draw_scene, render, render_night
from qflux.losses.timesteps import NoiseShift
from qflux.models import get_family
from qflux.models.flux_kontext.positions import image_ids
from qflux.models.flux_kontext.small import untrained
from qflux.models.flux_kontext.tiny import CLIP_LENGTH
from qflux.models.loading import load_part, save_checkpoint
from qflux.models.registry import shipped
from qflux.pictures.drawing import GridRow, edit_grid, write_png
from qflux.ragged.compilation import compile_blocks
from qflux.ragged.layout import PackedLayout
from qflux.ragged.patches import pack, unpack
from qflux.ragged.shapes import ImageShape, Shapes, token_shape
from qflux.sampling.sampler import schedules

SEED = 0
SAMPLING_STEPS = 12
CROP = 96
"""The VAE trains on squares of this many pixels: it is a convolution, and large pictures teach it nothing more."""


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    vae_scenes: int
    vae_steps: int
    vae_batch: int
    instructions: int
    steps: int
    batch: int
    groups: int
    """Of how many kinds of sample (sizes, second image) a batch consists."""
    compositions: int
    held_out: int


FULL = Plan(
    vae_scenes=24_000,
    vae_steps=3_000,
    vae_batch=48,
    instructions=120_000,
    steps=6_000,
    batch=768,
    groups=16,
    compositions=48,
    held_out=512,
)
SMOKE = Plan(
    vae_scenes=48, vae_steps=3, vae_batch=4, instructions=96, steps=3, batch=8, groups=4, compositions=2, held_out=8
)


class Training:
    """AdamW with a warm-up and a cosine, an exponential mean of the weights, and a line of progress now and then."""

    def __init__(
        self, name: str, modules: Sequence[nn.Module], steps: int, rate: float, deadline: float = math.inf
    ) -> None:
        self._name, self._steps, self._rate = name, steps, rate
        self._started = time.perf_counter()
        self._allowed = deadline - self._started
        self._parameters = [p for module in modules for p in module.parameters()]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
        self._warm = max(1, min(300, steps // 10))
        self._mean = [p.detach().clone() for p in self._parameters]
        self._losses: list[Tensor] = []

    def __iter__(self) -> Iterator[int]:
        """Step numbers, until steps or time are used up; the learning rate falls with what is left of them."""
        for number in range(self._steps):
            done = max(number / self._steps, (time.perf_counter() - self._started) / self._allowed)
            if done >= 1:
                print(f"{self._name}: {number} steps in the time there was", flush=True)
                break
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate * min((number + 1) / self._warm, 0.5 + 0.5 * math.cos(math.pi * done))
            yield number

    def step(self, number: int, loss: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        keep = min(0.9995, (1 + number) / (10 + number))
        torch._foreach_lerp_(self._mean, [p.detach() for p in self._parameters], 1 - keep)
        self._losses.append(loss.detach())
        if (number + 1) % 250 == 0 or number + 1 == self._steps:
            value = float(torch.stack(self._losses).mean())
            self._losses.clear()
            seconds = time.perf_counter() - self._started
            print(f"{self._name}: step {number + 1}/{self._steps}, loss {value:.4f}, {seconds:.0f} s", flush=True)

    def finish(self) -> None:
        """The mean takes the place of the weights."""
        with torch.no_grad():
            for parameter, mean in zip(self._parameters, self._mean, strict=True):
                parameter.copy_(mean)


def autocast(device: str) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def psnr(output: Tensor, wanted: Tensor) -> float:
    """Of pictures in -1 to 1."""
    return float(10 * torch.log10(4 / (output.clamp(-1, 1) - wanted).square().mean(dim=(1, 2, 3))).mean())


def in_chunks(items: Sequence[Any], size: int = 256) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def painted(scenes: Sequence[Scene], device: str) -> Tensor:
    """`(B, 3, H, W)` in -1 to 1, by day."""
    return torch.cat([render(chunk, device) for chunk in in_chunks(scenes)]) * 2 - 1


# The VAE


def draw_vae_scenes(seed: int, count: int) -> list[Scene]:
    rng = random.Random(seed)
    return [draw_scene(rng, *rng.choice(SIZES), most=4) for _ in range(count)]


def vae_pictures(scenes: Sequence[Scene], device: str) -> list[Tensor]:
    """Pictures of each size: by day, and by night in all lights."""
    rng = random.Random(SEED)
    by_size: dict[tuple[int, int], list[Scene]] = defaultdict(list)
    for scene in scenes:
        by_size[scene.width, scene.height].append(scene)
    pools = []
    for same in by_size.values():
        lit = [(scene, dimmed(rng.choice(list(COLOURS.values())))) for scene in same]
        nights = [render_night([s for s, _ in part], [light for _, light in part], device) for part in in_chunks(lit)]
        pools.append(torch.cat([painted(same, device), torch.cat(nights) * 2 - 1]).half())
    return pools


def recoloured(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the pictures in other colours and contrasts: a VAE knows more of the world than its transformer."""
    count, device = len(pictures), pictures.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    mix = torch.softmax(4 * uniform(count, 3, 3), dim=-1)
    changed = torch.einsum("bij,bjhw->bihw", mix, pictures)
    gain, offset = 0.4 + uniform(count, 1, 1, 1), 0.6 * uniform(count, 3, 1, 1) - 0.3
    sign = torch.where(uniform(count, 1, 1, 1) < 0.2, -1.0, 1.0)
    return torch.where(uniform(count, 1, 1, 1) < 0.5, pictures, (sign * gain * changed + offset).clamp(-1, 1))


def train_vae(vae: Any, plan: Plan, device: str, pool: Any) -> dict[str, float]:
    """Returns how well it reconstructs pictures it has not seen."""
    share = -(-plan.vae_scenes // 16)
    scenes = [s for part in pool.starmap(draw_vae_scenes, [(SEED + k, share) for k in range(16)]) for s in part]
    pictures = vae_pictures(scenes, device)
    generator = torch.Generator(device).manual_seed(SEED)
    rng = random.Random(SEED)
    training = Training("VAE", [vae.train()], plan.vae_steps, 2e-3)
    for number in training:
        same = rng.choices(pictures, weights=[len(each) for each in pictures])[0]
        chosen = torch.randint(0, len(same), (plan.vae_batch,), generator=generator, device=device)
        top, left = rng.randint(0, same.shape[2] - CROP), rng.randint(0, same.shape[3] - CROP)
        wanted = recoloured(same[chosen, :, top : top + CROP, left : left + CROP].float(), generator)
        with autocast(device):
            posterior = vae.encode(wanted).latent_dist
            mean, spread = posterior.mean.float(), posterior.std.float()
            noise = torch.randn(mean.shape, generator=generator, device=device)
            output = vae.decode((mean + spread * noise).to(posterior.mean.dtype)).sample.float()
        divergence = 0.5 * (mean.square() + spread.square() - 1 - 2 * spread.log()).mean()
        apart = output - wanted
        training.step(number, apart.abs().mean() + 2 * apart.square().mean() + 5e-4 * divergence)
    training.finish()
    vae.eval()
    fresh = draw_vae_scenes(SEED + 10_000, max(12, plan.vae_scenes // 100))
    with torch.no_grad():
        held_out = [each[:256].float() for each in vae_pictures(fresh, device)]
        found = [(len(each), psnr(vae(each).sample, each)) for each in held_out]
        latents = torch.cat([vae.encode(each).latent_dist.mode().flatten() for each in held_out])
    vae.register_to_config(scaling_factor=1 / float(latents.std()), shift_factor=float(latents.mean()))
    psnr_of_all = sum(count * value for count, value in found) / sum(count for count, _ in found)
    return {"steps": plan.vae_steps, "psnr": psnr_of_all}


# Instructions as tokens


@dataclass
class Group:
    """Encoded instructions whose pictures have the same sizes. n instructions, C = 64 channels of a token."""

    instructions: Sequence[Instruction]
    shapes: tuple[ImageShape, ...]
    images: list[Tensor]
    """`(n, tokens, C)` each: wanted, first, perhaps second picture."""
    t5_ids: Tensor
    clip_ids: Tensor

    def __len__(self) -> int:
        return len(self.t5_ids)


def draw_instructions(seed: int, count: int) -> list[Instruction]:
    rng = random.Random(seed)
    sizes = [rng.choice(SIZES) for _ in range(count)]
    return [draw_instruction(rng, size) for size in sizes]


class Encoded:
    """Instructions as the transformer sees them."""

    def __init__(self, parts: Any, instructions: Sequence[Instruction], device: str) -> None:
        self._parts, self._device = parts, device
        self._texts: dict[str, tuple[list[int], list[int]]] = {}
        together = defaultdict(list)
        for item in instructions:
            second = (item.second.width, item.second.height) if item.second else None
            together[item.before.width, item.before.height, second].append(item)
        self.groups = [self._group(same) for same in together.values()]

    def _group(self, same: Sequence[Instruction]) -> Group:
        pictures = [[item.after for item in same], [item.before for item in same]]
        if same[0].second:
            pictures.append([item.second for item in same if item.second])
        ids = [self._ids(item.prompt) for item in same]
        return Group(
            same,
            tuple(token_shape(scenes[0].height, scenes[0].width) for scenes in pictures),
            [self._latents(scenes) for scenes in pictures],
            *(torch.tensor(column, device=self._device) for column in zip(*ids, strict=True)),
        )

    def _ids(self, text: str) -> tuple[list[int], list[int]]:
        if text not in self._texts:
            t5 = self._parts.tokenizer_2(text, padding="max_length", max_length=shipped().text_tokens, truncation=True)
            clip = self._parts.tokenizer(text, padding="max_length", max_length=CLIP_LENGTH, truncation=True)
            self._texts[text] = (t5.input_ids, clip.input_ids)
        return self._texts[text]

    @torch.no_grad()
    def _latents(self, scenes: Sequence[Scene]) -> Tensor:
        vae = self._parts.vae
        found = []
        for chunk in in_chunks(scenes):
            with autocast(self._device):
                latents = vae.encode(painted(chunk, self._device)).latent_dist.mode().float()
            latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
            found.append(torch.vmap(pack)(latents).half())
        return torch.cat(found)


class Composition:
    """A fixed mixture of groups in one ragged batch: its layout and positions are made once."""

    def __init__(self, groups: Sequence[Group], each: int, device: str) -> None:
        self.groups, self.each = groups, each
        shapes = [group.shapes for group in groups for _ in range(each)]
        self.layout = PackedLayout.from_shapes([shipped().text_tokens] * len(shapes), shapes, device)
        self.img_ids = image_ids([Shapes(images[:1], images[1:]) for images in shapes], device)
        self.targets = (self.img_ids[:, 0] == 0).nonzero().squeeze(1)
        """The rows of wanted pictures."""
        self.txt_ids = torch.zeros(shipped().text_tokens * len(shapes), 3, device=device)


def encode_text(parts: Any, t5_ids: Tensor, clip_ids: Tensor) -> tuple[Tensor, Tensor]:
    return parts.text_encoder_2(t5_ids)[0], parts.text_encoder(clip_ids).pooler_output


def velocity(
    parts: Any, composition: Composition, images: Tensor, text: Tensor, pooled: Tensor, sigma: Tensor
) -> Tensor:
    """`(N, C)` for all image tokens."""
    return parts.transformer(
        hidden_states=images,
        encoder_hidden_states=text.flatten(0, 1),
        pooled_projections=pooled,
        timestep=sigma,
        img_ids=composition.img_ids,
        txt_ids=composition.txt_ids,
        guidance=1 + 3 * torch.rand(len(sigma), device=sigma.device),
        layout=composition.layout,
        return_dict=False,
    )[0]


def train_transformer(parts: Any, plan: Plan, device: str, pool: Any, deadline: float) -> None:
    """Flow matching; tokens that the instruction changes count four times."""
    started = time.perf_counter()
    share = -(-plan.instructions // 16)
    drawn = pool.starmap(draw_instructions, [(SEED + k, share) for k in range(16)])
    groups = Encoded(parts, [item for part in drawn for item in part], device).groups
    print(f"{plan.instructions} instructions encoded in {time.perf_counter() - started:.0f} s", flush=True)
    rng = random.Random(SEED)
    each = plan.batch // plan.groups
    sizes = [len(group) for group in groups]
    compositions = [
        Composition(rng.choices(groups, sizes, k=plan.groups), each, device) for _ in range(plan.compositions)
    ]
    trained = [part.to(device).train() for part in (parts.transformer, parts.text_encoder, parts.text_encoder_2)]
    if device == "cuda":
        compile_blocks(get_family("flux-kontext").blocks(parts.transformer))
    training = Training("transformer", trained, plan.steps, 1e-3, deadline)
    torch.manual_seed(SEED)
    for number in training:
        composition = rng.choice(compositions)
        images, goals, weights, t5_ids, clip_ids, levels = [], [], [], [], [], []
        for group in composition.groups:
            chosen = torch.randint(0, len(group), (each,), device=device)
            target, *controls = (latents[chosen].float() for latents in group.images)
            shift = math.exp(0.5 + (1.15 - 0.5) * (target.shape[1] - 256) / (4096 - 256))
            drawn_level = torch.sigmoid(torch.randn(each, 1, 1, device=device))
            sigma = shift * drawn_level / (1 + (shift - 1) * drawn_level)
            noise = torch.randn_like(target)
            images.append(torch.cat([(1 - sigma) * target + sigma * noise, *controls], dim=1).flatten(0, 1))
            goals.append((noise - target).flatten(0, 1))
            weights.append(1 + 3 * ((target - controls[0]).abs().mean(-1) > 0.1).float().flatten())
            t5_ids.append(group.t5_ids[chosen])
            clip_ids.append(group.clip_ids[chosen])
            levels.append(sigma.flatten())
        with autocast(device):
            text, pooled = encode_text(parts, torch.cat(t5_ids), torch.cat(clip_ids))
            predicted = velocity(parts, composition, torch.cat(images), text, pooled, torch.cat(levels))
        errors = (predicted[composition.targets].float() - torch.cat(goals)).square().mean(-1)
        training.step(number, (torch.cat(weights) * errors).mean())
    training.finish()
    for part in trained:
        part.eval()


# How good it is


@torch.no_grad()
def edited(parts: Any, instructions: Sequence[Instruction], device: str) -> list[tuple[Tensor, ...]]:
    """Output, wanted and given picture of every instruction, `(3, H, W)` in -1 to 1, all as the VAE shows them."""
    found: dict[int, tuple[Tensor, ...]] = {}
    generator = torch.Generator(device).manual_seed(SEED)
    for group in Encoded(parts, instructions, device).groups:
        composition = Composition([group], len(group), device)
        text, pooled = encode_text(parts, group.t5_ids, group.clip_ids)
        _, *controls = (latents.float() for latents in group.images)
        now = torch.randn(group.images[0].shape, generator=generator, device=device)
        tokens = now.shape[1]
        evenly = np.linspace(1.0, 1 / SAMPLING_STEPS, SAMPLING_STEPS)
        sigmas, told = schedules(
            parts.scheduler, NoiseShift.of(parts.scheduler), [tokens], evenly, torch.device(device)
        )
        for index in range(SAMPLING_STEPS):
            images = torch.cat([now, *controls], dim=1)
            level = told[index].expand(len(group))
            flow = velocity(parts, composition, images.flatten(0, 1), text, pooled, level).unflatten(
                0, images.shape[:2]
            )
            now = now + (sigmas[index + 1] - sigmas[index]) * flow[:, :tokens]
        pictures = [_decoded(parts.vae, tokens, group.shapes[0]) for tokens in (now, *group.images[:2])]
        for item, row in zip(group.instructions, zip(*pictures, strict=True), strict=True):
            found[id(item)] = row
    return [found[id(item)] for item in instructions]


def _decoded(vae: Any, tokens: Tensor, shape: ImageShape) -> Tensor:
    latents = torch.stack([unpack(item.float(), shape) for item in tokens])
    return vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample.clamp(-1, 1)


@dataclass(frozen=True)
class Judgement:
    """How well one instruction was followed."""

    missing: float
    """How much of the change is missing where something should change: 1 is no edit at all."""
    elsewhere: float
    """Mean difference where nothing should change, of pictures in -1 to 1."""

    @property
    def done(self) -> bool:
        return self.missing < 0.5 and self.elsewhere < 0.05


def judge(made: Tensor, wanted: Tensor, given: Tensor) -> Judgement:
    change, left = (wanted - given).abs().mean(0), (made - wanted).abs().mean(0)
    changes = change > 0.1
    missing = float(left[changes].sum() / change[changes].sum()) if changes.any() else 0.0
    return Judgement(missing, float(left[~changes].mean()) if not changes.all() else 0.0)


def measure(parts: Any, plan: Plan, device: str, output: Path) -> dict[str, Any]:
    """How well instructions on new scenes are followed, by kind; and a picture of some."""
    instructions = draw_instructions(SEED + 20_000, plan.held_out)
    results = edited(parts, instructions, device)
    kinds: dict[str, list[Judgement]] = defaultdict(list)
    for item, result in zip(instructions, results, strict=True):
        kinds[item.kind].append(judge(*result))
    rows = [
        GridRow(item.prompt or "(nothing)", {"control": to_image(g), "edit": to_image(m), "wanted": to_image(w)})
        for item, (m, w, g) in list(zip(instructions, results, strict=True))[:24]
    ]
    write_png(output / "edits.png", edit_grid(rows, ["control", "edit", "wanted"]))
    return {
        kind: {
            "count": len(judged),
            "missing": sum(each.missing for each in judged) / len(judged),
            "elsewhere": sum(each.elsewhere for each in judged) / len(judged),
            "done": sum(each.done for each in judged) / len(judged),
        }
        for kind, judged in sorted(kinds.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop training after so long")
    arguments = parser.parse_args()
    plan = SMOKE if arguments.smoke else FULL
    deadline = time.perf_counter() + 60 * arguments.minutes
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    # Processes are made before CUDA is: they draw descriptions of scenes, in parallel.
    with multiprocessing.get_context("fork").Pool() as pool:
        run(plan, output, pool, deadline)


def run(plan: Plan, output: Path, pool: Any, deadline: float) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = untrained(SEED, words())
    report_file, vae_file = output / "report.json", output / "vae.safetensors"
    report: dict[str, Any] = json.loads(report_file.read_text()) if report_file.exists() else {}
    parts.vae.to(device)
    if report.get("vae", {}).get("steps") == plan.vae_steps:
        parts.vae.load_state_dict(load_file(vae_file))
        parts.vae.register_to_config(**report["latents"])
        parts.vae.eval()
    else:
        report["vae"] = train_vae(parts.vae, plan, device, pool)
        report["latents"] = {name: parts.vae.config[name] for name in ("scaling_factor", "shift_factor")}
        save_file({name: tensor.cpu() for name, tensor in parts.vae.state_dict().items()}, vae_file)
        report_file.write_text(json.dumps(report, indent=2))
    print(f"VAE: {report['vae']['psnr']:.2f} dB on pictures it has not seen", flush=True)
    train_transformer(parts, plan, device, pool, deadline)
    models = ("transformer", "vae", "text_encoder", "text_encoder_2")
    for name in models:
        getattr(parts, name).half()
    save_checkpoint(parts, output / "model", get_family("flux-kontext").pipeline)
    for name in models:  # what is measured is what ships
        loader = type(getattr(parts, name))
        setattr(parts, name, load_part(loader, output / "model", name, torch.float32, torch.device(device)))
    report["edits"] = measure(parts, plan, device, output)
    report_file.write_text(json.dumps(report, indent=2))
    print("| instruction | edits | missing | elsewhere | done |\n|---|---|---|---|---|")
    for kind, found in report["edits"].items():
        print("| {} | {count} | {missing:.3f} | {elsewhere:.4f} | {done:.0%} |".format(kind, **found))


if __name__ == "__main__":
    main()
