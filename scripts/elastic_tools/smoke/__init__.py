"""A smoke test: a server with an elastic KV cache answers, resizes, and gives memory back. Minutes, not hours.

- `client`: what is asked of the server, over HTTP alone.
- `memory`: what the driver or the system says of its memory.
- `checks`: what has to hold, one function each, in the order in which they run.
- `run`: runs the checks within a time, and writes the JUnit file.
"""
