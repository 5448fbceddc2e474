"""Configs of the original qflux (qwen-image-finetune) as configs of this one.

Every key of the old file is taken from it by the line that knows what it becomes here. What nothing has taken in the
end has no counterpart, and is named.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qflux.config.reader import is_original, read_yaml
from qflux.errors import ConfigError, cut
from qflux.models.registry import ORIGINAL_DEFAULT, all_facts

FAMILIES = {facts.original_trainer: facts for facts in all_facts() if facts.original_trainer}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32", False: "float32"}
"""YAML reads `no` as false."""
_PADDINGS = {"center_padding": "padding", "right_padding": "padding"}
_NEEDLESS = {
    "data.init_args.cache_dir": "",
    "data.init_args.use_cache": "",
    "data.init_args.prompt_empty_drop_keys": "",
    "cache.prompt_empty_drop_keys": "",
    "model.lora.adapter_name": "",
    "mode": "",
    "train.train_batch_size": "",
    "data.init_args.use_edit_mask": "masks are used where samples have them, if loss.use_mask_loss is on",
    "train.low_memory": "encoders are never in memory beside the transformer",
    "train.fit_device": "model.device chooses one device; several are several processes",
    "cache.devices": "model.device chooses one device",
    "cache.vae_encoder_device": "model.device chooses one device",
    "cache.text_encoder_device": "model.device chooses one device",
    "predict.devices": "model.device chooses one device",
    "data.init_args.prompt_image_dropout_rate": "the original reads it and does nothing with it",
    "data.init_args.cache_drop_rate": "the original refuses it; data.init_args.caption_dropout_rate is what counts",
    "resume": "a run goes on from its newest checkpoint by itself",
    "resume_from_checkpoint": "a run goes on from its newest checkpoint by itself",
    "logging.logging_dir": "trackers write into the folder of the run",
}
"""What needs no counterpart, and why; nothing to say where the reason is nobody's concern."""


@dataclass
class Imported:
    """A config of this qflux, and what there is to say about its way here."""

    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """What is done differently."""
    missing: list[str] = field(default_factory=list)
    """What the old config asks for and this qflux does not have, by path."""


def import_original(path: Path) -> Imported:
    """Read a config file of the original; an error if there is nothing here that could run it."""
    values = read_yaml(path)
    if not is_original(values):
        raise ConfigError(f"{path} is no config of the original qflux", "it has neither trainer nor model.lora.")
    return _Importer(_resolved(values, values)).run()


