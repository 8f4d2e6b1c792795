

import exactly_once.sql.fields
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='IdempotentRequest',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('scope', exactly_once.sql.fields.NameField(max_length=255, verbose_name='scope')),
                ('key', exactly_once.sql.fields.NameField(max_length=255, verbose_name='key')),
                ('view', models.CharField(max_length=255, verbose_name='view')),
                ('fingerprint', models.CharField(max_length=64)),
                ('at', models.DateTimeField(verbose_name='time')),
                ('expires_at', models.DateTimeField(verbose_name='expires')),
                ('status', models.PositiveSmallIntegerField(null=True, verbose_name='status')),
                ('headers', models.JSONField(null=True)),
                ('body', models.BinaryField(null=True)),
            ],
            options={
                'verbose_name': 'idempotent request',
                'verbose_name_plural': 'idempotent requests',
                'default_permissions': ('view',),
                'indexes': [models.Index(fields=['expires_at'], name='exactly_once_views_expired')],
                'constraints': [models.UniqueConstraint(fields=('scope', 'key'), name='exactly_once_views_once'), models.CheckConstraint(condition=models.Q(exactly_once.sql.fields.IsInstant('at'), exactly_once.sql.fields.IsInstant('expires_at')), name='exactly_once_views_instants')],
            },
        ),
    ]
