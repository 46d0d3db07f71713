"""One policy version's model, and what it says about claimed tokens: one forward over many rollouts.

For every completion token t: the last hidden state that produced it (input of the LM head, bf16), the claimed token's
log-probability and the entropy of the distribution sampled from (logits / temperature), and the seed replay's margin.

Short rollouts are packed into rows, each prompt once (`prefill_layout`). Long ones are fed whole, padded on the right:
causality alone then keeps padding from reaching real tokens, and attention without a mask is much faster. Where prompts that
rollouts share are worth more than that, a forward has two parts: the distinct prompts of a batch, all but their last token,
fill a KV cache once; then each row is (last prompt token, completion without its last token), so that its T outputs are
exactly the T positions wanted, and attends to its prompt's rows of the cache. The LM head sees only wanted positions, a
bounded number at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from coordinator.verification.prefill_layout import (
    PACKED_TOKENS_MAX,
    ROW_TOKENS,
    Packed,
    PrefillItem,
    pad,
    plan_packed,
    plan_padded,
)
from coordinator.verification.replay import replay
from coordinator.verification.weights import State, build_module, put_state, read_state

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

DEFAULT_TOKEN_BUDGET = 16_384
DEFAULT_LOGITS_BYTES = 32 << 20
_SHARED_MIN = 0.3  # of a batch's tokens: from there on prompts are fed once (SmolLM2, 1,056 tokens: a mask costs 38 %)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillResult:
    """Measured for T tokens. `logprobs_T`, `entropies_T`, `margins_T`: float32 nats; `winners_T`: the token ids that
    the seed selects; `near_T`: whether another token came near it; `hidden_bits_TD`: bf16 bit patterns. Numbers may be
    NaN if the model's are."""

    hidden_bits_TD: NDArray[np.uint16]
    logprobs_T: NDArray[np.float32]
    entropies_T: NDArray[np.float32]
    margins_T: NDArray[np.float32]
    winners_T: NDArray[np.int64]
    near_T: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.logprobs_T)

    @property
    def finite(self) -> bool:
        """False if the model itself produced NaN or infinity: then nothing can be said about the rollout."""
        numbers = (self.logprobs_T, self.entropies_T, self.margins_T)
        exponents_TD = self.hidden_bits_TD & np.uint16(0x7F80)
        return all(bool(np.isfinite(x).all()) for x in numbers) and not bool((exponents_TD == 0x7F80).any())

    @classmethod
    def concatenate(cls, parts: Sequence[PrefillResult]) -> PrefillResult:
        """Join consecutive stretches of one completion."""
        return cls(
            np.concatenate([part.hidden_bits_TD for part in parts]),
            np.concatenate([part.logprobs_T for part in parts]),
            np.concatenate([part.entropies_T for part in parts]),
            np.concatenate([part.margins_T for part in parts]),
            np.concatenate([part.winners_T for part in parts]),
            np.concatenate([part.near_T for part in parts]),
        )


