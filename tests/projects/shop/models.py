from django.db import models


class Effect(models.Model):
    """One row for each effect of a message: two rows of one name are an effect that happened twice."""

    name = models.CharField(max_length=100)
    topic = models.CharField(max_length=100)

    class Meta:
        app_label = "projectshop"

    def __str__(self):
        return self.name
