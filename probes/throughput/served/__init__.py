"""A server under load: a closed loop with rising callers, then an open loop with rising rates.

`scan` goes from the server's metadata to the last level; `level` measures one until its windows agree; `load`
drives the requests, `http` sends them, `protocol` makes their bodies and checks responses. `results` has the
levels, their statistics, and which level comes next.
"""
