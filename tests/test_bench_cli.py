"""`pilotfish bench` from the command line: what it prints, what it leaves behind, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bench_artifacts import make_arm, make_artifact, make_sample, prompts_of_classes
from command_line import Outcome, Stream
from tiny_models import tiny_config, write_tiny_model

from pilotfish.bench import pair
from pilotfish.bench.artifact import Artifact, Margin, Mismatch, Phases, TokenChoice
from pilotfish.bench.compare import differences, same_machine
from pilotfish.bench.reading import load_artifact
from pilotfish.bench.runner import Progress, Turn
from pilotfish.cli.bench_tables import print_artifact
from pilotfish.cli.progress import BenchProgress

START = "from pilotfish.cli.main import main; main()"
Run = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _elsewhere(surroundings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("pair")
    common = {"config": tiny_config(context_length=2048)}
    target = write_tiny_model(folder / "target.gguf", **common)
    draft = write_tiny_model(folder / "draft.gguf", noise=0.1, **common)
    return ("--model", str(target), "--draft-model", str(draft))


def plain_artifact(**changes: object) -> Artifact:
    """Three rounds in which k=4 is half as quick again as target-only."""
    samples = []
    for number in range(3):
        samples.append(make_sample("target-only", number, [10, 20], place=2 * number))
        samples.append(make_sample("k=4", number, [15, 30], place=2 * number + 1))
    arms = [make_arm("target-only", 0), make_arm("k=4", 4)]
    return make_artifact(arms, prompts_of_classes("code", "chat"), samples, **changes)


def test_show_prints_verdict_arms_and_classes(cli: Run, tmp_path: Path) -> None:
    plain_artifact().save(tmp_path)
    outcome = cli("bench", "show", str(tmp_path))
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == "pays: 1.50× [1.50, 1.50] at proposal length 4"
    rows = [line.split() for line in lines if line]
    cells = {row[0]: row[1:] for row in reversed(rows)}  # a name's first row
    assert cells["target-only"][:2] == ["1", "14.1"]
    assert cells["k=4"][:4] == ["1.50×", "[1.50,", "1.50]", "21.2"]
    assert cells["code"] == cells["chat"] == ["1.50×", "[1.50,", "1.50]"]
    assert cli("bench", "show", str(tmp_path / "result.json")) == outcome


def test_show_explains_a_mismatch_and_spells_out_control_characters(cli: Run, tmp_path: Path) -> None:
    bell, other = TokenChoice(token_id=7, text="\x1b]0;title\x07"), TokenChoice(token_id=8, text=" b")
    margin = Margin(first=bell, first_logit=2.5, second=other, second_logit=2.25)
    mismatch = Mismatch(
        arm="k=4", baseline="target-only", prompt_id="1", position=3, expected=bell, found=other, margin=margin
    )
    plain_artifact(mismatches=[mismatch], identical=False).save(tmp_path)
    outcome = cli("bench", "show", str(tmp_path))
    assert outcome.status == 0
    assert "\x1b" not in outcome.out
    assert "\x07" not in outcome.out
    text = " ".join(outcome.out.split())
    assert "k=4 differs from target-only: prompt 1, output token 3: 7 (" in text
    assert "became 8 (' b')" in text
    assert "0.25 apart" in text


def hostile_artifact() -> Artifact:
    """Names with rich's markup, line breaks and a change of direction, in all places where a user may put them."""
    text = "[/code]\n[easy]\t\u202e"
    artifact = plain_artifact()
    prompts = prompts_of_classes(text, "chat")
    arms = [make_arm("target-only", 0), make_arm(text, 4)]
    samples = [
        sample.model_copy(update={"arm": text if sample.arm == "k=4" else sample.arm}) for sample in artifact.samples
    ]
    models = [artifact.models[0].model_copy(update={"file_name": f"m{text}.gguf"})]
    return make_artifact(arms, prompts, samples, models=models, created_at=text)


