"""`next_token_logits` gives the logits that decoding sees at the same place, whatever the chunks."""

from __future__ import annotations

import pytest
import torch
from tiny_models import write_tiny_model

import pilotfish
from pilotfish.errors import CacheFullError, PromptError


class Recording:
    """Keeps the last row of logits that the model gave for each length of the context."""

    def __init__(self, model) -> None:
        self._model = model
        self.config = model.config
        self.rows: dict[int, torch.Tensor] = {}

    def forward(self, batch, store):
        logits = self._model.forward(batch, store)
        for row, index in enumerate(batch.logits_indices.tolist()):
            self.rows[int(batch.positions[index]) + 1] = logits[row].clone()
        return logits


@pytest.mark.parametrize("chunk", [1, 3, 128])
def test_next_token_logits_are_those_of_decoding(tmp_path, chunk: int) -> None:
    model, tokenizer = pilotfish.load(write_tiny_model(tmp_path / "tiny.gguf"))
    recording = Recording(model)
    prompt = tokenizer.encode("the end of the line")
    sampling = pilotfish.SamplingParams(max_tokens=6)
    answer = pilotfish.generate(recording, tokenizer, prompt, sampling=sampling)
    for count in range(len(answer.token_ids)):
        token_ids = [*prompt, *answer.token_ids[:count]]
        logits = pilotfish.next_token_logits(model, token_ids, max_num_batched_tokens=chunk)
        assert torch.equal(logits, recording.rows[len(token_ids)])
        assert int(logits.argmax()) == answer.token_ids[count]


def test_next_token_logits_refuses_nothing_and_too_much(tmp_path) -> None:
    model, _ = pilotfish.load(write_tiny_model(tmp_path / "tiny.gguf"))
    with pytest.raises(PromptError, match="no tokens"):
        pilotfish.next_token_logits(model, [])
    with pytest.raises(CacheFullError):
        pilotfish.next_token_logits(model, [1] * (model.config.context_length + 1))
