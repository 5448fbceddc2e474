"""`qflux cache` and what looks after a cache: verify, gc, migrate, stats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from qflux.cli.options import Overrides, one_config
from qflux.cli.terminal import amount, console, duration, progress_bar, say, say_first, trainer_of
from qflux.errors import CacheError, ConfigError
from qflux.launch import launched

if TYPE_CHECKING:
    from qflux.cache.build import CacheReport, Estimate
    from qflux.cache.cache import EmbeddingCacheManager
    from qflux.commands import Trainer


class _FileOrCommand(TyperGroup):
    """`qflux cache FILE` is `qflux cache --config FILE`; any other word is the name of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        places = [place for place, word in enumerate(args) if Path(word).suffix.lower() in (".yaml", ".yml")]
        bare = [place for place in places if place == 0 or args[place - 1] not in ("--config", "--set")]
        if bare and not any(word in self.commands for word in args):
            args = [*args[: bare[0]], "--config", *args[bare[0] :]]
        return super().parse_args(ctx, args)


cache_app = typer.Typer(cls=_FileOrCommand, invoke_without_command=True, no_args_is_help=True)

MaybeConfig = Annotated[Path | None, typer.Option("--config", help="A YAML file; its cache is meant.")]
MaybeFile = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="The same, without --config.", show_default=False)
]
Folder = Annotated[Path | None, typer.Option("--path", help="A cache folder, instead of a config.")]


@cache_app.callback()
def cache(context: typer.Context, config: MaybeConfig = None, set_: Overrides = None) -> None:
    """Encode prompts and images once, so that training loads neither.

    qflux cache recipes/flux-kontext.yaml

    Run it again after a change or an interruption: only what is missing is made. Several processes may share the work:
    torchrun --nproc-per-node 8 -m qflux.cli cache FILE
    """
    if context.invoked_subcommand:
        if config or set_:
            raise ConfigError("--config and --set stand behind the name of the command", "cache verify --config FILE.")
        return
    cache_and_tell(trainer_of(one_config(config, None), set_))


def cache_and_tell(trainer: Trainer) -> None:
    """Fill the cache with a progress bar, and say what was made."""
    from qflux.cache.build import Listener  # noqa: PLC0415

    with progress_bar() as bar:
        task = bar.add_task("cache", total=None, note="entries")
        accounts: list[CacheReport] = []
        listener = Listener(
            estimate=_announce,
            forecast=lambda kind, seconds: say_first(f"{kind} entries: about {duration(seconds)} to go."),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            finished=accounts.append,
        )
        try:
            trainer.cache(listener)
        finally:
            bar.stop()
            for report in accounts:
                _account(report, trainer.store.root)


def _account(report: CacheReport, root: Path) -> None:
    parts = [f"{report.new_entries} entries new ({amount(report.new_bytes)})", f"{report.reused_entries} reused"]
    parts += [f"{report.cut} prompts cut"] if report.cut else []
    parts += [f"{len(report.skipped)} skipped"] if report.skipped else []
    say(f"{launched().label}{report.samples} samples in {root}: {', '.join(parts)}, {report.seconds:.1f} s.")


def _announce(estimate: Estimate) -> None:
    kinds = f"{estimate.prompts} prompts, {estimate.images} images, {estimate.masks} masks"
    say_first(f"to make: {kinds}; at most about {amount(estimate.bytes)}, {amount(estimate.free)} are free.")


@cache_app.command()
def verify(
    file: MaybeFile = None,
    config: MaybeConfig = None,
    path: Folder = None,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is broken; `cache` makes it again.")] = False,
    set_: Overrides = None,
) -> None:
    """Check every file of a cache against its checksum. Exit code 2 if something is broken and stays."""
    from qflux.cache.maintenance import verify as check  # noqa: PLC0415

    store = _store(file, config, path, set_)
    with progress_bar() as bar:
        task = bar.add_task("verify", total=None, note="entries")
        found = check(store, repair, lambda done, total: bar.update(task, completed=done, total=total))
    for broken, fault in found.broken.items():
        say(f"{broken}: {fault}")
    say(f"{found.entries} entries ({amount(found.bytes)}) of {found.samples} samples: {len(found.broken)} broken.")
    if repair and found.removed:
        say(f"{found.removed} files removed; `qflux cache` makes them again.")
    elif found.broken:
        raise CacheError(f"{len(found.broken)} files of {store.root} are broken", "run it again with --repair.")


