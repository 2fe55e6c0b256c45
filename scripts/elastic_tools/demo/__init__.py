"""A demonstration: a real server grows and shrinks its KV cache while it answers requests.

- `server`: starts the server and ends it on every path.
- `load`: keeps a number of chat requests running, through the official client.
- `story`: what happens when: the waves of requests and the resizes.
- `watch`: samples the cache's size, the server's memory and its requests.
- `verdict`: whether the memory followed the resizes.
- `picture`, `report`, `live`: what the user gets to see.
"""
