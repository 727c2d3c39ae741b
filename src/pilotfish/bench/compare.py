"""Two artifacts side by side: whether they can be compared at all, and what differs between their runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from pilotfish.bench.artifact import Artifact


def same_machine(first: Artifact, second: Artifact) -> bool | None:
    """None where one of them has no sample, and so names no machine."""
    if first.host is None or second.host is None:
        return None
    return first.host.machine_id == second.host.machine_id


def same_work(first: Artifact, second: Artifact) -> bool:
    """Whether the same models answered the same prompts, with as many tokens at most."""
    return _work(first) == _work(second)


def differences(first: Artifact, second: Artifact) -> list[tuple[str, str, str]]:
    """What the two runs did not have in common: a name, and its value in each."""
    values, others = dict(_conditions(first)), dict(_conditions(second))
    names = dict.fromkeys([*values, *others])
    rows = [(name, values.get(name, "–"), others.get(name, "–")) for name in names]
    return [(name, left, right) for name, left, right in rows if left != right]


def _conditions(artifact: Artifact) -> Iterator[tuple[str, str]]:
    for model in artifact.models:
        yield f"{model.role} model", f"{model.file_name} (sha256 {model.sha256[:12]}…)"
    host = artifact.host
    if host is not None:
        yield "CPU", f"{host.cpu}, {host.num_cores} cores"
        yield "memory", f"{host.memory_bytes / 2**30:.1f} GiB"
        yield "system", host.operating_system
        yield "instruction set", host.instruction_set
        yield "threads", str(host.num_threads)
        yield from host.versions.items()
        yield "commit", host.commit or "–"
    yield "prompts", _prompts(artifact)
    yield "max_tokens", str(artifact.settings.max_tokens)
    yield "repeats", str(artifact.settings.repeats)


def _work(artifact: Artifact) -> tuple[object, ...]:
    models = {model.role: model.sha256 for model in artifact.models}
    return models, [prompt.messages for prompt in artifact.prompts], artifact.settings.max_tokens


def _prompts(artifact: Artifact) -> str:
    # The same ids may name other texts.
    texts = json.dumps([prompt.messages for prompt in artifact.prompts])
    return f"{len(artifact.prompts)} (sha256 {hashlib.sha256(texts.encode()).hexdigest()[:12]}…)"
