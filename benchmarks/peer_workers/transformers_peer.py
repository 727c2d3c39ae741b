"""Hugging Face transformers as a peer: assisted generation with the GGUF files' weights as bfloat16."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peer_worker
import torch
from transformers import AutoModelForCausalLM, GgufConfig


class Transformers:
    """The target, and the draft model where the task has a proposal length."""

    def __init__(self, task: dict[str, Any]) -> None:
        torch.set_num_threads(task["threads"])
        folder = Path(task["models_folder"])
        self._target = _load(folder / "target")
        self._draft = None
        if task["proposal_length"]:
            self._draft = _load(folder / "draft")
            self._draft.generation_config.num_assistant_tokens = task["proposal_length"]
            self._draft.generation_config.num_assistant_tokens_schedule = "constant"
        self._eos_token_ids = task["eos_token_ids"]
        self.process_id = os.getpid()

    @torch.inference_mode()
    def answer(self, token_ids: Sequence[int], max_tokens: int) -> peer_worker.Answer:
        start = time.perf_counter()
        prompt = torch.tensor([token_ids])
        found = self._target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=self._eos_token_ids,
            assistant_model=self._draft,
        )
        output = found[0, len(token_ids) :].tolist()
        return peer_worker.Answer(output, time.perf_counter() - start)


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def prepare(target: Path, draft: Path, folder: Path) -> None:
    """Unpacks both files once, which takes it minutes."""
    for name, source in (("target", target), ("draft", draft)):
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder / name)


if __name__ == "__main__":
    peer_worker.run(Transformers, prepare)
