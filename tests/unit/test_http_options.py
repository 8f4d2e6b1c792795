"""The option `HTTP`: tokens are digests, and scopes cover the names that they say."""

import pytest

from exactly_once.conf import settings as options
from exactly_once.conf.app_options import HttpOptions
from outbox.conf import OutboxOptions
from tests.support.http_api import NEXT_SHOP, PARTNER, SHOP, TOKENS, digest

DIGESTS = [digest("a")]


def a_client(*scopes):
    return HttpOptions(TOKENS={"erp": {"DIGESTS": DIGESTS, "SCOPES": [*scopes]}}).clients[0]


@pytest.mark.parametrize(
    ("scope", "covered", "not_covered"),
    [
        ("publish:*", ["shop", "shop.order", "*"], []),
        ("publish:shop.*", ["shop.order", "shop.order.placed", "shop."], ["shop", "shopping.order", "other.shop.order"]),
        ("publish:shop.order", ["shop.order"], ["shop.order.placed", "shop", "Shop.order"]),
    ],
)
def test_scope_covers_a_name_the_names_below_it_or_all(scope, covered, not_covered):
    client = a_client(scope)

    assert [name for name in covered if not client.may(name, "publish")] == []
    assert [name for name in not_covered if client.may(name, "publish")] == []
    assert not any(client.may(name, "manage", "read") for name in covered), "only this action"


@pytest.mark.parametrize(
    "scope", ["", "publish", "publish:", "write:shop", "publish:sh*p", "publish:shop*", "publish:**", "publish:*.placed", ":*"]
)
def test_scope_in_another_form_is_refused(scope):
    with pytest.raises(ValueError, match="SCOPES"):
        a_client(scope)


@pytest.mark.parametrize(
    "tokens",
    [
        {"erp": {"DIGESTS": ["the token itself"], "SCOPES": ["read:*"]}},
        {"erp": {"DIGESTS": [DIGESTS[0].upper()], "SCOPES": ["read:*"]}},
        {"erp": {"DIGESTS": [], "SCOPES": ["read:*"]}},
        {"erp": {"DIGESTS": [*DIGESTS, digest("")], "SCOPES": ["read:*"]}},
        {"erp": {"SCOPES": ["read:*"]}},
        {"erp": {"DIGESTS": DIGESTS, "SCOPES": []}},
        {"erp": {"DIGESTS": DIGESTS}},
        {"erp": {"DIGESTS": DIGESTS[0], "SCOPES": ["read:*"]}},
        {"erp": {"DIGESTS": DIGESTS, "SCOPES": ["read:*"], "SCOPE": []}},
        {"erp": DIGESTS},
        {"": {"DIGESTS": DIGESTS, "SCOPES": ["read:*"]}},
        {1: {"DIGESTS": DIGESTS, "SCOPES": ["read:*"]}},
        {"erp/1": {"DIGESTS": DIGESTS, "SCOPES": ["read:*"]}},
        {"one": {"DIGESTS": DIGESTS, "SCOPES": ["read:*"]}, "two": {"DIGESTS": DIGESTS, "SCOPES": ["read:*"]}},
        [],
    ],
)
def test_tokens_that_are_not_digests_with_scopes_are_refused_and_not_shown(tokens):
    with pytest.raises(options.InvalidOptions) as refused:
        options.parse(OutboxOptions, "OUTBOX", {"HTTP": {"TOKENS": tokens}})

    assert "TOKENS" in str(refused.value)
    assert "the token itself" not in str(refused.value)
    assert DIGESTS[0] not in str(refused.value)


@pytest.mark.parametrize("given", [{"MAX_WAITING": 0}, {"MAX_WAITING": "20"}, {"TOKEN": {}}])
def test_other_options_are_checked(given):
    with pytest.raises(options.InvalidOptions, match="HTTP"):
        options.parse(OutboxOptions, "OUTBOX", {"HTTP": given})


def test_client_is_found_by_each_of_its_tokens_and_by_nothing_else():
    http = HttpOptions(TOKENS=TOKENS)

    assert [getattr(http.client_of(token), "name", None) for token in (SHOP, NEXT_SHOP, PARTNER)] == ["shop", "shop", "partner"]
    assert [http.client_of(token) for token in ("", "other", digest(SHOP), SHOP + " ", "\ud800")] == [None] * 5


def test_digest_is_not_in_a_repr():
    http = HttpOptions(TOKENS=TOKENS)

    assert digest(SHOP) not in repr(http) + repr(http.clients) + repr(OutboxOptions(HTTP=http))
