"""From a delivery to its outcome."""