class _Importer:
    def __init__(self, old: dict[str, Any]) -> None:
        self._old = old
        self._new: dict[str, Any] = {}
        self._result = Imported(self._new)

    def run(self) -> Imported:
        self._model()
        self._data()
        self._processor(self._take("data.init_args.processor.init_args"))
        self._training()
        self._loss()
        self._validation()
        self._logging()
        for name, reason in _NEEDLESS.items():
            if self._take(name) is not None and reason:
                self._result.notes.append(f"{name} is left out: {reason}")
        self._result.missing += [f"{name}: {cut(value)}" for name, value in _leaves(self._old)]
        return self._result

    def _model(self) -> None:
        trainer = str(self._take("trainer") or ORIGINAL_DEFAULT)
        if trainer not in FAMILIES:
            raise ConfigError(f"trainer: {trainer} has no counterpart in qflux", f"these have: {', '.join(FAMILIES)}.")
        self._put("family", FAMILIES[trainer].name)
        named = self._take("model.pretrained_model_name_or_path") or self._take("model.pretrained_model_path")
        pretrained = str(named or FAMILIES[ORIGINAL_DEFAULT].hub_id)
        self._put("model.pretrained", pretrained)
        if re.search(r"4bit|nf4|fp4|fp8", pretrained.lower()):
            self._note(
                f"model.pretrained: the weights of {pretrained} are quantized already; if they do not load, name the "
                "base they were made from, and set model.quantization"
            )
        if self._take("model.quantize"):
            self._put("model.quantization", "fp8")
        self._put("lora.rank", self._take("model.lora.r") or self._take("lora.rank"))
        self._put("lora.alpha", _number(self._take("model.lora.lora_alpha")))
        init = self._take("model.lora.init_lora_weights")
        if init not in (None, "gaussian"):
            self._note(f"model.lora.init_lora_weights: {init} is left out: lora.init is gaussian or kaiming")
        targets = self._take("model.lora.target_modules")
        if isinstance(targets, list):
            self._put("lora.target_modules", targets)
        elif targets is not None:
            self._missing("model.lora.target_modules", targets, "lora.target_modules is a list of names")

    def _data(self) -> None:
        self._take("data.class_path")
        paths = self._take("data.init_args.dataset_path") or self._take("data.dataset_path")
        sources = [_source(item) for item in (paths if isinstance(paths, list) else [paths]) if item]
        self._put("data.sources", sources)
        for name in ("batch_size", "num_workers"):
            self._put(f"data.{name}", self._take(f"data.{name}"))
        if self._take("data.shuffle") is False:
            self._missing("data.shuffle", False, "samples always train in random order")
        self._put("train.caption_dropout", self._take("data.init_args.caption_dropout_rate"))
        self._put("cache.path", self._take("cache.cache_dir"))
        self._put("cache.use_cache", self._take("cache.use_cache"))

    def _processor(self, settings: Any) -> None:
        self._take("data.init_args.processor.class_path")
        settings = _section("data.init_args.processor.init_args", settings)
        fit = settings.pop("process_type", None)
        if fit in _PADDINGS:
            self._note(f"process_type: {fit} is padding here, around the middle")
        self._put("data.processor.process_type", _PADDINGS.get(str(fit), fit))
        if settings.pop("resize_mode", None) not in (None, "lanczos"):
            self._note("resize_mode is left out: images are resampled with Lanczos")
        if settings.pop("resize_controls_mask_to_image", None):
            self._note(
                "resize_controls_mask_to_image is left out: the first control shares its target's transform, and a "
                "mask must have the target's size"
            )
        known = ("target_size", "target_pixels", "controls_size", "controls_pixels", "multi_resolutions")
        for name in (*known, "max_aspect_ratio"):
            if name in settings:
                self._put(f"data.processor.{name}", settings.pop(name), keep_null=name == "max_aspect_ratio")
        self._result.missing += [f"data.init_args.processor.{name}: {cut(value)}" for name, value in settings.items()]

    def _training(self) -> None:
        for name in ("class_path", "init_args"):
            self._put(f"optimizer.{name}", self._take(f"optimizer.{name}"))
        schedule = str(self._take("lr_scheduler.scheduler_type") or "constant")
        warmup = self._take("lr_scheduler.warmup_steps") or 0
        if schedule == "constant" and warmup:
            self._note("lr_scheduler.warmup_steps is left out: a constant schedule has none, there and here")
            warmup = 0
        self._put("train.lr_scheduler", schedule)
        self._put("train.lr_warmup_steps", warmup)
        cycles, power = self._take("lr_scheduler.num_cycles"), self._take("lr_scheduler.power")
        if schedule == "cosine_with_restarts":
            self._put("train.lr_num_cycles", max(1, round(cycles)) if isinstance(cycles, int | float) else 1)
        if schedule == "polynomial":
            self._put("train.lr_power", _number(power))
        here = {"checkpointing_steps": "checkpoint_every", "checkpoints_total_limit": "keep_checkpoints"}
        names = (
            "gradient_accumulation_steps",
            "max_train_steps",
            "num_epochs",
            "max_grad_norm",
            "gradient_checkpointing",
        )
        for name in (*names, *here):
            self._put(f"train.{here.get(name, name)}", self._take(f"train.{name}"))
        self._put("seed", self._take("train.seed"))
        precision = self._take("train.mixed_precision")
        if precision not in (None, *_DTYPES):
            self._missing("train.mixed_precision", precision, "")
        self._put("model.dtype", _DTYPES.get(precision, "bfloat16"))

    def _loss(self) -> None:
        weighs = bool(self._take("loss.mask_loss"))
        weights = {"foreground_weight": self._take("loss.forground_weight")}
        weights["background_weight"] = self._take("loss.background_weight")
        class_path, options = self._take("loss.class_path"), _section("loss.init_args", self._take("loss.init_args"))
        if class_path is not None:
            kind = str(class_path).rpartition(".")[2]
            weighs = weighs or kind in ("MaskEditLoss", "AttentionMaskMseLoss")
            if kind not in ("MaskEditLoss", "AttentionMaskMseLoss", "MseLoss"):
                self._missing("loss.class_path", class_path, "")
            weights = {name: options.pop(name, value) for name, value in weights.items()}
            options.pop("eps", None)
            if options.pop("reduction", "mean") != "mean":
                self._note("loss.init_args.reduction is left out: the loss of a step is a mean over its tokens")
            self._result.missing += [f"loss.init_args.{name}: {cut(value)}" for name, value in options.items()]
        self._put("loss.use_mask_loss", weighs)
        for name, value in weights.items():
            self._put(f"loss.mask_loss_fn.{name}", _number(value) if weighs else None)

    def _validation(self) -> None:
        old = _section("validation", self._take("validation"))
        sampling = _section("logging.sampling", self._take("logging.sampling"))
        if not old.pop("enabled", False):
            old = {}
        if not sampling.pop("enable", False):
            sampling = {}
        dataset = old.pop("dataset", None)
        if isinstance(dataset, dict):
            inner = _section("validation.dataset.init_args", dataset.get("init_args"))
            paths = inner.get("dataset_path")
            sources = [_source(item) for item in (paths if isinstance(paths, list) else [paths]) if item]
            self._put("data.held_out", {"sources": sources})
            self._note("validation.dataset is data.held_out; its images are prepared as data.processor says")
        self._put("validation.images", old.pop("max_samples", None) or sampling.pop("num_samples", None))
        steps = old.pop("steps", None) or sampling.pop("validation_steps", None)
        if steps is not None:
            self._note(f"validation every {steps} steps: here at every checkpoint (train.checkpoint_every)")
        for key in ("seed", "num_validation_samples"):
            old.pop(key, None)
            sampling.pop(key, None)
        for section, rest in (("validation", old), ("logging.sampling", sampling)):
            for name, value in rest.items():
                if value is not None:
                    why = "held-out samples have a target" if name in ("samples", "validation_data") else ""
                    self._missing(f"{section}.{name}", value, why)

    def _logging(self) -> None:
        self._put("output_dir", self._take("logging.output_dir"))
        name = re.sub(r"[^\w.-]+", "-", str(self._take("logging.tracker_project_name") or "")).strip("-.")
        self._put("run_name", name or None)
        tracker = self._take("logging.report_to")
        self._put("train.trackers", [tracker] if tracker not in (None, "none") else None)

    def _take(self, path: str) -> Any:
        """The value at a path of the old config, which is then done with."""
        node: Any = self._old
        *parents, last = path.split(".")
        for name in parents:
            node = node.get(name) if isinstance(node, dict) else None
        return node.pop(last, None) if isinstance(node, dict) else None

    def _put(self, path: str, value: Any, keep_null: bool = False) -> None:
        if value is None and not keep_null:
            return
        node = self._new
        *parents, last = path.split(".")
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value

    def _note(self, text: str) -> None:
        self._result.notes.append(text)

    def _missing(self, path: str, value: Any, why: str) -> None:
        self._result.missing.append(f"{path}: {cut(value)}" + (f" ({why})" if why else ""))


