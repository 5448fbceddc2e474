"""`qflux fit`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qflux.cli.terminal import (
    ConfigFile,
    LineNowAndThen,
    Overrides,
    is_first_process,
    progress_bar,
    say,
    trainer_of,
)

if TYPE_CHECKING:
    from qflux.training.metrics import StepReport


def fit(config: ConfigFile, set_: Overrides = None) -> None:
    """Train on cached samples; goes on where an interrupted run was.

    qflux fit --config recipes/flux-kontext.yaml --set train.max_train_steps=500

    On several GPUs: torchrun --nproc-per-node 8 -m qflux.cli fit --config FILE
    """
    trainer = trainer_of(config, set_)
    with progress_bar() as bar:
        task = bar.add_task("fit", total=None, note="loading")
        log = LineNowAndThen()

        def on_step(report: StepReport) -> None:
            bar.update(task, completed=report.step, total=report.total_steps, note=_progress_note(report))
            log(report.step, f"step {report.step}/{report.total_steps}  {_progress_note(report)}")

        result = trainer.fit(on_step)
    if not is_first_process():
        return
    if result.resumed_from:
        say(f"continued from step {result.resumed_from}.")
    losses = "" if result.first_loss is None else f", loss {result.first_loss:.4f} → {result.last_loss:.4f}"
    held_out = "" if result.held_out_loss is None else f", held-out loss {result.held_out_loss:.4f}"
    what = "transformer" if result.adapter.is_dir() else "LoRA"
    say(f"{result.steps} steps{losses}{held_out}. {result.coverage}. {what}: {result.adapter}")
    if result.best:
        folder = trainer.config.run_dir / "best"
        use = f"; its adapter: {folder}" if folder.is_dir() else ""
        say(f"best checkpoint by held-out loss ({result.best[1]:.4f}): {result.best[0]}{use}")
    if result.skipped_steps:
        say(f"{result.skipped_steps} steps were left out: their loss or gradient was no number (see metrics.jsonl).")
    for skipped in result.coverage.skipped[:20]:
        say(f"skipped: {skipped}")
    if len(result.coverage.skipped) > 20:
        say(f"… and {len(result.coverage.skipped) - 20} more, in {trainer.config.run_dir / 'ledger.jsonl'}")


def _progress_note(report: StepReport) -> str:
    parts = [f"loss {report.loss:.4f}", f"{report.tokens_per_second:,.0f} tokens/s"]
    if report.utilisation is not None:
        parts.append(f"{report.utilisation:.0%} MFU")
    if report.peak_memory_gib is not None:
        parts.append(f"{report.peak_memory_gib:.1f} GiB")
    if report.waiting_seconds > 0.1 * report.seconds:
        parts.append(f"{report.waiting_seconds / report.seconds:.0%} waiting for data")
    return "  ".join(parts)
