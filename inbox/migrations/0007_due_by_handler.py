from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('inbox', '0006_consumer_heartbeats'),
    ]

    operations = [
        migrations.RemoveIndex(
            model_name='inboxmessage',
            name='inbox_due',
        ),
        migrations.AddIndex(
            model_name='inboxmessage',
            index=models.Index(condition=models.Q(('state__in', ['received', 'retrying', 'running'])), fields=['handler', 'next_attempt_at'], name='inbox_due'),
        ),
    ]
