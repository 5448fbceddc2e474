"""A pass that there was not enough memory for: its samples, and what a user could change."""

from __future__ import annotations

from dataclasses import dataclass

from qflux.config import Config
from qflux.data.batch import Batch
from qflux.errors import QfluxError

IN_FEWER_BITS = "keep the base in fewer bits (model.precision: auto, which is faster too, or model.quantization: nf4)"


@dataclass(frozen=True)
class Shortage:
    """What is known of a pass that did not fit; it holds nothing of it."""

    samples: tuple[str, ...]
    """Their names."""
    lengths: tuple[int, ...]
    """Tokens of each."""
    reason: str

    @classmethod
    def of(cls, batch: Batch, error: Exception | None = None) -> Shortage:
        """Without an error, it was another process that ran out of memory."""
        reason = "Another process ran out of memory." if error is None else first_line(error)
        return cls(tuple(sample.name for sample in batch.samples), tuple(batch.lengths), reason)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def problem(self) -> str:
        named = ", ".join(f"{n} ({tokens} tokens)" for n, tokens in zip(self.samples, self.lengths, strict=True))
        return f"there is not enough memory for a pass of {self.tokens} tokens: {named}. {self.reason}"

    def error(self, config: Config) -> QfluxError:
        """What to say if nothing can be done about it."""
        ways = []
        if config.train.noises_per_sample > 1:
            ways.append(f"lower train.noises_per_sample, which is {config.train.noises_per_sample}")
        if len(self.lengths) > 1:
            ways.append(f"set data.max_tokens: {max(*self.lengths, self.tokens * 3 // 4)}")
        else:
            ways.append("choose smaller areas in data.processor")
        if config.model.quantization is None and config.model.precision is None and config.train.method == "lora":
            ways.append(IN_FEWER_BITS)
        if config.train.method == "full":
            ways.append("shard the model over several GPUs (train.distributed: fsdp)")
        return QfluxError(self.problem, ", or ".join(ways) + ".")


def first_line(error: Exception) -> str:
    """What an error says, without the advice that torch adds."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
