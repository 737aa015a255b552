"""How many inputs a second a model does, called directly and through a server, and what limits it.

`report` is the file that both halves go into; `ceilings` has a machine's largest rates as values and
`measure_ceilings` measures them on torch. The halves are `direct` and `served`.
"""
