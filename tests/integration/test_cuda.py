"""What only a GPU can show: nothing waits inside a step, a step that is NaN is skipped on the device."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from itertools import accumulate

import pytest
import torch
from safetensors.torch import load_file

from qflux.adapters.lora import inject
from qflux.commands import Trainer
from qflux.config import LoraSettings, load_config
from qflux.data.encoded import TextEmbedding
from qflux.errors import QfluxError
from qflux.losses.objective import Objective
from qflux.memory.recomputation import recompute
from qflux.memory.streaming import StreamedBlocks
from qflux.models import get_family
from qflux.models.family import ModelInputs
from qflux.models.loading import save_checkpoint
from qflux.ragged.shapes import Shapes
from qflux.ragged.spans import Span, SpanAttention, mask_of
from qflux.training.signals import repeatable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module", params=["flux-kontext", "qwen-image-edit-plus", "flux2", "flux3", "qwen-image-2.1"])
def recipe(request, tmp_path_factory, data_set):
    family = get_family(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint(family.tiny(0), folder / "model", family.pipeline)
    settings = {
        "family": request.param,
        "output_dir": str(folder / "runs"),
        "model": {"pretrained": str(folder / "model"), "dtype": "bfloat16", "device": "cuda"},
        "data": {
            "path": str(data_set),
            "batch_size": 3,
            "held_out": {"count": 2},
            "processor": {"multi_resolutions": ["96*96", "128*128", "160*160"]},
        },
        "lora": {"rank": 4},
        "train": {"max_train_steps": 8, "gradient_checkpointing": False, "compile": False},
        "validation": {"images": 1, "num_inference_steps": 2},
    }
    for dtype in ("bfloat16", "float16", "float32"):
        Trainer(load_config(settings, [f"model.dtype={dtype}"])).cache()
    # Where everything is trained, text is kept as it was before the transformer's first layer.
    Trainer(load_config(settings, ["train.method=full"])).cache()
    return lambda *overrides: load_config(settings, overrides)


AGAIN = "train.gradient_checkpointing=true"


@pytest.mark.parametrize(
    "extra",
    [
        [],
        [AGAIN],
        ["train.ema={decay: 0.9}"],
        [AGAIN, "train.streamed_blocks=3"],
        [AGAIN, "model.precision=fp8", "train.compile=true"],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nothing_waits_for_the_device_inside_a_step(recipe, extra, dtype, request):
    config = recipe(*extra, f"model.dtype={dtype}", f"run_name=sync-{abs(hash((str(extra), dtype)))}")
    original = Objective.__call__
    steps = []

    def strict(self, prediction, batch, base=None):
        """From the third step on torch raises where it would wait; the last step ends with a checkpoint, which may."""
        steps.append(1)
        mode = "error" if 3 < len(steps) < config.train.max_train_steps else "default"
        torch.cuda.set_sync_debug_mode(mode)
        return original(self, prediction, batch, base)

    try:
        Objective.__call__ = strict
        Trainer(config).fit()
    finally:
        Objective.__call__ = original
        torch.cuda.set_sync_debug_mode("default")
    assert len(steps) > config.train.max_train_steps


def test_a_loss_that_is_nan_stops_the_run_with_the_state_before_it(recipe):
    config = recipe("run_name=nan", "train.max_train_steps=30")
    original, seen = Objective.__call__, []

    def poisoned(self, prediction, batch, base=None):
        seen.append(1)
        return original(self, prediction * (math.nan if len(seen) == 12 else 1.0), batch, base)

    try:
        Objective.__call__ = poisoned
        with pytest.raises(QfluxError, match=r"step 11: the loss or the gradient is NaN or infinite"):
            Trainer(config).fit()
    finally:
        Objective.__call__ = original
    saved = config.run_dir / "checkpoints" / "step-00000010"
    optimizer = load_file(saved / "optimizer.safetensors")
    assert {float(t) for name, t in optimizer.items() if name.endswith("/step")} == {10.0}
    assert all(t.isfinite().all() for t in load_file(saved / "parameters.safetensors").values())
    assert len((config.run_dir / "metrics.jsonl").read_text().splitlines()) == 10


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_compiled_run_learns_what_an_uncompiled_one_does(recipe, method):
    found = {}
    for compiled in ("false", "true"):
        name = f"compiled-{method}-{compiled}"
        config = recipe(
            f"train.method={method}", f"train.compile={compiled}", f"run_name={name}", "train.max_train_steps=3"
        )
        Trainer(config).fit()
        steps = (config.run_dir / "metrics.jsonl").read_text().splitlines()
        found[compiled] = [json.loads(step)["loss"] for step in steps]
    assert found["true"] == pytest.approx(found["false"], rel=0.03)


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_what_waits_in_host_memory_trains_the_same_bytes(recipe, compiled):
    shared = [AGAIN, f"train.compile={compiled}", "train.deterministic=true", "train.max_train_steps=6"]
    for kept in ("false", "true"):
        found = [
            Trainer(
                recipe(
                    *shared,
                    f"train.keep_attention={kept}",
                    f"train.streamed_blocks={count}",
                    f"train.offload_inputs={offloads}",
                    f"run_name=waiting-{kept}-{count}-{compiled}",
                )
            ).fit()
            for count, offloads in ((0, "false"), (1, "false"), (100, "true"))
        ]
        assert len({result.adapter.read_bytes() for result in found}) == 1, kept


def test_blocks_of_real_size_have_the_same_gradients_wherever_weights_and_inputs_wait():
    """Whoever reads a slot before its weights are there, or after the next ones are, computes something else."""
    family = get_family("flux-kontext")
    shape = {"num_layers": 3, "num_single_layers": 6, "guidance_embeds": True}
    with torch.device("meta"):
        model = family.transformer(**shape)
    model = model.to(torch.bfloat16).to_empty(device="cuda").requires_grad_(False)
    inject(model, LoraSettings(rank=16), family.facts.lora_targets, 0)
    generator = torch.Generator("cuda").manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02, generator=generator)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    shapes = [Shapes(((1, rows, 40),), ((1, rows, 40),)) for rows in (30, 50)]
    images = torch.randn(sum(sample.tokens for sample in shapes), 64, **options)
    text = [TextEmbedding(torch.randn(512, 4096, **options), torch.randn(768, **options)) for _ in shapes]
    inputs = ModelInputs(images, shapes, text, torch.tensor([0.3, 0.8], device="cuda"), 3.5, ragged=True)
    blocks = family.blocks(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients(keeps: bool, hosts: bool) -> list[torch.Tensor]:
        recompute(model, {id(block) for block in blocks}, keeps, hosts)
        for _ in range(3):  # the later ones begin where the ones before have left the slots
            model.zero_grad()
            family.velocity(model, inputs).float().square().mean().backward()
        return [parameter.grad.clone() for parameter in trained]

    with repeatable(True):
        expected = gradients(False, False)
        assert all(bool(gradient.abs().max() > 0) for gradient in expected)
        ways = [(keeps, hosts) for keeps in (False, True) for hosts in (False, True)]
        for streamed in (False, True):
            if streamed:
                StreamedBlocks([blocks[place] for place in (0, 1, 2, 3, 5, 7, 8)], torch.device("cuda"))
            for keeps, hosts in ways:
                found = gradients(keeps, hosts)
                assert all(map(torch.equal, found, expected)), (streamed, keeps, hosts)


def test_memory_that_another_process_takes_changes_nothing_but_the_passes(recipe, caplog):
    """The second process leaves less than half of what a step needs; the run goes on in smaller passes."""
    larger = ["data.processor.multi_resolutions=['512*512', '640*640']", "data.batch_size=6", "model.dtype=float32"]
    shared = [*larger, "train.max_train_steps=8", "train.preflight=false", "train.tokens_per_pass=1000000"]
    Trainer(recipe(*larger)).cache()
    expected = load_file(Trainer(recipe(*shared, "run_name=undisturbed")).fit().adapter)
    taken: list[subprocess.Popen[str]] = []

    def take(report) -> None:
        if taken and report.step >= 6:
            taken[0].kill()  # validation is another matter
        if taken or report.step < 2:
            return
        torch.cuda.synchronize()
        left = (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) // 2
        torch.cuda.empty_cache()
        code = f"""