class PrefillModel:
    """A transformers model that measures claimed tokens, and takes other versions' weights in place.

    `dtype`: bf16 matches the engines; float32 says what exact arithmetic would. `token_budget` bounds one forward's
    tokens, KV cache and padding included; `logits_bytes` bounds each [positions, vocabulary] float32 array.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        token_budget: int = DEFAULT_TOKEN_BUDGET,
        logits_bytes: int = DEFAULT_LOGITS_BYTES,
    ) -> None:
        self._module = build_module(folder, dtype, device)
        self._names = set(self._module.state_dict())
        self._dtype = dtype
        self._device = device
        self._token_budget = token_budget
        self._head_rows = max(1, logits_bytes // (4 * self.vocab_size))
        self._packs = takes_packed_rows(self._module.config)

    @property
    def module(self) -> PreTrainedModel:
        """The transformers module that computes."""
        return self._module

    @property
    def vocab_size(self) -> int:
        return int(self._module.get_output_embeddings().weight.shape[0])  # type: ignore[union-attr]

    @property
    def hidden_size(self) -> int:
        return int(self._module.get_output_embeddings().weight.shape[1])  # type: ignore[union-attr]

    def read(self, folder: Path) -> State:
        """The weights of another version of this model, in main memory and this model's precision, for `put`."""
        return {name: tensor.to(self._dtype) for name, tensor in read_state(folder, self._names).items()}

    def put(self, state: State) -> None:
        """Compute with these weights from now on."""
        put_state(self._module, state)

    def prefill(self, items: Sequence[PrefillItem]) -> list[PrefillResult]:
        """Measure all items, in their order. Raises ValueError for an item that no form check would have let through."""
        for item in items:
            self._validate(item)
        short = {i for i, item in enumerate(items) if self._packs and item.fed_tokens <= PACKED_TOKENS_MAX}
        long = [i for i in range(len(items)) if i not in short]
        results: dict[int, PrefillResult] = {}
        for packed in plan_packed(items, sorted(short), self._token_budget):
            measured = self._measure_packed([items[index] for index in packed.items], packed)
            results.update(zip(packed.items, measured, strict=True))
        for batch in plan_padded(items, long, self._token_budget):
            results.update(zip(batch, self._measure_padded([items[index] for index in batch]), strict=True))
        return [results[index] for index in range(len(items))]

    def _validate(self, item: PrefillItem) -> None:
        if not item.prompt_token_ids or not 0 <= item.first < len(item.completion_token_ids):
            raise ValueError(f"item {item.key!r} has no prompt, or no completion token to measure")
        tokens = (*item.prompt_token_ids, *item.completion_token_ids)
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            raise ValueError(f"item {item.key!r} has a token outside the vocabulary of {self.vocab_size}")

    @torch.inference_mode()
    def _measure_packed(self, items: list[PrefillItem], packed: Packed) -> list[PrefillResult]:
        hidden_RLD = self._module.get_decoder()(  # type: ignore[operator]
            input_ids=packed.ids_RL.to(self._device),
            attention_mask=packed.allowed().to(self._device),
            position_ids=packed.position_RL.to(self._device),
            use_cache=False,
        ).last_hidden_state
        return self._results(items, hidden_RLD.flatten(0, 1)[packed.source_N.to(self._device)])

    @torch.inference_mode()
    def _measure_padded(self, items: list[PrefillItem]) -> list[PrefillResult]:
        return self._results(
            items, self._hidden_by_prompt(items) if _prompts_are_worth_it(items) else self._hidden(items)
        )

    def _results(self, items: list[PrefillItem], hidden_ND: torch.Tensor) -> list[PrefillResult]:
        """What N hidden states say, item after item."""
        measured = self._measure_rows(hidden_ND, _claims(items, self._device))
        bits_ND = hidden_ND.to(torch.bfloat16).view(torch.int16).cpu().numpy().view(np.uint16)
        counts = [len(item.completion_token_ids) - item.first for item in items]
        borders = np.cumsum(counts)[:-1]
        columns = [np.split(column, borders) for column in (bits_ND, *measured)]
        return [PrefillResult(*parts) for parts in zip(*columns, strict=True)]

    def _hidden(self, items: list[PrefillItem]) -> torch.Tensor:
        """[N, D] last hidden states of the measured positions of a padded batch, item after item, each fed whole."""
        ids_BL, lengths_B = pad([item.prompt_token_ids + item.completion_token_ids[:-1] for item in items])
        hidden_BLD = self._module.get_decoder()(input_ids=ids_BL.to(self._device), use_cache=False).last_hidden_state  # type: ignore[operator]
        first_B = torch.tensor([len(item.prompt_token_ids) - 1 + item.first for item in items])
        place_L = torch.arange(ids_BL.shape[1])
        wanted_BL = (place_L < lengths_B[:, None]) & (place_L >= first_B[:, None])
        return hidden_BLD[wanted_BL.to(self._device)]

    def _hidden_by_prompt(self, items: list[PrefillItem]) -> torch.Tensor:
        """The same with each distinct prompt fed once."""
        prompts = {item.prompt_token_ids: None for item in items}
        row_of = {prompt: row for row, prompt in enumerate(prompts)}
        cache = self._prompt_cache([prompt[:-1] for prompt in prompts])
        if cache is not None:
            rows_B = torch.tensor([row_of[item.prompt_token_ids] for item in items], device=self._device)
            cache.batch_select_indices(rows_B)
        ids_BT, lengths_B = pad([item.prompt_token_ids[-1:] + item.completion_token_ids[:-1] for item in items])
        past_B = torch.tensor([len(item.prompt_token_ids) - 1 for item in items])
        steps_T = torch.arange(ids_BT.shape[1])
        real_BT = steps_T < lengths_B[:, None]
        past_BP = torch.arange(int(past_B.max())) < past_B[:, None]
        hidden_BTD = self._module.get_decoder()(  # type: ignore[operator]
            input_ids=ids_BT.to(self._device),
            attention_mask=torch.cat([past_BP, real_BT], dim=1).long().to(self._device),
            position_ids=(past_B[:, None] + steps_T).to(self._device),
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        first_B = torch.tensor([item.first for item in items])
        wanted_BT = real_BT & (steps_T >= first_B[:, None])
        return hidden_BTD[wanted_BT.to(self._device)]

    def _prompt_cache(self, prompts: list[tuple[int, ...]]) -> Cache | None:
        """The KV cache of Q prompts, padded on the right; None if all are empty.

        Needs no mask: causality keeps padding from reaching real tokens, and the rows of padding are masked by the reader.
        """
        if not any(prompts):
            return None
        ids_QP, _ = pad(prompts)
        decoder = self._module.get_decoder()
        return decoder(input_ids=ids_QP.to(self._device), use_cache=True).past_key_values  # type: ignore[operator]

    def _measure_rows(self, hidden_ND: torch.Tensor, claims: _Claims) -> list[NDArray[np.generic]]:
        """Log-probabilities, entropies and the replay of N positions, `_head_rows` of them at a time."""
        head = self._module.get_output_embeddings()
        blocks = []
        for at in range(0, len(hidden_ND), self._head_rows):
            block = slice(at, at + self._head_rows)
            logits_NV = head(hidden_ND[block]).float()  # type: ignore[misc]
            blocks.append(_measure(logits_NV, claims, block))
        return [torch.cat(column).cpu().numpy() for column in zip(*blocks, strict=True)]


def _prompts_are_worth_it(items: Sequence[PrefillItem]) -> bool:
    """Whether the repetitions of prompts are so much of a batch that feeding each once pays for a masked attention."""
    repeated = sum(len(item.prompt_token_ids) for item in items)
    distinct = sum(map(len, {item.prompt_token_ids for item in items}))
    fed = sum(item.fed_tokens for item in items)
    return repeated - distinct > _SHARED_MIN * fed


def takes_packed_rows(config: Any) -> bool:
    """Whether a model computes the same under a mask of our own: attention alone, and no window narrower than a row."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    return kinds <= {"full_attention", "sliding_attention"} and (window is None or window >= ROW_TOKENS)


@dataclass(frozen=True, slots=True, eq=False)
class _Claims:
    """Per measured position: claimed token, seed, sequence position of its input token, temperature."""

    tokens_N: torch.Tensor
    seeds_N: torch.Tensor
    positions_N: torch.Tensor
    temperatures_N: torch.Tensor


def _claims(items: list[PrefillItem], device: str) -> _Claims:
    tokens: list[int] = []
    seeds: list[int] = []
    positions: list[int] = []
    temperatures: list[float] = []
    for item in items:
        claimed = item.completion_token_ids[item.first :]
        start = len(item.prompt_token_ids) - 1 + item.first
        tokens.extend(claimed)
        seeds.extend([item.seed] * len(claimed))
        positions.extend(range(start, start + len(claimed)))
        temperatures.extend([item.temperature] * len(claimed))
    return _Claims(
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(seeds, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        torch.tensor(temperatures, dtype=torch.float32, device=device),
    )


def _measure(logits_NV: torch.Tensor, claims: _Claims, block: slice) -> tuple[torch.Tensor, ...]:
    """Log-probabilities, entropies, margins, winners and near ties of the positions of one block."""
    scores_NV = logits_NV.div_(claims.temperatures_N[block, None]).log_softmax(dim=-1)
    probs_NV = scores_NV.exp()
    tokens_N = claims.tokens_N[block]
    drawn = replay(
        scores_NV,
        probs_NV,
        seeds_N=claims.seeds_N[block],
        positions_N=claims.positions_N[block],
        tokens_N=tokens_N,
    )
    logprobs_N = scores_NV.gather(1, tokens_N[:, None])[:, 0]
    entropies_N = -(probs_NV.mul_(scores_NV)).sum(dim=-1)
    return logprobs_N, entropies_N, drawn.margins_N, drawn.winners_N, drawn.near_N