def test_names_are_shown_as_they_are_and_keep_to_their_line(cli: Run, tmp_path: Path) -> None:
    for name, artifact in (("a", hostile_artifact()), ("b", plain_artifact())):
        (tmp_path / name).mkdir()
        artifact.save(tmp_path / name)
    shown = r"[/code]\n[easy]\t\u202e"
    outcome = cli("bench", "show", "a")
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].startswith("pays: 1.50×")
    assert [line.split()[0] for line in lines if line.startswith(shown)] == [shown] * 2  # an arm, a class
    assert sum(line.endswith(shown) for line in lines) == 1  # an arm above its ratios
    outcome = cli("bench", "compare", "a", "b")
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].startswith(f"A, {shown}: pays: 1.50×")
    (models,) = [line for line in lines if line.startswith("target model")]
    assert f"m{shown}.gguf (sha256" in models
    assert "\u202e" not in outcome.out


def test_no_sentence_is_broken_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = "cannot tell: " + "for one reason and another " * 20 + "in the end"
    print_artifact(plain_artifact(verdict=verdict))
    assert capsys.readouterr().out.splitlines()[0] == verdict
    print_artifact(plain_artifact(verdict="pays: one\nand another"))
    assert capsys.readouterr().out.splitlines()[0] == "pays: one\\nand another"


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX pipes")
def test_reader_that_has_left_is_no_difference(surroundings: None, tmp_path: Path) -> None:
    plain_artifact().save(tmp_path)
    for arguments in (("show", str(tmp_path)), ("compare", str(tmp_path), str(tmp_path))):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "wb") as gone:
            command = [sys.executable, "-c", START, "bench", *arguments]
            done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def progress_of(num_answers: int, stage: str) -> Progress:
    turn = Turn(make_arm("k=4", 4), round=1, place=3)
    return Progress(turn, num_turns=8, stage=stage, num_answers=num_answers, num_prompts=12, seconds_left=90.0)


