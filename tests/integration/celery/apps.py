import kombu.pools


def close(app):
    """Close every connection of the app."""
    kombu.pools.reset()  # they are kombu's, one for each broker
    backend = app.backend
    if hasattr(backend, "result_consumer"):
        # A result that outlives its test would connect again to unsubscribe, perhaps to a server that has ended.
        backend.result_consumer.cancel_for = lambda task_id: None
        backend.result_consumer.stop()
        backend.client.connection_pool.disconnect()
    app.close()
