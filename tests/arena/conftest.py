import pytest

from .drivers import CONTRACT


@pytest.fixture(params=sorted(CONTRACT))
def driver(request):
    """Every page driver in turn."""
    return CONTRACT[request.param]()
