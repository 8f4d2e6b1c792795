"""German, as the proof that the pages and commands can be translated."""

import html
import re
import shutil
from datetime import timedelta
from html.parser import HTMLParser

import pytest
from django.contrib.admin import site
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.management import get_commands, load_command_class
from django.urls import reverse
from django.utils import translation

from exactly_once.console.display import number
from exactly_once.models import Alert, Minute
from exactly_once.sql.now import DatabaseTime
from inbox.models import InboxMessage
from inbox.states import State as InboxState
from outbox.models import OutboxMessage
from outbox.states import State
from tests.support.commands import output_of
from tests.support.deliveries import deliver, fails
from tests.support.heartbeats import a_relay
from tests.support.lower_bounds import at_least
from tests.support.own_apps import OWN_APPS
from tests.support.relaying import published, set_columns
from tests.support.shop_day import hostile_rows
from tools.messages import APPS, catalog, update

pytestmark = pytest.mark.django_db(databases=["default", "other"])

ENTRY = re.compile(r'^msgid "(.+)"\n(?:msgid_plural ".*"\nmsgstr\[0\] "(.*)"|msgstr "(.*)")', re.MULTILINE)
LISTS = sorted(
    f"{model._meta.app_label}_{model._meta.model_name}" for model in site._registry if model._meta.app_label in OWN_APPS
)
SENTENCE = re.compile(r"[A-Za-z]{2,}[ ,]+[A-Za-z]{2,}")
SAME = {"Name, URL", "Exactly once", "- Select an option -"}
"""The same words in both languages, and a text that Django 6.1 does not translate."""


def entries(app):
    text = catalog(app, "de").with_suffix(".po").read_text(encoding="utf-8")
    return {english.replace('\\"', '"'): single or plural for english, plural, single in at_least(50, ENTRY.findall(text))}


@pytest.fixture
def german():
    with translation.override("de"):
        yield


@pytest.fixture
def leftovers():
    """The English sentences and phrases that a text contains although they have a German translation."""
    both = entries("outbox") | entries("inbox")
    phrases = [
        re.sub(r"%\(\w+\)[sdf.0-9]*", ".*?", re.escape(english)).replace(r"\ ", " ").replace(r"\{\}", ".*?")
        for english, german in both.items()
        if german != english and english.count(" ") >= 2 and not english.startswith("<")
    ]
    patterns = [re.compile(phrase) for phrase in phrases if len(phrase.replace(".*?", "")) > 12]

    def found(text):
        shown = html.unescape(text)
        return [pattern.pattern for pattern in patterns if pattern.search(shown)]

    return found


@pytest.mark.parametrize("app", APPS)
def test_every_text_has_a_german_translation_and_the_catalog_is_that_of_the_sources_and_compiled(app, tmp_path):
    """`make messages` changes nothing."""
    assert [english for english, german in entries(app).items() if not german] == []
    ours, fresh = catalog(app, "de"), catalog(app, "de", tmp_path)
    fresh.parent.mkdir(parents=True)
    shutil.copy(ours.with_suffix(".po"), fresh.with_suffix(".po"))
    (tmp_path / "work").mkdir()
    update(app, "de", tmp_path / "work", tmp_path)

    assert fresh.with_suffix(".po").read_text() == ours.with_suffix(".po").read_text()
    assert fresh.with_suffix(".mo").read_bytes() == ours.with_suffix(".mo").read_bytes()


class Texts(HTMLParser):
    """The texts of several words on a page, outside of scripts and styles."""

    def __init__(self, response):
        super().__init__()
        self.found, self._within = set(), ""
        self.feed(response.content.decode())

    def handle_starttag(self, tag, attrs):
        self._within = tag
        self.found |= {
            value for name, value in attrs if name in {"title", "placeholder", "aria-label"} and SENTENCE.search(value)
        }

    def handle_data(self, data):
        if self._within not in {"script", "style"} and SENTENCE.search(data):
            self.found.add(" ".join(data.split()))


