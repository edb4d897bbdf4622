"""The command line: what it prints, as tables and as JSON, its exit codes, and what it leaves behind."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner, Result

import schedule
from fused import whole_files
from fxschedule import __main__ as command_line
from fxschedule.cli import app, output
from schedule.report.report import Report
from schedule.rules import list_rules
from schedule.util.errors import VerificationError
from schedule.util.files import write
from tests.cli.models import make
from tests.small import bias_gelu

MODEL, MLP = "tests.cli.models:make", "tests.cli.models:mlp"
COMMANDS = ("optimize", "verify", "bench", "profile", "show", "explain", "rules", "primitives", "doctor")


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def data(*arguments: str, code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


# -- help -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_what_it_is_for_and_how_it_ends(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0 and "Exit codes: 0" in result.stdout and "--json" in result.stdout
    assert name in run("--help").stdout


def test_the_exit_codes_in_the_help_are_those_there_are() -> None:
    text = run("--help").stdout
    assert all(f"{code.value} " in text for code in output.Code) and "130" in text


# -- looking ----------------------------------------------------------------------------------------------------


def test_show_prints_the_tree_to_a_depth() -> None:
    text = run("show", MODEL, "--depth", "2").stdout
    assert "blocks: ModuleList" in text and "0: Block" in text and "fc1" not in text
    assert set(data("show", MODEL, "--depth", "1")["modules"]) == {"", "embed", "blocks", "branching", "unused", "head"}


def test_show_prints_the_graph_of_a_module() -> None:
    found = run("show", MODEL, "blocks.0.mlp")
    assert found.exit_code == 0
    assert "act = self.act(fc1)  # float32[2, 5, 32]" in found.stdout and "return fc10" in found.stdout
    assert data("show", MODEL, "blocks.0.mlp")["graph"][-1] == "return fc10"


def test_an_unknown_path_names_the_nearest() -> None:
    result = run("show", MODEL, "blocks.0.mpl")
    assert result.exit_code == 2 and "blocks.0.mlp" in result.stderr and result.stdout == ""


def test_what_cannot_be_traced_says_at_which_line() -> None:
    result = run("show", MODEL, "branching")
    assert result.exit_code == 4
    assert "small.py" in result.stderr and "| if hidden.detach().numpy().sum() > 0:" in result.stderr


def test_rules_and_primitives_are_all_there() -> None:
    assert [rule["name"] for rule in data("rules")] == [rule.name for rule in list_rules()]
    assert data("primitives") == schedule.list_primitives()
    assert {rule["family"] for rule in data("rules", "rms_norm")} == {"rms_norm"}
    assert run("rules", "rms_norms").exit_code == 2
    assert "bias_gelu_tanh" in run("rules").stdout and "checkpoint" in run("primitives").stdout


def test_doctor_says_what_runs_here() -> None:
    found = data("doctor", code=run("doctor").exit_code)
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["unavailable"]) == {"reference", "inductor", "triton"} and found["unavailable"]["reference"] == ""
    assert found["ops"]["rms_norm"]["backend"] in found["unavailable"]


def test_doctor_says_no_where_only_plain_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fxschedule.cli.inspect_commands.why_unavailable", lambda name, _: "" if name == "reference" else "gone"
    )
    result = run("doctor")
    assert result.exit_code == 1 and "does not run: gone" in result.stdout


# -- explaining -------------------------------------------------------------------------------------------------


def test_explain_shows_the_match() -> None:
    result = run("explain", MODEL, "blocks.0.mlp", "--rule", "bias_gelu_tanh", "--no-cost-guard")
    assert result.exit_code == 0 and "bias_gelu_tanh applies in blocks.0.mlp" in result.stdout
    assert "act__gelu = gelu(fc1__add, approximate=tanh)" in result.stdout


def test_explain_shows_the_nearest_miss() -> None:
    result = run("explain", MODEL, "blocks.0.mlp", "--rule", "bias_gelu", "--no-cost-guard")
    assert result.exit_code == 1 and "bias_gelu does not apply in blocks.0.mlp" in result.stdout
    assert "expected gelu(approximate='none'), found gelu(approximate='tanh')" in result.stdout
    lines = result.stdout.splitlines()
    marked = lines[next(i for i, line in enumerate(lines) if line.strip().startswith("^^^")) - 1]
    assert marked.strip().startswith("act__gelu = ")


def test_explain_says_that_it_would_not_pay() -> None:
    found = data("explain", MODEL, "blocks.0.mlp", "--rule", "bias_gelu_tanh", code=1)["rules"][0]
    assert (
        not found["applies"]
        and found["entries"][0]["status"] == "declined"
        and "too small" in found["entries"][0]["reason"]
    )


def test_explain_leaves_out_what_is_outside_the_path() -> None:
    entries = data("explain", MODEL, "blocks", "--rule", "bias_gelu_tanh", "--no-cost-guard")["rules"][0]["entries"]
    assert [entry["path"] for entry in entries] == ["blocks.0.mlp", "blocks.1.mlp"]
    data("explain", MODEL, "blocks.0.attn", "--rule", "bias_gelu_tanh", "--no-cost-guard", code=1)


# -- working ----------------------------------------------------------------------------------------------------


def test_show_draws_a_page(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    assert f"page: {page}" in run("show", MLP, "--html", str(page)).stdout
    assert page.read_text().startswith("<!doctype html>") and "<svg" in page.read_text()
    assert data("show", MLP, "--html", str(page))["html"] == str(page)
    assert run("show", MLP, "--html", str(tmp_path / "none" / "out.html")).exit_code == 2


def test_optimize_verifies_and_reports(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    result = run("optimize", MLP, "--no-cost-guard", "--verify", "--report", str(page))
    assert result.exit_code == 0, result.output
    assert "bias_gelu_tanh" in result.stdout and "verified: equal in all" in result.stdout
    assert "bias_gelu_tanh" in page.read_text() and list(tmp_path.iterdir()) == [page]


def test_optimize_as_json_is_what_the_report_has(tmp_path: Path) -> None:
    page = tmp_path / "out.json"
    told = data("optimize", MLP, "--no-cost-guard", "--rules", "bias_activation", "--report", str(page))
    written = json.loads(page.read_text())
    assert told["applied"] == written["applied"] == {"bias_gelu_tanh": 1} and told["verified"] is None
    assert written["costs"]["after"]["saved_bytes"] > 0 and {name: told[name] for name in written} == written


def test_the_cost_guard_is_on() -> None:
    assert data("optimize", MLP)["applied"] == {}


def test_a_difference_ends_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def different(report: Report, batch: Any) -> None:
        raise VerificationError("optimize(bias_gelu) changed what the model computes", fix="undo it")

    monkeypatch.setattr(Report, "verify", different)
    result = run("verify", MLP)
    assert result.exit_code == 1 and "changed what the model computes" in result.stderr
    assert "DIFFERENT" in result.stdout
    assert data("optimize", MLP, "--verify", code=1)["verified"]["equal"] is False


def test_verify_tells_each_case() -> None:
    found = data("verify", MLP, "--no-cost-guard")
    assert found["equal"] and len(found["cases"]) > 4 and found["applied"] == {"bias_gelu_tanh": 1}


def test_an_unknown_attention_names_the_choices() -> None:
    result = run("optimize", "gpt2", "--tiny", "--attention", "flashy")
    assert result.exit_code == 2
    assert "no attention 'flashy'" in result.stderr and "eager" in result.stderr and "sdpa" in result.stderr


# -- models -----------------------------------------------------------------------------------------------------


def test_a_tiny_model_is_rewritten_although_nothing_pays_there() -> None:
    asked = ("explain", "gpt2", "transformer.h.0.mlp", "--rule", "bias_gelu_tanh", "--tiny")
    assert data(*asked)["rules"][0]["applies"]
    assert data(*asked, "--cost-guard", code=1)["rules"][0]["entries"][0]["status"] == "declined"


@pytest.mark.slow
def test_calls_that_verify_makes_are_not_the_models() -> None:
    """It also calls with a cache, which GPT-2's attention then has no graph for."""
    result = run("optimize", "gpt2", "--tiny", "--rules", "attention_softmax,bias_dropout", "--verify")
    assert result.exit_code == 0 and "verified: equal" in result.stdout
    assert "ran the original forward" not in result.stdout and "FallbackWarning" not in result.stderr


