"""Every Python snippet of README and docs runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_SNIPPETS = [
    pytest.param(page, match[1], page.read_text()[: match.start()].count("\n") + 1, id=f"{page.stem}-{i}")
    for page in _PAGES
    if page.exists()
    for i, match in enumerate(_BLOCK.finditer(page.read_text()))
]


@pytest.mark.parametrize(("page", "source", "line"), _SNIPPETS)
def test_snippet_runs(page: Path, source: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = compile("\n" * line + source, str(page), "exec")
    exec(code, {"__name__": "__main__"})


def test_the_first_example_of_the_readme_cuts_and_is_exact() -> None:
    """It would show nothing with a budget that the whole batch fits in."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(_BLOCK.findall((ROOT / "README.md").read_text())[0], names)

    sizes = names["result"].micro_batch_sizes
    assert len(sizes) > 1
    assert sum(sizes) == 512
    assert names["result"].exactness == "exact"


def test_a_snippet_that_fails_is_noticed() -> None:
    """Control: the blocks that are found are really Python that runs."""
    assert _BLOCK.findall("```python\nassert False\n```\n") == ["assert False\n"]
    assert len(_SNIPPETS) >= 6
