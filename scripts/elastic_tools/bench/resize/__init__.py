"""What a resize costs while a server decodes: how long it takes, and what clients see of it.

- `cases`: what is resized, in which order, and what one resize gave.
- `load`: the clients: those that stream all the time, and those that fill the cache.
- `stage`: brings the cache into the state that a case needs.
- `copies`: what copying as many bytes costs without an engine.
- `measure`: the order of it all.
- `report`: the tables, the numbers behind them and the picture.
"""
