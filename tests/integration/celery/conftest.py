import pytest


@pytest.fixture(params=["rabbitmq", "redis"])
def broker(request):
    """The URL of a broker with nothing in it."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def results(redis_server):
    """The URL of a result backend with nothing in it."""
    redis_server.start().flush()
    return redis_server.url.rpartition("/")[0] + "/5"