import torch
torch.ones(1, device="cuda")
held = torch.empty(torch.cuda.mem_get_info()[0] - {left}, dtype=torch.uint8, device="cuda")
print("taken", flush=True)
input()
"""
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        taken.append(process)
        assert process.stdout.readline() == "taken\n"

    try:
        found = load_file(Trainer(recipe(*shared, "run_name=disturbed")).fit(take).adapter)
    finally:
        for process in taken:
            process.kill()
    told = [record.message for record in caplog.records if "not enough memory for a pass" in record.message]
    assert told, "nothing ran out"
    assert all(torch.allclose(found[name], expected[name], atol=1e-4) for name in expected)


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_a_lora_trains_over_a_quantized_base(recipe, kind):
    pytest.importorskip("bitsandbytes" if kind == "nf4" else "torchao")
    config = recipe(f"model.quantization={kind}", f"run_name={kind}", "optimizer.init_args={lr: 0.01}")
    result = Trainer(config).fit()
    assert math.isfinite(result.last_loss)
    losses = [
        json.loads(line)["held_out_loss"] for line in (config.run_dir / "validation.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_8_bit_products_learn_what_others_do_and_go_on_to_the_same_bytes(recipe, kind):
    shared = [f"model.precision={kind}", "train.compile=true", "train.deterministic=true", AGAIN]
    found = {}
    for name, last in (("whole", 6), ("part", 3), ("part", 6)):
        config = recipe(*shared, f"run_name={name}-{kind}", f"train.max_train_steps={last}")
        found[name] = Trainer(config).fit()
    assert found["part"].adapter.read_bytes() == found["whole"].adapter.read_bytes()
    plain = Trainer(recipe(f"run_name=beside-{kind}", "train.max_train_steps=6")).fit()
    assert found["whole"].last_loss == pytest.approx(plain.last_loss, rel=0.05)


@pytest.mark.parametrize("optimizer", ["bitsandbytes.optim.AdamW8bit", "torch.optim.AdamW"])
def test_a_resumed_run_goes_on_where_it_was(recipe, optimizer):
    pytest.importorskip(optimizer.split(".")[0])
    shared = [f"optimizer.class_path={optimizer}", "optimizer.init_args={lr: 0.001}", "train.deterministic=true"]
    name = optimizer.replace(".", "-")
    whole = Trainer(recipe(*shared, f"run_name=whole-{name}", "train.max_train_steps=6")).fit()
    Trainer(recipe(*shared, f"run_name=part-{name}", "train.max_train_steps=3")).fit()
    rest = Trainer(recipe(*shared, f"run_name=part-{name}", "train.max_train_steps=6")).fit()
    assert rest.adapter.read_bytes() == whole.adapter.read_bytes()


@pytest.mark.parametrize("sizes", [[(1, 8, 8)], [(1, 8, 8), (1, 8, 8)], [(1, 8, 8), (1, 6, 10)]], ids=str)
@pytest.mark.parametrize("name", ["flux-kontext", "qwen-image-edit", "flux2", "flux3", "qwen-image-2.1"])
def test_gradients_of_fast_attention_are_those_of_plain_attention(name, sizes):
    """cuDNN's backward is wrong if its gradient is a slice, as in diffusers' own single-stream blocks (torch 2.11)."""
    family = get_family(name)
    transformer = family.tiny(0).transformer.to("cuda", torch.bfloat16).requires_grad_(True)
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    widths = family.widths(transformer)
    pooled = torch.randn(widths.pooled or 1, **options)
    inputs = ModelInputs(
        torch.randn(sum(2 * rows * columns for _, rows, columns in sizes), widths.image, **options),
        [Shapes((size,), (size,)) for size in sizes],
        [TextEmbedding(torch.randn(40, widths.text, **options), pooled, places=(7,)) for _ in sizes],
        torch.rand(len(sizes), device="cuda"),
        3.5,
    )
    gradients = []
    for enabled in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        family.velocity(transformer, inputs).float().square().mean().backward()
        gradients.append(torch.cat([p.grad.float().flatten() for p in transformer.parameters() if p.grad is not None]))
        transformer.zero_grad()
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert (gradients[0] - gradients[1]).norm() < 0.03 * gradients[1].norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("longest", [40, 700, 3000], ids=["short", "medium", "long"])
def test_attention_over_spans_is_that_of_their_mask_whatever_kernel_runs(longest, dtype):
    """Block-causal samples and several targets behind one prefix, forward and backward, against float64."""
    random.seed(longest)
    torch.manual_seed(longest)
    samples = [spans_of([random.randint(1, longest) for _ in range(3)], targets) for targets in (1, 3)]
    attention = SpanAttention.of(samples, "cuda")
    total = attention.spans[-1].queries[1]
    inputs = [torch.randn(total, 2, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(total, 2, 64, device="cuda", dtype=dtype)
    output = attention(*inputs)
    gradients = torch.autograd.grad(output, inputs, upstream)

    query, key, value = (x.transpose(0, 1).double() for x in inputs)
    scores = (query @ key.transpose(1, 2) / 8).masked_fill(~mask_of(attention.spans).cuda(), float("-inf"))
    expected = (scores.softmax(-1) @ value).transpose(0, 1)
    wanted = torch.autograd.grad(expected, inputs, upstream.double())
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-4
    for found, right in zip((output, *gradients), (expected, *wanted), strict=True):
        assert (found.double() - right).norm() <= tolerance * right.norm()


def spans_of(lengths: list[int], targets: int) -> list[Span]:
    """Text, an image, text, and targets of the last length, which see what came before and themselves."""
    first, image, text = accumulate(lengths)
    spans = [
        Span((0, first), ((0, first),), causal=True),
        Span((first, image), ((0, image),)),
        Span((image, text), ((0, text),), causal=True),
    ]
    for start in range(text, text + targets * lengths[-1], lengths[-1]):
        end = start + lengths[-1]
        spans.append(Span((start, end), ((0, text), (start, end))))
    return spans
