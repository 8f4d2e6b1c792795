from django.apps import AppConfig


class CrashConfig(AppConfig):
    name = "tests.support.crash"

    def ready(self) -> None:
        from tests.support.crash import bugs, failpoints  # noqa: PLC0415 - they patch what is complete only now

        failpoints.install_from_environment()
        bugs.install_from_environment()