def test_a_model_type_is_built_tiny() -> None:
    found = data("show", "gpt2", "--tiny")
    assert found["origin"] == "random weights, tiny" and "transformer.h.1.mlp" in found["modules"]
    assert "transformer.h.2" not in found["modules"]


def test_a_folder_gives_its_weights(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=64, n_layer=1, n_embd=32, n_head=4, n_positions=64, eos_token_id=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    found = data("show", str(tmp_path), "--attention", "eager")
    assert found["origin"] == f"weights of the folder {tmp_path}" and "transformer.h.0" in found["modules"]
    assert data("show", str(tmp_path), "--tiny")["origin"] == "random weights, tiny"
    (tmp_path / "model.safetensors").unlink()
    assert data("show", str(tmp_path), code=3)["error"]["fix"].startswith("--tiny")


def test_remote_code_is_not_run_unasked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}})
    )
    ran = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    result = run("show", str(tmp_path))
    assert result.exit_code == 3 and "--trust-remote-code" in result.stderr and not ran.exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no/such-model", "nothing is downloaded"),
        ("bret", "bert"),
        ("/no/such/folder", "nothing is at /no/such/folder"),
        ("tests.cli.nowhere:make", "no module 'tests.cli.nowhere'"),
        ("tests.cli.models:nowhere", "has no 'nowhere'"),
        ("tests.cli.models:nothing", "gave int, not a model"),
    ],
)
def test_a_model_that_is_not_there_is_said_at_once(name: str, why: str) -> None:
    result = run("optimize", name)
    assert result.exit_code == 3 and why in result.stderr and "fix: " in result.stderr
    assert data("optimize", name, code=3)["error"]["kind"] == "CommandError"


