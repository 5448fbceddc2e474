"""Embeddings on disk, addressed by everything they were made from.

1. `keys`         where the embeddings of a sample belong: hashes of its content, its transforms and the encoders
2. `samples`      the samples of a config, each with its place in the cache; what is missing, and why
3. `build`        `qflux cache`: every missing entry is made once, however many processes are at it
4. `cache`        the folder: entries (`tensor_file`), manifests, failures
5. `stored`       samples that exist only as embeddings, of another cache or in torch files (`torch_files`)
6. `maintenance`  verify, gc and stats; `migrate` rewrites old caches
"""
