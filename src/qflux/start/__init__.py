"""From somebody's pictures to a config: what `qflux init` and `qflux train` find out. Nothing here imports torch.

1. `layouts`   which pictures belong together: `folder` what there is, `pairs` by the `words` of names, `rows` a table
2. `tables`    which column of a table is what
3. `look`      sizes, controls and masks of the samples
4. `machine`   the GPU and its memory
5. `presets`   what a model should be trained with on such a machine
6. `writer`    the config, with a word about everything
"""
