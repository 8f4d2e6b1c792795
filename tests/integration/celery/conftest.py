import pytest
from celery import _state


@pytest.fixture(params=["rabbitmq", "redis"])
def broker(request):
    """The URL of a broker with nothing in it."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def results(redis_server):
    """The URL of a result backend with nothing in it."""
    redis_server.start().flush()
    return redis_server.url.rpartition("/")[0] + "/5"


@pytest.fixture
def current():
    """Make an app the current one of this process, as a project's own is: `current(app)`."""
    before = _state._tls.current_app
    yield lambda app: app.set_current()
    _state._set_current_app(before)
