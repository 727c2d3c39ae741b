"""A measurement from its options to its artifact: with tiny models and a fake clock, in this process and in fresh ones.

Nothing here depends on how long anything takes.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import pytest
from doubles import FakeClock
from fake_hub import lay_out_cache
from huggingface_hub import constants
from tiny_models import tiny_config, tiny_metadata, write_tiny_model

import pilotfish
import pilotfish.engine.generation
from pilotfish.bench import pair, worker
from pilotfish.bench.artifact import Artifact, Prompt, claim
from pilotfish.bench.order import balanced_order
from pilotfish.bench.pair import PairOptions, measure_pair
from pilotfish.bench.prompts import default_prompts, read_prompts
from pilotfish.bench.reading import load_artifact
from pilotfish.bench.runner import Progress
from pilotfish.bench.worker import Event, Task
from pilotfish.errors import (
    ArtifactError,
    BenchmarkError,
    ModelNotFoundError,
    OptionError,
    PairMismatchError,
    PromptError,
)
from pilotfish.types import VerifyOutcome

SCHEMA = Path(pilotfish.__file__).parent / "bench/result.schema.json"


class InThisProcess:
    """Runs a worker's task here, with a fake clock; what a fresh process would send comes back as it would."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.interrupt_at: int | None = None
        self.num_left = 0

    @property
    def samples(self) -> list[Task]:
        return [task for task in self.tasks if task.purpose == "sample"]

    @contextmanager
    def __call__(self, task: Task, seed: int) -> Iterator[Iterator[Event]]:
        if task.purpose == "sample" and len(self.samples) == self.interrupt_at:
            raise KeyboardInterrupt
        self.tasks.append(Task.model_validate_json(task.model_dump_json()))
        events: list[Event] = []
        worker.run_task(task, events.append, FakeClock(tick=1e-3))
        try:
            yield (Event.model_validate_json(event.model_dump_json()) for event in events)
        finally:
            self.num_left += 1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a draft model that agrees with it often, but not always."""
    folder = tmp_path_factory.mktemp("pair")
    common = {"config": tiny_config(context_length=2048), "output": "untied"}
    target = write_tiny_model(folder / "target.gguf", **common)
    return str(target), str(write_tiny_model(folder / "draft.gguf", noise=0.15, **common))


@pytest.fixture(autouse=True)
def _small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotfish.model.calibrate._PROBE_BYTES", 1 << 21)


def options(models: tuple[str, str], **changes) -> PairOptions:
    values = {
        "model": models[0],
        "draft_model": models[1],
        "proposal_lengths": (0, 2, 4),
        "prompts": default_prompts()[:2],
        "max_tokens": 12,
        "repeats": 2,
        "threads": 1,
    }
    return PairOptions(**values | changes)


def measured(
    models: tuple[str, str], launch: InThisProcess | None = None, **changes
) -> tuple[Artifact, list[Progress]]:
    progress: list[Progress] = []
    launch = launch or InThisProcess()
    artifact = measure_pair(options(models, **changes), lambda so_far: None, progress.append, launch)
    assert launch.num_left == len(launch.tasks), "a process outlived its turn"
    return artifact, progress


def test_every_arm_answers_every_prompt_in_each_round_in_balanced_order(models) -> None:
    launch = InThisProcess()
    artifact, _ = measured(models, launch)
    names = ["target-only", "k=2", "k=4"]
    assert artifact.order == [names[arm] for row in balanced_order(3, 2) for arm in row]
    assert [sample.arm for sample in artifact.samples] == artifact.order
    assert [sample.place for sample in artifact.samples] == list(range(6))
    assert artifact.complete
    assert artifact.identical is True
    for task in launch.samples:
        speculative = task.arm != "target-only"
        assert (task.draft_model is not None) == speculative == (task.proposal_length > 0)
    same = [
        {
            name: value
            for name, value in task.model_dump().items()
            if name in ("model", "max_tokens", "threads", "prompts")
        }
        for task in launch.tasks
    ]
    assert all(task == same[0] for task in same)


def test_answers_are_those_of_generate_and_their_numbers_add_up(models) -> None:
    artifact, _ = measured(models)
    model, tokenizer = pilotfish.load(models[0], threads=1)
    sampling = pilotfish.SamplingParams(max_tokens=12)
    expected = {
        prompt.id: list(pilotfish.generate(model, tokenizer, prompt.messages, sampling=sampling).token_ids)
        for prompt in artifact.prompts
    }
    lengths = {arm.name: arm.proposal_length for arm in artifact.arms}
    num_accepted = 0
    for sample in artifact.samples:
        assert {answer.prompt_id: answer.token_ids for answer in sample.answers} == expected
        for answer in sample.answers:
            assert answer.num_draft_tokens is not None
            assert answer.num_accepted_tokens is not None
            assert answer.num_steps is not None
            assert len(answer.num_draft_tokens) == len(answer.num_accepted_tokens) == answer.num_verification_calls
            assert all(0 < length <= lengths[sample.arm] for length in answer.num_draft_tokens)
            pairs = zip(answer.num_accepted_tokens, answer.num_draft_tokens, strict=True)
            assert all(0 <= accepted <= length for accepted, length in pairs)
            num_accepted += sum(answer.num_accepted_tokens)
            assert sum(answer.accepted_by_position) == sum(answer.num_accepted_tokens)
            assert len(answer.accepted_by_position) == max(answer.num_draft_tokens, default=0)
            assert answer.accepted_by_position == sorted(answer.accepted_by_position, reverse=True)
            # Each step gives one token of the target's own, and the prompt's last chunk one more.
            assert len(answer.token_ids) == 1 + answer.num_steps + sum(answer.num_accepted_tokens)
            phases = answer.phases
            assert phases is not None
            assert sum(phases.model_dump().values()) == pytest.approx(answer.end_to_end_seconds)
            assert phases.target_seconds > 0
            assert (phases.draft_seconds > phases.target_seconds / 100) or sample.arm == "target-only"
            assert 0 < answer.prefill_seconds < answer.end_to_end_seconds
    assert num_accepted > 0, "nothing was accepted: this pair tests nothing"


class BrokenVerifier(pilotfish.engine.generation.RequestVerifier):
    """Takes the first draft token's word for it wherever something was drafted."""

    def verify(self, sequence, draft, logits) -> VerifyOutcome:
        outcome = super().verify(sequence, draft, logits)
        if outcome.next_kind != "recovered" or outcome.num_accepted_tokens > 0:
            return outcome
        return VerifyOutcome(0, draft.token_ids[0], "recovered")


