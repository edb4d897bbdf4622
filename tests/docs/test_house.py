"""The code keeps what docs/architecture.md says of it."""

from __future__ import annotations

from pathlib import Path

from tests.docs.house import INTERNALS, ROOT, House

HOUSE = House()


def test_no_files_import_each_other_in_a_circle() -> None:
    assert HOUSE.circles() == []


def test_no_floor_imports_from_above() -> None:
    assert HOUSE.upward() == []


def test_private_names_of_torch_are_used_in_one_folder_and_the_table_of_assumptions() -> None:
    private = HOUSE.private()
    assert [name for name in private if not name.startswith(INTERNALS)] == []
    assert len(private) <= 12


def test_the_counts_can_fail(tmp_path: Path) -> None:
    files = {
        "schedule/__init__.py": "",
        "schedule/util/low.py": "def f():\n    from schedule.core import high\n",
        "schedule/core/high.py": '"""What is high; and low."""\nimport torch._dynamo\nimport schedule.util.low\n',
        "schedule/util/broad.py": "try:\n    pass\nexcept (OSError, Exception):\n    pass\n",
        "pyproject.toml": "[[tool.importlinter.contracts]]\n"
        'layers = ["fxschedule", "schedule.core", "schedule.util"]\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    house = House(tmp_path)
    assert house.circles() == [["schedule.core.high", "schedule.util.low"]]
    assert house.upward() == [("schedule.util.low", "schedule.core.high")]
    assert house.private() == ["schedule.core.high"]
    assert house.broad_excepts() == ["schedule.util.broad:3"]


def test_few_handlers_catch_everything() -> None:
    assert len(HOUSE.broad_excepts()) <= 8


def test_the_picture_shows_the_floors() -> None:
    picture = (ROOT / "docs" / "floors.svg").read_text()
    assert all(f">{name}</text>" in picture for name in HOUSE.floors)
