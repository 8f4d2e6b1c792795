"""What a quorum queue without a delivery limit of its own has, by the version of RabbitMQ."""

from types import SimpleNamespace

import pytest

from inbox.consumer.topology import Unusable, _refuse_low_limit


def connected_to(version):
    return SimpleNamespace(connection=SimpleNamespace(server_properties={"version": version}))


@pytest.mark.parametrize("version", ["4.0.1", "4.2.0", "10.0.0"])
def test_a_queue_without_a_limit_is_refused_where_rabbitmq_has_one_by_default(version):
    with pytest.raises(Unusable, match="delivered 20 times"):
        _refuse_low_limit(connected_to(version), "q", None)


@pytest.mark.parametrize("version", ["3.10.8", "3.13.7"])
def test_a_queue_without_a_limit_is_used_where_rabbitmq_has_none_by_default(version):
    _refuse_low_limit(connected_to(version), "q", None)
