from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "tests.projects.shop"
    label = "projectshop"
    default_auto_field = "django.db.models.BigAutoField"
