"""`qflux fit`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qflux.cli.options import AcceptData, ConfigFile, ConfigOption, Overrides, one_config
from qflux.cli.terminal import LineNowAndThen, progress_bar, say, say_first, trainer_of
from qflux.launch import launched

if TYPE_CHECKING:
    from qflux.commands import Trainer
    from qflux.runs.metrics import StepReport


def fit(
    file: ConfigFile = None,
    config: ConfigOption = None,
    accept_data_change: AcceptData = False,
    set_: Overrides = None,
) -> None:
    """Train on cached samples; goes on where an interrupted run was.

    qflux fit recipes/flux-kontext.yaml --set train.max_train_steps=500

    On several GPUs: torchrun --nproc-per-node 8 -m qflux.cli fit FILE
    """
    fit_and_tell(trainer_of(one_config(file, config), set_), accept_data_change)


def fit_and_tell(trainer: Trainer, accept_data_change: bool = False) -> None:
    """Train with a progress bar, and say how it went."""
    from qflux.ragged.compilation import watched  # noqa: PLC0415  (imports torch: by now the trainer has)

    say_first(f"run: {trainer.config.run_dir.absolute()}")
    with progress_bar() as bar:
        task = bar.add_task("fit", total=None, note="loading")
        log = LineNowAndThen()

        def on_step(report: StepReport) -> None:
            bar.update(task, completed=report.step, total=report.total_steps, note=_progress_note(report))
            log(report.step, f"step {report.step}/{report.total_steps}  {_progress_note(report)}")

        def on_compiled(pieces: int, seconds: float) -> None:
            note = f"compiling, once for all sizes: {pieces} pieces of code in {seconds:.0f} s"
            bar.update(task, note=note)
            log(0, note)

        with watched(on_compiled):
            result = trainer.fit(on_step, accept_data_change)
    if not launched().is_first:
        return
    if result.resumed_from:
        say(f"continued from step {result.resumed_from}.")
    losses = "" if result.first_loss is None else f", loss {result.first_loss:.4f} → {result.last_loss:.4f}"
    held_out = "" if result.held_out_loss is None else f", held-out loss {result.held_out_loss:.4f}"
    what = "transformer" if result.adapter.is_dir() else "LoRA"
    say(f"{result.steps} steps{losses}{held_out}. {result.coverage}. {what}: {result.adapter}")
    if result.best:
        best = trainer.paths.best
        use = f"; its adapter: {best}" if best.is_dir() else ""
        say(f"best checkpoint by held-out loss ({result.best[1]:.4f}): {result.best[0]}{use}")
    if result.skipped_steps:
        say(f"{result.skipped_steps} steps were skipped: loss or gradient was NaN or infinite (see metrics.jsonl).")
    for skipped in result.coverage.skipped[:20]:
        say(f"skipped: {skipped}")
    if len(result.coverage.skipped) > 20:
        say(f"… and {len(result.coverage.skipped) - 20} more, in {trainer.paths.ledger}")


def _progress_note(report: StepReport) -> str:
    parts = [f"loss {report.loss:.4f}", f"{report.tokens_per_second:,.0f} tokens/s"]
    if report.utilisation is not None:
        parts.append(f"{report.utilisation:.0%} MFU")
    if report.peak_memory_gib is not None:
        parts.append(f"{report.peak_memory_gib:.1f} GiB")
    if report.waiting_seconds > 0.1 * report.seconds:
        parts.append(f"{report.waiting_seconds / report.seconds:.0%} waiting for data")
    return "  ".join(parts)
