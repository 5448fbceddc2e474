"""`qflux train`: from a folder of pictures to a trained edit."""

from __future__ import annotations

from dataclasses import dataclass, fields

from qflux.cli.commands.cache import cache_and_tell
from qflux.cli.commands.checks import check_and_tell
from qflux.cli.commands.fit import fit_and_tell
from qflux.cli.commands.init import write_and_tell
from qflux.cli.options import AcceptData, DataOptions, Overrides, takes
from qflux.cli.terminal import expanded, say, trainer_of
from qflux.errors import ConfigError
from qflux.launch import launched


@dataclass(frozen=True)
class TrainOptions(DataOptions):
    accept_data_change: AcceptData = False
    set_: Overrides = None


@takes(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train on your own pictures: a config is written for them, checked, cached, trained on, and reported.

    Run it again after an interruption: it goes on where it was.

    qflux train my_data
    qflux train my_data --model black-forest-labs/FLUX.1-Kontext-dev --prompt "make it night"
    """
    if launched().world_size > 1:
        raise ConfigError("qflux train is for one process", "with torchrun: init once, then check, cache and fit.")
    from qflux.start.request import config_name, edit_command  # noqa: PLC0415

    config = expanded(options.data)
    if config.suffix.lower() in (".yaml", ".yml") and not config.is_dir():
        about_data = [item.name for item in fields(DataOptions) if item.name != "data"]
        unused = [name for name in about_data if getattr(options, name)]
        if unused:
            problem = f"--{unused[0]} is for data, and {options.data} is a config"
            raise ConfigError(problem, "change it there, or with --set.")
    else:
        data = config
        config = expanded(options.output) if options.output else config_name(data)
        write_and_tell(options, config, may_go_on=True)
    trainer = trainer_of(config, options.set_)
    check_and_tell(trainer, config)
    cache_and_tell(trainer)
    fit_and_tell(trainer, options.accept_data_change)
    say(f"report: {trainer.paths.report.absolute()}")
    command = edit_command(config, trainer.config)
    if command:
        say(f"→ {command}")
