from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("testapp", "0002_bank")]

    operations = [
        migrations.CreateModel(
            name="Payment",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("reference", models.CharField(max_length=100, unique=True)),
                ("order", models.CharField(max_length=100)),
                ("shelf", models.CharField(max_length=100)),
            ],
        ),
    ]
