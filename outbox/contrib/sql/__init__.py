"""`SELECT outbox_publish('shop.order.placed', '{"order": 17}', biz_id => 'order-17')`: publishing from SQL, on PostgreSQL.

    INSTALLED_APPS += ["outbox.contrib.sql"]

`migrate` installs the function. Nothing else in the outbox imports this package.
"""