def test_broken_verifier_is_caught_and_explained(models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pilotfish.engine.generation, "RequestVerifier", BrokenVerifier)
    launch = InThisProcess()
    artifact, _ = measured(models, launch, prompts=default_prompts()[:4])
    assert artifact.identical is False
    assert not artifact.complete
    assert "outputs differ" in artifact.verdict
    assert not any(comparison.verdict == "pays" for comparison in artifact.comparisons)
    (mismatch,) = artifact.mismatches
    target_only, speculative = artifact.samples[0], artifact.samples[-1]
    assert (mismatch.arm, mismatch.baseline) == (speculative.arm, "target-only")
    expected, found = (
        next(answer.token_ids for answer in sample.answers if answer.prompt_id == mismatch.prompt_id)
        for sample in (target_only, speculative)
    )
    assert expected[: mismatch.position] == found[: mismatch.position]
    assert mismatch.expected.token_id == expected[mismatch.position] != found[mismatch.position]
    assert mismatch.found.token_id == found[mismatch.position]
    # What the target says there is the target-only token, by the margin shown.
    assert mismatch.margin.first == mismatch.expected
    assert mismatch.margin.first_logit > mismatch.margin.second_logit
    tokenizer = pilotfish.load(models[0])[1]
    assert mismatch.found.text == tokenizer.decode([mismatch.found.token_id])


