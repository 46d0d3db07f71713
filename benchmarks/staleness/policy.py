"""A policy small enough that a training takes seconds, autoregressive like a large one.

Shapes: N completions, T tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.staleness.task import BASE, TOKENS, VOCABULARY

_HIDDEN = 64


class Policy(nn.Module):
    """Sees the prompt's sum (one-hot over a + b), the place, and the token before."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.total = nn.Embedding(2 * BASE, _HIDDEN)
        self.place = nn.Embedding(TOKENS, _HIDDEN)
        self.before = nn.Embedding(VOCABULARY + 1, _HIDDEN)
        self.middle = nn.Linear(_HIDDEN, _HIDDEN)
        self.head = nn.Linear(_HIDDEN, VOCABULARY)

    def logprobs(self, pairs_N2: torch.Tensor, before_NT: torch.Tensor, places_T: torch.Tensor) -> torch.Tensor:
        """[N, T, V] log-probs, each after the token before it (VOCABULARY stands for none)."""
        hidden = self.total(pairs_N2.sum(dim=1))[:, None] + self.place(places_T) + self.before(before_NT)
        hidden = hidden + torch.tanh(self.middle(torch.tanh(hidden)))
        return torch.log_softmax(self.head(torch.tanh(hidden)), dim=-1)

    def of_tokens(self, pairs_N2: torch.Tensor, tokens_NT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """([N, T] log-probs of the tokens, [N, T] entropies)."""
        start = torch.full_like(tokens_NT[:, :1], VOCABULARY)
        before_NT = torch.cat([start, tokens_NT[:, :-1]], dim=1)
        all_NTV = self.logprobs(pairs_N2, before_NT, torch.arange(TOKENS))
        return all_NTV.gather(2, tokens_NT[..., None]).squeeze(2), -(all_NTV.exp() * all_NTV).sum(dim=-1)

    @torch.no_grad()
    def sample(self, pairs_N2: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """([N, T] tokens, [N, T] their log-probs)."""
        tokens: list[torch.Tensor] = []
        chosen: list[torch.Tensor] = []
        before = torch.full((len(pairs_N2), 1), VOCABULARY)
        for place in range(TOKENS):
            logprob_NV = self.logprobs(pairs_N2, before, torch.tensor([place]))[:, 0]
            before = torch.multinomial(logprob_NV.exp(), 1, generator=generator)
            tokens.append(before)
            chosen.append(logprob_NV.gather(1, before))
        return torch.cat(tokens, dim=1), torch.cat(chosen, dim=1)
