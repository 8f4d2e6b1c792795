"""The database of a test on the server that it may kill."""

from urllib.parse import urlsplit

import pytest

from tests.support.aliases import the_default_at


@pytest.fixture
def mortal_database(mortal_postgres, transactional_db):
    """For this test, `default` is a database on the server that may be killed; its URL."""
    url = mortal_postgres.create_database()
    with the_default_at(HOST="127.0.0.1", PORT=mortal_postgres.port, NAME=urlsplit(url).path[1:], USER="postgres"):
        yield url
