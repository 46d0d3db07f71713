"""Scores a model folder on held-out arithmetic tasks, sampled and greedy: `python -m demo.evaluate MODEL --out FILE`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from environments.registry import make_environment

TASKS = 200
SEED = 20260


def evaluate(folder: Path, *, template: str, eos: list[int], max_tokens: int, tasks: int = TASKS) -> dict[str, Any]:
    """Accuracy, format rate and accuracy given the format over the same held-out tasks; per-task scores for pairing.

    In float32: the weights are the published bf16 ones, and CPUs without bf16 units are several times faster so.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from protocol.tokenizer import RunTokenizer
    from trainer.scoring import generate_completions

    environment = make_environment("arithmetic", {"template": template})
    tokenizer = RunTokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chosen = [environment.eval_task(index) for index in range(min(tasks, environment.eval_size))]
    prompts = [tokenizer.encode(task.prompt) for task in chosen]
    result: dict[str, Any] = {"tasks": len(chosen)}
    for mode, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        completions = generate_completions(
            model, prompts, temperature=temperature, max_tokens=max_tokens, eos_token_ids=tuple(eos), seed=SEED
        )
        texts = [tokenizer.decode(samples[0]) for samples in completions]
        scores = [environment.score(task, text) for task, text in zip(chosen, texts, strict=True)]
        formed = [environment.well_formed(text) for text in texts]
        result[mode] = {
            "accuracy": sum(scores) / len(scores),
            "format_rate": sum(formed) / len(formed),
            "accuracy_given_format": sum(scores) / max(1, sum(formed)),
            "scores": scores,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--eos", type=json.loads, required=True, help="JSON list of EOS token ids")
    parser.add_argument("--template", required=True, help="the prompt, with {a} and {b}")
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    result = evaluate(arguments.model, template=arguments.template, eos=arguments.eos, max_tokens=arguments.max_tokens)
    arguments.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
