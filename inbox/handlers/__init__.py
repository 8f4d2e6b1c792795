"""What a user writes: a function, a decorator, its options; and the message that the function gets."""
