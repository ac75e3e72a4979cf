"""Every test, and every process a test starts, has a cache folder of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's own is neither read nor written."""
    before = os.environ.get("ORTKV_CACHE_DIR")
    os.environ["ORTKV_CACHE_DIR"] = str(tmp_path_factory.mktemp("ortkv-cache"))
    yield
    del os.environ["ORTKV_CACHE_DIR"]
    if before is not None:
        os.environ["ORTKV_CACHE_DIR"] = before
