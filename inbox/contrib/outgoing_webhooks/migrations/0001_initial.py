import django.core.validators
import django.db.models.functions.datetime
from django.db import migrations, models

import exactly_once.sql.fields
import inbox.contrib.outgoing_webhooks.models
from exactly_once.packages import label_of


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        (label_of('inbox'), '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='Endpoint',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('name', exactly_once.sql.fields.NameField(help_text='It cannot be changed later.', max_length=64, unique=True, validators=[django.core.validators.RegexValidator('\\A[a-z0-9][a-z0-9._-]*\\Z', "Use lower-case letters, digits, '.', '_' and '-'.")])),
                ('url', models.CharField(max_length=2000, validators=[inbox.contrib.outgoing_webhooks.models.valid_url], verbose_name='URL')),
                ('topics', models.JSONField(blank=True, default=list, help_text='A list, ["shop.order.placed"]. [] means all.', validators=[inbox.contrib.outgoing_webhooks.models.valid_topics])),
                ('concurrency', models.PositiveSmallIntegerField(default=2, help_text='The maximum number of requests at a time in one process.', validators=[django.core.validators.MinValueValidator(1), django.core.validators.MaxValueValidator(64)])),
                ('secret', models.CharField(default=inbox.contrib.outgoing_webhooks.models.new_secret, max_length=255)),
                ('old_secret', models.CharField(blank=True, db_default='', default='', max_length=255)),
                ('old_secret_until', models.DateTimeField(blank=True, null=True)),
                ('state', models.CharField(choices=[('active', 'Active'), ('paused', 'Paused'), ('disabled', 'Disabled')], default='active', max_length=8)),
                ('state_since', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('reason', models.TextField(blank=True, db_default='', default='')),
                ('failures', models.PositiveIntegerField(db_default=0, default=0)),
                ('probe_at', models.DateTimeField(blank=True, null=True)),
            ],
            options={
                'verbose_name': 'webhook endpoint',
                'verbose_name_plural': 'webhook endpoints',
                'permissions': (('add_endpoint', 'Can add an endpoint'), ('edit_endpoint', 'Can change the URL, the topics and the concurrency of an endpoint'), ('enable_endpoint', 'Can enable an endpoint'), ('disable_endpoint', 'Can disable an endpoint'), ('test_endpoint', 'Can send a test message to an endpoint'), ('rotate_endpoint', 'Can give an endpoint a new secret'), ('secret_endpoint', 'Can see the secret of an endpoint')),
                'default_permissions': ('view',),
            },
        ),
    ]
