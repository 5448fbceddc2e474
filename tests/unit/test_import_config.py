"""Configs of the original qflux become configs of this one, and nothing in them is dropped without a word.

The keys are those of all its published configs; the values are made up.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from qflux.cli import main
from qflux.config import load_config
from qflux.config.original import import_original
from qflux.errors import ConfigError

OLD = """
trainer: FluxKontext
resume: null
model:
  pretrained_model_name_or_path: black-forest-labs/FLUX.1-Kontext-dev
  quantize: false
  lora:
    {r: 24, lora_alpha: 12, init_lora_weights: gaussian, target_modules: [to_k, to_q], pretrained_weight: null,
    adapter_name: e}
data:
  class_path: qflux.data.dataset.ImageDataset
  init_args:
    dataset_path:
      - {split: train, repo_id: someone/some_pairs}
      - /data/pairs
      - /data/list.csv
    caption_dropout_rate: 0.05
    prompt_image_dropout_rate: 0.05
    cache_dir: ${cache.cache_dir}
    use_cache: ${cache.use_cache}
    use_edit_mask: true
    processor:
      class_path: qflux.data.preprocess.ImageProcessor
      init_args:
        {process_type: center_crop, resize_mode: bilinear, target_size: [832, 576],
        controls_size: [[832, 576], [512, 512]]}
  batch_size: 2
  num_workers: 3
  shuffle: true
logging: {output_dir: /out, report_to: tensorboard, tracker_project_name: "my run!"}
optimizer: {class_path: prodigyopt.Prodigy, init_args: {lr: 1.0, weight_decay: 0.01}}
lr_scheduler: {scheduler_type: cosine, warmup_steps: 50, num_cycles: 0.5, power: 1.0}
loss:
  class_path: qflux.losses.AttentionMaskMseLoss
  init_args: {foreground_weight: 3.0, background_weight: 1.5, eps: 1e-12, reduction: mean}
train:
  gradient_accumulation_steps: 4
  max_train_steps: 6000
  num_epochs: 100
  checkpointing_steps: 120
  checkpoints_total_limit: 20
  max_grad_norm: 0.7
  mixed_precision: fp16
  gradient_checkpointing: True
  low_memory: True
  fit_device: {vae: cuda:1, text_encoder: cuda:1}
cache:
  devices: {vae: cuda:1, text_encoder: cuda:1}
  cache_dir: ${logging.output_dir}/${logging.tracker_project_name}/cache
  use_cache: true
  prompt_empty_drop_keys: [empty_prompt_embeds]
predict:
  devices: {vae: cuda:1}
