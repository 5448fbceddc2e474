"""One run on several processes, over `torch.distributed`: DDP and FSDP2.

`torchrun` and `accelerate launch` start the processes; what they are is read from the environment. Without a launcher
the world has one process, and nothing here does anything.

Gradients are summed, not averaged: the loss of a step is divided by counts over all ranks, which the plan knows.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from qflux.errors import QfluxError
from qflux.launch import launched

BUCKET = 64 * 2**20
"""Bytes of gradients that are summed at once."""

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls) -> World:
        """The world that the launcher has made; a program that has joined already stays in."""
        if launched().world_size == 1 and not dist.is_initialized():
            return cls()
        if not dist.is_initialized():
            backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo"
            try:
                dist.init_process_group(backends)
                atexit.register(dist.destroy_process_group)  # gloo's threads must not outlive the interpreter
            except (ValueError, RuntimeError) as error:
                raise QfluxError(
                    f"the processes can't find each other: {error}",
                    "start them with torchrun or accelerate launch; several nodes need one rendezvous address.",
                ) from error
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place, on all ranks."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether it is true on some rank. Asked on the host: no device waits."""
        return bool(self.sum_(torch.tensor(int(flag)))) if self.size > 1 else flag

    def share(self, value: T) -> T:
        """The first rank's value, on all ranks; anything that JSON can hold."""
        if self.size == 1:
            return value
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor(len(data))
        dist.broadcast(length, 0)
        if not self.is_first:
            data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0)
        return json.loads(bytes(data.numpy()))

    def first(self, action: Callable[[], T]) -> T | None:
        """Let the first rank act while the others wait. If it fails, all do: nobody waits for a rank that is gone."""
        result, failure = None, None
        if self.is_first:
            try:
                result = action()
            except Exception as error:
                failure = error
        failed = self.any(failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise QfluxError("the first process has failed", "see its message.")
        return result

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by the first rank's."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def shard(self, transformer: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
        """FSDP2: every rank keeps a share of each block, and gathers the block while it is used."""
        mesh = init_device_mesh(device.type, (self.size,))
        for module in (*blocks, transformer):
            # The root too: left gathered after validation, it would not see what is written into its shards.
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """DDP: sum the gradients of all ranks. Those of shards have been summed while they were scattered."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
        for bucket in _buckets(gradients):
            together = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(together)
            parts = together.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients as one vector, on all ranks."""
        squares = torch.stack(torch._foreach_norm([local(gradient) for gradient in gradients])).square().sum()
        if gradients and isinstance(gradients[0], DTensor):
            self.sum_(squares)
        return squares.sqrt()

    def scatter(self, tensors: Mapping[str, Callable[[str], Tensor]] | None) -> Iterator[tuple[str, Tensor]]:
        """The first rank's full tensors, on the host, on all ranks, one after another.

        The first rank says how to get each; the others pass nothing.
        """
        for name in self.share(sorted(tensors) if tensors is not None else []):
            if self.size == 1:
                yield name, tensors[name](name) if tensors else torch.empty(0)
                continue
            own = tensors[name](name).contiguous() if tensors is not None else None
            described: Any = None if own is None else [str(own.dtype).removeprefix("torch."), list(own.shape)]
            dtype, shape = self.share(described)
            tensor = own if own is not None else torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(tensor, 0)
            yield name, tensor


def local(tensor: Tensor) -> Tensor:
    """The shard of a tensor that is on this rank; it shares its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor gathered from the shards of all ranks; all of them must ask."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """A full tensor, which all ranks have, on the device and in the shards of `model`."""
    if isinstance(model, DTensor):
        return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements, src_data_rank=None)
    return tensor.to(model.device)


def copy_(target: Tensor, source: Tensor) -> None:
    """Overwrite `target`, which may be sharded, by the full tensor `source`."""
    local(target).copy_(local(like(source, target)))


def _buckets(gradients: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or sum(g.nbytes for g in bucket) + gradient.nbytes > BUCKET):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
