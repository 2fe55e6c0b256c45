"""Makes ``.venv``: the pinned engine, the tools, and the patch series on top. Standard library only."""
