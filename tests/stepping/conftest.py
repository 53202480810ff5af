"""What the tests of several ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stepping.workers import Workers, workers


@pytest.fixture(scope="module")
def ranks() -> Iterator[Workers]:
    """Processes for up to four ranks."""
    with workers(4) as found:
        yield found
