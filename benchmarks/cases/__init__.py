"""The benchmarks, one module each. Every module has a `measure(lab, plan, record)`; its docstring is the question it asks."""