def test_progress_says_what_is_true_and_is_drawn_only_when_something_happens(
    surroundings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(sys, "stderr", err := Stream(terminal=True))
    threads = threading.active_count()
    with BenchProgress() as progress:
        assert threading.active_count() == threads  # nobody to draw in between
        progress(progress_of(0, "loading"))
        assert "sample 4 of 8, round 2: k=4, loading" in err.text()
        progress(progress_of(3, "edit"))
        assert "sample 4 of 8, round 2: k=4, 3 of 12 prompts answered" in err.text()
        assert "0:01:30 left" in err.text()
        assert "edit" not in err.text()


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX pipes")
@pytest.mark.parametrize("terminal", [True, False])
def test_measurement_goes_on_where_stderr_is_gone(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as gone:
        monkeypatch.setattr(gone, "isatty", lambda: terminal)
        monkeypatch.setattr(sys, "stderr", gone)
        with BenchProgress() as progress:
            for num_answers in range(3):
                progress(progress_of(num_answers, "loading"))
        print("what is said afterwards goes nowhere", file=sys.stderr, flush=True)


def test_compare_holds_rates_side_by_side_only_where_they_did_the_same_work(cli: Run, tmp_path: Path) -> None:
    first = plain_artifact()
    assert first.host is not None
    others = {
        "same": {},
        "machine": {"host": first.host.model_copy(update={"machine_id": "other"})},
        "prompts": {"prompts": [prompt.model_copy(update={"user": "Another."}) for prompt in first.prompts]},
        "models": {"models": [first.models[0].model_copy(update={"sha256": "1" * 64})]},
        "max_tokens": {"settings": first.settings.model_copy(update={"max_tokens": 99})},
    }
    first.save(tmp_path)
    for name, change in others.items():
        (tmp_path / name).mkdir()
        first.model_copy(update=change).save(tmp_path / name)
        out = cli("bench", "compare", ".", name).out
        quotients = [line.split()[-1] for line in out.splitlines() if line.startswith(("target-only ", "k=4 "))]
        assert quotients == ["1.00" if name == "same" else "–"] * 2, name


def test_compare_says_whether_it_is_the_same_machine_and_what_differs(cli: Run, tmp_path: Path) -> None:
    first = plain_artifact()
    assert first.host is not None
    second = first.model_copy(
        update={
            "host": first.host.model_copy(update={"machine_id": "other", "num_threads": 7}),
            "settings": first.settings.model_copy(update={"max_tokens": 99}),
        }
    )
    for name, artifact in (("a", first), ("b", second)):
        (tmp_path / name).mkdir()
        artifact.save(tmp_path / name)
    outcome = cli("bench", "compare", "a", "a")
    assert outcome.status == 0
    assert "the same machine" in outcome.out
    assert "are the same" in outcome.out
    outcome = cli("bench", "compare", "a", "b")
    assert outcome.status == 0
    out = outcome.out
    assert "different machines" in out
    assert {tuple(line.split()) for line in out.splitlines()} >= {("threads", "2", "7"), ("max_tokens", "8", "99")}
    assert same_machine(first, second) is False
    assert {name for name, _, _ in differences(first, second)} == {"threads", "max_tokens"}


def test_compare_sees_other_texts_behind_the_same_ids() -> None:
    first = plain_artifact()
    prompts = [prompt.model_copy(update={"user": "Another."}) for prompt in first.prompts]
    assert [name for name, _, _ in differences(first, first.model_copy(update={"prompts": prompts}))] == ["prompts"]


def test_real_run_leaves_result_and_report(cli: Run, models: tuple[str, ...], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"user": "the end"}\n{"user": "and then", "class": "other"}\n')
    out_dir = tmp_path / "new/out"
    arguments = ("bench", *models, "--proposal-length", "0,2", "--prompts", str(prompts), "--max-tokens", "6")
    arguments += ("--repeats", "1", "--threads", "1", "--out", str(out_dir))
    outcome = cli(*arguments)
    assert outcome.status == 0
    artifact = load_artifact(out_dir)
    assert artifact.complete
    assert artifact.identical is True
    assert (out_dir / "report.html").stat().st_size > 10_000
    assert {path.name for path in out_dir.iterdir()} == {"result.json", "report.html"}
    assert outcome.out.startswith("cannot tell: ")  # a single round
    assert "sample 2 of 2, round 1: k=2" in outcome.err
    assert outcome.err.splitlines()[-1] == f"{out_dir / 'result.json'} and {out_dir / 'report.html'}"
    before = (out_dir / "result.json").read_bytes()
    assert "already holds a result.json" in cli(*arguments).error
    assert (out_dir / "result.json").read_bytes() == before


def test_difference_ends_with_status_1(
    cli: Run, models: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mismatch = Mismatch(
        arm="k=4", baseline="target-only", prompt_id="0", position=0, expected=None, found=None, margin=None
    )
    different = plain_artifact(mismatches=[mismatch], identical=False)

    def measure(options: pair.PairOptions, save: Callable[[Artifact], None], report: object) -> Artifact:
        save(different)
        return different

    monkeypatch.setattr(pair, "measure_pair", measure)
    outcome = cli("bench", *models, "--out", str(tmp_path / "out"))
    assert outcome.status == 1
    assert "k=4 differs from target-only" in outcome.out


def workers() -> dict[int, int]:
    """The living worker processes on this machine, each with its parent."""
    listed = subprocess.run(["ps", "-ewwo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines() if "pilotfish.bench.worker" in line]
    return {int(process): int(parent) for process, parent, _ in rows}


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_keeps_the_finished_samples_and_leaves_no_process(models: tuple[str, ...], tmp_path: Path) -> None:
    # A run in a shell's background starts with the signal ignored.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); " + START
    out = tmp_path / "out"
    arguments = [*models, "--proposal-length", "2", "--repeats", "50", "--max-tokens", "4", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, "bench", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    stopped: list[int] = []
    try:
        result = out / "result.json"
        while not (result.exists() and result.stat().st_size) and process.poll() is None:
            time.sleep(0.05)
        while not stopped and process.poll() is None:
            stopped = [worker for worker, parent in workers().items() if parent == process.pid]
        for worker in stopped:
            os.kill(worker, signal.SIGSTOP)  # a worker that nobody ends does not end by itself
        process.send_signal(signal.SIGINT)
        said, told = process.communicate(timeout=120)
        left = [worker for worker in stopped if worker in workers()]
        for worker in left:
            os.kill(worker, signal.SIGKILL)
    finally:
        process.kill()
    assert process.returncode == 130
    assert stopped
    assert left == []
    artifact = load_artifact(out)
    assert not artifact.complete
    assert len(artifact.samples) >= 1
    assert f"interrupted: {len(artifact.samples)} of 100 samples are finished" in told
    assert "incomplete" in said
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--proposal-length", "1,x"), "not a list of whole numbers"),
        (("--proposal-length", "2,2"), "names a length twice"),
        (("--proposal-length", "-1"), "not a list of whole numbers"),
        (("--repeats", "0"), "not in the range"),
        (("--max-tokens", "0"), "not in the range"),
        (("--prompts", "nowhere.json"), "cannot read the prompts in nowhere.json"),
        (("--model", "nowhere.gguf"), "give --draft-model"),
        (("--model", "nowhere.gguf", "--proposal-length", "0"), "no such model: nowhere.gguf"),
        (("--model", ""), "--model is empty"),
        (("show", "nowhere"), "cannot read nowhere"),
        (("--repeats", "2", "show", "nowhere"), "--repeats comes without show"),
        (("compare", "nowhere", "there"), "cannot read nowhere"),
    ],
)
def test_bad_input_is_one_line_and_status_2(cli: Run, arguments: tuple[str, ...], message: str) -> None:
    assert message in cli("bench", *arguments).error


def test_bad_input_leaves_no_folder_behind(cli: Run, tmp_path: Path) -> None:
    assert cli("bench", "--model", "nowhere.gguf", "--proposal-length", "0").status == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["pydantic", "scipy", "matplotlib"])
def test_missing_extra_is_one_line(package: str, models: tuple[str, ...]) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; " + START
    command = [sys.executable, "-c", code, "bench", *models, "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"pilotfish: error: this needs {package}, of pilotfish's extra `bench`: pip install 'pilotfish[bench]'\n"
    )


def test_artifact_whose_parts_do_not_fit_is_refused(cli: Run, tmp_path: Path) -> None:
    plain_artifact().save(tmp_path)
    path = tmp_path / "result.json"
    sound = json.loads(path.read_text())
    for damage in (
        lambda value: value["samples"][0]["answers"].pop(),
        lambda value: value["samples"][0].update(arm="k=5"),
        lambda value: value["samples"][0]["answers"][0].update(token_ids=[]),
        lambda value: value["samples"][0]["answers"][0].update(end_to_end_seconds=0),
        lambda value: value["arms"].append(value["arms"][0]),
        lambda value: (value["prompts"].clear(), [sample["answers"].clear() for sample in value["samples"]]),
        lambda value: value["settings"].update(seed=-1),
        lambda value: value["samples"][0].update(peak_memory_bytes=10**400),
        lambda value: value["host"].update(memory_bytes=10**400),
        lambda value: value["models"][0].update(sha256="[/x]"),
        lambda value: value["samples"][0]["answers"][0].update(end_to_end_seconds=5e-324),
        lambda value: value["samples"][0]["answers"][0].update(num_steps=-5),
        lambda value: value["samples"][0]["answers"][0].update(num_draft_tokens=[1_000_000], num_accepted_tokens=[1]),
        lambda value: value["samples"][0]["answers"][0].update(num_draft_tokens=[4], num_accepted_tokens=[-1]),
        lambda value: value["samples"][0]["answers"][0].update(num_draft_tokens=[4], num_accepted_tokens=[5]),
        lambda value: value["samples"][0]["answers"][0].update(num_draft_tokens=[4, 4], num_accepted_tokens=[4]),
        lambda value: value["samples"][0]["answers"][0].update(num_draft_tokens=[4]),
        lambda value: value["samples"][0]["answers"][0].update(phases=dict.fromkeys(Phases.model_fields, 1e308)),
    ):
        value = json.loads(json.dumps(sound))
        damage(value)
        path.write_text(json.dumps(value))
        assert "is not an artifact of this version" in cli("bench", "show", str(tmp_path)).error