def test_a_model_without_a_batch_is_asked_for_one() -> None:
    error = data("optimize", "tests.cli.models:without_batch", code=4)["error"]
    assert "what is Asking called with?" in error["why"] and "no attribute 'embeddings'" in error["why"]
    assert "dict(session=…)" in error["fix"] and "a factory that returns (model, batch)" in error["fix"]


# -- bad input --------------------------------------------------------------------------------------------------


def test_a_report_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxschedule.cli.batches.load_model", lambda asked: pytest.fail("it was loaded"))
    (tmp_path / "folder.html").mkdir()
    for path in (tmp_path / "none" / "out.html", tmp_path / "out.txt", tmp_path / "folder.html"):
        result = run("optimize", MODEL, "--report", str(path))
        assert result.exit_code == 2 and "fix: " in result.stderr
    assert run("optimize", MODEL, "--rules", "nonsense").exit_code == 2
    assert run("optimize", MODEL, "--nonsense").exit_code == 2


def test_a_recipe_is_written_and_done_again(tmp_path: Path) -> None:
    made = tmp_path / "made.json"
    first = data("optimize", MODEL, "--no-cost-guard", "--recipe-out", str(made))
    again = data("optimize", MODEL, "--recipe", str(made), "--recipe-out", str(tmp_path / "made.py"), "--verify")
    assert first["costs"] == again["costs"] and again["verified"]["equal"]
    assert sum(again["applied"].values()) == sum(first["applied"].values()) > 0
    assert "def apply(sch" in (tmp_path / "made.py").read_text()
    assert data("optimize", MLP, "--recipe", str(made), code=4)["error"]["kind"] == "RecipeError"


def test_a_recipe_that_is_none_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxschedule.cli.batches.load_model", lambda asked: pytest.fail("it was loaded"))
    (tmp_path / "no.json").write_text("{}")
    for arguments in (("--recipe", "no.json"), ("--recipe", "none.json"), ("--recipe-out", "out.txt")):
        assert (
            run(
                "verify" if "out" not in arguments[0] else "optimize", MODEL, arguments[0], str(tmp_path / arguments[1])
            ).exit_code
            == 2
        )


def test_a_recipe_that_calls_code_of_others_is_not_run_unasked(tmp_path: Path) -> None:
    sch = schedule.create_schedule(*make())
    mlp = sch["blocks.0.mlp"]
    mlp.fuse(mlp.find(bias_gelu, expect=1))
    path = tmp_path / "recipe.json"
    path.write_text(sch.recipe().to_json())
    result = run("verify", MODEL, "--recipe", str(path))
    assert result.exit_code == 2 and "tests.small:bias_gelu" in result.stderr and "--trust-remote-code" in result.stderr
    assert data("verify", MODEL, "--recipe", str(path), "--trust-remote-code")["equal"]


def test_an_unknown_device_is_refused() -> None:
    assert run("optimize", MODEL, "--device", "abacus").exit_code == 2


def test_an_interruption_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "out.json"
    page.write_text("old")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(whole_files.os, "replace", interrupted)
    assert run("optimize", MLP, "--report", str(page)).exit_code == 130
    assert page.read_text() == "old" and list(tmp_path.iterdir()) == [page]


def test_a_written_file_may_be_read_by_those_who_may_read_others(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    write(tmp_path / "ours", "text")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_progress_is_not_among_the_results() -> None:
    result = run("show", MODEL, "--json")
    assert "loading" in result.stderr and json.loads(result.stdout)


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "schedule", "show", MODEL, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["modules"][""] == "Small"


def test_the_installed_command_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    written = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, name = written["project"]["scripts"]["fxschedule"].partition(":")
    run = list[str]()
    monkeypatch.setattr("fxschedule.cli.main", lambda: run.append("fxschedule.cli"))
    getattr(importlib.import_module(module), name)()
    assert run == ["fxschedule.cli"]


def test_the_list_of_commands_does_not_import_torch() -> None:
    code = "import sys; sys.argv[1:] = ['--help']\nfrom fxschedule.__main__ import main\n"
    code += "try: main()\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert "optimize" in done.stdout and done.stdout.endswith("False\n")


@pytest.mark.parametrize("by", ["an interrupt", "typer"])
def test_an_interrupt_ends_with_one_line(
    by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt if by == "an interrupt" else SystemExit(130)

    monkeypatch.setattr("fxschedule.cli.main", interrupted)
    with pytest.raises(SystemExit) as stopped:
        command_line.main()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "fxschedule: interrupted\n"


def test_the_model_of_a_factory_may_be_a_module_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.cli.models.ready", nn.Linear(3, 3), raising=False)
    assert data("show", "tests.cli.models:ready")["modules"] == {"": "Linear"}