"""


@pytest.fixture
def old(tmp_path) -> Path:
    file = tmp_path / "old.yaml"
    file.write_text(OLD)
    return file


def changed(old: Path, **sections) -> Path:
    values = yaml.safe_load(old.read_text())
    for path, value in sections.items():
        node = values
        *parents, last = path.split("__")
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    old.write_text(yaml.safe_dump(values))
    return old


def test_every_setting_lands_where_it_means_the_same(old):
    imported = import_original(old)
    assert imported.missing == []
    config = load_config(imported.values)
    assert config.family == "flux-kontext"
    assert (config.lora.rank, config.lora.alpha, config.lora.target_modules) == (24, 12.0, ("to_k", "to_q"))
    assert [type(source).__name__ for source in config.data.sources] == ["HubSource", "FolderSource", "CsvSource"]
    assert (config.data.batch_size, config.data.num_workers) == (2, 3)
    assert config.data.processor.target_size == (832, 576)
    assert config.data.processor.controls_size == [(832, 576), (512, 512)]
    assert config.train.caption_dropout == 0.05
    assert (config.train.lr_scheduler, config.train.lr_warmup_steps) == ("cosine", 50)
    assert (config.train.max_train_steps, config.train.checkpoint_every, config.train.keep_checkpoints) == (
        6000,
        120,
        20,
    )
    assert (config.train.gradient_accumulation_steps, config.train.max_grad_norm) == (4, 0.7)
    assert config.model.dtype == "float16"
    assert (config.output_dir, config.run_name, config.train.trackers) == (Path("/out"), "my-run", ["tensorboard"])
    assert config.cache.path == Path("/out/my run!/cache")
    assert config.loss.use_mask_loss
    assert (config.loss.mask_loss_fn.foreground_weight, config.loss.mask_loss_fn.background_weight) == (3.0, 1.5)
    assert config.optimizer.class_path == "prodigyopt.Prodigy"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data__init_args__selected_control_indexes": [1]}, "data.init_args.selected_control_indexes: [1]"),
        ({"model__lora__target_modules": "all-linear"}, "model.lora.target_modules: 'all-linear'"),
        ({"model__lora__pretrained_weight": "x.safetensors"}, "model.lora.pretrained_weight"),
        ({"model__use_vlm_prompt_enhancer": True}, "model.use_vlm_prompt_enhancer"),
        ({"logging__tags": ["a"]}, "logging.tags"),
        ({"validation": {"enabled": True, "steps": 10, "samples": [{"prompt": "x"}]}}, "validation.samples"),
        (
            {"logging__sampling": {"enable": True, "validation_data": [{"prompt": "x"}]}},
            "logging.sampling.validation_data",
        ),
        ({"data__shuffle": False}, "data.shuffle"),
        ({"loss__class_path": "mine.MyLoss"}, "loss.class_path"),
        ({"something": {"of": {"mine": 3}}}, "something.of.mine: 3"),
        ({"data__init_args__image_size": [864, 1048]}, "data.init_args.image_size"),
    ],
    ids=str,
)
def test_what_has_no_counterpart_is_named(old, change, named):
    imported = import_original(changed(old, **change))
    assert [entry for entry in imported.missing if entry.startswith(named)], imported.missing
    load_config(imported.values)


def test_validation_data_is_held_out(old):
    dataset = {"class_path": "x", "init_args": {"dataset_path": [{"split": "test", "repo_id": "a/b"}]}}
    imported = import_original(changed(old, validation={"enabled": True, "max_samples": 2, "dataset": dataset}))
    config = load_config(imported.values)
    assert config.data.held_out.sources[0].split == "test"
    assert config.validation.images == 2


@pytest.mark.parametrize("trainer", ["DreamOmni2", "Flux2Klein"])
def test_a_trainer_without_a_counterpart_is_an_error(old, trainer):
    with pytest.raises(ConfigError, match=f"{trainer} has no counterpart"):
        import_original(changed(old, trainer=trainer))


def test_references_that_lead_nowhere_or_to_themselves_are_errors(old):
    with pytest.raises(ConfigError, match="refers to nothing"):
        import_original(changed(old, cache__cache_dir="${no.such}"))
    with pytest.raises(ConfigError, match="refers to itself"):
        import_original(changed(old, cache__cache_dir="${cache.cache_dir}"))


def test_the_command_writes_a_config_that_loads_and_replaces_nothing(old, tmp_path, capsys):
    arguments = ["import-config", str(changed(old, logging__notes="n")), "--output", str(tmp_path / "new.yaml")]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "1 settings without a counterpart" in capsys.readouterr().out
    assert "# no counterpart: logging.notes: 'n'" in (tmp_path / "new.yaml").read_text()
    load_config(tmp_path / "new.yaml")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_an_old_config_given_to_a_command_names_the_way(old):
    with pytest.raises(ConfigError) as error:
        load_config(old)
    assert f"qflux import-config {old}" in error.value.remedy


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"loss__init_args": 3}, "loss.init_args"),
        ({"data__init_args__processor__init_args": 5}, "processor.init_args"),
        ({"validation": True}, "validation"),
    ],
    ids=str,
)
def test_a_section_that_is_none_is_named(old, change, named):
    with pytest.raises(ConfigError, match=named):
        import_original(changed(old, **change))


@pytest.mark.parametrize(("precision", "dtype"), [(False, "float32"), ("no", "float32"), ("bf16", "bfloat16")])
def test_no_mixed_precision_is_float32_however_yaml_reads_it(old, precision, dtype):
    assert import_original(changed(old, train__mixed_precision=precision)).values["model"]["dtype"] == dtype


def test_an_unknown_precision_is_named(old):
    assert import_original(changed(old, train__mixed_precision="fp7")).missing == ["train.mixed_precision: 'fp7'"]
