"""Programs that the benchmarks run as processes of their own: they do one thing and print what they saw as JSON."""
