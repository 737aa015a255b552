"""What reports hold: dataclasses, their JSON form and JSON Schema, their statistics.

rows: the records of probes. facts: the machine. schema: a probe report and its file. watch: samples and
report of a watch. rounds: the processes of a report put together. stats: statistics of repeated samples.
files: how files of all kinds of reports are read, refused and written. json_schema: schemas from classes.
"""