def _source(item: Any) -> dict[str, Any]:
    if isinstance(item, dict) and "repo_id" in item:
        return {"type": "huggingface", "path": str(item["repo_id"]), "split": str(item.get("split", "train"))}
    if isinstance(item, str):
        kind = {".csv": "csv", ".jsonl": "jsonl"}.get(Path(item).suffix.lower(), "folder")
        return {"type": kind, "path": item}
    raise ConfigError(f"data.init_args.dataset_path: {cut(item)} is neither a path nor a repo_id", "correct it there.")


def _section(path: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{path}: {cut(value)} is not a section", "correct it there.")
    return dict(value or {})


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _resolved(value: Any, root: dict[str, Any], depth: int = 0) -> Any:
    """`${section.key}` replaced by what stands there, as OmegaConf does."""
    if depth > 20:
        raise ConfigError(f"{cut(value)} refers to itself", "write the value out.")
    if isinstance(value, dict):
        return {key: _resolved(item, root, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, root, depth + 1) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    alone = re.fullmatch(r"\$\{([\w.]+)\}", value)
    if alone:
        return _resolved(_at(root, alone[1]), root, depth + 1)
    return re.sub(r"\$\{([\w.]+)\}", lambda match: str(_resolved(_at(root, match[1]), root, depth + 1)), value)


def _at(root: dict[str, Any], path: str) -> Any:
    node: Any = root
    for name in path.split("."):
        if not isinstance(node, dict) or name not in node:
            raise ConfigError(f"${{{path}}} refers to nothing in this file", "write the value out.")
        node = node[name]
    return node


def _leaves(node: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """What is left, by path; nothing is said of what is empty."""
    found = []
    for key, value in node.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            found += _leaves(value, f"{path}.")
        elif value not in (None, [], ""):
            found.append((path, value))
    return found
