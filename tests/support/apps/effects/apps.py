from django.apps import AppConfig


class TestAppConfig(AppConfig):
    name = "tests.support.apps.effects"
    label = "testapp"
    default_auto_field = "django.db.models.BigAutoField"
