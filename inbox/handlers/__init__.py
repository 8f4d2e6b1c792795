"""The public API of handlers: decorators, their options, the registry, and the message that a handler gets."""
