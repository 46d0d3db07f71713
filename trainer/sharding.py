"""FSDP2: layers' weights, gradients and optimizer state are divided among the processes; embeddings and head are whole on each.

The head is applied in as many chunks as a microbatch needs, which differ between processes, so it can't take part in
collectives; with tied weights the embeddings can't either. Their gradients are averaged once per update instead. State is
saved whole, so any number of processes can go on from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

from protocol.errors import UserError


def shard(model: Any) -> list[torch.nn.Parameter]:
    """Divide the model among all processes; the parameters that stay whole. Raises UserError for unknown structures.

    After a forward pass everything is divided again, so that `parameters()` are the same objects at any time.
    """
    from torch.distributed.fsdp import fully_shard

    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        raise UserError(
            f"training on several processes needs a model with a list of layers, not {type(model).__name__}"
        )
    whole = {model.get_output_embeddings().weight, model.get_input_embeddings().weight}
    for layer in layers:
        fully_shard(layer)
    fully_shard(model.base_model, ignored_params=whole, reshard_after_forward=True)
    return list(whole)


def average_gradients(parameters: list[torch.nn.Parameter], size: int) -> None:
    """What FSDP does for the divided ones, for those that are whole on each process."""
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        distributed.all_reduce(parameter.grad)
        parameter.grad /= size


def whole(value: Any) -> Any:
    """A tree of tensors with every divided one put together, on the CPU; all processes must call it alike."""
    if isinstance(value, torch.Tensor):
        full = put_together(value).detach()
        return full.cpu() if hasattr(value, "full_tensor") else full
    if isinstance(value, Mapping):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(item) for item in value)
    return value


def put_together(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a divided tensor, on every process and where its parts are; the tensor itself if it is not divided."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is on this process: a view of it; the tensor itself if it is not divided."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def divided_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor divided as `parameter` is; itself if that is whole."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or tensor.shape != parameter.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(mesh.device_type), mesh, parameter.placements)  # type: ignore[attr-defined]


@torch.no_grad()
def load_whole(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Load whole weights into a model that may be divided. Raises ValueError if names or shapes differ, nothing loaded then."""
    own = model.state_dict()
    if own.keys() != weights.keys():
        raise ValueError(f"the weights' names differ: {sorted(own.keys() ^ weights.keys())[:3]}")
    for name, tensor in own.items():
        if weights[name].shape != tensor.shape:
            raise ValueError(f"{name} has shape {tuple(weights[name].shape)}, not {tuple(tensor.shape)}")
    for name, tensor in own.items():
        tensor.copy_(divided_like(weights[name].to(tensor.dtype), tensor))
