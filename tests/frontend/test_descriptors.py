"""How many connections a limit on descriptors allows."""

from __future__ import annotations

import resource

import pytest

from ssd.errors import UsageError
from ssd.frontend.descriptors import for_connections


@pytest.fixture
def limited(request: pytest.FixtureRequest) -> int:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before))
    resource.setrlimit(resource.RLIMIT_NOFILE, (request.param, before[1]))
    return int(request.param)


@pytest.mark.parametrize(("limited", "most"), [(1024, 768), (512, 256), (257, 1)], indirect=["limited"])
def test_256_are_kept(limited: int, most: int) -> None:
    assert for_connections(4224) == most
    assert for_connections(1) == 1


@pytest.mark.parametrize("limited", [256], indirect=True)
def test_fewer_are_an_error_that_says_so(limited: int) -> None:
    with pytest.raises(UsageError, match=r"HTTP needs more than 256 open files .* may have 256"):
        for_connections(4224)
