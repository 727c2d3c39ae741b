"""OpenVINO GenAI as a peer: IR that it saved from the GGUF files, greedy, with a draft model of its own kind."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai
import peer_worker
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

_READABLE = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"}
"""What its GGUF reader takes."""


class OpenVino:
    """A pipeline with the target, and with the draft model where the task has a proposal length."""

    def __init__(self, task: dict[str, Any]) -> None:
        folder = Path(task["models_folder"])
        properties = {"INFERENCE_NUM_THREADS": task["threads"]}
        # By default it keeps the prompts it has seen, of which the warm-up's is the first one measured.
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 1 << 20
        self._config = openvino_genai.GenerationConfig()
        self._config.do_sample = False
        self._config.stop_token_ids = set(task["eos_token_ids"])
        more: dict[str, object] = {}
        if task["proposal_length"]:
            more["draft_model"] = openvino_genai.draft_model(folder / "draft", "CPU", **properties)
            self._config.num_assistant_tokens = task["proposal_length"]
        self._pipeline = openvino_genai.LLMPipeline(
            folder / "target", "CPU", scheduler_config=scheduler, **properties, **more
        )
        self.process_id = os.getpid()

    def answer(self, token_ids: Sequence[int], max_tokens: int) -> peer_worker.Answer:
        self._config.max_new_tokens = max_tokens
        start = time.perf_counter()
        found = self._pipeline.generate(ov.Tensor(np.array([token_ids], dtype=np.int64)), self._config)
        seconds = time.perf_counter() - start
        return peer_worker.Answer(found.tokens[0], seconds, found.perf_metrics.get_ttft().mean / 1e3)


def prepare(target: Path, draft: Path, folder: Path) -> None:
    """Saves both models as IR; it writes that beside the GGUF file it reads."""
    for name, source in (("target", target), ("draft", draft)):
        place = folder / name
        place.mkdir(parents=True)
        file = place / "model.gguf"
        _make_readable(source, file)
        openvino_genai.LLMPipeline(file, "CPU", enable_save_ov_model=True)
        file.unlink()


def _make_readable(source: Path, destination: Path) -> None:
    """The file itself, or where it holds what OpenVINO cannot read a copy with those tensors as Q8_0."""
    reader = GGUFReader(source)
    if all(tensor.tensor_type.name in _READABLE for tensor in reader.tensors):
        destination.symlink_to(source.resolve())
        return
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(destination, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            element_type = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], element_type)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind.name not in _READABLE:
            data, kind = quantize(dequantize(data, kind), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    peer_worker.run(OpenVino, prepare)
