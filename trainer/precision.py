"""Policy versions hold bfloat16, so the trainer computes with nothing finer: the policy that trains is the one that samples.

A step of a small learning rate is less than half of bfloat16's spacing for most weights. Were it trained with finer weights
than are published, the published policy would lag behind by many steps: on SmolLM2-135M at 3e-5 the two were 0.1 to 0.9
nats apart within ten versions. What is finer is kept in the optimizer's masters alone.
"""

from __future__ import annotations

from typing import Any

import torch

PUBLISHED = torch.bfloat16


def as_published(tensor: torch.Tensor) -> torch.Tensor:
    """The values that a version holds of these weights, in the tensor's own dtype."""
    return tensor.to(PUBLISHED).to(tensor.dtype)


@torch.no_grad()
def round_as_published(model: Any) -> None:
    """Round whatever a version holds of a model, in place."""
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(as_published(tensor))
