"""However a step is cut into passes, recomputed or not, and whatever runs out of memory meanwhile: the same result."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from qflux.capacity.choice import Choice
from qflux.commands import Trainer
from qflux.data.plan import PlannedStep, Visit
from qflux.errors import ConfigError, QfluxError
from qflux.losses.timesteps import NoiseLevels
from qflux.training.batches import Batches, SampleReader
from qflux.training.distributed import World
from qflux.training.model import TrainedModel
from qflux.training.optimizer.step import Update

OPTIMIZERS = {
    "SGD": ("optimizer.class_path=torch.optim.SGD", "optimizer.init_args={lr: 0.1}", 1e-6),
    "AdamW": ("optimizer.class_path=torch.optim.AdamW", "optimizer.init_args={lr: 0.001}", 1e-4),
}
STEP = ("data.batch_size=2", "train.gradient_accumulation_steps=3", "train.preflight=false")


def trained(config, name: str, optimizer: str, *more: str) -> dict[str, torch.Tensor]:
    *chosen, _ = OPTIMIZERS[optimizer]
    return load_file(Trainer(config(*STEP, *chosen, f"run_name={name}", *more)).fit().adapter)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor - expected[name]).abs().max() <= tolerance, name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_cut_of_a_step_gives_the_same_parameters(config, optimizer, data):
    tokens = data.draw(st.integers(1, 2500), label="tokens of a pass")
    recomputed = data.draw(st.sampled_from(["true", "false", "2"]), label="recomputed")
    streamed = data.draw(st.integers(0, 3), label="streamed") if recomputed == "true" else 0
    flag = st.booleans() if recomputed != "false" else st.just(False)
    keeps, offloads = data.draw(flag, label="keeps attention"), data.draw(flag, label="offloads")
    expected = trained(config, f"whole-{optimizer}", optimizer, "train.tokens_per_pass=null")
    found = trained(
        config,
        f"{optimizer}-{tokens}-{recomputed}-{streamed}-{keeps}-{offloads}",
        optimizer,
        f"train.tokens_per_pass={tokens}",
        f"train.gradient_checkpointing={recomputed}",
        f"train.streamed_blocks={streamed}",
        f"train.keep_attention={keeps}".lower(),
        f"train.offload_inputs={offloads}".lower(),
    )
    assert_same(found, expected, OPTIMIZERS[optimizer][2])


class Memory:
    """A card on which passes of more than so many tokens run out of memory, half of the way through their backward."""

    def __init__(self, monkeypatch, most: int, since: int = 0) -> None:
        self.most, self.since, self.failed = most, since, list[int]()
        self.calls = 0
        self._velocity, self._backward = TrainedModel.velocity, Update.backward
        self._tokens = 0
        # A bound method would not be handed the object it is called on.
        monkeypatch.setattr(TrainedModel, "velocity", lambda *args: self.velocity(*args))  # noqa: PLW0108
        monkeypatch.setattr(Update, "backward", lambda *args: self.backward(*args))  # noqa: PLW0108

    def velocity(self, model, batch):
        self._tokens, self.calls = sum(batch.lengths), self.calls + 1
        return self._velocity(model, batch)

    def backward(self, update, loss):
        if self._tokens > self.most and self.calls > self.since:
            self.failed.append(self._tokens)
            parameters = list(update.parameters.values())
            # Some gradients have arrived, and must not count.
            for parameter in parameters[: len(parameters) // 2]:
                parameter.grad = torch.full_like(parameter, 1e3)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        self._backward(update, loss)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_runs_out_of_memory_is_done_again_with_the_same_result(config, monkeypatch, caplog, optimizer):
    expected = trained(config, "undisturbed", optimizer)
    lines = (config("run_name=undisturbed").run_dir / "metrics.jsonl").read_text().splitlines()
    memory = Memory(monkeypatch, most=700, since=3)  # the second step is the first that fails
    caplog.set_level(logging.WARNING)
    found = trained(config, "disturbed", optimizer, "train.tokens_per_pass=1500")
    assert len(memory.failed) >= 1
    assert_same(found, expected, OPTIMIZERS[optimizer][2])
    told = [record.message for record in caplog.records if "not enough memory for a pass" in record.message]
    assert len(told) == len(memory.failed), "every change is reported, and once"
    assert "scene_" in told[0]
    assert "at most" in told[0]
    again = (config("run_name=disturbed").run_dir / "metrics.jsonl").read_text().splitlines()
    for line, undisturbed in zip(map(json.loads, again), map(json.loads, lines), strict=True):
        assert line["loss"] == pytest.approx(undisturbed["loss"], rel=1e-5)
        assert (line["samples"], line["tokens"]) == (undisturbed["samples"], undisturbed["tokens"])


def test_after_running_out_of_memory_passes_stay_small(config, monkeypatch):
    memory = Memory(monkeypatch, most=900, since=0)
    trained(config, "once", "SGD", "train.tokens_per_pass=3000", "train.max_train_steps=5")
    assert len(memory.failed) <= 3, "it fails until it fits, and never again"


def test_a_sample_that_does_not_fit_alone_is_recomputed_before_it_is_given_up(config, monkeypatch, caplog):
    """Only recomputing helps: a sample can't be cut."""
    known = TrainedModel.velocity
    recomputing: list[int] = []

    def velocity(model, batch):
        recomputing.append(len(model._choice.recomputed(5)))
        if not recomputing[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return known(model, batch)

    monkeypatch.setattr(TrainedModel, "velocity", velocity)
    caplog.set_level(logging.WARNING)
    trained(config, "again", "SGD", "train.gradient_checkpointing=false", "train.tokens_per_pass=1")
    assert recomputing[0] == 0
    assert recomputing[-1] > 0
    assert any("every block is recomputed" in record.message for record in caplog.records)


def test_what_fits_nowhere_is_an_error_that_names_the_sample(config, monkeypatch):
    def velocity(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(TrainedModel, "velocity", velocity)
    with pytest.raises(
        QfluxError, match=r"not enough memory for a pass of \d+ tokens: scene_\d+ .*20\.00 GiB"
    ) as caught:
        trained(config, "nowhere", "SGD")
    assert str(caught.value).count("scene_") == 1
    assert "smaller areas" in str(caught.value)


def test_a_run_goes_on_the_way_it_began(config, monkeypatch):
    """What was chosen for a card is kept with the run."""
    settings = config("train.max_train_steps=1", "memory=24GB")
    Trainer(settings).fit()
    kept = json.loads((settings.run_dir / "fitting.json").read_text())
    monkeypatch.setattr("qflux.training.preflight.fitting.fitted", lambda *_: pytest.fail("chosen again"))
    chosen: list[Choice] = []
    known = TrainedModel.__init__

    def note(self, *args, **kwargs):
        chosen.extend(arg for arg in args if isinstance(arg, Choice))
        known(self, *args, **kwargs)

    monkeypatch.setattr(TrainedModel, "__init__", note)
    Trainer(config("train.max_train_steps=2", "memory=24GB")).fit()
    assert chosen == [Choice(**kept["choice"])]
    assert isinstance(kept["choice"]["most_tokens"], int)


def test_the_cut_is_no_part_of_what_a_resumed_run_must_share(config):
    Trainer(config("train.max_train_steps=1")).fit()
    result = Trainer(config("train.max_train_steps=2", "train.tokens_per_pass=300")).fit()
    assert (result.resumed_from, result.steps) == (1, 2)
    assert Path(result.adapter).is_file()


@pytest.mark.parametrize("streamed", [1, 3, 100])
def test_streamed_blocks_train_the_same_bytes(config, streamed):
    """However many of them, more than there are too; with validation in between."""
    shared = ("train.gradient_checkpointing=true", "data.held_out={count: 2}", "validation.num_inference_steps=2")
    plain = Trainer(config(*STEP, *shared, "run_name=plain")).fit()
    found = Trainer(config(*STEP, *shared, "run_name=streamed", f"train.streamed_blocks={streamed}")).fit()
    assert found.adapter.read_bytes() == plain.adapter.read_bytes()
    assert found.held_out_loss == plain.held_out_loss


def test_streaming_that_can_not_be_is_refused(config):
    for wrong, message in {
        "train.method=full": "what trains has to stay",
        "train.distributed=fsdp": "FSDP moves its own",
        "train.gradient_checkpointing=2": "auto or true",
    }.items():
        with pytest.raises(ConfigError, match=message):
            config("train.gradient_checkpointing=true", "train.streamed_blocks=2", wrong)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tokens", [1, 900], ids=["one sample a pass", "several"])
def test_steps_after_one_that_was_begun_again_train_their_own_samples(config, monkeypatch, tokens, workers):
    """It fails in its first pass of several, when the rest of it and steps behind it have been read already."""
    shared = (f"train.tokens_per_pass={tokens}", f"data.num_workers={workers}", "train.max_train_steps=4")
    expected = trained(config, "undisturbed", "SGD", *shared)
    known, calls = TrainedModel.velocity, []

    def once(model, batch):
        calls.append(len(batch.samples))
        if len(calls) == sum(first_step) + 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return known(model, batch)

    first_step = passes_of_first_step(config, shared)
    assert len(first_step) > 1
    monkeypatch.setattr(TrainedModel, "velocity", once)
    found = trained(config, "begun-again", "SGD", *shared)
    assert_same(found, expected, 1e-6)
    ledgers = [config(f"run_name={name}").run_dir / "ledger.jsonl" for name in ("undisturbed", "begun-again")]
    assert ledgers[0].read_text() == ledgers[1].read_text()


def passes_of_first_step(config, shared: tuple[str, ...]) -> list[int]:
    """One for each pass of the first step."""
    counted: list[int] = []
    known = TrainedModel.velocity

    def count(model, batch):
        counted.append(1)
        return known(model, batch)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(TrainedModel, "velocity", count)
        trained(config, "counted", "SGD", *shared, "train.max_train_steps=1")
    return counted


def test_a_sample_that_also_stands_in_for_nothing_keeps_its_weight_when_passes_become_smaller(config):
    """Two ranks: the first has fewer passes than the second, and its own cheapest sample stands in."""
    trainer = Trainer(config())
    samples = sorted(trainer.samples().training, key=lambda sample: sample.tokens)
    lengths = [sample.tokens for sample in samples]
    small, *large = range(len(samples))
    step = PlannedStep(0, 0, (((Visit(small, 0),),), tuple((Visit(place, 0),) for place in large[-4:])))
    levels = NoiseLevels(trainer.config.loss.timesteps)
    arguments = (trainer.config, Plan([step]), samples, SampleReader(), levels, 64, World(0, 2), torch.device("cpu"))
    batches = Batches(*arguments).cut_to(max(lengths) + 1)
    steps = batches.steps(0, 3)
    list(next(steps))
    batches.most_tokens = max(lengths)
    with patch.object(Batches, "_regrouped", autospec=True, side_effect=Batches._regrouped) as regrouped:
        again = next(steps)
    assert regrouped.called, "it was read before the limit changed"
    counting = [batch for batch in again if batch.counts]
    assert [sample.name for batch in counting for sample in batch.samples] == [samples[small].name]
    assert all(float(batch.weight.min()) > 0 for batch in counting)


class Plan:
    """The same step again and again."""

    def __init__(self, steps: list[PlannedStep]) -> None:
        self._steps = steps

    def steps(self, start: int, stop: int):
        return ((number, self._steps[0]) for number in range(start, stop))


def test_a_record_of_something_else_is_not_taken(config):
    settings = config("train.max_train_steps=1", "memory=24GB")
    file = settings.run_dir / "fitting.json"
    Trainer(settings).fit()
    good = json.loads(file.read_text())
    wrong = ("{", "[]", json.dumps({**good, "choice": {**good["choice"], "every": 0}}))
    for content in (*wrong, json.dumps({**good, "choice": {"strange": 1}}), json.dumps({**good, "asked": {}})):
        file.write_text(content)
        assert Trainer(settings).fit().steps == 1
        assert json.loads(file.read_text()) == good
