"""Sandboxes of other machines: `etude env serve` on theirs, a `RemoteHost` on ours, the same protocol between.

etude env serve --root /var/lib/etude --listen 0.0.0.0:7711 --tls-cert c.pem --tls-key k.pem
host = RemoteHost("https://envs.example:7711", token)          # a SandboxHost like any other

remote.py      the client: RemoteHost and RemoteSandbox; adopts what a lost connection left running
http.py        the server's routes                    core.py     what they do: environments, operations, leases, recovery
admission.py   who may start now                      ledger.py   what must survive a kill -9 of the server
metrics.py     counts for Prometheus                  wire.py     values, errors and their classes as bytes
commands.py    `etude env ...`                        fleet.py    which host gets which environment (pure)
"""
