"""What several integration tests stand on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.door import Door, open_door


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    """One gateway for all tests of a module, which must leave it as they found it."""
    async with open_door(tmp_path_factory.mktemp("door")) as door:
        yield door