@pytest.mark.parametrize("name", LISTS)
def test_no_text_of_several_words_on_a_list_is_the_same_in_english_and_german(name, admin_client):
    """Also a text that is not marked for translation, which no catalog has. No stored text has a letter."""
    hostile_rows("§")
    url = reverse(f"admin:{name}_changelist")
    english = Texts(admin_client.get(url)).found
    with translation.override("de"):
        german = Texts(admin_client.get(url)).found

    assert english
    assert english & german - SAME == set()


@pytest.mark.parametrize(("language", "text"), [("en", "1,234.6"), ("de", "1.234,6")])
def test_numbers_are_written_as_the_language_of_the_page_does(language, text):
    with translation.override(language):
        assert number(1234.56, 1) == text


@pytest.mark.parametrize("state", [state for state in State if state is not State.DEAD])
def test_page_of_an_outbox_message_in_german_has_no_english_text(state, admin_client, german, leftovers):
    set_columns(published("t", key="k"), state=state)
    row = OutboxMessage.objects.get()
    page = admin_client.get(reverse("admin:outbox_outboxmessage_change", args=[row.pk])).content.decode()

    assert leftovers(page) == []
    assert str(State(state).label) in page
    assert "Herkunft" in page


@pytest.mark.parametrize("action", ["publish_now", "reschedule", "cancel"])
def test_confirmation_and_report_in_german_have_no_english_text(action, admin_client, german, leftovers):
    published("t", delay=timedelta(hours=1))
    given = {"action": action, ACTION_CHECKBOX_NAME: OutboxMessage.objects.get().pk}
    url = reverse("admin:outbox_outboxmessage_changelist")
    asked = admin_client.post(url, given).content.decode()
    done = admin_client.post(url, {**given, "confirmed": "yes", "delay": "2h"}, follow=True).content.decode()

    assert leftovers(asked) == []
    assert leftovers(done) == []
    assert "Zustand" in asked
    assert "Nachricht" in done


def test_other_pages_in_german_have_no_english_text(admin_client, handles, german, leftovers):
    deliver(handles(fails))
    times = {"first_seen_at": DatabaseTime(), "seen_at": DatabaseTime(), "raised_at": DatabaseTime()}
    Alert.objects.create(app="outbox", condition="lag", summary="-", state="raised", **times)
    Minute.objects.create(app="outbox", minute=DatabaseTime(), process="-", subject="t", times={"to_broker": {"3": 1}})
    urls = [reverse("admin:inbox_inboxmessage_change", args=[InboxMessage.objects.get().pk])]
    urls += [reverse(f"admin:exactly_once_overview_{page}") for page in ("changelist", "latency")]

    of_a_message, *others = (admin_client.get(url).content.decode() for url in urls)

    assert [leftovers(page) for page in (of_a_message, *others)] == [[], [], []]
    assert str(InboxState.RETRYING.label) == "In Wiederholung"
    assert "In Wiederholung" in of_a_message


@pytest.mark.parametrize(
    "command",
    [
        *([f"exactly_once_{name}"] for name in ("status", "purge", "alerts", "processes")),
        *(
            ["outbox_pause", "t"],
            ["outbox_restore", "--all", "--dry-run"],
            ["inbox_retry", "--all"],
            ["outbox_resume", "--checks"],
        ),
    ],
    ids=" ".join,
)
def test_command_in_german_has_no_english_text(command, handles, german, leftovers):
    handles(lambda message: None)
    published("t")
    a_relay()
    said = output_of(*command)

    assert leftovers(said) == []
    assert re.search("wartend|Nachricht|Alarm|Prozess|Lebenszeichen|angehalten", said)


def test_help_of_each_command_in_german_has_no_english_text(german, leftovers):
    for command in at_least(15, sorted(name for name, app in get_commands().items() if app in APPS)):
        parser = load_command_class(get_commands()[command], command).create_parser("manage.py", command)
        said = " ".join(parser.format_help().split())
        assert leftovers(said) == [], command
        assert re.search("Nachricht|Alarm|Topic|Handler|Gruppe|Consumer|Relay|Prüfer|Prozess", said), command
