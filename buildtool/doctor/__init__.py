"""What this host has, which torch its cards can run, and what to type next.

host.py            the facts of a host, as values; gather.py reads them
compatibility.py   data/compatibility.yaml: cards, targets, published torch builds
routes.py          the ways to a torch for a card, and what this host lacks for each
advice.py          advise(): routes, remarks and the next command; text.py prints it
fix.py             what `--fix` and `--variants` write
prove.py           `--prove`: an image's promises, tried on this host's card
lint/              `--lint`: faults of Dockerfiles and their like; says how to add a rule
"""