@cache_app.command()
def gc(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="Configs whose data stay.", show_default=False)
    ] = None,
    config: Annotated[list[Path] | None, typer.Option("--config", help="The same; repeat for several.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    set_: Overrides = None,
) -> None:
    """Remove what no data set of these configs refers to."""
    from qflux.cache.maintenance import collect_unused  # noqa: PLC0415

    configs = [*(files or []), *(config or [])]
    if not configs:
        raise ConfigError("there is no config", "name those whose data stay.")
    trainers = [trainer_of(file, set_) for file in configs]
    roots = {trainer.store.root.resolve() for trainer in trainers}
    if len(roots) > 1:
        raise ConfigError(
            f"these configs have {len(roots)} caches: {', '.join(map(str, sorted(roots)))}", "one at a time."
        )
    store = _existing(trainers[0].store)
    found = collect_unused(store, [(trainer.config, trainer.family) for trainer in trainers], dry_run)
    verb = "would go" if dry_run else "removed"
    kept = f"{found.kept} entries of {found.samples} samples stay"
    say(f"{len(found.files)} files {verb} ({amount(found.bytes)}); {kept}.")


@cache_app.command()
def migrate(
    old: Annotated[Path, typer.Argument(help="A folder with torch files of format 1.0 or 2.0; it is only read.")],
    new: Annotated[Path, typer.Argument(help="The folder of the new cache.")],
    default_size: Annotated[
        str | None, typer.Option(help="HEIGHTxWIDTH in pixels, for 1.0 files that do not say theirs.")
    ] = None,
) -> None:
    """Rewrite an old cache in today's format. Train on the result with a source of type cache."""
    from qflux.cache.migrate import migrate as rewrite  # noqa: PLC0415
    from qflux.config import load_config  # noqa: PLC0415

    source: dict[str, object] = {"type": "cache", "path": str(old)}
    if default_size:
        source["default_size"] = [int(side) if side.isdigit() else side for side in default_size.lower().split("x")]
    settings = load_config({"model": {"pretrained": "-"}, "data": {"sources": [source]}})
    with progress_bar() as bar:
        task = bar.add_task("migrate", total=None, note="samples")
        result = rewrite(settings.data.sources[0], new, lambda d, t: bar.update(task, completed=d, total=t))  # type: ignore[arg-type]
    for failure in result.failed:
        say(failure)
    say(f"{result.samples} samples in {new}: {result.new_entries} entries ({amount(result.bytes)}).")
    if result.failed:
        raise CacheError(f"{len(result.failed)} of {old} could not be migrated", "the others were; see above.")


@cache_app.command()
def stats(file: MaybeFile = None, config: MaybeConfig = None, path: Folder = None, set_: Overrides = None) -> None:
    """Say what a cache holds."""
    from qflux.cache.maintenance import stats as count  # noqa: PLC0415

    store = _store(file, config, path, set_)
    found = count(store)
    say(str(store.root))
    table = Table("kind", "entries", "size")
    for kind, counted in found.kinds.items():
        table.add_row(kind, f"{counted.files:,}", amount(counted.bytes))
    table.add_row("all", f"{sum(k.files for k in found.kinds.values()):,}", amount(found.bytes))
    console.print(table)
    say(f"{found.samples} samples, {found.failed} that could not be encoded, {found.unused} entries without a sample.")


def _store(
    file: Path | None, option: Path | None, path: Path | None, overrides: list[str] | None
) -> EmbeddingCacheManager:
    from qflux.cache.cache import EmbeddingCacheManager  # noqa: PLC0415
    from qflux.config import load_config  # noqa: PLC0415

    config = one_config(file, option) if file or option else None
    if (config is None) == (path is None):
        raise ConfigError("either --config or --path says which cache is meant", "give one of them.")
    folder = load_config(config, overrides or []).cache_dir if config else path
    return _existing(EmbeddingCacheManager(Path(str(folder)).expanduser()))


def _existing(store: EmbeddingCacheManager) -> EmbeddingCacheManager:
    if not store.root.is_dir():
        raise CacheError(f"there is no cache at {store.root}", "fill one with `qflux cache`.")
    return store
