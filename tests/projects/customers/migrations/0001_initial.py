from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            name="Customer",
            fields=[
                ("id", models.BigAutoField(primary_key=True)),
                ("schema_name", models.CharField(max_length=63, unique=True)),
                ("name", models.CharField(max_length=100)),
            ],
        ),
        migrations.CreateModel(
            name="Domain",
            fields=[
                ("id", models.BigAutoField(primary_key=True)),
                ("domain", models.CharField(max_length=253, unique=True)),
                ("is_primary", models.BooleanField(default=True)),
                ("tenant", models.ForeignKey(on_delete=models.CASCADE, related_name="domains", to="customers.customer")),
            ],
        ),
    ]