def test_output_that_only_ends_sooner_is_a_difference(models, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(InThisProcess):
        def __call__(self, task: Task, seed: int):
            shorter = {"max_tokens": 5} if task.proposal_length and task.purpose == "sample" else {}
            return super().__call__(task.model_copy(update=shorter), seed)

    artifact, _ = measured(models, Short())
    assert artifact.identical is False
    (mismatch,) = artifact.mismatches
    assert (mismatch.position, mismatch.found) == (5, None)
    assert mismatch.expected == mismatch.margin.first


def test_interrupted_run_keeps_its_finished_samples(models) -> None:
    launch = InThisProcess()
    launch.interrupt_at = 4
    saved: list[Artifact] = []
    artifact = measure_pair(options(models), saved.append, lambda progress: None, launch)
    assert not artifact.complete
    assert [sample.arm for sample in artifact.samples] == artifact.order[:4]
    assert "ended early" in artifact.verdict
    assert [len(so_far.samples) for so_far in saved] == [1, 2, 3, 4]
    assert saved[-1] == artifact
    launch = InThisProcess()
    launch.interrupt_at = 0
    nothing = measure_pair(options(models), saved.append, lambda progress: None, launch)
    assert (nothing.samples, nothing.identical, nothing.comparisons) == ([], None, [])


def test_target_alone_can_be_measured(models) -> None:
    artifact, _ = measured(models, draft_model=None, proposal_lengths=(0,))
    assert [arm.name for arm in artifact.arms] == ["target-only"]
    assert [model.role for model in artifact.models] == ["target"]
    assert artifact.complete
    assert artifact.verdict.startswith("cannot tell")


def test_progress_tells_arm_sample_prompt_and_time_left(models) -> None:
    _, progress = measured(models, proposal_lengths=(2,))
    assert {one.num_turns for one in progress} == {4}
    assert [one.turn.place for one in progress] == sorted(one.turn.place for one in progress)
    assert {one.num_answers for one in progress if one.turn.place == 3} == {0, 1, 2}
    assert all((one.seconds_left is None) == (one.turn.place < 2) for one in progress)


def test_real_run_in_fresh_processes_is_valid_by_the_schema(models, tmp_path: Path) -> None:
    artifact = measure_pair(
        options(models, proposal_lengths=(3,), repeats=1), lambda so_far: so_far.save(tmp_path), lambda progress: None
    )
    written = json.loads((tmp_path / "result.json").read_text("utf-8"))
    schema = json.loads(SCHEMA.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(written)
    assert load_artifact(tmp_path) == load_artifact(tmp_path / "result.json") == artifact
    processes = {sample["process_id"] for sample in written["samples"]}
    assert len(processes) == len(written["samples"]) == 2
    assert os.getpid() not in processes
    for sample in written["samples"]:
        assert sample["bandwidth_bytes_per_second"] > 0
        assert sample["peak_memory_bytes"] > 10e6
        for answer in sample["answers"]:
            rate = len(answer["token_ids"]) / answer["end_to_end_seconds"]
            assert answer["end_to_end_tokens_per_second"] == pytest.approx(rate)
    assert written["host"]["num_threads"] == 1
    assert written["identical"] is True


def test_schema_is_that_of_the_types() -> None:
    expected = json.dumps(Artifact.model_json_schema(mode="serialization"), indent=1) + "\n"
    assert SCHEMA.read_text("utf-8") == expected, (
        "write it anew: json.dumps(Artifact.model_json_schema(mode='serialization'), indent=1) and a newline"
    )


def test_process_that_fails_says_why_in_one_line(models, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(Path(models[0]).read_bytes()[:5000])
    with pytest.raises(BenchmarkError, match=r"^/.*damaged.gguf"):
        measure_pair(options((str(damaged), models[1])), lambda so_far: None, lambda progress: None)


def test_process_that_dies_is_told_with_its_last_word(models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(BenchmarkError, match=r"process of k=4 ended with status 1: "):
        measure_pair(options(models), lambda so_far: None, lambda progress: None)


def test_host_that_changes_ends_the_run(models) -> None:
    class Other(InThisProcess):
        @contextmanager
        def __call__(self, task: Task, seed: int):
            with super().__call__(task, seed) as events:
                yield (
                    event
                    if event.host is None
                    else event.model_copy(
                        update={"host": event.host.model_copy(update={"num_threads": len(self.tasks)})}
                    )
                    for event in events
                )

    with pytest.raises(BenchmarkError, match=r"^num_threads changed between two samples"):
        measured(models, Other())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"proposal_lengths": (2, 2)}, "different"),
        ({"proposal_lengths": (-1,)}, "not negative"),
        ({"draft_model": None}, "need a draft model"),
    ],
)
def test_options_that_cannot_be_honoured(models, changes, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        options(models, **changes)


PROMPT_FILES = [
    ('[{"user": "a"}, {"user": "b", "class": "x", "id": "y", "system": "s"}]', [("1", "all"), ("y", "x")]),
    ('{"user": "a"}\n\n{"user": "b"}\n', [("1", "all"), ("2", "all")]),
    ('\ufeff[{"user": "a"}]', [("1", "all")]),
    ('{"user": "a\u2028b"}\r\n{"user": "c\u0085d"}', [("1", "all"), ("2", "all")]),
]


@pytest.mark.parametrize(("text", "expected"), PROMPT_FILES)
def test_prompt_files(tmp_path: Path, text: str, expected: list[tuple[str, str]]) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(text, "utf-8")
    assert [(prompt.id, prompt.prompt_class) for prompt in read_prompts(path)] == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no prompts"),
        (b"[]", "holds no prompts"),
        (b"[1]", "prompt 1 is not an object"),
        (b'{"user": "a"}\nhello', "line 2: neither"),
        (b'[{"user": "a"},\n{"user": }]', "line 2: neither"),
        (b'[{"id": "a"}]', "prompt 1: user: Field required"),
        (b'[{"user": "a"}, {"user": 7}]', "prompt 2: user: .*string"),
        (b'{"user": "a", "sytem": "s"}', "prompt 1: sytem: Extra inputs are not permitted"),
        (b'{"user": "a", "prompt_class": "s"}', "prompt 1: prompt_class: Extra inputs are not permitted"),
        (b'[{"user": " "}]', "prompt 1 is empty"),
        (b'[{"user": "a", "id": "x"}, {"user": "b", "id": "x"}]', "two prompts have the id 'x'"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "neither"),
        (None, "cannot read the prompts"),
    ],
)
def test_bad_prompt_files_are_refused_with_the_place(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "prompts.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=message):
        read_prompts(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("{}", "not an artifact of this version: created_at"),
        ("hello", "not an artifact of this version: the file: Invalid JSON"),
        ('{"version": 2}', "version: Input should be 1"),
        ("[" * 100_000, "not an artifact"),
    ],
)
def test_other_files_are_no_artifacts(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    with pytest.raises(ArtifactError, match=message):
        load_artifact(tmp_path)


def test_default_prompts_are_twelve_of_ten_classes() -> None:
    prompts = default_prompts()
    assert len(prompts) == 12
    assert len({prompt.prompt_class for prompt in prompts}) == 10


def test_models_are_named_with_their_hash(models) -> None:
    described = pair.describe_model("target", models[0])
    path = Path(models[0])
    assert (described.file_name, described.num_bytes) == (path.name, path.stat().st_size)
    assert described.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_folder_is_named_with_a_hash_over_its_model_files(tmp_path: Path) -> None:
    contents = {"tokenizer.json": b"{}", "config.json": b"[]", "model.safetensors": b"weights"}
    for name, content in (contents | {"README.md": b"stray"}).items():
        (tmp_path / name).write_bytes(content)
    described = pair.describe_model("target", str(tmp_path))
    files = ["config.json", "model.safetensors", "tokenizer.json"]
    as_sha256sum = "".join(f"{hashlib.sha256(contents[name]).hexdigest()}  {name}\n" for name in files)
    assert described.sha256 == hashlib.sha256(as_sha256sum.encode()).hexdigest()
    assert (described.name, described.file_name, described.num_bytes) == (tmp_path.name, tmp_path.name, 11)
    (tmp_path / "README.md").write_bytes(b"another")
    assert pair.describe_model("target", str(tmp_path)) == described
    (tmp_path / "tokenizer.json").write_bytes(b"[]")
    assert pair.describe_model("target", str(tmp_path)).sha256 != described.sha256


def test_a_model_of_the_hub_is_named_as_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}
    snapshot = lay_out_cache(tmp_path, "someone/toy", files)
    described = pair.describe_model("target", "someone/toy")
    assert (described.name, described.file_name) == ("someone/toy", snapshot.name)


