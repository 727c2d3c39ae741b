"""What a paired measurement leaves behind: `result.json`, its parts as validated types.

An *arm* is a way to run the models; target-only is the *baseline* that speculative arms are compared with. A *sample*
is one fresh process in which an arm answers every prompt once. A *round* takes one sample of each arm. Seconds,
bytes and tokens are the units throughout. `result.schema.json` beside this module is the JSON Schema of `Artifact`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from operator import gt
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field, model_validator

from pilotfish.bench.bounds import Count, DraftLength, Name, NumBytes, Seconds
from pilotfish.errors import OptionError

RESULT_FILE = "result.json"
OWN_SYSTEM = "pilotfish"
_LIST_OF_NUMBERS = re.compile(r"\[\n[\d\s,]+\]")  # no string is meant: a line break is \n in one
VerdictKind = Literal["pays", "does not pay", "cannot tell"]


class Part(BaseModel):
    """Part of an artifact; unchangeable. Derived values are written for readers of the JSON and not read back."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Prompt(Part):
    id: Name = Field(min_length=1)
    prompt_class: Name = Field(alias="class", min_length=1)
    user: str = Field(min_length=1)
    system: str | None = None

    model_config = ConfigDict(extra="forbid", validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.user}]


class Arm(Part):
    """A way to run the models. `baseline` is the arm it is compared with, None for one that is itself a baseline."""

    name: str
    system: str = OWN_SYSTEM
    system_version: str
    proposal_length: int = Field(ge=0)
    baseline: str | None = None
    settings: dict[str, str] = {}
    """What else was set, and how the arm runs, in words."""


def num_reaching(lengths: Sequence[int], longest: int) -> list[int]:
    """How many of the lengths reach 1, 2, …, `longest`."""
    counts = Counter(lengths)
    return list(accumulate(counts[position] for position in range(longest, 0, -1)))[::-1]


class Phases(Part):
    """Where an answer's seconds went. `other` is what no phase accounts for."""

    draft_seconds: float
    """Inside the drafter's `propose`: the draft model's forwards, its prefill and its cache's pages included."""
    target_seconds: float
    """The target model's forwards, its prefill included."""
    verification_seconds: float
    cache_maintenance_seconds: float
    """Reserving pages of the target's cache, and after each step rewinding both caches."""
    other_seconds: float


class Answer(Part):
    """One prompt's answer. Without `phases` and proposals where the system does not tell."""

    prompt_id: Name
    num_prompt_tokens: Count
    token_ids: list[Count] = Field(min_length=1)
    finish_reason: Name
    end_to_end_seconds: float = Field(ge=1e-9, le=1e9)
    """From before the prompt is encoded until the last token is out."""
    prefill_seconds: Seconds | None = None
    """The part until the first token is out."""
    num_steps: Count | None = None
    """Target forwards after the prompt's last chunk; those with a draft are verification calls."""
    num_draft_tokens: list[DraftLength] | None = None
    """Drafted tokens, for each verification call."""
    num_accepted_tokens: list[DraftLength] | None = None
    """Accepted tokens (the bonus not counted), for each verification call."""
    draft_prefill_seconds: Seconds | None = None
    """The part of the draft model's seconds in which it read the prompt."""
    phases: Phases | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Answer:
        proposed, accepted = self.num_draft_tokens or [], self.num_accepted_tokens or []
        if len(accepted) != len(proposed) or any(map(gt, accepted, proposed)):
            raise ValueError("more tokens were accepted than drafted, or for another number of verification calls")
        if self.phases is not None and any(abs(seconds) > 1e9 for seconds in self.phases.model_dump().values()):
            raise ValueError("a phase is longer than can be")
        return self

    @computed_field  # type: ignore[prop-decorator]
    @property
    def end_to_end_tokens_per_second(self) -> float:
        return len(self.token_ids) / self.end_to_end_seconds

    @computed_field  # type: ignore[prop-decorator]
    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first over the seconds after it."""
        if self.prefill_seconds is None or len(self.token_ids) < 2 or self.end_to_end_seconds <= self.prefill_seconds:
            return None
        return (len(self.token_ids) - 1) / (self.end_to_end_seconds - self.prefill_seconds)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def num_verification_calls(self) -> int | None:
        return None if self.num_draft_tokens is None else len(self.num_draft_tokens)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def accepted_by_position(self) -> list[int] | None:
        """Verification calls that accepted the draft's first token, its second, …, up to the longest draft."""
        if self.num_draft_tokens is None or self.num_accepted_tokens is None:
            return None
        return num_reaching(self.num_accepted_tokens, max(self.num_draft_tokens, default=0))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def residual_share(self) -> float | None:
        """The share of `end_to_end_seconds` that no phase accounts for."""
        return None if self.phases is None else self.phases.other_seconds / self.end_to_end_seconds


