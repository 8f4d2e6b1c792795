"""What a quorum queue without a delivery limit of its own has, by the version of RabbitMQ."""

from types import SimpleNamespace

from inbox.consumer.topology import Unusable, _refuse_low_limit


def refusal(version):
    """Why a queue without a limit is not used; "" if it is used."""
    connection = SimpleNamespace(connection=SimpleNamespace(server_properties={"version": version}))
    try:
        _refuse_low_limit(connection, "q", None)
    except Unusable as error:
        return str(error)
    return ""


def test_queue_without_a_limit_is_refused_only_where_rabbitmq_has_one_by_default():
    refusals = {version: refusal(version) for version in ("3.10.8", "3.13.7", "4.0.1", "4.2.0", "10.0.0")}

    assert [version for version, text in refusals.items() if "delivered 20 times" in text] == ["4.0.1", "4.2.0", "10.0.0"]
    assert [version for version, text in refusals.items() if text == ""] == ["3.10.8", "3.13.7"]
