"""Muon against the definition: singular values near 1, the published scale, and torch's own implementation."""

from __future__ import annotations

import pytest
import torch

from trainer.muon import Muon, orthogonalized


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_directions_are_orthogonal_and_keep_their_singular_vectors(shape: tuple[int, int]) -> None:
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, vh = torch.linalg.svd(direction, full_matrices=False)
    found = orthogonalized(direction).float()
    singular = torch.linalg.svdvals(found)
    assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3
    assert float((u.T @ found @ vh.T).diagonal().mean()) > 0.7


def test_it_steps_as_torchs_own_does() -> None:
    start = torch.randn(12, 20, generator=torch.Generator().manual_seed(1))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    one = Muon([ours], lr=1e-2, weight_decay=0.1)
    other = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for number in range(4):
        gradient = torch.randn(12, 20, generator=torch.Generator().manual_seed(10 + number))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        one.step()
        other.step()
    assert float((ours.detach() - start).abs().max()) > 1e-3
    assert float((ours.detach() - theirs.detach()).abs().max()) < 1e-4  # bfloat16 inside


def test_a_gradient_of_nothing_moves_nothing_but_by_decay() -> None:
    matrix = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([matrix], lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(matrix.detach(), torch.ones(4, 4)), "no gradient, no step"
    matrix.grad = torch.zeros(4, 4)
    optimizer.step()
    assert torch.allclose(matrix.detach(), torch.full((4, 4), 0.95))
