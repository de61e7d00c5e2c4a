"""`build --tune` with a clock that a test sets: what is chosen, what stays, what is written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from gptoss_trt.build_engine import tune, tune_gpu
from gptoss_trt.build_engine.random_engine import write_random_engine
from gptoss_trt.build_engine.spec import Formats, Manifest
from gptoss_trt.build_engine.synthetic import small_config, write_checkpoint
from gptoss_trt.build_engine.tune_cases import Case, Subject, subjects, tile_candidates
from gptoss_trt.build_engine.tune_gpu import TuneError
from gptoss_trt.client.cli import gptoss_trt
from gptoss_trt.ops import plan
from gptoss_trt.ops.library import ABI_VERSION, LibraryError
from gptoss_trt.ops.plan import Choices, Plan
from gptoss_trt.reference.tolerance import Row

SHAPE = (64, 128)
CPU = torch.device("cpu")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(gptoss_trt, [str(argument) for argument in arguments])


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    write_random_engine(tmp_path / "engine", "tiny", Formats("mxfp4", "fp8_block128", "bf16", "static"))
    return tmp_path / "engine"


def subject(refused: str = "", wrong: str = "") -> Subject:
    """One whose op knows which choice the trial plan makes."""

    def make(tokens: int) -> Case:
        out = torch.zeros(tokens, 8)

        def call(name: str, _copy: int) -> None:
            choices = plan.choices("dense_fp8", SHAPE)
            assert choices is not None and choices.at(tokens) == name
            if name == refused:
                raise LibraryError(f"{name} is refused")
            out.fill_(2.0 if name == wrong else 1.0)

        return Case(call, 1, ((out, Row(2**-9)),))

    built_in = Choices((4,), ("few", "auto"))
    return Subject("dense_fp8", SHAPE, built_in, 1 << 20, tile_candidates, make)


def fastest(name: str) -> Callable[[Callable[[int], object], int, int], float]:
    """A clock by which one choice takes half the time of the others."""

    def timer(call: Callable[[int], object], copies: int, calls: int) -> float:
        assert calls >= 4 and copies >= 1
        call(0)
        choices = plan.choices("dense_fp8", SHAPE)
        assert choices is not None
        return 5e-6 if choices.names == (name,) else 1e-5

    return timer


def tuned(subject: Subject, timer: tune.Timer, tokens: tuple[int, ...], shipped: plan.Table | None = None) -> Choices:
    return tune.tune([subject], shipped or {}, timer, lambda _: None, tokens)["dense_fp8"][SHAPE]


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"a": 1.0, "b": 0.99}, "a"),  # a tie
        ({"a": 1.02, "b": 1.0}, "a"),
        ({"a": 1.03, "b": 1.0}, "b"),
        ({"a": 1.0, "b": None}, "a"),
        ({"a": 1.0, "b": 0.9, "c": 0.8}, "c"),
    ],
)
def test_the_fastest_is_chosen_and_a_tie_keeps_the_base(seconds: dict[str, float | None], chosen: str) -> None:
    assert tune.choose("a", seconds) == chosen


def test_a_winner_holds_from_behind_the_number_before_up_to_its_own() -> None:
    base = Choices((4, 64), ("few", "64/2", "128/1"))
    assert tune.merged(base, [(1, "few"), (64, "64/2"), (128, "128/1")]) == base
    assert tune.merged(base, [(16, "64/2"), (32, "64/3"), (64, "64/2")]) == Choices(
        (4, 16, 32, 64), ("few", "64/2", "64/3", "64/2", "128/1")
    )
    assert tune.merged(base, [(8, "few")]) == Choices((8, 64), ("few", "64/2", "128/1"))
    assert tune.merged(base, [(8192, "256/1")]) == Choices(
        (4, 64, 4096, 8192), ("few", "64/2", "128/1", "256/1", "128/1")
    )
    assert tune.merged(Choices((), ("triton",)), [(1, "few"), (2, "triton")]) == Choices((1,), ("few", "triton"))


def test_tiles_hold_for_all_larger_steps_or_not_at_all(tmp_path: Path) -> None:
    base = Choices((256, 767), ("decode", "prefill", "tiles"))
    for winners, wanted in (
        ([(256, "decode"), (512, "tiles"), (1024, "tiles")], Choices((256,), ("decode", "tiles"))),
        ([(512, "prefill"), (1024, "prefill")], Choices((256, 1024), ("decode", "prefill", "tiles"))),
        ([(512, "tiles"), (1024, "prefill")], Choices((256, 1024), ("decode", "prefill", "tiles"))),
        ([(512, "tiles")], Choices((256,), ("decode", "tiles"))),
        ([(512, "tiles"), (4096, "prefill")], Choices((256, 4096), ("decode", "prefill", "tiles"))),
    ):
        merged = tune.merged(base, winners)
        assert merged == wanted
        Plan("card", ABI_VERSION, {"experts": {("fp8", 8, 32, 32): merged}}).write(tmp_path / "a")
        assert Plan.read(tmp_path / "a").ops["experts"]["fp8", 8, 32, 32] == merged


def test_a_faster_choice_is_taken_and_the_built_in_rule_stays_elsewhere() -> None:
    assert tuned(subject(), fastest("64/3"), (64,)) == Choices((4, 32, 64), ("few", "auto", "64/3", "auto"))
    assert tuned(subject(), lambda *_: 1e-5, (1, 64, 512)) == subject().built_in


def test_the_shipped_choice_is_the_base_where_there_is_one() -> None:
    shipped = {"dense_fp8": {SHAPE: Choices((64,), ("64/1", "128/1"))}}
    assert tuned(subject(), lambda *_: 1e-5, (1, 64, 512), shipped) == shipped["dense_fp8"][SHAPE]


def test_a_choice_that_is_refused_or_gives_another_result_is_never_taken() -> None:
    rows: list[tune.Row] = []
    for faulty in (subject(refused="64/3"), subject(wrong="64/3")):
        table = tune.tune([faulty], {}, fastest("64/3"), rows.append, (64,))
        assert table["dense_fp8"][SHAPE] == faulty.built_in
    assert [row.seconds["64/3"] for row in rows] == [None, None]
    assert "64/3 -" in str(rows[0]) and "*auto 10.0" in str(rows[0])


def test_a_base_that_does_not_run_is_an_error() -> None:
    with pytest.raises(TuneError, match="dense_fp8 64x128: auto is refused"):
        tuned(subject(refused="auto"), lambda *_: 1e-5, (64,))


@pytest.mark.parametrize(
    ("experts", "dense", "h_scale"),
    [("mxfp4", "fp8_block128", "static"), ("fp8_block128", "bf16", "block64")],
)
def test_every_case_runs_and_its_choices_agree(engine: Path, experts: str, dense: str, h_scale: str) -> None:
    """On a CPU all choices are one implementation; the calls are whole, and a plan of them can be read."""
    write_random_engine(engine, "tiny", Formats(experts, dense, "bf16", h_scale), force=True)  # type: ignore[arg-type]
    torch.manual_seed(0)
    rows: list[tune.Row] = []
    found = subjects(Manifest.read(engine), CPU)
    table = tune.tune(found, {}, lambda call, *_: (call(0), 1e-5)[1], rows.append, (1, 48))
    assert [row.op for row in rows if row.tokens == 1].count("dense_fp8" if dense != "bf16" else "dense") == 3
    assert {(row.op, row.chosen) for row in rows} == {(row.op, row.base) for row in rows}
    assert all(seconds is not None for row in rows for seconds in row.seconds.values())
    path = plan.engine_file(engine, "card")
    Plan("card", ABI_VERSION, table).write(path)
    assert Plan.read(path).ops == table
    assert plan.choices("experts", ("mxfp4", 8, 160, 224)) is None  # no trial is left behind


def test_tune_writes_the_engines_plan_and_keeps_other_shapes(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"dense": {(8, 8): Choices((), ("triton",))}, "dense_fp8": {SHAPE: Choices((), ("auto",))}}
    Plan("NVIDIA H200", ABI_VERSION, other).write(plan.engine_file(engine, "NVIDIA H200"))
    for module in (tune, tune_gpu):
        monkeypatch.setattr(module, "require_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(tune, "subjects", lambda *_: [subject()])
    monkeypatch.setattr(
        tune, "graph_seconds", lambda _device, call, copies, calls, _: fastest("64/1")(call, copies, calls)
    )
    result = run("build", engine, "--tune", "--tune-tokens", "64")
    assert result.exit_code == 0, result.output
    assert (
        "*64/1 5.0" in result.output
        and "(was auto)" in result.output
        and "tune/NVIDIA_H200.json: written" in result.output
    )
    written = Plan.read(plan.engine_file(engine, "NVIDIA H200"))
    assert written.ops["dense"] == other["dense"]
    assert written.ops["dense_fp8"] == {SHAPE: Choices((4, 32, 64), ("few", "auto", "64/1", "auto"))}
    described = json.loads(run("inspect", engine, "--json").stdout)
    assert described["plan"] == "tune/NVIDIA_H200.json, tuned on NVIDIA H200: dense 1, dense_fp8 1"
    assert run("inspect", engine, "--verify").exit_code == 0
    (plan.engine_file(engine, "NVIDIA H200")).write_text("{}")
    result = run("inspect", engine, "--verify")
    assert result.exit_code == 1 and "NVIDIA_H200.json: version is None" in result.output


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--tune"], 1, "--tune measures on a GPU, and torch"),
        (["--tune", "--out", "elsewhere"], 1, "--tune measures on a GPU, and torch"),
        ([], 2, "Missing option '--out'"),
        (["--out", "elsewhere"], 2, "is an engine; --out builds one of a checkpoint"),
        (["--tune-op", "dense"], 2, "--tune-op and --tune-tokens belong to --tune"),
        (["--tune", "--tune-op", "denes"], 2, "'denes' is not one of"),
        (["--tune", "--tp", "2"], 2, "--tune takes engines of one rank"),
        (["--tune", "--tune-tokens", "0"], 2, "is not a list of numbers from 1 to 8192"),
    ],
)
def test_what_is_asked_wrongly_is_said(
    engine: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("build", engine, *arguments)
    assert result.exit_code == status and message in result.output


def test_without_a_gpu_nothing_of_triton_is_wanted(engine: Path) -> None:
    """There may be no Triton then."""
    code = (
        "import sys; sys.modules['triton'] = None; import torch; torch.cuda.is_available = lambda: False; "
        "from gptoss_trt.client.cli import gptoss_trt; gptoss_trt(sys.argv[1:])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "build", str(engine), "--tune"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1 and ended.stderr.startswith("Error: --tune measures on a GPU"), ended.stderr


@pytest.mark.parametrize(("option", "value"), [("--dense", "bf16"), ("--json", None), ("--h-scale", "static")])
def test_options_of_a_build_are_refused_with_an_engine(
    engine: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: str | None
) -> None:
    monkeypatch.setattr(tune_gpu, "require_gpu", lambda: "NVIDIA H200")
    result = run("build", engine, "--tune", option, *([value] if value else []))
    assert result.exit_code == 2 and f"{option} belongs to building" in result.output


def test_a_checkpoint_wants_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_gpu, "require_gpu", lambda: "NVIDIA H200")
    checkpoint = write_checkpoint(tmp_path / "checkpoint", small_config())
    result = run("build", checkpoint, "--tune")
    assert result.exit_code == 2 and "--out names the engine" in result.output
