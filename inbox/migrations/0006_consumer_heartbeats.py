from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('inbox', '0005_trail'),
    ]

    operations = [
        migrations.CreateModel(
            name='ConsumerHeartbeat',
            fields=[
                ('id', models.UUIDField(primary_key=True, serialize=False)),
                ('host', models.CharField(max_length=255)),
                ('pid', models.PositiveIntegerField()),
                ('version', models.CharField(max_length=32)),
                ('started_at', models.DateTimeField(verbose_name='started')),
                ('beat_at', models.DateTimeField(verbose_name='last heartbeat')),
                ('handlers', models.JSONField(default=list)),
                ('received', models.PositiveBigIntegerField(default=0, verbose_name='deliveries since its start')),
                ('ran', models.PositiveBigIntegerField(default=0, verbose_name='stored messages run since its start')),
                ('waits_for', models.CharField(blank=True, default='', max_length=255)),
            ],
            options={
                'verbose_name': 'consumer',
                'default_permissions': ('view',),
            },
        ),
    ]
