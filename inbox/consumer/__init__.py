"""The consumer: the process that receives from the broker."""
