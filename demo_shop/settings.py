"""Settings of the demo shop: a SQLite file and no broker, unless DATABASE_URL and BROKER_URL say otherwise.

Durations are short, so that a demo of crashes and retries takes seconds; a real project keeps the defaults.
"""

import os
from datetime import timedelta
from pathlib import Path

import dj_database_url

BASE_DIR = Path(__file__).resolve().parent.parent

DEBUG = os.environ.get("DEBUG", "").lower() in {"1", "true", "yes", "on"}
SECRET_KEY = "for the demo only, never for anything that matters"  # noqa: S105 - it protects nothing
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]"]
ROOT_URLCONF = "demo_shop.urls"
USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "exactly_once",
    "outbox",
    "inbox",
    "inbox.contrib.joins",
    "demo_shop.orders",
    "demo_shop.stock",
    "demo_shop.payments",
    "demo_shop.notices",
    "demo_shop.banks",
    "demo_shop.simulation",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

DATABASES = {
    "default": dj_database_url.parse(
        os.environ.get("DATABASE_URL") or f"sqlite:///{BASE_DIR / 'demo.sqlite3'}", conn_max_age=60
    ),
    # Of the other bank. It may be a SQLite file while the shop is on PostgreSQL, because no transaction includes both.
    "savings": dj_database_url.parse(
        os.environ.get("SAVINGS_DATABASE_URL") or f"sqlite:///{BASE_DIR / 'demo_savings.sqlite3'}", conn_max_age=60
    ),
}
DATABASE_ROUTERS = ["demo_shop.banks.router.BanksRouter"]
for _database in DATABASES.values():
    if _database["ENGINE"] == "django.db.backends.sqlite3":
        _database["OPTIONS"] = {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;",
        }

OUTBOX = {
    "BROKER_URL": os.environ.get("BROKER_URL") or "local://",
    "EXCHANGE": "demo_shop",
    "POLL_INTERVAL": timedelta(seconds=0.1),
    "BATCH_DEADLINE": timedelta(seconds=2),
    "CHECKS": {"AFTER": timedelta(seconds=1), "EVERY": timedelta(seconds=1)},
    "BACKOFF": (timedelta(seconds=1), timedelta(seconds=5)),
}
INBOX = {
    "GROUP": "demo_shop",
    # SQLite has one writer: more threads would only wait for it, and keep others waiting.
    "CONCURRENCY": 1 if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3" else 4,
    "POLL_INTERVAL": timedelta(seconds=0.1),
    "REDELIVERY_AFTER": timedelta(seconds=2),
    "BACKOFF": (timedelta(seconds=1), timedelta(seconds=5)),
}

# Every message of the shop has a biz-id from its producer, which is the shop itself.
SILENCED_SYSTEM_CHECKS = ["inbox.I001"]

# The clock of the demo: the duration of one of its minutes.
DEMO_MINUTE = timedelta(milliseconds=60)

# The settings of the shop itself.
SHOP_TAKE_BACK_WITHIN = 10 * DEMO_MINUTE
SHOP_SMS_AFTER = 20 * DEMO_MINUTE
SHOP_UNPAID_AFTER = 30 * DEMO_MINUTE
SHOP_REVIEW_AFTER = 60 * DEMO_MINUTE
# 48 hours would last almost three minutes, so the demo uses 48 minutes.
SHOP_RATE_AFTER = 48 * DEMO_MINUTE
# 10 minutes would be less than RetryLater's minimum of a second. The demo uses 2 seconds, longer than the first of BACKOFF, so
# that the audit can distinguish this delay from that of an ordinary failure.
SHOP_MAIL_RETRY_AFTER = timedelta(seconds=2)
SHOP_OUT_OF_STOCK_RETRY = timedelta(seconds=1)
PAYMENTS_WEBHOOK_SECRET = "shared with the payment provider"  # noqa: S105 - it protects nothing
