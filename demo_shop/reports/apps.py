from django.apps import AppConfig


class ReportsConfig(AppConfig):
    name = "demo_shop.reports"
    label = "reports"
