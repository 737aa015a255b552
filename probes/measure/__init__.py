"""Measures what memory placement costs: the probes, and the processes that they run in.

session: one run, from its start to the report. catalog: the table of probes. schedule: processes of a run,
progress, further processes. in_turns: two Pythons side by side. journal: every record, for a resumed run.
this_machine: the machine that is measured, and `doctor`'s check-up.

Probes: transfer, breakeven, spill, scenarios. They ask a workbench (a protocol; device is torch's) and take
samples as sampling says. background_load: what else uses the machine meanwhile.

Worker processes, also those of fit and throughput: supervisor is the parent's side, worker the child's,
probe_worker the jobs of probes.

placement_*: models placed for `scenarios` and `place`, and others' placements beside them.
"""
