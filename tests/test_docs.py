"""The documentation: the site builds without a warning and needs no network, and all code in it runs."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from mkdocs.commands.build import build
from mkdocs.config import load_config
from typer.testing import CliRunner

from docs.generate import filled
from fused.backends.backend_registry import OPS
from fxschedule.cli import app
from schedule.primitives import registry as primitives
from schedule.rules import rule_registry as rules
from tests.code_blocks import SHOWN, Block, blocks, commands

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_NOT_RUN = 2
"""So many blocks are not run, each with its reason in the page. More need a better reason than this number."""

EXTERNAL = re.compile(
    r"""<(?:script|img|iframe|link(?=[^>]*stylesheet))[^>]*(?:src|href)=["'](?:https?:)?//|url\(["']?(?:https?:)?//"""
)


def tiny_gpt2(layers: int = 2) -> tuple[hf.PreTrainedModel, dict[str, torch.Tensor]]:
    """What pages call ``model`` and ``batch``: GPT-2 with random weights."""
    config = hf.GPT2Config(
        n_layer=layers, n_embd=16, n_head=2, vocab_size=64, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    ids = torch.randint(3, 64, (2, 8))
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model, {"input_ids": ids, "labels": ids}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A page may write files and register rules, ops and primitives: none of it stays."""
    monkeypatch.chdir(tmp_path)
    known = set(primitives.registered())
    kept = [(registry, dict(registry)) for registry in (rules.RULES, OPS)]
    yield
    for registry, before in kept:
        registry.clear()
        registry.update(before)
    for name in set(primitives.registered()) - known:
        primitives.unregister(name)


@pytest.mark.one_in(4)
@pytest.mark.unreplayable("pages change models beside their schedules")
@pytest.mark.unwritable("pages define what they look for and put in")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path) -> None:
    names: dict[str, Any] = {"__name__": f"page_{page.stem}"}
    if page.stem != "README":  # which is to be copied as it stands
        names |= {"tiny_gpt2": tiny_gpt2, "torch": torch}
    for block in blocks(filled(page.read_text(encoding="utf-8"))):
        if block.language in SHOWN or block.not_run:
            continue
        if block.language == "console":
            _run_commands(block)
        else:
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(page), "exec", dont_inherit=True), names)
    if page.stem == "README":
        assert {"bias_gelu_tanh", "cross_entropy"} <= names["report"].applied.keys()


def _run_commands(block: Block) -> None:
    found = commands(block)
    assert found, f"line {block.line}: no command; they begin with $"
    for line in found:
        words = shlex.split(line)
        if words[0] == "fxschedule" or words[:3] == ["python", "-m", "schedule"]:
            result = CliRunner().invoke(app, words[1 if words[0] == "fxschedule" else 3 :])
            assert result.exit_code in (0, 1), f"{line}\n{result.output}"
        else:
            assert _exists(words), f"there is nothing to run: {line}"


def _exists(words: list[str]) -> bool:
    """Whether a command that takes long names what is there: a target, a module or a file of this repository."""
    match words:
        case ["make", target, *_]:
            return re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
        case ["python", "-m", module, *_]:
            return importlib.util.find_spec(module) is not None
        case ["python" | "torchrun", *rest]:
            return any((ROOT / word).is_file() for word in rest)
    return False


def test_what_is_added_takes_less_than_sixty_lines() -> None:
    sections = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8").split("\n## ")[1:]
    lengths = [sum(len(b.text.splitlines()) for b in blocks(section) if b.language == "python") for section in sections]
    assert len(lengths) == 3 and max(lengths) < 60, lengths


def test_the_hooks_before_a_commit_are_of_the_versions_that_the_tests_use() -> None:
    pinned = dict(re.findall(r"^(ruff|mypy)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    hooks = re.findall(r"name: (ruff|mypy).*\((\S+)\)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert len(hooks) == 3 and set(hooks) == set(pinned.items())


def test_little_is_not_run() -> None:
    found = {
        f"{page.name}:{block.line}": block.not_run
        for page in PAGES
        for block in blocks(filled(page.read_text(encoding="utf-8")))
        if block.not_run
    }
    assert len(found) <= MOST_NOT_RUN, found
    assert all(len(reason) > 10 for reason in found.values()), found


def test_the_site_builds_strictly_and_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(ROOT)
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site"))
    build(config)
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert {page.stem for page in PAGES} - {"README", "CONTRIBUTING"} <= {page.stem for page in pages}
    for page in [*pages, *(tmp_path / "site").rglob("*.css")]:
        found = EXTERNAL.search(page.read_text(encoding="utf-8"))
        assert found is None, f"{page.name} loads {found and found[0]}"
