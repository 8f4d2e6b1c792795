import pytest
from django.db import connection


@pytest.fixture
def empty_database(tmp_path, request):
    """Make an empty database, for this test; its entry of DATABASES: `empty_database("main")`."""
    server = None if connection.vendor == "sqlite" else request.getfixturevalue("postgres_server")
    names = []

    def make(name):
        if server is None:
            options = {"transaction_mode": "IMMEDIATE", "timeout": 20}
            return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / name), "OPTIONS": options}
        names.append(server.create_database().rpartition("/")[2])
        given = {"HOST": "127.0.0.1", "PORT": str(server.port), "USER": "postgres", "NAME": names[-1]}
        return {"ENGINE": "django.db.backends.postgresql", **given}

    yield make
    for name in names:
        server.drop_database(name)
