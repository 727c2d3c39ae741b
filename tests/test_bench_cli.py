"""`pilotfish bench` from the command line: what it prints, what it leaves behind, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bench_artifacts import make_arm, make_artifact, make_sample, prompts_of_classes
from command_line import Outcome
from tiny_models import tiny_config, write_tiny_model

from pilotfish.bench import pair
from pilotfish.bench.artifact import Artifact, Margin, Mismatch, TokenChoice
from pilotfish.bench.compare import differences, same_machine
from pilotfish.bench.reading import load_artifact

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


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_keeps_the_finished_samples_and_leaves_no_process(models: tuple[str, ...], tmp_path: Path) -> None:
    # A run in a shell's background starts with the signal ignored.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); " + START
    out = tmp_path / "out"
    arguments = [*models, "--proposal-length", "2", "--repeats", "50", "--max-tokens", "4", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, "bench", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        result = out / "result.json"
        while not (result.exists() and result.stat().st_size) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, told = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    artifact = load_artifact(out)
    assert not artifact.complete
    assert len(artifact.samples) >= 1
    assert f"interrupted: {len(artifact.samples)} of 100 samples are finished" in told
    assert "incomplete" in said
    assert (out / "report.html").exists()
    commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert models[1] not in commands


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
    ):
        value = json.loads(json.dumps(sound))
        damage(value)
        path.write_text(json.dumps(value))
        assert "is not an artifact of this version" in cli("bench", "show", str(tmp_path)).error
