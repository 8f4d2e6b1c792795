"""A backend for Django's background tasks, whose tasks are messages: `django.tasks`, or the package django-tasks before 6.0.

    TASKS = {"default": {"BACKEND": "inbox.tasks.ExactlyOnceBackend", "QUEUES": ["default", "mail"]}}

`enqueue()` publishes a message in the caller's transaction. Each queue is a topic and a handler, so its tasks are retried,
paused, limited, measured and shown as messages are. A task's effect, its result and its receipt are one commit (`running`).

Its status is read where it is: in the outbox, then in the inbox, then in the table of results (`results`).

An optional app: add "inbox.contrib.tasks" to INSTALLED_APPS.
"""