class Sample(Part):
    """One fresh process: an arm answers every prompt once, after a warm-up that is not counted."""

    arm: Name
    round: Count
    """From 0."""
    place: Count
    """In the order of all processes, from 0."""
    process_id: Count
    started_at: Name
    bandwidth_bytes_per_second: float | None = Field(default=None, ge=0, le=1e18)
    """Read from memory before the sample, all threads together."""
    load_average_before: float = Field(ge=0, le=1e9)
    load_average_after: float = Field(ge=0, le=1e9)
    load_seconds: Seconds
    """Opening the models."""
    peak_memory_bytes: NumBytes
    """The most memory resident in the process, from when it opened the models."""
    answers: list[Answer] = Field(min_length=1)


class ModelFile(Part):
    role: Literal["target", "draft"]
    name: Name
    """In the catalog or on the hub, else the file's or the folder's."""
    file_name: Name
    """Or the folder's, which the hub's library names after the commit."""
    num_bytes: NumBytes
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Of a folder of safetensors: of what `sha256sum` prints for its model files, in the order of their names."""


class Host(Part):
    """The machine and the software. `machine_id` is a hash that tells whether two artifacts come from one machine."""

    machine_id: str
    cpu: str
    instruction_set: str
    num_logical_cpus: Count
    num_cores: Count
    """Physical ones that the process may use."""
    num_threads: Count
    memory_bytes: NumBytes
    operating_system: str
    versions: dict[str, str]
    commit: str | None
    """Of pilotfish's source, with `-dirty` where it was changed; None for an installed package."""


class Settings(Part):
    """What every arm had in common."""

    max_tokens: Count
    repeats: Count
    seed: Count
    threads: Count | None
    """As asked for; `Host.num_threads` is what ran."""
    temperature: float = Field(default=0.0, ge=0)
    warm_up: Name
    clock: Name
    """What a measured answer spans, and how its end is known."""


class TokenChoice(Part):
    token_id: int
    text: str = ""


class Margin(Part):
    """The two likeliest tokens of the target where two outputs part, and their raw logits."""

    first: TokenChoice
    first_logit: float
    second: TokenChoice
    second_logit: float


class Mismatch(Part):
    """The first place where an arm's output differs from its baseline's."""

    arm: str
    baseline: str
    prompt_id: str
    position: int
    """Of the output token, from 0."""
    expected: TokenChoice | None
    """The baseline's token; None where its output had ended."""
    found: TokenChoice | None
    margin: Margin | None


class Interval(Part):
    """A ratio of tokens per second, end to end, and its interval; without bounds for a single round."""

    ratio: float
    low: float | None
    high: float | None


class Comparison(Part):
    """An arm against its baseline."""

    arm: str
    baseline: str
    identical: bool
    num_rounds: int
    overall: Interval
    classes: dict[str, Interval]
    prompts: dict[str, Interval]
    verdict: VerdictKind
    reason: str
    """Why there is no verdict, and what to do about it; empty where there is one."""


class Artifact(Part):
    format: Literal["pilotfish-bench"] = "pilotfish-bench"
    version: Literal[1] = 1
    created_at: str
    complete: bool
    settings: Settings
    prompts: list[Prompt]
    host: Host | None
    """None until the first sample is finished."""
    models: list[ModelFile]
    arms: list[Arm]
    order: list[str]
    """The arm of each process, in the order in which they run; an incomplete run has fewer samples."""
    samples: list[Sample]
    identical: bool | None
    """Whether all of pilotfish's own output was that of target-only's first sample; None before any was compared."""
    mismatches: list[Mismatch]
    baseline_drift: dict[str, float]
    """For each baseline: (fastest − slowest) / median of its samples' rates."""
    comparisons: list[Comparison]
    verdict: str
    """One sentence."""

    @model_validator(mode="after")
    def _fits_together(self) -> Artifact:
        names = [arm.name for arm in self.arms]
        if len({*names}) < len(names) or not {*self.order, *(sample.arm for sample in self.samples)} <= {*names}:
            raise ValueError("a sample or a process names an arm that there is not, or that there is twice")
        prompt_ids = [prompt.id for prompt in self.prompts]
        if any([answer.prompt_id for answer in sample.answers] != prompt_ids for sample in self.samples):
            raise ValueError("a sample does not answer each prompt once, in their order")
        return self

    def save(self, folder: Path) -> None:
        """Writes `result.json`, whole or not at all."""
        path = folder / RESULT_FILE
        partial = path.with_suffix(".partial")
        partial.write_text(_LIST_OF_NUMBERS.sub(_on_one_line, self.model_dump_json(indent=1)) + "\n", "utf-8")
        os.replace(partial, path)


def _on_one_line(found: re.Match[str]) -> str:
    return "[" + " ".join(found[0].strip("[]").split()) + "]"


@contextmanager
def claim(folder: Path) -> Iterator[Callable[[Artifact], None]]:
    """Makes the folder one measurement's own, and gives what saves its artifact there.

    Raises `OptionError` where it already has an artifact, and `OSError` where it cannot be written to. A folder in
    which nothing was saved is left as it was.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULT_FILE
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        raise OptionError(f"{folder} already holds a {RESULT_FILE}; give another --out") from None
    try:
        yield lambda artifact: artifact.save(folder)
    finally:
        if not path.stat().st_size:
            path.unlink()
            for empty in made:
                with suppress(OSError):  # somebody else has put something there
                    empty.rmdir()