class Shortened(InThisProcess):
    """Cuts the output of one sample short, as a difference between two outputs."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def __call__(self, task: Task, seed: int):
        if task.purpose == "sample" and task.place == self.place:
            task = task.model_copy(update={"max_tokens": 5})
        return super().__call__(task, seed)


def test_target_only_that_differs_from_itself_ends_the_run(models) -> None:
    artifact, _ = measured(models, Shortened(place=3), proposal_lengths=(2,), repeats=4)
    assert [sample.arm for sample in artifact.samples] == ["target-only", "k=2", "k=2", "target-only"]
    assert artifact.identical is False
    assert (artifact.mismatches[0].arm, artifact.mismatches[0].baseline) == ("target-only", "target-only")
    assert not any(comparison.identical for comparison in artifact.comparisons)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, BenchmarkError("no memory")])
def test_difference_is_kept_where_it_cannot_be_explained(models, failure) -> None:
    class Unexplained(Shortened):
        def __call__(self, task: Task, seed: int):
            if task.purpose == "explain":
                raise failure
            return super().__call__(task, seed)

    saved: list[Artifact] = []
    artifact = measure_pair(options(models), saved.append, lambda progress: None, Unexplained(place=1))
    assert artifact.identical is saved[-1].identical is False
    assert artifact.mismatches[0].margin is None
    assert len(artifact.samples) == 2


def test_prompt_that_does_not_fit_is_found_before_anything_is_measured(models) -> None:
    prompts = [*default_prompts()[:1], Prompt(id="long", prompt_class="a", user="word " * 3000)]
    launch = InThisProcess()
    with pytest.raises(PromptError, match=r"prompt 'long' has \d+ tokens, which leaves no room"):
        measured(models, launch, prompts=prompts)
    assert launch.samples == []


def test_draft_model_of_another_kind_is_found_before_anything_is_measured(models, tmp_path: Path) -> None:
    tokens = list(tiny_metadata(tiny_config())["tokenizer.ggml.tokens"])
    tokens[5], tokens[6] = tokens[6], tokens[5]
    other = write_tiny_model(tmp_path / "other.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    launch = InThisProcess()
    with pytest.raises(PairMismatchError):
        measured((models[0], str(other)), launch)
    assert launch.samples == []


def test_model_file_that_changes_ends_the_run(models, tmp_path: Path) -> None:
    copy = tmp_path / "target.gguf"
    copy.write_bytes(Path(models[0]).read_bytes())

    class Touching(InThisProcess):
        def __call__(self, task: Task, seed: int):
            if task.place == 2:
                os.utime(copy, (1, 1))
            return super().__call__(task, seed)

    with pytest.raises(BenchmarkError, match=r"target.gguf changed while it was measured"):
        measured((str(copy), models[1]), Touching())


def test_artifact_is_not_believed_what_its_samples_do_not_say(models, tmp_path: Path) -> None:
    artifact, _ = measured(models)
    boasting = artifact.model_copy(update={"verdict": "pays: 9.99×", "comparisons": [], "identical": None})
    boasting.save(tmp_path)
    assert load_artifact(tmp_path) == artifact


def test_folder_is_one_measurements_own(models, tmp_path: Path) -> None:
    artifact, _ = measured(models, proposal_lengths=(2,), repeats=1)
    folder = tmp_path / "a/b"
    with claim(folder) as save:
        with pytest.raises(OptionError, match="already holds"), claim(folder):
            pass
        save(artifact)
    with pytest.raises(OptionError, match="already holds"), claim(folder):
        pass
    assert load_artifact(folder) == artifact
    with pytest.raises(KeyboardInterrupt), claim(tmp_path / "c/d"):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with claim(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_model_of_a_path_is_named_without_its_folders() -> None:
    """Artifacts are shown to others."""
    with pytest.raises(ModelNotFoundError):
        pair.describe_model("target", "/home/me/secret.gguf")


PARENT = """
import sys
from pilotfish.bench.process import fresh_process
from pilotfish.bench.worker import Task
with fresh_process(Task.model_validate_json(sys.stdin.read()), 0) as events:
    for event in events:
        print(event.kind, event.text, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_worker_ends_with_whoever_started_it(models) -> None:
    task = Task(
        arm="a", round=0, place=0, model=models[0], draft_model=None, proposal_length=0, max_tokens=2000, threads=1,
        prompts=[*default_prompts()] * 50,
    )  # fmt: skip
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(task.model_dump_json())
    parent.stdin.close()
    try:
        while not parent.stdout.readline().startswith("answer"):
            assert parent.poll() is None
        (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    finally:
        parent.kill()
        parent.wait()
    for _ in range(600):
        if not Path(f"/proc/{child}").exists():
            break
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()


def test_worker_runs_no_files_of_the_current_folder(models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pydantic.py").write_text("raise SystemExit('taken from the current folder')")
    monkeypatch.chdir(tmp_path)
    artifact = measure_pair(
        options(models, proposal_lengths=(), draft_model=None, repeats=1, max_tokens=1), lambda _: None, lambda _: None
    )
    assert artifact.complete
