"""A storm: streaming clients and a resize four times a second against one server, judged from outside.

- `plan`: what is sent: the prompts, the requests of each client, and the sizes; all of it follows from the seed.
- `stream`: one streaming request, with a limit on every wait.
- `clients`: many of them, one request after the other.
- `reference`: what the greedy requests answer while the size stays.
- `resizes`: asks for sizes at a steady rate and checks the answers.
- `watch`: polls the state and the health, and checks that they add up.
- `memory`: what the operating system says of the server's processes.
- `run`: the order of it all.
- `verdict`: what has to hold, and whether it does.
- `report`: the result as JSON and as a table.
"""
