"""The memory of a step is what was predicted for it; what is chosen fits, and what can't fit is told beforehand."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from family_samples import REFERENCES, Models
from qflux.adapters.lora import inject
from qflux.capacity import planner
from qflux.capacity.card import Card
from qflux.capacity.choice import Choice
from qflux.capacity.footprint import Footprint
from qflux.capacity.planner import choose, compiles
from qflux.cli.app import app
from qflux.commands import Trainer
from qflux.config import load_config
from qflux.data.encoded import TextEmbedding
from qflux.errors import ConfigError
from qflux.memory.counting import MemoryCount, take_fused_norms
from qflux.memory.recomputation import recompute
from qflux.memory.streaming import SLOTS
from qflux.models import get_family
from qflux.models.family import Arithmetic, ModelInputs
from qflux.models.loading import save_checkpoint
from qflux.ragged.shapes import Shapes

ARITHMETIC = Arithmetic(per_token=1e9, per_pair=1e3)


def config_of(name: str, folder, *overrides: str):
    reference = REFERENCES[name]
    save_checkpoint(reference.components(0), folder, reference.pipeline_name)
    settings = {"family": reference.family, "model": {"pretrained": str(folder)}, "data": {"path": str(folder)}}
    return load_config(settings, ["cache.project_text=false", *overrides])


def on_meta(name: str, times: int = 1):
    """A tiny transformer without weights, with so many times its blocks."""
    config = dict(REFERENCES[name].components(0).transformer.config)
    layers = {key: count * times for key, count in config.items() if key.startswith("num_") and key.endswith("layers")}
    with torch.device("meta"):
        return get_family(REFERENCES[name].family).transformer.from_config({**config, **layers})


def way(recomputed: int, streamed: int = 0, keeps: bool = False, hosts: bool = False) -> Choice:
    return Choice(None, recomputed, 1, False, streamed, keeps, hosts)


def least(footprint: Footprint, tokens: int) -> float:
    """The least memory in which anything can be done about a pass of so many tokens."""
    blocks = footprint.blocks
    ways = [way(blocks, count, hosts=hosts) for count in range(blocks + 1) for hosts in (False, True)]
    return min(footprint.peak(tokens, each) for each in ways) / 0.96


def counted(config, family, transformer, sizes, text: int, choice: Choice) -> tuple[int, int]:
    """A whole step counted, tensor by tensor: its tokens, and its peak without weights and gradients."""
    transformer.to(torch.bfloat16).requires_grad_(False).train()
    with torch.device("meta"):
        inject(transformer, config.lora, config.lora_targets, 0)
    take_fused_norms(transformer)
    again = {id(block) for block in family.blocks(transformer)[: choice.first]}
    recompute(transformer, again, choice.keeps_attention)
    widths = family.widths(transformer)
    shapes = [Shapes((size,), (size,) if family.facts.controls[1] != 0 else ()) for size in sizes]
    options = {"device": "meta", "dtype": torch.bfloat16}
    texts = [
        TextEmbedding(
            torch.empty(text, widths.text, **options),
            torch.empty(widths.pooled, **options) if widths.pooled else None,
            places=(3,) * len(sample.controls) if widths.has_places else (),
        )
        for sample in shapes
    ]
    images = torch.empty(sum(sample.tokens for sample in shapes), widths.image, **options)
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    known = [*transformer.parameters(), *transformer.buffers(), *(parameter.grad for parameter in trained)]
    inputs = ModelInputs(images, shapes, texts, torch.empty(len(sizes), device="meta"), 3.5)
    with MemoryCount(known) as count:
        (family.velocity(transformer, inputs) - images).float().square().sum().backward()
    return text * len(sizes) + len(images), count.peak


@pytest.mark.parametrize(
    "name", ["flux-kontext", "qwen-image", "qwen-image-edit-plus, 2511", "flux2", "flux3", "qwen-image-2.1"]
)
def test_what_two_blocks_of_each_kind_take_tells_what_a_whole_model_takes(name, tmp_path):
    config, family = config_of(name, tmp_path), get_family(REFERENCES[name].family)
    footprint = Footprint.of(config, family, on_meta(name, 4), text=64)
    sizes = [(1, 20, 22), (1, 32, 16), (1, 10, 40), (1, 24, 24)]
    blocks = footprint.blocks
    for choice in (way(0), way(blocks // 2), way(blocks), way(blocks // 2, keeps=True), way(blocks, keeps=True)):
        tokens, peak = counted(config, family, on_meta(name, 4), sizes, 64, choice)
        assert 0.97 * peak <= footprint.activations(choice)(tokens) <= 1.1 * peak, choice


def test_what_attention_gave_is_as_large_as_the_input_of_a_block(tmp_path):
    _, footprint = footprint_of(tmp_path)
    for kind in footprint.kinds:
        assert kind.attention.per_token == pytest.approx(kind.recomputed.per_token, rel=0.3)


def test_inputs_on_the_host_are_not_on_the_device(tmp_path):
    _, footprint = footprint_of(tmp_path, "model.dtype=float32")
    hosted, there = way(footprint.blocks, hosts=True), way(footprint.blocks)
    saved = footprint.activations(there).per_token - footprint.activations(hosted).per_token
    on_host = footprint.inputs_on_host(hosted).per_token
    assert on_host == pytest.approx(sum(kind.count * kind.recomputed.per_token for kind in footprint.kinds))
    assert 0 <= saved < on_host, "some of them are on their way"
    assert footprint.inputs_on_host(there).per_token == 0


def test_the_count_is_what_torch_really_holds():
    """On real memory: everything that lives is counted, and what is gone is not."""
    with MemoryCount() as count:
        first = torch.zeros(1000)
        second = first.view(10, 100)  # the same memory
        assert count.now == 4000
        third = second * 2
        assert count.now == 8000
        del first, second
        assert count.now == 4000
        del third
        assert (count.now, count.peak) == (0, 8000)


def test_gradient_memory_of_a_real_step_is_counted_as_it_is_on_no_memory():
    """The same code on the CPU and on the meta device, but for attention, which keeps more on a CPU."""
    models = Models("flux-kontext")
    block = models.ours.transformer_blocks[0].ff

    def peak(device: str) -> int:
        layer = block.to(device) if device == "cpu" else torch.nn.Module.to(block, device="meta")
        rows = torch.empty(64, models.ours.config.num_attention_heads * models.ours.config.attention_head_dim)
        rows = rows.to(device).requires_grad_()
        with MemoryCount(layer.parameters()) as count:
            layer(rows).sum().backward()
        return count.peak

    assert peak("cpu") == peak("meta")


def footprint_of(tmp_path, *overrides: str):
    config = config_of("flux-kontext", tmp_path, *overrides)
    return config, Footprint.of(config, get_family("flux-kontext"), on_meta("flux-kontext"), text=64)


def card(memory: float) -> Card:
    return Card("a card", int(memory), 1e14)


def test_what_is_chosen_fits_and_recomputes_no_more_than_it_must(tmp_path):
    config, footprint = footprint_of(tmp_path)
    steps = [[[900, 400, 650]], [[300, 900], [1200]]]
    before, smallest = footprint.blocks + 1, least(footprint, 1200)
    for memory in (1.02, 1.3, 2.0, 6.0, 40.0):
        choice, predicted = choose(config, footprint, ARITHMETIC, card(smallest * memory), steps, compiled=False)
        assert predicted.peak <= smallest * memory
        assert choice.most_tokens >= 1200
        again = len(choice.recomputed(footprint.blocks))
        assert again <= before, "more memory, and more recomputation"
        before = again
    assert before == 0
    assert predicted.passes == 1


def test_settings_made_by_hand_are_taken_as_they_are(tmp_path):
    config, footprint = footprint_of(tmp_path, "train.gradient_checkpointing=2", "train.tokens_per_pass=1300")
    choice, _ = choose(config, footprint, ARITHMETIC, card(1e9), [[[900, 1200]]], compiled=True)
    assert (choice.most_tokens, choice.compiled) == (1300, True)
    assert list(choice.recomputed(footprint.blocks)) == list(range(0, footprint.blocks, 2))
    config, _ = footprint_of(tmp_path, "train.gradient_checkpointing=false", "train.tokens_per_pass=null")
    choice, _ = choose(config, footprint, ARITHMETIC, card(1e9), [[[900, 1200]]], compiled=False)
    assert choice.most_tokens is None
    assert not choice.recomputed(5)


def test_a_card_on_which_nothing_fits_is_told_the_least_that_works(tmp_path):
    config, footprint = footprint_of(tmp_path)
    message = r"(?s)longest sample has 1,200 tokens.*least memory that works is [\d.]+ GB"
    with pytest.raises(ConfigError, match=message) as caught:
        choose(config, footprint, ARITHMETIC, card(footprint.other_weights), [[[900, 1200]]], compiled=False)
    told = float(str(caught.value).rpartition("works is ")[2].partition(" GB")[0]) * 1e9
    choice, _ = choose(config, footprint, ARITHMETIC, card(told), [[[900, 1200]]], compiled=False)
    assert choice.most_tokens >= 1200


def test_quantized_and_sharded_weights_take_less(tmp_path):
    _, plain = footprint_of(tmp_path)
    _, eight = footprint_of(tmp_path, "model.quantization=int8")
    _, four = footprint_of(tmp_path, "model.quantization=nf4")
    assert four.weights(way(0)) < eight.weights(way(0)) < plain.weights(way(0))
    assert plain.sharded(4).trained == plain.trained // 4
    assert [kind.weights for kind in plain.sharded(4).kinds] == [kind.weights // 4 for kind in plain.kinds]


def test_training_everything_takes_gradients_and_moments_of_every_weight(tmp_path):
    _, footprint = footprint_of(tmp_path, "train.method=full")
    weights = sum(parameter.numel() for parameter in on_meta("flux-kontext").parameters())
    assert footprint.weights(way(0)) == 4 * weights
    assert footprint.trained == 12 * weights


def test_check_shows_the_plan_for_a_card_that_is_not_here(config, tmp_path):
    settings = config("train.gradient_accumulation_steps=2")
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(settings.dump()))
    result = CliRunner().invoke(app, ["check", str(file), "--memory", "24GB", "--json"])
    found = {item["what"]: item for item in json.loads(result.stdout)["checks"]}
    assert found["memory"]["state"] == "ok"
    assert "of 22.4 GiB" in found["memory"]["detail"]
    assert "a card like RTX 4090" in found["memory"]["detail"]
    result = CliRunner().invoke(app, ["check", str(file), "--memory", "lots"])
    assert isinstance(result.exception, ConfigError)
    assert "16GB" in str(result.exception)


def test_a_run_says_before_it_loads_anything_that_nothing_fits(config, monkeypatch):
    monkeypatch.setattr("qflux.models.pretrained.load_transformer", lambda *_: pytest.fail("too late"))
    monkeypatch.setattr(Card, "of", partial(lambda *_: Card("a card", 2**20, 1e14)))
    with pytest.raises(ConfigError, match="the least memory that works"):
        Trainer(config()).fit()


def test_a_lora_of_more_layers_keeps_more(tmp_path):
    few, more = (
        footprint_of(tmp_path, f"lora.target_modules={targets}")[1]
        for targets in ("[to_q]", "[to_q, to_k, to_v, to_out.0, proj_mlp, proj_out]")
    )
    assert more.trained > few.trained
    assert more.activations(way(0))(1000) > few.activations(way(0))(1000)


def test_blocks_are_compiled_on_a_gpu_that_can_unless_somebody_says_otherwise(tmp_path, monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    there = {"triton"}
    monkeypatch.setattr(planner, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(planner, "which", lambda name: f"/usr/bin/{name}" if name in there else None)
    monkeypatch.delenv("CC", raising=False)
    plain = config_of("flux-kontext", tmp_path)
    assert not compiles(plain, gpu), "without a C compiler kernels can't be started"
    there.add("gcc")
    assert compiles(plain, gpu)
    assert not compiles(plain, cpu)
    assert not compiles(config_of("flux-kontext", tmp_path, "model.quantization=fp8"), gpu)
    assert not compiles(config_of("flux-kontext", tmp_path, "train.compile=false"), gpu)
    there.clear()
    assert compiles(config_of("flux-kontext", tmp_path, "train.compile=true"), cpu)


def test_weights_stay_on_the_host_only_where_there_is_no_room_for_them(tmp_path):
    config, footprint = footprint_of(tmp_path, "model.dtype=float32")
    steps = [[[40, 30]]]
    enough, _ = choose(config, footprint, ARITHMETIC, card(10 * footprint.weights(way(0))), steps, compiled=False)
    assert enough.streamed == 0
    smallest = least(footprint, 40)
    assert smallest < footprint.peak(40, way(footprint.blocks))
    tight, predicted = choose(config, footprint, ARITHMETIC, card(1.001 * smallest), steps, compiled=False)
    assert tight.streamed > 0
    assert set(tight.waiting(footprint.blocks)) <= set(tight.recomputed(footprint.blocks))
    assert predicted.on_host > 0
    assert predicted.peak <= 1.001 * smallest


def test_no_more_waits_in_host_memory_than_there_is_room_for(tmp_path):
    config, footprint = footprint_of(tmp_path, "model.dtype=float32")
    steps, smallest = [[[40, 30]]], least(footprint, 40)
    small = Card("a card", int(1.001 * smallest), 1e14, host=1000)
    with pytest.raises(ConfigError, match="are too little"):
        choose(config, footprint, ARITHMETIC, small, steps, compiled=False)
    enough = Card("a card", int(footprint.peak(70, way(footprint.blocks)) / 0.95), 1e14, host=1000)
    choice, predicted = choose(config, footprint, ARITHMETIC, enough, steps, compiled=False)
    assert predicted.on_host == choice.streamed == 0


def test_more_than_host_memory_has_is_refused_by_name(tmp_path):
    config, footprint = footprint_of(tmp_path, "train.streamed_blocks=3", "train.gradient_checkpointing=true")
    with pytest.raises(ConfigError, match=r"(?s)wait in host memory.*train\.streamed_blocks"):
        choose(config, footprint, ARITHMETIC, Card("a card", 10**12, 1e14, host=1000), [[[40, 30]]], compiled=False)


def test_settings_about_recomputed_blocks_are_refused_where_there_are_none(tmp_path):
    for name in ("keep_attention", "offload_inputs"):
        with pytest.raises(ConfigError, match=f"{name} is about recomputed blocks"):
            footprint_of(tmp_path, f"train.{name}=true", "train.gradient_checkpointing=false")


def test_streamed_weights_are_counted_in_slots(tmp_path):
    _, footprint = footprint_of(tmp_path)
    largest = max(kind.weights for kind in footprint.kinds)
    in_blocks = sum(kind.count * kind.weights for kind in footprint.kinds)
    everything = way(footprint.blocks, footprint.blocks)
    assert footprint.weights(everything) == footprint.other_weights + min(SLOTS, footprint.blocks) * largest
    assert footprint.weights_on_host(everything) == in_blocks


def test_arithmetic_that_is_done_again_costs_time_and_a_slow_link_does_too(tmp_path):
    """A card with a fast link may stream for nothing, so that memory is left for something better."""
    _, footprint = footprint_of(tmp_path, "model.dtype=float32")
    steps, blocks = [[[900, 400, 650]]], footprint.blocks
    heavy = Arithmetic(per_token=1e9, per_pair=1e6)

    def seconds(choice: Choice, link: float = 1e12) -> float:
        return planner.predict(choice, footprint, heavy, Card("a card", 10**12, 1e12, link), steps).seconds

    assert seconds(way(0)) < seconds(way(blocks, keeps=True)) < seconds(way(blocks))
    assert seconds(way(blocks, blocks)) == seconds(way(blocks))
    assert seconds(way(blocks, blocks), link=1e4) > seconds(way(blocks), link=1e4)
    assert seconds(way(blocks, hosts=True), link=1e4) > seconds(way(blocks), link=1e4)


def test_passes_asked_for_by_hand_recompute_what_they_must(tmp_path):
    """Larger ones than would fit get as little memory as can be; smaller ones than a sample are no reason to stop."""
    steps = [[[900, 1200], [300]]]
    for asked in ("null", "3000", "500"):
        config, footprint = footprint_of(tmp_path, f"train.tokens_per_pass={asked}")
        room = footprint.peak(2100, way(footprint.blocks)) / 0.9
        choice, predicted = choose(config, footprint, ARITHMETIC, card(room), steps, compiled=False)
        assert choice.most_tokens == (None if asked == "null" else int(asked))
        assert predicted.peak <= room or len(choice.recomputed(footprint.blocks)) == footprint.blocks
        tight, _ = choose(config, footprint, ARITHMETIC, card(footprint.other_weights), steps, compiled=False)
        assert len(tight.recomputed(footprint.blocks)) >= footprint.blocks - 1, "the last one makes no difference"


def test_the_longest_sample_of_all_decides_not_that_of_some_steps(tmp_path):
    config, footprint = footprint_of(tmp_path)
    room = card(footprint.peak(5000, way(footprint.blocks)) / 0.9)
    choice, _ = choose(config, footprint, ARITHMETIC, room, [[[900]]], compiled=False, longest=5000)
    assert choice.most_tokens >= 5000


def test_check_does_not_guess_how_many_processes_share_a_model(config, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(config("train.distributed=fsdp").dump()))
    result = CliRunner().invoke(app, ["check", str(file), "--memory", "24GB", "--json"])
    found = {item["what"]: item for item in json.loads(result.stdout)["checks"]}
    assert found["memory"]["state"] == "unknown"
